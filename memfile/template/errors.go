package template

import "errors"

// Errors are wrapped by what the functions of this package return, with a
// message that names the file and says what to do.
var (
	// ErrNotTemplate: the folder lacks a file that an uncompressed checkpoint
	// has.
	ErrNotTemplate = errors.New("not an uncompressed checkpoint")
	// ErrTruncated: a file is shorter than it was.
	ErrTruncated = errors.New("truncated")
	// ErrModified: a page differs from the page that was indexed, or there are
	// more pages.
	ErrModified = errors.New("modified")
	// ErrMismatch: a metadata file is not the one that belongs to the pages.
	ErrMismatch = errors.New("file of another image")
	// ErrIndex: the index cannot be read or is damaged.
	ErrIndex = errors.New("unusable index")
	// ErrVersion: the index has a format version that this build cannot read.
	ErrVersion = errors.New("unsupported index version")
)
