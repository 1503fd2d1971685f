// Command toolserver is a tool server with state in its memory, and its client, to be
// run inside a sandbox.
//
//	toolserver serve        answer lines on a socket of the sandbox's own
//	toolserver ask WORD...  send a line, print the answer; exit with 3 if it begins with ERR
//
// The server knows
//
//	put KEY VALUE   remember
//	get KEY         what was remembered
//	grow MIB SEED   write so much text to memory
//	sum             the number of bytes of text, and their checksum
//	collect         give garbage back
package main

import (
	"bufio"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"
)

// address is an abstract socket: nothing of it is in the file system.
const address = "@agentzip-toolserver"

func main() {
	args := os.Args[1:]
	switch {
	case len(args) == 1 && args[0] == "serve":
		fmt.Fprintln(os.Stderr, "toolserver:", serve())
		os.Exit(1)
	case len(args) > 1 && args[0] == "ask":
		answer, err := ask(strings.Join(args[1:], " "))
		if err != nil {
			fmt.Fprintln(os.Stderr, "toolserver:", err)
			os.Exit(1)
		}
		if strings.HasPrefix(answer, "ERR") {
			fmt.Fprintln(os.Stderr, answer)
			os.Exit(3)
		}
		fmt.Println(answer)
	default:
		fmt.Fprintf(os.Stderr, "toolserver: arguments %q: want serve or ask WORD...\n", args)
		os.Exit(2)
	}
}

func serve() error {
	l, err := net.Listen("unix", address)
	if err != nil {
		return err
	}
	s := &server{known: map[string]string{}}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			for in := bufio.NewScanner(conn); in.Scan(); {
				fmt.Fprintln(conn, s.answer(strings.Fields(in.Text())))
			}
		}()
	}
}

type server struct {
	mu    sync.Mutex
	known map[string]string
	text  [][]byte
}

func (s *server) answer(words []string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(words) == 3 && words[0] == "put":
		s.known[words[1]] = words[2]
		return "OK"
	case len(words) == 2 && words[0] == "get":
		if v, ok := s.known[words[1]]; ok {
			return v
		}
		return "ERR nothing is known of " + words[1]
	case len(words) == 3 && words[0] == "grow":
		n, err := strconv.Atoi(words[1])
		if err != nil || n < 0 || n > 1024 {
			return "ERR so much memory: " + words[1]
		}
		s.text = append(s.text, text(n<<20, words[2]))
		return "OK"
	case len(words) == 1 && words[0] == "sum":
		n, sum := 0, uint32(0)
		for _, t := range s.text {
			n += len(t)
			sum = crc32.Update(sum, crc32.IEEETable, t)
		}
		return fmt.Sprintf("%d bytes %08x", n, sum)
	case len(words) == 1 && words[0] == "collect":
		debug.FreeOSMemory()
		return "OK"
	}
	return "ERR what is " + strings.Join(words, " ")
}

// text is n bytes of lines as a tool would print them: each differs, and all are
// alike.
func text(n int, seed string) []byte {
	b := make([]byte, 0, n)
	for i := 0; len(b) < n; i++ {
		line := fmt.Appendf(nil, "%s: %d: compiling module %d of 4096, %d warnings, checksum %08x\n", seed, i, i%4096, i%7, i*2654435761)
		b = append(b, line[:min(len(line), n-len(b))]...)
	}
	return b
}

// ask sends a line and returns the answer. The server may be about to start.
func ask(line string) (string, error) {
	var conn net.Conn
	var err error
	for range 400 {
		if conn, err = net.Dial("unix", address); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, line); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(answer, "\n"), err
}
