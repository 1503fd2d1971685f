package integrity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// walker looks at files in every way that a path leads to one, waits, and looks
// again: it prints what differs.
const walker = `
import hashlib, os, sys, time

rounds = int(sys.argv[1])
tree = '/usr/lib/python3'
if sum(len(f) for _, _, f in os.walk(tree)) < 500: tree = '/usr/share'

def walk():
    h, n = hashlib.sha256(), 0
    for d, dirs, files in os.walk(tree):
        dirs.sort()
        for f in sorted(files):
            p = os.path.join(d, f)
            s = os.lstat(p)
            h.update(('%s %o %d %d' % (p, s.st_mode, s.st_size, s.st_mtime_ns)).encode())
            n += 1
            if n >= 3000: return h.hexdigest()
    return h.hexdigest()

want = walk()
top = '/tmp/dentries-%d' % os.getpid()
os.makedirs(top + '/a/b')
os.chdir(top + '/a/b')                                  # a working directory
passwd = open('/etc/passwd')                            # a file in the root file system
first = passwd.readline()
rest = open('/etc/passwd').read()[len(first):]
lib = os.open('/usr/lib', os.O_RDONLY | os.O_DIRECTORY)  # a directory to start from
names = sorted(os.listdir('/usr/lib'))
gone = open('gone', 'w+'); gone.write('still here'); gone.flush(); os.unlink('gone')
os.symlink('/usr/lib', 'link')
for i in range(rounds):
    print('round', i, flush=True)
    time.sleep(1.5)
    assert walk() == want, 'the tree differs'
    assert os.getcwd() == top + '/a/b', os.getcwd()
    assert sorted(os.listdir(lib)) == names
    assert os.stat('../../a/b').st_ino == os.stat('.').st_ino
    assert os.stat('../lib', dir_fd=lib).st_ino == os.stat('/usr/lib').st_ino
    assert sorted(os.listdir('link')) == names
    gone.seek(0); assert gone.read() == 'still here'
    open('f%d' % i, 'w').write(str(i))
    os.rename('f%d' % i, '../g%d' % i)
    for j in range(i + 1): assert open('../g%d' % j).read() == str(j)
    os.rename(top + '/a', top + '/c'); os.rename(top + '/c', top + '/a')
    try: os.stat('/usr/lib/none-of-this')
    except FileNotFoundError: pass
    else: raise AssertionError('found what is not there')
assert passwd.read() == rest, 'an open file reads otherwise'
print('done')
`

// TestDroppedDentries: what filesystems cache for later lookups is dropped in a
// wait, and nobody notices but the host, which has its descriptors back.
func TestDroppedDentries(t *testing.T) {
	needs(t, "usr/bin/python3")
	for _, m := range distinct(modeReference(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			if m.evicts {
				m.flags = append(slices.Clone(m.flags), "--agentzip-trim-after=200ms")
			}
			b := startBox(t, m)
			stop, counted := make(chan struct{}), make(chan struct{})
			most := 0
			go func() {
				defer close(counted)
				for {
					select {
					case <-stop:
						return
					case <-time.After(50 * time.Millisecond):
					}
					if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.sb.Pid())); err == nil {
						most = max(most, len(fds))
					}
				}
			}()
			b.exec(time.Minute, "/usr/bin/python3", "-c", walker, "4")
			if m.evicts {
				// The sandbox waits from now on. What only timers have looked at
				// stays for some seconds.
				for range 600 {
					if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.sb.Pid())); err == nil && len(fds) < 150 {
						break
					}
					time.Sleep(50 * time.Millisecond)
				}
			}
			close(stop)
			<-counted
			fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.sb.Pid()))
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("the Sentry had up to %d descriptors open, and has %d", most, len(fds))
			if m.evicts && (most < 400 || len(fds) >= 150) {
				t.Errorf("the Sentry had up to %d descriptors open and has %d: want 400 and more, and less than 150 in the wait", most, len(fds))
			}
			b.finish()
		})
	}
}

// TestDroppedDentriesWhileSaving: dentries are not dropped amid a save, which goes
// through them.
func TestDroppedDentriesWhileSaving(t *testing.T) {
	agentzipOnly(t)
	needs(t, "usr/bin/python3")
	m := modeIdle(t)
	m.flags = append(slices.Clone(m.flags), "--agentzip-trim-after=10ms", "--agentzip-idle=10ms")
	b := startBox(t, m)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	saved := make(chan error)
	saves := seconds(6, 60)
	go func() {
		defer close(saved)
		for i := range saves {
			// At every point of a wait of the walker's, of 1.5 s each.
			time.Sleep(time.Duration(100+70*i) * time.Millisecond)
			dir := filepath.Join(harness.TempDir(t), "image")
			if err := b.sb.Checkpoint(ctx, dir, fleet.CheckpointOptions{LeaveRunning: true}); err != nil {
				saved <- fmt.Errorf("checkpoint %d: %w", i, err)
				return
			}
			os.RemoveAll(dir)
		}
	}()
	b.exec(2*time.Minute, "/usr/bin/python3", "-c", walker, "4")
	for err := range saved {
		t.Error(err)
	}
	b.exec(time.Minute, "/usr/bin/python3", "-c", walker, "1")
	b.finish()
}

// stamps says when the timestamp of a file that it has written changes.
const stamps = `
import os, sys, time
os.chdir(sys.argv[1])
path = 'file'
with open(path, 'w') as f: f.write('x' * 10000)
for i in range(300): open('other-%d' % i, 'w').close()
want = os.stat(path).st_mtime_ns
for i in range(4):
    time.sleep(1.2)
    got = os.stat(path).st_mtime_ns
    assert got == want, 'changed by %d ns' % (got - want)
    assert open(path).read() == 'x' * 10000
os.utime(path, ns=(1, 1))
print('done')
`

// TestDirtyDentries: files that only the sandbox writes to keep the time that it has
// given them, which the host does not know until later.
func TestDirtyDentries(t *testing.T) {
	needs(t, "usr/bin/python3")
	if *rootfsFlag != "/" {
		t.Skip("the folder that is written to is one of the host's")
	}
	for _, m := range distinct(modeReference(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			// The files of the host's that the guest writes to are those of a folder
			// of the test's.
			m.flags = append(slices.Clone(m.flags), "--overlay2=none", "--file-access=exclusive")
			if m.evicts {
				m.flags = append(m.flags, "--agentzip-trim-after=200ms")
			}
			dir := harness.TempDir(t)
			b := startBox(t, m)
			b.exec(time.Minute, "/usr/bin/python3", "-B", "-c", stamps, dir)
			b.finish()
		})
	}
}
