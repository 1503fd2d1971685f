package integrity

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// TestTemplateCommands makes templates of a running container, reads them with
// the other template commands and restores from one.
func TestTemplateCommands(t *testing.T) {
	agentzipOnly(t)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	rt := newRuntime(t, modeIdle(t))
	dir := harness.TempDir(t)
	bundle := filepath.Join(dir, "bundle")
	if err := fleet.WriteBundle(bundle, fleet.Spec{
		Rootfs:         *rootfsFlag,
		ReadonlyRootfs: true,
		Args:           []string{"/bin/sh", "-c", `n=0; while read -r line; do n=$((n+1)); echo "$n $line"; done`},
		Env:            []string{"GREETING=settled"},
	}); err != nil {
		t.Fatal(err)
	}
	sb, err := rt.Run(ctx, "maker", bundle)
	if err != nil {
		t.Fatal(err)
	}
	request := func(s *fleet.Sandbox, line, want string) {
		t.Helper()
		if got, err := s.Request(ctx, line); err != nil || got != want {
			t.Fatalf("Request(%q) = %q, %v, want %q", line, got, err, want)
		}
	}
	tpl := func(args ...string) (stdout, all string, err error) {
		var out, both bytes.Buffer
		cmd := exec.CommandContext(ctx, rt.Binary(), append([]string{"--root=" + rt.Root(), "agentzip", "template"}, args...)...)
		cmd.Stdout, cmd.Stderr = &out, &both
		err = cmd.Run()
		return out.String(), out.String() + both.String(), err
	}
	image := filepath.Join(dir, "image")
	request(sb, "hello", "1 hello")

	// What is refused leaves the container and the disk alone.
	for _, c := range []struct {
		what  string
		args  []string
		words []string
	}{
		{"no folder", []string{"create", "maker"}, []string{"--image-path"}},
		{"no container", []string{"create", "--image-path=" + image, "nobody"}, []string{"nobody", rt.Root()}},
		{"failing settle command", []string{"create", "--image-path=" + image, "--settle-cmd=exit 3", "maker"}, []string{"--settle-cmd", "status 3"}},
		{"endless settle command", []string{"create", "--image-path=" + image, "--settle-cmd=sleep 1000", "--settle-timeout=1s", "maker"}, []string{"--settle-cmd", "1s"}},
		{"negative timeout", []string{"create", "--image-path=" + image, "--settle-timeout=-1s", "maker"}, []string{"--settle-timeout"}},
		{"no template", []string{"info", image}, []string{image}},
		{"wrong command", []string{"make", image}, []string{"make", "create"}},
	} {
		_, out, err := tpl(c.args...)
		refused(t, c.what, out, err, c.words...)
	}
	busy := make(chan error, 1)
	go func() {
		_, err := sb.Exec(ctx, "/bin/sh", "-c", `end=$(($(date +%s)+5)); while [ $(date +%s) -lt $end ]; do :; done`)
		busy <- err
	}()
	time.Sleep(time.Second)
	_, out, err := tpl("create", "--image-path="+image, "--settle-timeout=1s", "maker")
	refused(t, "busy container", out, err, "maker", "not quiet", "--settle-timeout")
	if err := <-busy; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(image); !os.IsNotExist(err) {
		t.Errorf("the folder was made: %v", err)
	}
	request(sb, "still", "2 still")

	info := func(args ...string) (i template.Info) {
		t.Helper()
		out, all, err := tpl(args...)
		t.Logf("%q: %s", args, all)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(out), &i); err != nil {
			t.Fatal(err)
		}
		return i
	}
	_, all, err := tpl("create", "--image-path="+image, "--leave-running", `--settle-cmd=echo "$GREETING" >&2`, "maker")
	if err != nil || !strings.Contains(all, "settled") || !strings.Contains(all, "digest") {
		t.Fatalf("create: %v: %s", err, all)
	}
	request(sb, "on", "3 on")
	first := info("info", "-json", image)
	if st, err := os.Stat(filepath.Join(image, template.PagesFile)); err != nil || st.Size() != int64(first.Bytes) || first.Bytes != first.Pages*template.PageSize {
		t.Errorf("info is %+v, pages: %v, %v", first, st, err)
	}
	if again := info("verify", "-json", image); again != first {
		t.Errorf("verify says %+v, info %+v", again, first)
	}
	_, out, err = tpl("create", "--image-path="+image, "maker")
	refused(t, "create over a template", out, err, image, "exists")
	request(sb, "and on", "4 and on")

	second := filepath.Join(dir, "second")
	if i := info("create", "-json", "--image-path="+second, "maker"); i.Digest == first.Digest {
		t.Error("two templates have the same digest")
	}
	if _, err := sb.Wait(ctx); err != nil {
		t.Errorf("the container goes on after create: %v", err)
	}
	for _, c := range []struct{ id, image, want string }{{"clone-1", image, "3 hi"}, {"clone-2", second, "5 hi"}} {
		s, err := rt.Restore(ctx, c.id, bundle, c.image)
		if err != nil {
			t.Fatal(err)
		}
		request(s, "hi", c.want)
	}

	// One image's pages with another's metadata.
	if err := os.Rename(filepath.Join(second, template.PagesFile), filepath.Join(image, template.PagesFile)); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"info", "verify"} {
		_, out, err = tpl(command, image)
		refused(t, command+" of a mixed image", out, err, filepath.Join(image, template.PagesFile))
		_, out, err = tpl(command, second)
		refused(t, command+" of an image without pages", out, err, second, template.PagesFile)
	}
}
