// Package template opens uncompressed checkpoints as templates: images that any
// number of sandboxes read from without copying them.
//
// A template is a folder with the files that "runsc checkpoint
// --compression=none" writes and an index:
//
//	checkpoint.img   state of the kernel
//	pages_meta.img   which memory file pages pages.img holds
//	pages.img        pages of PageSize bytes
//	pages.azidx      the index: checksums and sketches of the pages of pages.img
//
// The index is made once, by whoever opens the folder first. It ties the files
// together, so that a truncated, modified or mixed up image is refused before a
// guest runs on it, and it makes that cheap: [Open] reads the two small files
// and the index, not the pages. Those are checked as they are read, by
// [View.ReadPages], or all at once, by [Verify] and by an Open that finds that
// pages.img is not the very file that was indexed.
//
// [Open] is for the program that starts the sandbox, [FromFiles] for the
// sandbox, which is given descriptors and may not open anything.
//
// # Format of the index
//
// Integers are little-endian and unsigned unless said otherwise, offsets and
// lengths are in bytes, times in nanoseconds since 1970 (signed). The file
// begins with a header of 4096 bytes:
//
//	   0    8  magic, "AZPGIDX\n"
//	   8    4  format version, 1
//	  12    4  size of the header, 4096
//	  16    4  size of a page, 4096
//	  20    4  number of sections, 1 to 59
//	  24    8  number of pages in pages.img, which has this many times 4096 bytes
//	  32    8  size of the index file
//	  40    8  time the index was made
//	  48    8  inode of pages.img       \
//	  56    8  mtime of pages.img        | its fingerprint
//	  64    8  ctime of pages.img       /
//	  72   32  SHA-256 of checkpoint.img
//	 104   32  SHA-256 of pages_meta.img
//	 136   32  digest of the template, see below
//	 168   88  zero
//	 256    -  section table, one entry of 64 bytes per section
//	   -    -  zero
//	4088    8  XXH3-64 of the bytes before
//
// An entry of the section table:
//
//	 0    4  kind
//	 4    4  flags; bit 0: a reader that does not know the kind must refuse
//	 8    8  offset in the file, a multiple of 4096
//	16    8  length
//	24    8  XXH3-64 of the section
//	32    4  size of a record
//	36   28  zero
//
// Sections follow the header in the order of the table, which has a kind once.
// Gaps between them, for alignment, are zero and not checked. A reader ignores
// sections of kinds it does not know, unless their flag says otherwise.
//
//	kind 1  checksums: codec.Sum (XXH3-64) of each page of pages.img, 8 bytes each
//	kind 2  sketches: a dedup.Table whose items are page numbers, in records of
//	        8 bytes. About 85 bytes per page. Absent in indexes made by older
//	        builds, which are used without it. A sandbox does not compare it with
//	        its checksum again: it reads no more of it than it uses, and what
//	        it reads is a hint.
//
// The digest is the SHA-256 of "agentzip template 1\n", the number of pages (8
// bytes), the two SHA-256 in the order of the header and the checksums. It says
// which template this is, for programs that trust whoever made the template:
// page checksums are not cryptographic.
//
// # Trust
//
// The checksums find accidents: truncation, bit flips, files of two images in
// one folder, an image rewritten in place. They do not keep out somebody who may
// write to the folder, who may as well write a checkpoint of a hostile guest.
//
// The fingerprint decides whether pages.img needs to be read again. It cannot be
// set back from user space (utimes changes the ctime), and an image is not
// indexed or verified before its ctime is so old that another change would show.
package template
