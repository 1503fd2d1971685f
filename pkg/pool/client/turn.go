package client

import "runsc-agentzip/pkg/pool/wire"

// TakeTurn asks for the sandbox's turn to evict. The channel is closed
// when it has it: at once if there is no connection, and when one is lost, for
// then nobody says whose turn it is. GiveTurn must follow, also if the channel is
// not waited for.
func (c *Client) TakeTurn() <-chan struct{} {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.mu.Lock()
	c.turn, c.granted = make(chan struct{}), false
	turn, cn := c.turn, c.liveConn(nil)
	c.mu.Unlock()
	c.w.Begin(wire.Turn, 1)
	if !c.transmit(cn) {
		c.mu.Lock()
		c.grantTurn()
		c.mu.Unlock()
	}
	return turn
}

// GiveTurn says that the sandbox has had its turn or does not want it any more.
func (c *Client) GiveTurn() {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.mu.Lock()
	c.turn, c.granted = nil, false
	cn := c.liveConn(nil)
	c.mu.Unlock()
	c.w.Begin(wire.Turn, 0)
	c.transmit(cn) // otherwise it ends by itself
}

// grantTurn gives the sandbox its turn if it waits for it.
//
// Preconditions: c.mu is held.
func (c *Client) grantTurn() {
	if c.turn != nil && !c.granted {
		c.granted = true
		close(c.turn)
	}
}
