package fsutil

import (
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
)

// enterFileSection is EnterSection for a file that may be a MemoryFile.
func enterFileSection(file memmap.File) pgalloc.Section {
	if f, ok := file.(*pgalloc.MemoryFile); ok {
		return f.EnterSection()
	}
	return pgalloc.Section{}
}
