// Package memfile is the memory file backend: it takes guest pages out of a
// memory file while nothing can access them, keeps a smaller form of each, and
// puts them back before anything accesses them again.
//
// It does not import the Sentry. What it needs of the memory file and of the
// Sentry is the Host interface; what the hooks inside gVisor call is the
// Backend's exported methods.
//
// # States
//
// Each page of the file has one word in the page table. Words that are what they
// were to begin with, resident or the template's, take no memory (table.go):
//
//   - Resident: the content is in the file. This is the state of a page that
//     was never touched, of a free page and of a page in use alike.
//   - Candidate: the content is in the file, an eviction has marked the page
//     and may take it. Whoever accesses the page makes it resident again; the
//     eviction then leaves it alone. This is the accessed bit.
//   - Raw: like candidate, but no eviction is interested: the page had no
//     profitable form. It stays unmapped from the application, so that the next
//     eviction knows it has not changed and need not try again.
//   - Committing: an eviction has stored the page and is freeing it in the
//     file. Whoever accesses the page waits.
//   - Evicted: the file has a hole; the word tells where the stored form is.
//   - Busy: somebody is turning an evicted page into a resident one, reading,
//     moving or replacing its stored form. Whoever accesses the page waits.
//
// Transitions, all by compare-and-swap on the word:
//
//	resident -> candidate             Evict, under the allocator's lock
//	candidate -> resident             Gate, Drop, unmark
//	raw -> resident                   Gate, Drop
//	candidate -> committing           Evict
//	candidate -> raw                  Evict
//	committing -> evicted, candidate  Evict (candidate if freeing failed)
//	evicted -> busy                   Gate, Prefetch, BeginSave, Deepen, Share, compact, Check
//	busy -> resident, evicted         the same
//	evicted -> resident               Drop, without restoring
//
// # Why an eviction is safe
//
// Evict marks pages, then has the Host end every access that began before:
// application mappings are removed, memory manager locks are taken once, and
// sections that were open are waited for. Every access that begins later passes
// Gate, which makes the page resident. So a page still candidate after that has
// no accessor, and the transition to committing by compare-and-swap decides
// between an accessor and the eviction.
//
// # Stored forms
//
// An eviction stores a page in the form that its tier of the codec finds, alone
// or relative to the template's page at the same place. Deepening, which goes on
// while a wait lasts, replaces forms by smaller ones and also looks for bases
// elsewhere: see deepen.go for which, blob.go for how pages refer to each other,
// and package dedup for what it gains. Whoever deepens holds at most two pages
// busy, the one at work and for a moment the page of a root, and never waits for
// one that somebody else has: it does without. At the end, and after an eviction,
// blobs are moved so that each size class of the store has as few slabs as it can,
// and those of slabs that are not full are packed (compact.go): what a store holds
// beyond its blobs is then 4 to 7 %, and a page or two.
//
// A page that is restored keeps its form until the next eviction, which uses it
// again if it still is that of the page: see kept.go. So a word in the resident
// or the candidate state may have a form, too.
//
// # Templates
//
// A file loaded from an uncompressed checkpoint begins with evicted pages whose
// stored form is the template's page (Adopt). An eviction that finds a page equal
// to the template's stores nothing; other pages may be stored relative to it, or
// to any other page of the template.
//
// An application may map the template's pages, read-only, while they are evicted
// in that form, if they are private: written to in place only by a memory manager
// that is their only owner. Each such page is marked in the page table before the
// mapping is made, while it is the template's. The mark is apart from the word, so
// that reading memory does not make the table larger; whoever makes the page resident
// turns it into the word's flag tmapped, which is cleared once the owner has replaced
// its mapping, when an eviction has unmapped the page everywhere, and when the page
// is freed. A mark that is left over from a page that was freed costs an unmapping,
// no more. Whoever writes to a resident page looks at the flag first
// (GateMapped). The Sentry's side of this, with the lock that orders mapping
// against restoring, is MemoryManager.templateMu.
//
// # Sharing
//
// With a pool (Pool, share.go), evictions and deepening ask it for pages that have
// no short form, by a hash of the content. If the pool has the same page, compared
// byte by byte, what is stored is a reference to it; otherwise the page is stored
// as usual and, once deepening has found its smallest form and that is long, offered
// to the pool, with its sketch if it is longer. (An eviction offers those that it has
// asked for: a busy host may not get to deepening.) Share does
// later, while the wait lasts, what the pool asks for: it publishes pages that
// other sandboxes have, too, or nearly, replaces stored pages by references to
// those that were published, or by what differs from one that is similar, and
// follows pages of the pool that move. Pages that nobody else has taken are stored
// here again by the next deepening. It works on evicted pages, one at a time and busy, like
// Deepen. Nothing ever waits for the pool; and a reference keeps the page
// readable whatever becomes of the pool.
//
// # Resuming
//
// Accesses that had to restore pages make up a step's working set
// (memfile/prefetch). Prefetch restores what the next step is predicted to want.
//
// # Locks
//
// Backend.passMu serialises evictions, deepening, sharing, checks, prefetching and
// saves. It is taken with no other lock held. Gate, Drop, Pin, Window and the section methods take
// no lock but a waiter's shard lock, the arena's and the Pool's, which are leaves, and the page
// table's, which is one below the shard locks, so they may be called with any lock of the Sentry
// held, the allocator's included.
// Host.VisitEvictable is called with passMu held and takes the allocator's lock.
//
// The workers of a deepening, which goes on with passMu held, have three locks of their
// own, of which none is held while another is taken: deepener.restMu, with which they pause
// and no page is busy; compactMu, below which are the arena's and the page table's; ownMu.
// Who waits for passMu says so in Backend.waiting, so that nobody pauses, or in
// Backend.hurry, which ends the deepening.
package memfile
