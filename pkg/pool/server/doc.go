// Package server is the pool of a host: it keeps, once, the pages that several
// sandboxes of a dedup domain own. Package pkg/pool/wire says what it exchanges
// with sandboxes and who trusts whom.
//
// # A page
//
// Within a domain, a hash that sandboxes offer is
//
//   - a candidate, when one connection has offered it. The pool remembers half
//     of the hash and whose it is, nothing else;
//   - pending, when a second one has, and was asked for the content. What it
//     sends is hashed again, and encoded;
//   - published, once it lies in a segment and the index leads to it. All
//     that are known to have offered it are told;
//   - refused, when it has no form worth keeping: it is not asked for again for
//     a while.
//
// Most sandboxes have next to nothing that resembles what siblings have, unless it is
// small anyway, and then remembering sketches costs more than it can spare. So the
// memory for them is small: sketchFloor for each sandbox and a sketchShare of what bases
// have spared of late, which sandboxes report, less what these take. One sketch in
// sketchSample takes the place of the oldest ones, the others are remembered while there
// is room. Those of pages that are published or gone are swept out.
//
// A candidate that came with a sketch may also be near others. If a published page
// without a base resembles it, its owner is told of that base. Else, if a candidate
// of another connection does, the page is asked for although nobody else has it: it
// is pending as a base. It is then stored without a base of its own, and the owner
// of the other candidate is told where it lies. A sandbox sends a base only if it
// stores that page alone, too: otherwise it has a smaller form, and the base would
// cost more than that. What is known by sketches, candidates
// and published pages without a base, leads to hashes only, and the oldest entries
// are forgotten. Sketches of published pages are made by the pool itself.
//
// A pending page that is not sent within 10 s is asked for again when somebody
// who has it offers it.
//
// # References and compaction
//
// A published page's count is the number of connections that have a reference
// to it. References are bits of a connection: taking one twice changes nothing,
// nobody can give up another's, and all go when it ends. A page without references
// for longer than Options.Keep is dead. The place of a dead page is never
// written to again, since a sandbox may hold it all the same; instead a segment
// of which less than half is alive is rewritten: what lives is copied to the open
// segment, the index leads there, and the segment is retired, that is, the pool
// lets go of it. Its memory is freed when the last sandbox does so too. So a
// domain holds at most about twice what it needs, and what a sandbox has a
// descriptor of never changes.
//
// A page that one connection alone has referred to for aloneTime costs more than if
// its sandbox stored it: the sandbox is told, and takes it back.
//
// # Memory
//
// The pool keeps 12 bytes per published page beside its record, a slot of the
// index (16 bytes, in a table that doubles), about 26 bytes per candidate, 110 per
// sketch of a candidate or of a base (of which a domain has 256 Ki each at most),
// what is known about steps, packed, and, per connection, about 8 KiB with its goroutine plus 0.2 to 60 bytes per reference,
// depending on how close they are to each other. With 1000 sandboxes that have
// offered 2000 pages each, half of them common to all, this is 42 MiB
// (BenchmarkClients1000). Everything that a
// connection can make the pool hold is bounded: candidates, pending pages, queued
// messages, parts of patterns.
//
// # Connections
//
// A connection has a goroutine that waits in the netpoller and handles its
// messages one by one, with a buffer only while there is a message, and one that
// sends, only while there is something to send. Work for a message is done there,
// so who sends much waits for its own work. Nobody waits for a slow receiver:
// Want, Published, Similar and Share are dropped if too much is queued, and a
// connection that does not take the rest is closed.
//
// # Locks
//
// In this order; one of each kind at a time:
//
//   - Server.mu: the domains and connections that there are;
//   - domain.encMu: the domain's encoder and template. Held while a page is
//     encoded (40 us), one page at a time;
//   - domain.mu: everything else of the domain and what a connection has in it.
//     Held for one message (256 pages of a Resemble), for one segment in
//     compaction, while the index grows, or while one of the indexes of sketches
//     is swept;
//   - turns.mu: whose turn it is to evict;
//   - conn.mu: the queue of a connection.
//
// No system call that waits for somebody else is made under Server.mu or
// domain.mu.
package server
