package cmd

import (
	"bytes"
	"context"
	"errors"
	goflag "flag"
	"fmt"
	"io/fs"
	stdlog "log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/google/subcommands"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"

	"runsc-agentzip/pkg/census"
)

// metricsUsage is what "agentzip metrics" says of itself.
const metricsUsage = `agentzip metrics [flags] - metrics of all sandboxes below --root and of the pool, for Prometheus

  -listen=ADDRESS        serve them, as /metrics, at HOST:PORT or unix:PATH until SIGTERM
                         (default: print them once)
  -pool=PATH             socket of the pool (default: as for top)

Whoever can connect to ADDRESS can read them: use 127.0.0.1:PORT or a socket, which
only the own user can connect to.
`

const (
	// maxScrapes is how many requests may wait for their turn.
	maxScrapes = 8
	// scrapeTimeout is how long a client may take to send its request, and to read the
	// answer once more than a census takes.
	scrapeTimeout = 10 * time.Second
	// lastScrapes is how long those that are in progress may take at the end.
	lastScrapes = 5 * time.Second
	// maxUnixPath is the length of the longest path of a socket, in bytes.
	maxUnixPath = 107
)

// metrics runs "agentzip metrics" with the arguments that follow it.
func (a *Agentzip) metrics(conf *config.Config, args []string) subcommands.ExitStatus {
	f := flag.NewFlagSet("agentzip metrics", flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, metricsUsage) }
	address := f.String("listen", "", "where to serve them")
	pool := f.String("pool", conf.AgentzipPool, "the pool's socket")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, goflag.ErrHelp) {
			return subcommands.ExitSuccess
		}
		return subcommands.ExitUsageError
	}
	switch {
	case f.NArg() != 0:
		util.Fatalf("agentzip metrics: want flags only, got %q", f.Arg(0))
	case a.json:
		util.Fatalf("agentzip metrics: they are not JSON: use \"agentzip top -n=1 -json\"")
	}
	c, err := newCollector(conf.RootDir, *pool)
	if err == nil {
		defer c.Close()
		if *address == "" {
			err = printMetrics(c)
		} else {
			err = serveMetrics(c, *address)
		}
	}
	if err != nil {
		util.Fatalf("agentzip metrics: %v", err)
	}
	return subcommands.ExitSuccess
}

func printMetrics(c *census.Collector) error {
	now, err := c.Take()
	if err != nil {
		return err
	}
	return census.WriteMetrics(os.Stdout, now)
}

// serveMetrics serves metrics until SIGTERM or SIGINT.
func serveMetrics(c *census.Collector, address string) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	l, err := listenMetrics(address)
	if err != nil {
		return fmt.Errorf("-listen=%s: %w", address, err)
	}
	logger := stdlog.New(os.Stderr, "", stdlog.LstdFlags)
	s := &http.Server{
		Handler:           metricsHandler(c.Take),
		ReadTimeout:       scrapeTimeout,
		ReadHeaderTimeout: scrapeTimeout,
		// From the request to the end of the answer, waiting for the turn included.
		WriteTimeout:   6 * scrapeTimeout,
		IdleTimeout:    6 * scrapeTimeout,
		MaxHeaderBytes: 1 << 14,
		ErrorLog:       logger,
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	if l.Addr().Network() == "unix" {
		logger.Printf("serving /metrics at %s", address)
	} else {
		logger.Printf("serving http://%s/metrics", l.Addr())
	}
	select {
	case err := <-served:
		return err
	case <-signals:
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastScrapes)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		_ = s.Close()
	}
	return nil
}

// listenMetrics listens at HOST:PORT or unix:PATH.
func listenMetrics(address string) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return nil, fmt.Errorf("want HOST:PORT or unix:PATH: %w", err)
		}
		return net.Listen("tcp", address)
	}
	if path == "" || len(path) > maxUnixPath {
		return nil, fmt.Errorf("the path has %d bytes, and can have 1 to %d", len(path), maxUnixPath)
	}
	switch st, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("%s exists, and is no socket: use another path", path)
	default:
		// One that nobody listens on was left behind.
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("another program listens on %s: use another path, or end it first", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	defer unix.Umask(unix.Umask(0o177))
	return net.Listen("unix", path)
}

// metricsHandler answers GET /metrics with a census, one after the other.
func metricsHandler(take func() (*census.Census, error)) http.Handler {
	waiting := make(chan struct{}, maxScrapes)
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.Error(w, "there is /metrics", http.StatusNotFound)
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "use GET", http.StatusMethodNotAllowed)
			return
		}
		select {
		case waiting <- struct{}{}:
			defer func() { <-waiting }()
		default:
			http.Error(w, "too many requests wait already", http.StatusServiceUnavailable)
			return
		}
		// Not for a client that has gone away meanwhile.
		select {
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		var c *census.Census
		var err error
		func() {
			// The server goes on after a panic.
			defer func() { <-turn }()
			c, err = take()
		}()
		var b bytes.Buffer
		if err == nil {
			err = census.WriteMetrics(&b, c)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", census.ContentType)
		_, _ = w.Write(b.Bytes())
	})
}
