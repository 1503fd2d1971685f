// Package wire defines what a sandbox and the host's page pool exchange: the
// messages on their socket, the index and the segments that they share, and the
// form of a page in a segment.
//
// # The pool
//
// One pool serves a host. It keeps, once, pages that at least two sandboxes of one
// dedup domain own or nearly own; a domain is a tenant's key together with a
// template's digest, and nothing is shared between two domains. Sandboxes name
// their pages by keyed hashes, and those that stay long when compressed by their
// sketches, too (package dedup). The pool asks for a page's content when a second
// sandbox names the same hash or a sketch that has features in common, hashes it
// itself, stores it in a segment and tells the sandboxes that named it. These
// compare the content with their own page before they give that up, or store
// their own page relative to it.
//
// What siblings compute is less equal than one would think. In dumps of the memory
// of four clones that had taken different steps of the same kinds, of the pages that
// siblings did not have at the same place anyway:
//
//   - language servers started after the restore: 14.6 % of the pages have a twin in
//     a sibling (11.4 of 68.3 MB of compressed pages a clone), and 23.3 % more
//     resemble one (23.5 MB, of which it would spare 17.0);
//   - pandas: none have a twin, 24 % resemble one (7.4 of 26.7 MB; 5.2);
//   - language servers in the template: 1.5 % have a twin (0.3 of 12.9 MB). For what
//     is similar the template's page at the same place is the better base.
//
// Two or three siblings have such a page, so that half of this or less is gained.
//
// # Who trusts whom
//
// A sandbox's domain is chosen by runsc, outside of the sandbox, in the Hello
// that precedes everything else on a connection. What comes from the sandbox
// later is taken for hostile: lengths are checked, hashes are computed again, a
// reference is worth only what the connection itself holds, and nothing is
// bounded by the sandbox's good will.
//
// A sandbox trusts the pool with its memory in one respect: a segment does not
// change where it was written. Segments are sealed memfds (F_SEAL_GROW,
// F_SEAL_SHRINK and F_SEAL_FUTURE_WRITE, and F_SEAL_WRITE once they are full)
// that sandboxes get read-only and only the pool appends to; no byte is written
// twice. A sandbox keeps the descriptors of the segments that it has pages in, so
// these pages outlive the pool; and it verifies a checksum of its own whenever it
// reads one. Everything else that the pool says, the index included, is a hint.
//
// # The dialogue
//
//	runsc    -> pool   Hello: version, domain, template
//	pool     -> sandbox Welcome: key of the hashes; then Index, Segment for each
//	                   segment there is, and Patterns if the domain has any
//	sandbox  -> pool   Offer: hashes of pages stored, each with a cookie
//	sandbox  -> pool   Resemble: the same, with sketches
//	pool     -> sandbox Want: hashes of pages that another sandbox has offered,
//	                   too, or that resemble one that another has offered
//	sandbox  -> pool   Publish: content of wanted pages
//	pool     -> sandbox Segment, for new ones; Published: where an offered page
//	                   lies, to every sandbox that has offered it; Similar:
//	                   where a page lies that resembles an offered one. Such
//	                   records have no base, so that they can be one
//	sandbox  -> pool   Ref: pages that it has taken; Unref: that it has no longer
//	pool     -> sandbox Retire: a segment goes away; what is still needed of it
//	                   has moved, and is found in the index by its hash
//	pool     -> sandbox Alone: pages that only this sandbox has taken, for long.
//	                   It stores them itself again
//	sandbox  -> pool   Usage, with what others' pages have spared as bases; pool ->
//	                   sandbox Share
//	sandbox  -> pool   Patterns: what its steps have taught about prefetching
//	sandbox  -> pool   Turn 1: it has memory to evict and would like to have its
//	                   turn; Turn 0: it is done, or no longer wants it
//	pool     -> sandbox Turn 1: it has its turn
//
// Turns keep sandboxes that wait from slowing those that work: there are fewer of
// them than processors. They are advice. A turn ends by itself after some seconds.
//
// No message has to be answered, and none is waited for: the guest runs on. Offer,
// Want, Published and Similar may be dropped when a queue is full; what they would have
// brought is brought by a later one. Ref and Unref are idempotent for each
// connection and location. References end with the connection.
//
// A message is one packet of a SOCK_SEQPACKET socket, at most [MaxMessage]
// bytes, to a sandbox [MaxReply], little-endian: type (1 byte), 0 (1), number of items (2), argument (4),
// items of the type's size. Segment and Index carry a descriptor.
package wire
