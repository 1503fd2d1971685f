package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// template is the checkpoint that clones are restored from.
type template struct {
	image string
	// ready is what the tool server said when its working set was built.
	ready                  json.RawMessage
	start, checkpoint      time.Duration
	imageBytes, memfdBytes uint64
}

// templateTimeout bounds how long a tool server takes to get ready, settle and
// be checkpointed.
const templateTimeout = 10 * time.Minute

// makeTemplate starts a tool server, lets it settle and checkpoints it.
func makeTemplate(ctx context.Context, rt *fleet.Runtime, id, bundle, image string, stepTimeout time.Duration) (template, error) {
	t := template{image: image}
	began := time.Now()
	sb, err := rt.Run(ctx, id, bundle)
	if err != nil {
		return t, err
	}
	ctx, cancel := context.WithTimeout(ctx, templateTimeout)
	defer cancel()
	ready, err := sb.ReadLine(ctx)
	if err != nil {
		return t, fmt.Errorf("the tool server did not get ready: %w", err)
	}
	if !json.Valid([]byte(ready)) {
		return t, fmt.Errorf("the tool server did not get ready: it said %.200q", ready)
	}
	t.ready = json.RawMessage(ready)
	if _, err := ask(ctx, sb, request{Op: "settle"}.line(), stepTimeout); err != nil {
		return t, fmt.Errorf("settling before the checkpoint: %w", err)
	}
	mem, err := sb.Memory()
	if err != nil {
		return t, err
	}
	t.memfdBytes = mem.GuestMemfd
	t.start = time.Since(began)
	began = time.Now()
	if err := sb.Checkpoint(ctx, image, fleet.CheckpointOptions{}); err != nil {
		return t, err
	}
	t.checkpoint = time.Since(began)
	if err := sb.Delete(ctx); err != nil {
		return t, err
	}
	entries, err := os.ReadDir(image)
	if err != nil {
		return t, err
	}
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			t.imageBytes += uint64(fi.Size())
		}
	}
	return t, nil
}

// takeReference records a template's pages as clones see them: the guest memory
// of a clone that was restored by a runtime that copies all of it, and has done
// nothing yet.
func takeReference(ctx context.Context, rt *fleet.Runtime, id, bundle, image, path string) (*fleet.GuestSnapshot, error) {
	sb, err := rt.Restore(ctx, id, bundle, image)
	if err != nil {
		return nil, fmt.Errorf("restoring the template under %s: %w", rt.Binary(), err)
	}
	if _, err := quiesce(ctx, []*fleet.Sandbox{sb}, nil, 5*time.Second); err != nil {
		return nil, err
	}
	ref, err := sb.SnapshotGuest(path)
	if err != nil {
		return nil, err
	}
	if err := sb.Delete(ctx); err != nil {
		ref.Close()
		return nil, err
	}
	return ref, nil
}
