package config

import (
	"fmt"
	"path/filepath"
	"time"

	"gvisor.dev/gvisor/runsc/flag"
)

// AgentzipMode says whether guest memory is evicted while a sandbox waits.
type AgentzipMode bool

// Set implements flag.Value.
func (m *AgentzipMode) Set(v string) error {
	switch v {
	case "on":
		*m = true
	case "off":
		*m = false
	default:
		return fmt.Errorf("invalid value %q: must be on or off", v)
	}
	return nil
}

// Get implements flag.Getter.
func (m *AgentzipMode) Get() any {
	return *m
}

// String implements flag.Value.
func (m AgentzipMode) String() string {
	if m {
		return "on"
	}
	return "off"
}

const (
	// maxPoolSocket is the length of the longest path of a pool's socket, in
	// bytes. The kernel's limit is 107.
	maxPoolSocket = 99
	// maxDomain is the length of the longest domain, in bytes.
	maxDomain = 128
)

func registerAgentzipFlags(flagSet *flag.FlagSet) {
	on := AgentzipMode(true)
	flagSet.Var(&on, "agentzip", "evict guest memory into compressed storage while the sandbox waits: on (default) or off, which is stock runsc.")
	flagSet.Duration("agentzip-idle", 200*time.Millisecond, "how long nothing must run or come from outside before eviction starts, at least: it grows if the sandbox's gaps are too short.")
	flagSet.Duration("agentzip-settle", 20*time.Millisecond, "how long pages stay unmapped before they are written out; pages touched meanwhile are cheap to keep.")
	flagSet.Duration("agentzip-trim-after", 2*time.Second, "how long a wait lasts before the Sentry's own unused heap is given back to the host; 0 is never.")
	flagSet.Duration("agentzip-deepen-after", 2*time.Second, "how long a wait lasts before what was stored in a quick form is compressed harder; 0 compresses hard at once.")
	flagSet.Duration("agentzip-pageout-after", 0, "how long a wait lasts before the host is asked to move the Sentry's own heap to swap, if it has any; 0 is never.")
	flagSet.Uint("agentzip-map-unit", 64<<10, "bytes restored and mapped together by a fault on evicted memory: a power of two from 4096 to 2097152.")
	flagSet.Uint("agentzip-workers", 1, "goroutines that compress during an eviction, 1 to 64.")
	flagSet.Uint("agentzip-store-max", 0, "largest size in bytes of the compressed store; 0 is no limit.")
	flagSet.String("agentzip-template", "map", "how a restored sandbox uses the pages of an uncompressed checkpoint: map (map them into applications until they are written to), copy (copy each when it is used), load (read all of them at once, as stock runsc does).")
	flagSet.String("agentzip-prefetch", "on", "restore what a step is predicted to want as soon as it begins: on or off.")
	flagSet.String("agentzip-pool", "", "absolute path of the socket of the host's page pool (agentzip pool serve), through which sandboxes of one --agentzip-domain keep equal pages once. Empty is no pool. Not settable by annotation.")
	flagSet.Bool("agentzip-pool-start", false, "start a pool if none answers on --agentzip-pool; it ends when no sandbox has used it for 10 minutes. Not settable by annotation.")
	flagSet.String("agentzip-domain", "", "the tenant whose sandboxes may share pages with each other: 1 to 128 printable ASCII characters. Sandboxes of other domains, or of another template, share nothing with them. Empty shares nothing. As an annotation, dev.agentzip.domain, it is to be set by whoever sets the tenant, since it decides with whom a sandbox shares. It is a name, not a secret.")
	flagSet.Duration("agentzip-test-evict-every", 0, "TEST ONLY: evict everything eligible this often, whatever the tasks do.")
	flagSet.Uint("agentzip-test-corrupt", 0, "TEST ONLY: flip a bit in the n-th stored page, to see that the checksum catches it.")
}

// ValidateAgentzip checks the values of our flags.
func (c *Config) ValidateAgentzip() error {
	if c.AgentzipMapUnit == 0 && c.AgentzipWorkers == 0 && !c.Agentzip {
		// A Config that was not made from flags.
		return nil
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{
		{"agentzip-idle", c.AgentzipIdle},
		{"agentzip-settle", c.AgentzipSettle},
		{"agentzip-trim-after", c.AgentzipTrimAfter},
		{"agentzip-deepen-after", c.AgentzipDeepenAfter},
		{"agentzip-pageout-after", c.AgentzipPageoutAfter},
		{"agentzip-test-evict-every", c.AgentzipTestEvictEvery},
	} {
		if d.v < 0 {
			return fmt.Errorf("--%s=%v: must not be negative", d.name, d.v)
		}
	}
	if u := c.AgentzipMapUnit; u < 4096 || u > 2<<20 || u&(u-1) != 0 {
		return fmt.Errorf("--agentzip-map-unit=%d: must be a power of two from 4096 to 2097152", u)
	}
	if w := c.AgentzipWorkers; w < 1 || w > 64 {
		return fmt.Errorf("--agentzip-workers=%d: must be from 1 to 64", w)
	}
	switch c.AgentzipTemplate {
	case "map", "copy", "load":
	default:
		return fmt.Errorf("--agentzip-template=%s: must be map, copy or load", c.AgentzipTemplate)
	}
	if v := c.AgentzipPrefetch; v != "on" && v != "off" {
		return fmt.Errorf("--agentzip-prefetch=%s: must be on or off", v)
	}
	if s := c.AgentzipPool; s != "" && !filepath.IsAbs(s) {
		return fmt.Errorf("--agentzip-pool=%s: must be an absolute path", s)
	} else if len(s) > maxPoolSocket {
		return fmt.Errorf("--agentzip-pool=%s: the path has %d bytes, a socket's can have %d: use a shorter one, below /run for instance", s, len(s), maxPoolSocket)
	}
	if c.AgentzipPoolStart && c.AgentzipPool == "" {
		return fmt.Errorf("--agentzip-pool-start needs --agentzip-pool=SOCKET, which says where")
	}
	if d := c.AgentzipDomain; len(d) > maxDomain {
		return fmt.Errorf("--agentzip-domain has %d bytes: must be at most %d", len(d), maxDomain)
	}
	for _, b := range []byte(c.AgentzipDomain) {
		if b < ' ' || b > '~' {
			return fmt.Errorf("--agentzip-domain=%q: must consist of printable ASCII characters", c.AgentzipDomain)
		}
	}
	if s := c.AgentzipStoreMax; s != 0 && s < 1<<20 {
		return fmt.Errorf("--agentzip-store-max=%d: must be 0 or at least 1048576 bytes", s)
	}
	return nil
}
