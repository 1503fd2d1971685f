package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// progress tells the user what a run is doing: one line for each event, and
// one line about what goes on, which is replaced in place on a terminal and
// repeated now and then elsewhere.
type progress struct {
	w        io.Writer
	began    time.Time
	terminal bool

	mu sync.Mutex
	// shown: the last line on the terminal is to be replaced.
	shown bool
	last  time.Time
}

// statusEvery is how often what goes on is told where it cannot be replaced.
const statusEvery = 15 * time.Second

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, began: time.Now()}
	if f, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		p.terminal = err == nil
	}
	p.last = p.began
	return p
}

// clearLine moves to the start of a terminal's line and empties it.
const clearLine = "\r\x1b[K"

func (p *progress) line(format string, args []any) string {
	return fmt.Sprintf("[%6.1fs] "+format, append([]any{time.Since(p.began).Seconds()}, args...)...)
}

// say tells an event.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintln(p.w, p.line(format, args))
	p.last = time.Now()
}

// status tells what goes on.
func (p *progress) status(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.terminal:
		fmt.Fprint(p.w, clearLine+p.line(format, args))
		p.shown = true
	case time.Since(p.last) >= statusEvery:
		fmt.Fprintln(p.w, p.line(format, args))
		p.last = time.Now()
	}
}

// clear removes the line that is to be replaced, if there is one.
func (p *progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, clearLine)
		p.shown = false
	}
}

// Write implements io.Writer for what others have to say.
func (p *progress) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	return p.w.Write(b)
}

// columns is the width of the terminal that w is, or what to assume elsewhere.
func columns(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return int(size.Col)
		}
	}
	return 120
}
