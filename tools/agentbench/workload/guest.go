package workload

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	"runsc-agentzip/pkg/fleet"
)

//go:embed guest
var guest embed.FS

// guestDir is where the guest finds its programs.
const guestDir = "/opt/agentbench/workload"

// install puts the guest's programs into the root file system, which runs
// share: a file is replaced atomically, and only if it differs.
func install(rootfs string) error {
	dir := filepath.Join(rootfs, guestDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	entries, err := guest.ReadDir("guest")
	if err != nil {
		return err
	}
	for _, e := range entries {
		content, err := guest.ReadFile(path.Join("guest", e.Name()))
		if err != nil {
			return err
		}
		dst := filepath.Join(dir, e.Name())
		if old, err := os.ReadFile(dst); err == nil && bytes.Equal(old, content) {
			continue
		}
		tmp := fmt.Sprintf("%s.%d", dst, os.Getpid())
		if err := os.WriteFile(tmp, content, 0o644); err != nil {
			return err
		}
		if err := os.Rename(tmp, dst); err != nil {
			return errors.Join(err, os.Remove(tmp))
		}
	}
	return nil
}

// config is the tool server's argument.
type config struct {
	// Workload is the module that the server loads.
	Workload string `json:"workload"`
	Seed     uint64 `json:"seed"`
	// Late leaves the start of the language servers to steps.
	Late bool `json:"late,omitempty"`
}

// spec returns the Spec function of a workload; the seed is filled in.
func spec(c config) func(rootfs string, seed uint64) fleet.Spec {
	return func(rootfs string, seed uint64) fleet.Spec {
		c := c
		c.Seed = seed
		config, err := json.Marshal(c)
		if err != nil {
			panic(err) // strings and numbers
		}
		return fleet.Spec{
			Rootfs:   rootfs,
			Hostname: "agent",
			Args:     []string{"/usr/bin/python3", guestDir + "/server.py", string(config)},
			Env: []string{
				// Reproducible answers: fixed hashing, one BLAS thread. The
				// shared root file system gets no bytecode of the server.
				"PYTHONHASHSEED=0", "OPENBLAS_NUM_THREADS=1", "LC_ALL=C.UTF-8", "TZ=UTC",
				"PYTHONDONTWRITEBYTECODE=1",
			},
		}
	}
}
