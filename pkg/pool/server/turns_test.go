package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/pool/wire"
)

// turnConn is a connection whose queue the test reads.
func turnConn() *conn {
	return &conn{s: &Server{}, limit: 1 << 20, writing: true}
}

// told returns the arguments of the Turns in the queue, and empties it.
func told(t *testing.T, c *conn) (args []uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.queue {
		m, err := wire.Parse(p.msg)
		require.NoError(t, err)
		require.Equal(t, wire.Turn, m.Type)
		args = append(args, m.Arg)
	}
	c.queue, c.queued = nil, 0
	return args
}

func TestTurns(t *testing.T) {
	s := &turns{most: 2}
	defer s.stop()
	a, b, c, d := turnConn(), turnConn(), turnConn(), turnConn()
	s.take(a)
	s.take(b)
	require.Equal(t, []uint32{1}, told(t, a))
	require.Equal(t, []uint32{1}, told(t, b))
	s.take(a) // it has it
	require.Equal(t, []uint32{1}, told(t, a))

	s.take(c)
	s.take(c)
	require.Empty(t, told(t, c))
	s.take(d)
	s.give(d) // not wanted any more
	s.give(b)
	require.Equal(t, []uint32{1}, told(t, c))
	require.Empty(t, told(t, d))
	require.Len(t, s.holders, 2)
	require.Empty(t, s.queue)

	// Who keeps it for too long loses it.
	s.take(d)
	require.Empty(t, told(t, d))
	s.mu.Lock()
	s.holders[0].since = time.Now().Add(-turnLease)
	s.next()
	s.mu.Unlock()
	require.Equal(t, []uint32{1}, told(t, d))
	require.EqualValues(t, 1, s.lapsed)
	s.give(a) // has been
	require.Len(t, s.holders, 2)

	// Whoever does not take what it is sent is passed over.
	told(t, a)
	b.closed = true
	s.take(b)
	s.take(a)
	s.give(c)
	require.Equal(t, uint32(1), told(t, a)[0])
	s.give(a)
	s.give(d)
	require.Empty(t, s.holders)
	require.Nil(t, s.timer)
}

// TestTurnsEnd has sandboxes go away with their turn and while they wait for it.
func TestTurnsEnd(t *testing.T) {
	s := New(Options{})
	defer s.Close()
	s.turns.most = 1
	take := func() *client {
		c := attach(t, s, greeting("a"))
		var w wire.Writer
		w.Begin(wire.Turn, 1)
		c.send(w.Bytes())
		return c
	}
	state := func(holders, queue int) {
		require.Eventually(t, func() bool {
			s.turns.mu.Lock()
			defer s.turns.mu.Unlock()
			return len(s.turns.holders) == holders && len(s.turns.queue) == queue
		}, 10*time.Second, time.Millisecond)
	}
	a := take()
	state(1, 0)
	b := take()
	state(1, 1)
	c := take()
	state(1, 2)
	b.close()
	state(1, 1)
	a.close()
	state(1, 0)
	c.close()
	state(0, 0)
}
