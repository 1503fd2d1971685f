package census

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/control"
)

const (
	// maxAnswer is the longest answer that is read, in bytes. Usual ones have 3000.
	maxAnswer = 1 << 20
	// maxPath is the longest path that fits in the address of a socket, in bytes.
	maxPath = 107
	// glance is how long a call that is pending is looked at.
	glance = 10 * time.Millisecond
)

var (
	errOff     = errors.New("it runs with --agentzip=off")
	errForeign = errors.New("it was started by another runtime, or a version without agentzip")
	errRefused = errors.New("nobody listens on its control socket")
	errSilent  = errors.New("it does not answer")
)

// callStats asks for the stats of the sandbox with a control socket, until the
// deadline. If pending, an earlier call, is still unanswered, it does not ask. It takes
// over pending, and returns the connection if the error is errSilent and there may
// still be an answer.
func callStats(socket string, pending *net.UnixConn, deadline time.Time) (*control.Stats, *net.UnixConn, error) {
	if pending != nil {
		// An answer that comes now is out of date.
		_ = pending.SetReadDeadline(time.Now().Add(glance))
		if _, err := pending.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, pending, fmt.Errorf("%w, since it was last asked", errSilent)
		}
		_ = pending.Close()
	}
	conn, err := dial(socket)
	if err != nil {
		return nil, nil, err
	}
	s, err := exchange(conn, deadline)
	if errors.Is(err, errSilent) {
		return nil, conn, err
	}
	_ = conn.Close()
	return s, nil, err
}

// dial connects to a control socket, without waiting.
func dial(socket string) (*net.UnixConn, error) {
	if socket == "" {
		return nil, fmt.Errorf("%w: there is none", errRefused)
	}
	if len(socket) > maxPath {
		dir, err := unix.Open(filepath.Dir(socket), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("%w: %v", errRefused, err)
		}
		defer unix.Close(dir)
		socket = "/proc/self/fd/" + strconv.Itoa(dir) + "/" + filepath.Base(socket)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("%w: %v", errRefused, err)
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: its control socket's queue is full", errSilent)
	}
	return conn, err
}

// exchange sends the call and reads the answer.
func exchange(conn *net.UnixConn, deadline time.Time) (*control.Stats, error) {
	_ = conn.SetDeadline(deadline)
	// The form is that of gVisor's package urpc.
	const request = `{"method":"Agentzip.Stats","arg":{}}`
	if _, err := io.WriteString(conn, request); err != nil {
		return nil, silence(err)
	}
	var out struct {
		Success bool           `json:"success"`
		Err     string         `json:"err"`
		Result  *control.Stats `json:"result"`
	}
	in := &io.LimitedReader{R: conn, N: maxAnswer}
	if err := json.NewDecoder(in).Decode(&out); err != nil {
		switch {
		case in.N == 0:
			return nil, fmt.Errorf("its answer is longer than %d bytes", maxAnswer)
		case in.N != maxAnswer && errors.Is(err, os.ErrDeadlineExceeded):
			return nil, errors.New("its answer is incomplete")
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errors.New("it ended the connection before it had answered")
		}
		return nil, silence(err)
	}
	switch {
	case out.Success && out.Result != nil:
		tidy(out.Result)
		return out.Result, nil
	case strings.Contains(out.Err, "unknown method"):
		return nil, errForeign
	case strings.Contains(out.Err, "--agentzip=off"):
		return nil, errOff
	case out.Success:
		return nil, errors.New("its answer has no result")
	}
	return nil, fmt.Errorf("it answers with an error: %s", out.Err)
}

// tidy takes control characters out of what a sandbox says in words: JSON leaves some.
func tidy(s *control.Stats) {
	for _, word := range []*string{&s.Phase.State, &s.Phase.Why, &s.Pressure.Level, &s.Pool.State, &s.Pool.Reason} {
		*word = clean(*word, maxReason)
	}
	s.Rejects = tidyKeys(s.Rejects)
	s.Stages = tidyKeys(s.Stages)
}

func tidyKeys[V any](m map[string]V) map[string]V {
	if len(m) == 0 {
		return m
	}
	out := make(map[string]V, len(m))
	for name, v := range m {
		out[clean(name, maxReason)] = v
	}
	return out
}

// silence makes errSilent of an exceeded deadline.
func silence(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errSilent
	}
	return fmt.Errorf("its answer: %w", err)
}
