package memfile

import (
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

// A PoolLoc says where a Pool has a page, in poolLocBits bits. It is valid, and
// means the same bytes, as long as somebody has a reference to it.
type PoolLoc uint64

// PoolLocBits is how many bits a PoolLoc has at most.
const PoolLocBits = 40

// A Pool is the host-wide pool of pages as the Backend needs it: package
// pkg/pool/client. Its methods are safe for concurrent use and never wait for
// the pool. Ref, Unref, Read and Stale may be called with any lock held.
type Pool interface {
	// Key returns the key of hashes, or nil while there is no connection. A
	// new connection has another key: the pointers differ.
	Key() *wire.Key

	// Find looks for a page by its hash under key, and reads what the pool has
	// of it into buf, which has wire.MaxRecord bytes. The caller then has a
	// reference to the location. What is found is a hint: the page may be
	// another.
	Find(key *wire.Key, h *wire.Hash, buf []byte) (PoolLoc, wire.Record, bool)

	// Read reads the record at a location that the caller has a reference to
	// into buf, which has wire.MaxRecord bytes.
	Read(l PoolLoc, buf []byte) (wire.Record, error)

	// Ref and Unref take and give up a reference.
	Ref(l PoolLoc)
	Unref(l PoolLoc)

	// Stale tells whether a page should be looked for anew, and given up if it is
	// nowhere else: its segment goes away, or is one of an earlier connection, or
	// nobody else has taken the page.
	Stale(l PoolLoc) bool

	// Offer says that the sandbox has stored a page with the hash under key.
	Offer(key *wire.Key, h *wire.Hash, page uint32)

	// Resemble is Offer, and asks for pages that resemble the one whose sketch
	// is s. If alone is set the page may serve as a base, because it is stored
	// without one.
	Resemble(key *wire.Key, h *wire.Hash, page uint32, s *dedup.Sketch, alone bool)

	// Spared says that a base of the pool has made a page so many bytes smaller.
	Spared(bytes int)

	// Work returns what the pool asks for. It returns less than there is if
	// there is much.
	Work() PoolWork

	// OfferedAll says that all that is stored was offered to the pool with the key:
	// PoolWork.Anew is not set any more.
	OfferedAll(key *wire.Key)

	// Publish gives the pool a page that it wants. tpl is the number of the
	// template's page at the same place, or wire.NoPage. It returns false if
	// the pool does not take it now.
	Publish(key *wire.Key, h *wire.Hash, page, tpl uint32, content *codec.Page) bool

	// Flush sends what has been put off.
	Flush()

	// Sharing is what the sandbox was last told to cost the pool, and what the
	// Pool itself holds in this process, in bytes.
	Sharing() (share wire.Sharing, own uint64)
}

// PoolWork is what a pool asks a sandbox for.
type PoolWork struct {
	// Key is what the hashes are made with.
	Key *wire.Key
	// Want are pages that other sandboxes have too. The cookie is the number
	// of the page.
	Want []wire.Page
	// Published are pages that the pool has now. Whoever got the PoolWork has
	// a reference to each location.
	Published []PoolPlace
	// Similar are pages that the pool has and that resemble one of this
	// sandbox. They may serve as bases. References as for Published.
	Similar []PoolPlace
	// Stale is set if there may be pages that are Stale.
	Stale bool
	// Anew is set if the pool is another one since OfferedAll, and it is time to
	// offer it some more of what is stored: what was stored before, and what an
	// eviction finds as it was, nothing else offers to it.
	Anew bool
}

// A PoolPlace says where the pool has what a page contained, or something similar.
type PoolPlace struct {
	Hash wire.Hash
	Page uint32
	Loc  PoolLoc
}
