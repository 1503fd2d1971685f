package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// reply is what a tool server answers to a request.
type reply struct {
	OK     bool            `json:"ok"`
	Error  string          `json:"error"`
	Result json.RawMessage `json:"result"`
}

// ask sends a request to a sandbox's tool server and returns the result part
// of a good answer.
func ask(ctx context.Context, sb *fleet.Sandbox, line string, timeout time.Duration) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer, err := sb.Request(ctx, line)
	if err != nil {
		return nil, err
	}
	return resultOf(answer)
}

// resultOf returns the result part of a good answer.
func resultOf(answer string) (json.RawMessage, error) {
	var r reply
	if err := json.Unmarshal([]byte(answer), &r); err != nil {
		return nil, fmt.Errorf("the tool server answered %.200q: %w", answer, err)
	}
	if !r.OK {
		return nil, fmt.Errorf("the tool failed: %s", r.Error)
	}
	return r.Result, nil
}

// endedWhy adds a sandbox's last words to an error.
func endedWhy(sb *fleet.Sandbox, err error) error {
	if msg := strings.TrimSpace(sb.Stderr()); sb.Exited() && msg != "" {
		return fmt.Errorf("%w; it said: %s", err, tail([]byte(msg), 2000))
	}
	return err
}
