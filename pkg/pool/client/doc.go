// Package client is a sandbox's end of the connection to the host's page pool.
// It keeps count of the pool's pages that the sandbox refers to, finds pages by
// their hash, and carries messages; what is shared, and when, is decided by
// package memfile, whose Pool it is.
//
// # System calls
//
// It runs in a process with narrow seccomp filters. New makes a socket pair, so
// it has to be called before they are installed. After that there is ppoll,
// recvmsg with MSG_DONTWAIT and MSG_TRUNC, sendmsg with MSG_DONTWAIT and
// MSG_NOSIGNAL, pread64 and close, and nothing else. Segments and the index are
// read, not mapped: a page is needed rarely, and a mapping would let whoever made
// the file raise SIGBUS.
//
// # States
//
//   - disconnected: there is no connection, or the last one was lost.
//   - greeting: Attach has been given a connection; nothing is sent, and only
//     Welcome or Refuse is taken.
//   - live: from Welcome on. There is a Key. Until OfferedAll, what is stored is to
//     be offered: this pool does not know of it.
//
// Whatever is wrong with a connection leads to disconnected: its end, a malformed
// message, one that does not belong there. Queues are dropped. Segments stay: each
// has a descriptor until it is gone, which is when it is retired or its connection
// has ended, and has no references left. So pages stay readable without a pool.
// While a connection is live, pages of segments that are gone are Stale: the pool
// may have them elsewhere.
//
// # References
//
// Each segment has a map from places to a count of references, whether the pool has
// been told of any, and whether it says that no other sandbox has one: such a place is
// Stale, too, and the Backend stores its page itself again. Only the difference is sent, by Flush: a place whose
// last reference was given up and taken again in between costs no message, and
// neither does one that was taken and given up. What could not be sent is sent by
// the next Flush. Of segments that are gone nothing is said: the pool has
// forgotten its side.
//
// # Memory
//
// Most of the time a sandbox waits and nothing is sent. Buffers and queues are then
// given up: what stays is some 600 bytes, and what the segments' maps have.
//
// # What the pool can do
//
// Numbers that the pool chooses are keys of a map and never index anything. A
// location in the index, or one that is Published, that leads nowhere is a page not
// found. What is found is compared with the page, and verified by a checksum of
// the Backend's whenever it is read, so a pool that lies cannot make a sandbox
// compute with wrong data. It can make it stop, by changing a segment that the
// sandbox has pages in, which the seals of a segment forbid, or by handing out
// descriptors of something whose reads block. Queues are bounded: it cannot make
// the sandbox hold more than a few hundred KiB, MaxPatterns bytes of patterns and
// maxSegments descriptors.
//
// # Locks
//
// sendMu is taken before mu. mu is a leaf: no system call is made with it held,
// but for the byte that wakes the receiver when a connection comes or goes.
package client
