package mm

import "sync"

// agentzipMutex is a type of ours, so that the struct it is a field of needs no
// import of its own.
type agentzipMutex struct{ sync.Mutex }
