package client_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"runsc-agentzip/pkg/bundle"
	"runsc-agentzip/pkg/client"
)

// The loop of a scheduler: a template, clones that take a step and wait, a fork.
// test/cloud runs one like it.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	check := func(err error) {
		if err != nil {
			log.Panic(err) // the deferred deletions run
		}
	}
	c, err := client.New(client.Options{
		Binary: "/usr/local/bin/runsc-agentzip",
		Root:   "/run/agents",
		Flags:  []string{"--network=none", "--overlay2=all:memory"},
	})
	check(err)
	check(bundle.Write("/srv/bundle", bundle.Spec{Rootfs: "/srv/rootfs", Args: []string{"/usr/bin/tool-server"}}))

	// Once: start the tools, and keep them as a template.
	defer c.Delete(context.Background(), "seed")
	check(c.Run(ctx, "/srv/bundle", client.Start{ID: "seed"}))
	tpl, err := c.CreateTemplate(ctx, "seed", "/srv/template", client.TemplateOptions{})
	check(err)

	// Each agent has a clone.
	agents := []string{"agent-1", "agent-2", "agent-3", "agent-4"}
	check(c.RestoreAll(ctx, tpl, client.Starts(agents...), 2))
	for _, id := range agents {
		defer c.Delete(context.Background(), id)

		step, err := c.Exec(ctx, id, client.ExecOptions{Args: []string{"make", "test"}})
		check(err)
		fmt.Println(id, step.ExitCode, step.Stdout)
		check(c.Hint(ctx, id, client.Wait))
	}

	// While their models think, they cost little.
	for _, id := range agents {
		s, err := c.Stats(ctx, id)
		check(err)
		fmt.Println(id, s.Phase.State, s.GuestBytes, s.OwnedBytes)
	}

	// Two ways to go on from where one agent is.
	_, err = c.Fork(ctx, "agent-1", "/srv/template-1", client.Starts("try-1", "try-2"), 2)
	check(err)
	defer c.Delete(context.Background(), "try-1")
	defer c.Delete(context.Background(), "try-2")
}
