package specutils

import (
	"fmt"
	"sort"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
)

// agentzipAnnotationPrefix is what our annotations begin with:
// dev.agentzip.NAME sets --agentzip-NAME, dev.agentzip.mode sets --agentzip.
const agentzipAnnotationPrefix = "dev.agentzip."

// hostFlags are flags of the host: a container's spec must not choose which
// socket the runtime connects to, nor have it start a daemon.
var hostFlags = map[string]bool{"agentzip-pool": true, "agentzip-pool-start": true}

// applyAgentzipAnnotations overrides our flags by the spec's annotations. The
// caller validates conf.
func applyAgentzipAnnotations(conf *config.Config, spec *specs.Spec) error {
	for name := range hostFlags {
		// gVisor's own way to set flags, if it is enabled.
		k := annotationFlagPrefix + name
		if _, ok := spec.Annotations[k]; ok {
			return hostFlagError(k, name)
		}
	}
	keys := make([]string, 0, len(spec.Annotations))
	for k := range spec.Annotations {
		if strings.HasPrefix(k, agentzipAnnotationPrefix) {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	for _, k := range keys {
		name := "agentzip"
		if suffix := strings.TrimPrefix(k, agentzipAnnotationPrefix); suffix != "mode" {
			name += "-" + suffix
		}
		if hostFlags[name] {
			return hostFlagError(k, name)
		}
		if flag.CommandLine.Lookup(name) == nil {
			return fmt.Errorf("annotation %q: there is no such setting (no flag --%s)", k, name)
		}
		if err := conf.Override(flag.CommandLine, name, spec.Annotations[k], true /* force */); err != nil {
			return fmt.Errorf("annotation %q: %w", k, err)
		}
		if err := conf.ValidateAgentzip(); err != nil {
			return fmt.Errorf("annotation %q: %w", k, err)
		}
		log.Infof("Annotation %s sets --%s=%q", k, name, spec.Annotations[k])
	}
	return nil
}

func hostFlagError(annotation, name string) error {
	return fmt.Errorf("annotation %q: --%s is the host's to set, not a container's: remove the annotation, and give the runtime the flag (runtimeArgs in Docker's daemon.json)", annotation, name)
}
