package main

import "fmt"

// overheadEstimate is a rough upper estimate of what a sandbox adds to the host
// besides guest memory: Sentry, gofer, stubs and client.
const overheadEstimate = 60 << 20

// usableMemory is the part of the available memory that sandboxes may fill: the
// machine keeps a tenth.
func usableMemory(available uint64) uint64 { return available / 10 * 9 }

// checkFits makes sure, before a run, that its stock sandboxes fit into memory.
func checkFits(available, perSandbox uint64, clones int) error {
	usable := usableMemory(available)
	need := perSandbox * uint64(clones)
	if need <= usable {
		return nil
	}
	msg := fmt.Sprintf("%d stock sandboxes need up to %s of memory, and of the %s available they may take %s", clones, mib(need), mib(available), mib(usable))
	fits := usable / perSandbox
	if fits == 0 {
		return fmt.Errorf("%s: not even one fits", msg)
	}
	return fmt.Errorf("%s: use --clones %d or less", msg, fits)
}

func mib(n uint64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
