package readme

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/containerd/stage"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test, which has agentbench beside it; a relative path is taken from the top of the repository")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that the test needs is missing")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

func TestMain(m *testing.M) {
	flag.Parse()
	// On SIGTERM the go command goes first and the pipe that we print into breaks;
	// dying of that would leave the stage's folder.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if os.Geteuid() == 0 {
		if err := stage.RemoveAbandoned(); err != nil {
			fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
		}
	}
	os.Exit(m.Run())
}

// A step is what the test does with a command of README.md.
type step struct {
	// text is the command, or with the suffix "..." how it begins.
	text string
	// run runs it. Without run or why it is run as it is and has to succeed.
	run func(*env, string)
	// why says why it is not run, and what covers it.
	why string
}

// matches tells whether the step is for the command.
func (s step) matches(text string) bool {
	if head, ok := strings.CutSuffix(s.text, "..."); ok && strings.HasPrefix(text, head) {
		return true
	}
	return s.text == text
}

// steps are the commands in README.md's order, as far as one needs the other. One that
// is there several times is listed once.
var steps = []step{
	{text: "make demo", why: "it takes minutes and a Debian mirror; `make agentbench-test` runs what it is made of"},
	{text: "make test", why: "this test is a part of it"},
	{text: "install -m 755 bin/runsc-agentzip /usr/local/bin/"},

	{text: "runsc-agentzip install && systemctl reload docker", run: (*env).dockerInstall},
	{text: "runsc-agentzip install --runtime=agentzip-eager -- --agentzip-idle=50ms"},
	{text: "systemctl reload docker", run: (*env).dockerReload},
	{text: "docker run --rm --runtime=agentzip-eager debian:12 true"},
	{text: "runsc-agentzip uninstall --runtime=agentzip-eager"},
	{text: "{\n  \"runtimes\": ...", run: (*env).daemonJSON},
	{text: "docker run --rm --runtime=agentzip debian:12 dmesg", run: (*env).dmesg},

	{text: "runsc-agentzip run --bundle BUNDLE ID", run: (*env).runBundle},
	{text: "runsc-agentzip checkpoint --image-path DIR ID", run: (*env).checkpoint},
	{text: "runsc-agentzip restore --bundle BUNDLE --image-path DIR ID2", run: (*env).restore},

	{text: "runsc-agentzip agentzip stats [-json] ID", run: (*env).stats},
	{text: "runsc-agentzip agentzip evict ID"},
	{text: "runsc-agentzip agentzip check ID"},
	{text: "runsc-agentzip agentzip prefetch ID"},
	{text: "runsc-agentzip agentzip hint -phase=wait ID", run: (*env).hint},
	{text: "runsc-agentzip agentzip hint -phase=resume ID", run: (*env).hint},
	{text: "runsc-agentzip agentzip top", run: (*env).top},
	{text: "runsc-agentzip agentzip metrics -listen=127.0.0.1:9464", run: (*env).metrics},
	{text: "runsc-agentzip agentzip template ...", why: "it stands for the commands of the section that it names, which are run"},
	{text: "runsc-agentzip agentzip pool ...", why: "it stands for the commands of the section that it names, which are run"},
	{text: "runsc-agentzip --root /run/docker/runtime-runc/moby agentzip stats $(docker ps -q --no-trunc -n 1)", run: (*env).dockerStats},

	{text: "mkfs.erofs -E noinline_data -x-1 IMAGE FOLDER"},
	{text: `"annotations": ...`, run: (*env).rootImage},

	{text: "runsc-agentzip agentzip template create --image-path DIR ID", run: (*env).templateCreate},
	{text: "runsc-agentzip agentzip template info DIR"},
	{text: "runsc-agentzip agentzip template verify DIR"},
	{text: "runsc-agentzip restore --bundle BUNDLE --image-path DIR CLONE", run: (*env).clone},
	{text: "runsc-agentzip agentzip prefetch -save DIR CLONE", run: (*env).prefetchSave},
	{text: "tar -C DIR --transform 's,^,template/,' -c . | docker import - REGISTRY/template:1", run: (*env).ship},
	{text: "docker push REGISTRY/template:1"},
	{text: "docker pull REGISTRY/template:1", run: (*env).pull},
	{text: "docker create --name shipping REGISTRY/template:1 none"},
	{text: "docker cp shipping:/template DIR2"},
	{text: "docker rm shipping"},
	{text: "runsc-agentzip agentzip template verify DIR2", run: (*env).shipped},

	{text: "runsc-agentzip agentzip pool serve --socket=/run/runsc-agentzip/pool.sock", run: (*env).poolServe},
	{text: "runsc-agentzip agentzip pool stats --socket=/run/runsc-agentzip/pool.sock"},
	{text: "runsc-agentzip agentzip pool drain --socket=/run/runsc-agentzip/pool.sock"},
	{text: "install -m 644 runsc-agentzip/systemd/runsc-agentzip-pool.service /etc/systemd/system/"},
	// The machine's systemd, if it has one, is not for a test: what the unit would run
	// is run.
	{text: "systemctl enable --now runsc-agentzip-pool", run: (*env).unit},
	{text: "runsc-agentzip install --pool=/run/runsc-agentzip/pool.sock -- --platform=systrap", run: (*env).installPool},
	{text: `"runtimeArgs": ...`, run: (*env).runtimeArgs},
	{text: "docker run --rm --runtime=agentzip --annotation dev.agentzip.domain=TENANT debian:12 true", run: (*env).annotation},

	{text: "R=...", run: (*env).cloud},
	{text: "$R ...", run: (*env).loop},
	{text: "for id in ...", run: (*env).loop},
	{text: "runsc-agentzip/examples/scheduler.sh FOLDER", run: (*env).scheduler},
	{text: "c, err := client.New(...", run: (*env).goLoop},

	{text: "bin/agentbench run --workload swe --clones 8 --systems stock,linux,agentzip", why: "it takes half an hour; `make agentbench-test` runs it with 4 clones"},
	{text: "bin/agentbench run --workload all --clones 8,16", why: "it takes hours; test/results has what it came to"},
	{text: "bin/agentbench run --trace my-trace.json", why: "it needs a trace and a Debian mirror; `make unit` reads and runs traces (tools/agentbench)"},
	{text: "bin/agentbench idle --clones 1,8 --waits 1s,10s,60s", why: "it takes minutes and a Debian mirror; `make unit` tests what it computes (tools/agentbench)"},
	{text: "bin/agentbench density --memory 4GiB --systems stock,linux,agentzip", why: "it takes minutes and a Debian mirror; `make agentbench-test` runs it with 400 MiB"},
	{text: "bin/agentbench compare OLD.json NEW.json", run: (*env).compare},

	{text: "make ...", run: (*env).target},
	{text: "bazel test --test_env=AGENTZIP_RUNTIME=$PWD/bin/runsc-agentzip //test/docker:docker_test", run: (*env).bazelLabel},
}

// TestREADME runs README.md.
func TestREADME(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(repository(t), "README.md"))
	require.NoError(t, err)
	all := commands(string(readme))
	plan := make([]step, len(all))
	used := map[string]bool{}
	for i, c := range all {
		// The longest one: "make ..." is for all targets that have none.
		for _, s := range steps {
			if s.matches(c.text) && len(s.text) > len(plan[i].text) {
				plan[i] = s
			}
		}
		if plan[i].text == "" {
			t.Errorf("README.md:%d: no step of this test is for this; run it, or say why not and what covers it:\n%s", c.line, c.text)
		}
		used[plan[i].text] = true
	}
	for _, s := range steps {
		if !used[s.text] {
			t.Errorf("README.md has it no more, remove its step: %s", s.text)
		}
	}
	if t.Failed() {
		return
	}

	e := open(t)
	for i, c := range all {
		s := plan[i]
		if s.why != "" {
			t.Logf("README.md:%d: not run: %s: %s", c.line, c.text, s.why)
			continue
		}
		// What follows needs what this one does.
		if !t.Run(fmt.Sprintf("line %d", c.line), func(t *testing.T) {
			started := time.Now()
			e.t = t
			if s.run == nil {
				s.run = func(e *env, text string) { e.must(text) }
			}
			s.run(e, c.text)
			t.Logf("%v: %s", time.Since(started).Round(time.Millisecond), c.text)
		}) {
			t.Fatalf("README.md:%d failed: %s", c.line, c.text)
		}
	}
}

// env is where the commands run: a stage with a folder that has in it what the top of
// the repository has after `make build`.
type env struct {
	*stage.Stage
	t   *testing.T
	ctx context.Context
	// folder is the working folder of the commands.
	folder string
	// words are what stands for README.md's words in capitals.
	words map[string]string
	// guests are the sandboxes that run in the foreground, by their id.
	guests map[string]*stage.Daemon
	// pool and dockerd are the ones that run.
	pool, dockerd *stage.Daemon
	// daemon.json as README.md has it.
	config map[string]map[string]map[string]any
	// installed are the runtime's flags as install wrote them last.
	installed []string
	// assignment is what the commands of "Agent clouds" begin with.
	assignment string
}

func repository(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("not inside the repository: no go.mod above the working folder")
	return ""
}

func open(t *testing.T) *env {
	t.Helper()
	skip := t.Skipf
	if *requireFlag {
		skip = t.Fatalf
	}
	if os.Geteuid() != 0 {
		skip("sandboxes need root: run the tests as root")
	}
	for _, tool := range append(slices.Clone(stage.Tools), "mkfs.erofs", "docker", "dockerd", "containerd", "docker-registry") {
		if _, err := exec.LookPath(tool); err != nil {
			skip("%v: make deps installs the packages that have it", err)
		}
	}
	runtime := *runtimeFlag
	if !filepath.IsAbs(runtime) {
		runtime = filepath.Join(repository(t), runtime)
	}
	agentbench := filepath.Join(filepath.Dir(runtime), "agentbench")
	for _, file := range []string{runtime, agentbench} {
		if _, err := os.Stat(file); err != nil {
			skip("%v: run `make build` or name a runsc with -runtime", err)
		}
	}
	// Early enough, on the test's own time-out as on Ctrl-C, to remove everything.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	t.Cleanup(stop)
	if deadline, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-time.Minute))
		t.Cleanup(cancel)
	}
	s, err := stage.New()
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.Logs())
		}
		require.NoError(t, s.Close())
	})
	e := &env{Stage: s, t: t, ctx: ctx, folder: s.Path("checkout"), guests: map[string]*stage.Daemon{}}

	require.NoError(t, os.MkdirAll(filepath.Join(e.folder, "bin"), 0o755))
	require.NoError(t, stage.CopyFile(runtime, filepath.Join(e.folder, "bin/runsc-agentzip")))
	require.NoError(t, stage.CopyFile(agentbench, filepath.Join(e.folder, "bin/agentbench")))
	for _, dir := range []string{"systemd", "examples"} {
		dir = filepath.Join("runsc-agentzip", dir)
		require.NoError(t, os.CopyFS(filepath.Join(e.folder, dir), os.DirFS(filepath.Join(repository(t), dir))))
	}
	_, err = e.Output(ctx, "mkdir", "-p", "/etc/docker", "/etc/systemd/system")
	require.NoError(t, err)

	rootfs, err := s.Rootfs(ctx, "")
	require.NoError(t, err)
	require.NoError(t, stage.WriteImage(s.Path("image.tar"), "debian:12", rootfs, "/bin/sh"))
	e.words = map[string]string{"BUNDLE": s.Path("bundle"), "ID": "first", "ID2": "second", "CLONE": "clone", "DIR": s.Path("image"), "TENANT": "tenant",
		"IMAGE": s.Path("root.erofs"), "FOLDER": rootfs, "DIR2": s.Path("shipped"), "REGISTRY": "localhost:5000"}
	e.writeBundle(rootfs)
	return e
}

// guest answers each line that it gets in /in with how many there have been.
const guest = `mkfifo /tmp/in; exec 3<>/tmp/in; n=0; echo n=0; while read x <&3; do n=$((n+1)); echo n=$n; done`

func (e *env) writeBundle(rootfs string) {
	e.t.Helper()
	bundle := e.words["BUNDLE"]
	require.NoError(e.t, fleet.WriteBundle(bundle, fleet.Spec{Rootfs: rootfs, Args: []string{"sh", "-c", guest}}))
	// Its cgroup is among those that the stage removes.
	file := filepath.Join(bundle, "config.json")
	content, err := os.ReadFile(file)
	require.NoError(e.t, err)
	var spec map[string]any
	require.NoError(e.t, json.Unmarshal(content, &spec))
	spec["linux"].(map[string]any)["cgroupsPath"] = e.Cgroup() + "/direct"
	content, err = json.Marshal(spec)
	require.NoError(e.t, err)
	require.NoError(e.t, os.WriteFile(file, content, 0o644))
}

var word = regexp.MustCompile(`\b[A-Z]+2?\b`)

// script is the command with what README.md's words in capitals stand for.
func (e *env) script(text string) string {
	return "cd " + e.folder + " && " + word.ReplaceAllStringFunc(text, func(w string) string {
		if v, ok := e.words[w]; ok {
			return v
		}
		return w
	})
}

// must runs a command, which has to succeed.
func (e *env) must(text string) string {
	e.t.Helper()
	out, err := e.Output(e.ctx, "sh", "-c", e.script(text))
	require.NoError(e.t, err)
	return out
}

// eventually waits for at most a minute until f returns nil.
func (e *env) eventually(f func() error) {
	e.t.Helper()
	var err error
	for start := time.Now(); time.Since(start) < time.Minute && e.ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	e.t.Fatal(errors.Join(err, context.Cause(e.ctx)))
}

// foreground starts a command that lasts as long as the sandbox id.
func (e *env) foreground(id, text string) {
	e.t.Helper()
	e.guests[id] = e.background(id, text)
}

// answers gives the guest a line, and waits for the answer.
func (e *env) answers(id string, n int) {
	e.t.Helper()
	e.eventually(func() error {
		_, err := e.Output(e.ctx, "runsc-agentzip", "exec", id, "sh", "-c", "echo >/tmp/in")
		return err
	})
	e.prints(id, n)
}

func (e *env) prints(id string, n int) {
	e.t.Helper()
	e.eventually(func() error {
		if out := e.guests[id].Log(); !slices.Contains(strings.Split(out, "\n"), fmt.Sprintf("n=%d", n)) {
			return fmt.Errorf("%s does not print n=%d but %q", id, n, out)
		}
		return nil
	})
}

// ended waits until the sandbox's command has ended.
func (e *env) ended(id string) {
	e.t.Helper()
	select {
	case <-e.guests[id].Done():
	case <-time.After(time.Minute):
		e.t.Fatalf("%s has not ended", id)
	}
}

func (e *env) startDocker() {
	e.t.Helper()
	// The folders and the cgroup are the test's own, and there is no network.
	d, err := e.Start("dockerd", "dockerd", "--data-root", e.Path("docker"), "--cgroup-parent", e.Cgroup(), "--exec-opt", "native.cgroupdriver=cgroupfs",
		"--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--userland-proxy=false")
	require.NoError(e.t, err)
	require.NoError(e.t, d.Await(e.ctx, func() error {
		_, err := e.Output(e.ctx, "docker", "version")
		return err
	}))
	e.dockerd = d
}

func (e *env) writeDaemonJSON(content []byte) {
	e.t.Helper()
	require.NoError(e.t, os.WriteFile(e.Path("daemon.json"), content, 0o644))
	e.must("cp ../daemon.json /etc/docker/daemon.json")
}

// dockerInstall is the machine's dockerd being reloaded, or here the first one being
// started.
func (e *env) dockerInstall(text string) {
	e.must(strings.TrimSuffix(text, " && systemctl reload docker"))
	if e.dockerd != nil {
		e.dockerReload("")
		return
	}
	e.startDocker()
	e.must("docker load --input ../image.tar")
}

// dockerReload does what systemctl does, and waits until dockerd has read its file.
func (e *env) dockerReload(string) {
	e.t.Helper()
	require.NoError(e.t, e.dockerd.Signal(syscall.SIGHUP))
	var file struct{ Runtimes map[string]any }
	require.NoError(e.t, json.Unmarshal([]byte(e.must("cat /etc/docker/daemon.json")), &file))
	e.eventually(func() error {
		var known map[string]any
		if err := json.Unmarshal([]byte(e.must("docker info --format '{{json .Runtimes}}'")), &known); err != nil {
			return err
		}
		for name := range file.Runtimes {
			if known[name] == nil {
				return fmt.Errorf("dockerd does not know the runtime %q of daemon.json", name)
			}
		}
		return nil
	})
}

func (e *env) daemonJSON(text string) {
	require.NoError(e.t, json.Unmarshal([]byte(text), &e.config))
	e.writeDaemonJSON([]byte(text))
	e.dockerReload("")
	e.must("docker run --rm --runtime=agentzip debian:12 true")
}

func (e *env) dmesg(text string) {
	require.Contains(e.t, e.must(text), "gVisor")
}

func (e *env) runBundle(text string) {
	e.foreground("first", text)
	e.prints("first", 0)
	e.answers("first", 1)
}

func (e *env) checkpoint(text string) {
	e.must(text)
	e.ended("first")
}

func (e *env) restore(text string) {
	e.foreground("second", text)
	e.answers("second", 2)
	// README.md goes on to say what can be done with a container ID.
	e.words["ID"] = "second"
}

func (e *env) stats(text string) {
	require.Contains(e.t, e.must(strings.Replace(text, "[-json] ", "", 1)), "guest ")
	var s control.Stats
	require.NoError(e.t, json.Unmarshal([]byte(e.must(strings.Replace(text, "[-json]", "-json", 1))), &s))
	require.NotZero(e.t, s.GuestBytes)
}

func (e *env) hint(text string) {
	e.must(text)
	require.Contains(e.t, e.must("runsc-agentzip agentzip stats ID"), "\nphase ")
}

// background starts a command that lasts until it is interrupted.
func (e *env) background(name, text string) *stage.Daemon {
	e.t.Helper()
	d, err := e.Start(name, "sh", "-c", strings.Replace(e.script(text), " && ", " && exec ", 1))
	require.NoError(e.t, err)
	return d
}

// interrupt ends one as Ctrl-C does.
func (e *env) interrupt(d *stage.Daemon) {
	e.t.Helper()
	require.NoError(e.t, d.Signal(syscall.SIGINT))
	select {
	case <-d.Done():
	case <-time.After(time.Minute):
		e.t.Fatalf("it has not ended: %s", d.Log())
	}
}

func (e *env) top(text string) {
	d := e.background("top", text)
	e.eventually(func() error {
		// The second round has rates.
		if out := d.Log(); strings.Count(out, e.words["ID"]) < 2 {
			return fmt.Errorf("top does not show %s: %q", e.words["ID"], out)
		}
		return nil
	})
	e.interrupt(d)
}

func (e *env) metrics(text string) {
	d := e.background("metrics", text)
	require.NoError(e.t, d.Await(e.ctx, func() error {
		out, err := e.Output(e.ctx, "busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:9464/metrics")
		if err == nil && !(strings.Contains(out, "\nagentzip_") && strings.Contains(out, `"`+e.words["ID"]+`"`)) {
			err = fmt.Errorf("%s is not in %q", e.words["ID"], out)
		}
		return err
	}))
	e.interrupt(d)
}

func (e *env) dockerStats(text string) {
	id := e.must("docker run --detach --runtime=agentzip debian:12 sleep 1000")
	require.Contains(e.t, e.must(text), "guest ")
	e.must("docker rm --force " + id)
}

// rootImage runs a container with the annotations, for which there is no gofer.
func (e *env) rootImage(text string) {
	var part struct{ Annotations map[string]string }
	require.NoError(e.t, json.Unmarshal([]byte("{"+text+"}"), &part))
	for name, value := range part.Annotations {
		if v, ok := e.words[value]; ok {
			part.Annotations[name] = v
		}
	}
	bundle, empty := e.Path("erofs-bundle"), e.Path("empty")
	require.NoError(e.t, os.MkdirAll(empty, 0o755))
	require.NoError(e.t, fleet.WriteBundle(bundle, fleet.Spec{Rootfs: empty, Annotations: part.Annotations,
		Args: []string{"sh", "-c", "echo written >/file && cat /file && sleep 1000"}}))
	d := e.background("erofs", "runsc-agentzip --ignore-cgroups run --bundle "+bundle+" erofs")
	require.NoError(e.t, d.Await(e.ctx, func() error {
		if out := d.Log(); !strings.Contains(out, "written\n") {
			return fmt.Errorf("it prints %q", out)
		}
		return nil
	}))
	require.Contains(e.t, e.must("runsc-agentzip agentzip stats erofs"), " gofer 0 B,")
	e.must("runsc-agentzip kill erofs KILL")
	<-d.Done()
}

func (e *env) templateCreate(text string) {
	e.words["DIR"] = e.Path("template")
	e.must(text)
	e.ended("second")
}

func (e *env) clone(text string) {
	e.foreground("clone", text)
	e.answers("clone", 3)
	e.words["ID"] = "clone"
}

func (e *env) prefetchSave(text string) {
	// Steps to learn from: what they want has to be away before.
	for n := 4; n < 7; n++ {
		e.must("runsc-agentzip agentzip evict CLONE")
		e.answers("clone", n)
	}
	e.must(text)
}

// ship starts the registry that README.md takes for granted.
func (e *env) ship(text string) {
	config := fmt.Sprintf("version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: %s\nhttp:\n  addr: 127.0.0.1:5000\n", e.Path("registry"))
	require.NoError(e.t, os.WriteFile(e.Path("registry.yml"), []byte(config), 0o644))
	d, err := e.Start("registry", "docker-registry", "serve", e.Path("registry.yml"))
	require.NoError(e.t, err)
	require.NoError(e.t, d.Await(e.ctx, func() error {
		_, err := e.Output(e.ctx, "busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:5000/v2/")
		return err
	}))
	e.must(text)
}

// pull is a node's, which does not have the image yet.
func (e *env) pull(text string) {
	e.must("docker rmi REGISTRY/template:1")
	e.must(text)
}

// shipped restores a clone from the template that has come through the registry.
func (e *env) shipped(text string) {
	require.Equal(e.t, e.must("runsc-agentzip agentzip template info DIR | head -2"), e.must(text+" | head -2"))
	e.foreground("shipped", "runsc-agentzip --ignore-cgroups restore --bundle BUNDLE --image-path DIR2 shipped")
	e.answers("shipped", 3)
	var s control.Stats
	require.NoError(e.t, json.Unmarshal([]byte(e.must("runsc-agentzip agentzip stats -json shipped")), &s))
	require.NotZero(e.t, s.TemplateBytes)
	require.NotZero(e.t, s.Prefetch.Patterns, "what was learnt travels with it")
	e.must("runsc-agentzip kill shipped KILL")
	e.ended("shipped")
}

func (e *env) poolServe(text string) {
	e.pool = e.background("pool", text)
	e.poolAnswers()
}

func (e *env) poolAnswers() {
	e.t.Helper()
	require.NoError(e.t, e.pool.Await(e.ctx, func() error {
		_, err := e.Output(e.ctx, "runsc-agentzip", "agentzip", "pool", "stats", "--socket=/run/runsc-agentzip/pool.sock")
		return err
	}))
}

// unit does what systemd does with the unit that has been installed.
func (e *env) unit(text string) {
	require.NoError(e.t, e.pool.Signal(syscall.SIGTERM))
	<-e.pool.Done()
	require.Zero(e.t, e.pool.ExitCode(), e.pool.Log())
	fields := strings.Fields(text)
	unit := e.must("cat /etc/systemd/system/" + fields[len(fields)-1] + ".service")
	start := regexp.MustCompile(`(?m)^ExecStart=(.*)$`).FindStringSubmatch(unit)
	require.NotNil(e.t, start, unit)
	require.Contains(e.t, unit, "\n[Install]\nWantedBy=")
	e.pool = e.background("unit", start[1])
	e.t.Logf("not run: %s: run instead: %s", text, start[1])
	e.poolAnswers()
}

// installPool leaves what README.md goes on to say is in daemon.json.
func (e *env) installPool(text string) {
	e.must(text)
	var file struct {
		Runtimes map[string]struct{ RuntimeArgs []string }
	}
	require.NoError(e.t, json.Unmarshal([]byte(e.must("cat /etc/docker/daemon.json")), &file))
	e.installed = file.Runtimes["agentzip"].RuntimeArgs
}

// runtimeArgs puts the line into daemon.json and restarts dockerd.
func (e *env) runtimeArgs(text string) {
	var line map[string]any
	require.NoError(e.t, json.Unmarshal([]byte("{"+text+"}"), &line))
	var args []string
	for _, arg := range line["runtimeArgs"].([]any) {
		args = append(args, arg.(string))
	}
	require.Equal(e.t, e.installed, args)
	e.config["runtimes"]["agentzip"]["runtimeArgs"] = line["runtimeArgs"]
	content, err := json.Marshal(e.config)
	require.NoError(e.t, err)
	e.writeDaemonJSON(content)
	require.NoError(e.t, e.dockerd.Signal(syscall.SIGTERM))
	<-e.dockerd.Done()
	e.startDocker()
	e.must("docker run --rm --runtime=agentzip debian:12 true")
}

// annotation needs a newer Docker than Debian 12's, which refuses the flag by name.
// test/containerd passes annotations through containerd and podman.
func (e *env) annotation(text string) {
	version := e.must("docker version --format '{{.Server.APIVersion}}'")
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d", &major, &minor)
	require.NoError(e.t, err, version)
	if major == 1 && minor < 43 {
		_, err := e.Output(e.ctx, "sh", "-c", e.script(text))
		require.ErrorContains(e.t, err, "annotation")
		e.t.Logf("docker run --annotation needs API 1.43, this dockerd has %s", strings.TrimSpace(version))
		return
	}
	e.must(text)
}

// cloud is the first line of the shell's loop, which the others need.
func (e *env) cloud(text string) {
	e.assignment = text + "; "
	e.words["DIR"], e.words["DIR2"], e.words["COMMAND"] = e.Path("cloud"), e.Path("cloud-fork"), "date"
	e.must(text)
}

func (e *env) loop(text string) {
	out := e.must(e.assignment + text)
	if strings.Contains(text, " stats -json ") {
		var s control.Stats
		require.NoError(e.t, json.Unmarshal([]byte(out), &s))
		require.NotZero(e.t, s.TemplateBytes)
	}
}

func (e *env) scheduler(text string) {
	// It calls the runtime some sixty times, which takes a busy machine minutes.
	d := e.background("scheduler", text)
	select {
	case <-d.Done():
	case <-e.ctx.Done():
		e.t.Fatal(context.Cause(e.ctx))
	}
	out := d.Log()
	require.Zero(e.t, d.ExitCode(), out)
	require.Contains(e.t, out, "\nclone-004 waits: owns ")
	require.Contains(e.t, out, "\nfork-2: step 4, ")
}

// goLoop makes a program of a module of its own of the lines, and runs it.
func (e *env) goLoop(text string) {
	e.words["DIR"], e.words["DIR2"] = e.Path("cloud-go"), e.Path("cloud-go-fork")
	var body strings.Builder
	for line := range strings.Lines(text) {
		for w, v := range e.words {
			line = strings.ReplaceAll(line, strconv.Quote(w), strconv.Quote(v))
		}
		fmt.Fprintf(&body, "\t%s\n\tcheck(err)\n", strings.TrimSpace(line))
	}
	dir := e.t.TempDir()
	program := "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\n\t\"runsc-agentzip/pkg/client\"\n)\n\n" +
		"func check(err error) {\n\tif err != nil {\n\t\tpanic(err)\n\t}\n}\n\n" +
		"func main() {\n\tctx := context.Background()\n" + body.String() + `
	fmt.Println(step.ExitCode, tpl.Dir, fork.Dir)
	all, err := c.List(ctx)
	check(err)
	for _, s := range all {
		fmt.Println(s.ID, s.Status)
		check(c.Delete(ctx, s.ID))
	}
	check(c.Cleanup())
}
`
	require.NoError(e.t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o644))
	require.NoError(e.t, os.WriteFile(filepath.Join(dir, "go.mod"),
		[]byte("module example.com/cloud\n\ngo 1.26\n\nrequire runsc-agentzip v0.0.0\n\nreplace runsc-agentzip => "+repository(e.t)+"\n"), 0o644))
	build := exec.CommandContext(e.ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", e.Path("loop"), ".")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(e.t, err, "%s\n%s", out, program)
	printed := e.must(e.Path("loop"))
	for _, want := range []string{"a running", "b running", "c running", "d running", "e running", "seed stopped", "0 " + e.words["DIR"]} {
		require.Contains(e.t, printed, want)
	}
}

// compare compares two results of the repository's.
func (e *env) compare(text string) {
	results, err := filepath.Glob(filepath.Join(repository(e.t), "test/results/*-n8.json.gz"))
	require.NoError(e.t, err)
	require.GreaterOrEqual(e.t, len(results), 2)
	slices.Sort(results)
	text = strings.Replace(text, "OLD.json", results[0], 1)
	require.NotEmpty(e.t, e.must(strings.Replace(text, "NEW.json", results[len(results)-1], 1)))
}

// target: `make test` runs the targets or they are known, and this test is one.
func (e *env) target(text string) {
	makefile, err := os.ReadFile(filepath.Join(repository(e.t), "Makefile"))
	require.NoError(e.t, err)
	inTest := regexp.MustCompile(`(?m)^test:(.*?)(##.*)?$`).FindSubmatch(makefile)
	require.NotNil(e.t, inTest)
	for _, target := range strings.Fields(text)[1:] {
		require.Regexp(e.t, `(?m)^`+regexp.QuoteMeta(target)+`:.* ## `, string(makefile))
		if bytes.Contains(append(inTest[1], ' '), []byte(" "+target+" ")) {
			e.t.Logf("not run here: `make %s` is a part of `make test`", target)
		} else {
			e.t.Logf("not run: `make %s` takes long", target)
		}
	}
}

// bazelLabel: bazel's run of the Docker test would be the second one; `make bazel-test`
// runs bazel.
func (e *env) bazelLabel(text string) {
	label := regexp.MustCompile(`//(\S+):(\S+)$`).FindStringSubmatch(text)
	require.NotNil(e.t, label)
	build, err := os.ReadFile(filepath.Join(repository(e.t), label[1], "BUILD.bazel"))
	require.NoError(e.t, err)
	require.Contains(e.t, string(build), fmt.Sprintf("go_test(\n    name = %q,", label[2]))
}
