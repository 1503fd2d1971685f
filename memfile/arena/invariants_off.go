//go:build !invariants

package arena

// invariants turns on checks and poisoning that cost time.
const invariants = false
