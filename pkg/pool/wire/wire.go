package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// Version is that of the protocol. A pool and a sandbox of different versions
// share nothing.
const Version = 2

const (
	// MaxMessage is the length of the longest message, in bytes.
	MaxMessage = 64 << 10
	// MaxReply is the length of the longest message from the pool to a sandbox, in
	// bytes: as long as some come, the sandbox has a buffer for one. MaxPart is the longest
	// part of patterns in one.
	MaxReply = 4 << 10
	MaxPart  = MaxReply - header
	// header is what precedes the items of a message.
	header = 8
	// SegmentSize is the size of a segment, in bytes. Memory behind it is only
	// taken as pages are appended.
	SegmentSize = 4 << 20
	// Align is what locations in a segment are multiples of, in bytes.
	Align = 16
	// NoPage says that a page has no counterpart in the template.
	NoPage = ^uint32(0)
	// MaxPatterns is the largest size of prefetch patterns, in bytes.
	MaxPatterns = 1 << 20
	// MaxDomain is the length of the longest domain key, in bytes.
	MaxDomain = 128
)

// A Type is that of a message.
type Type uint8

// The messages, first those of the sandbox. See the package comment.
const (
	Hello    Type = 1  // body: JSON of a Greeting
	Offer    Type = 2  // items: Page
	Publish  Type = 3  // items: Content
	Ref      Type = 4  // items: Loc
	Unref    Type = 5  // items: Loc
	Patterns Type = 6  // both ways. Argument: total length; body: the next part
	Usage    Type = 7  // argument: what bases have spared since the last, in bytes
	Resemble Type = 10 // items: Sketched. An Offer that also asks for similar pages
	Turn     Type = 9  // both ways, see the package comment. Argument: 0 or 1
	Admin    Type = 8  // body: a command, "stats" or "drain"; instead of Hello

	Welcome   Type = 65 // body: Key
	Refuse    Type = 66 // body: why, in words. The connection ends
	Index     Type = 67 // items: uint64, the number of places; descriptor
	Segment   Type = 68 // argument: its number; descriptor
	Retire    Type = 69 // argument: number of a segment
	Want      Type = 70 // items: Page
	Published Type = 71 // items: Place
	Share     Type = 72 // items: uint64 of Sharing
	Similar   Type = 74 // items: Place
	Alone     Type = 75 // items: Loc
	Report    Type = 73 // body: the answer to an Admin, JSON
)

// most is the length of the longest message of the type, in bytes.
func (t Type) most() int {
	if t >= Welcome && t != Report {
		return MaxReply
	}
	return MaxMessage
}

// itemSize is the size of a type's items, or 0 if the body has any length.
var itemSize = map[Type]int{
	Hello: 0, Offer: PageSize, Publish: ContentSize, Ref: LocSize, Unref: LocSize, Patterns: 0, Usage: 0, Admin: 0, Turn: 0, Resemble: SketchedSize,
	Welcome: 0, Refuse: 0, Index: 8, Segment: 0, Retire: 0, Want: PageSize, Published: PlaceSize, Share: 8, Report: 0, Similar: PlaceSize, Alone: LocSize,
}

var typeNames = map[Type]string{
	Hello: "hello", Offer: "offer", Publish: "publish", Ref: "ref", Unref: "unref", Patterns: "patterns", Usage: "usage", Admin: "admin", Turn: "turn", Resemble: "resemble",
	Welcome: "welcome", Refuse: "refuse", Index: "index", Segment: "segment", Retire: "retire", Want: "want",
	Published: "published", Share: "share", Report: "report", Similar: "similar", Alone: "alone",
}

// String returns the message's name.
func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return fmt.Sprintf("message-%d", uint8(t))
}

// ErrMessage is wrapped by errors about malformed messages.
var ErrMessage = errors.New("malformed message")

// A Message is one that was received. Its body is valid as long as the buffer
// it was parsed from.
type Message struct {
	Type Type
	// N is the number of items in Body.
	N    int
	Arg  uint32
	Body []byte
}

// Parse checks the form of a message.
func Parse(b []byte) (Message, error) {
	if len(b) < header || len(b) > MaxMessage {
		return Message{}, fmt.Errorf("%w of %d bytes", ErrMessage, len(b))
	}
	m := Message{Type: Type(b[0]), N: int(binary.LittleEndian.Uint16(b[2:])), Arg: binary.LittleEndian.Uint32(b[4:]), Body: b[header:]}
	size, ok := itemSize[m.Type]
	if !ok {
		return Message{}, fmt.Errorf("%w of unknown type %d", ErrMessage, b[0])
	}
	if b[1] != 0 || size == 0 && m.N != 0 || size != 0 && len(m.Body) != m.N*size || len(b) > m.Type.most() {
		return Message{}, fmt.Errorf("%w: %v with %d items in %d bytes", ErrMessage, m.Type, m.N, len(m.Body))
	}
	return m, nil
}

// A Writer puts a message together. Its zero value is ready for Begin.
type Writer struct {
	b    []byte
	n    int
	size int
	most int
}

// Begin begins a message.
func (w *Writer) Begin(t Type, arg uint32) {
	if w.b == nil {
		w.b = make([]byte, header, 1024)
	}
	w.b = w.b[:header]
	clear(w.b)
	w.b[0] = byte(t)
	binary.LittleEndian.PutUint32(w.b[4:], arg)
	w.n, w.size, w.most = 0, itemSize[t], t.most()
}

// Room is how many more items fit into the message.
func (w *Writer) Room() int { return (w.most - len(w.b)) / max(w.size, 1) }

// Len is how many items the message has.
func (w *Writer) Len() int { return w.n }

// Body appends to a message without items.
func (w *Writer) Body(b []byte) { w.b = append(w.b, b...) }

// Bytes returns the message, which is valid until the next Begin.
func (w *Writer) Bytes() []byte {
	binary.LittleEndian.PutUint16(w.b[2:], uint16(w.n))
	return w.b
}

// Uint64 appends an item that is a number.
func (w *Writer) Uint64(v uint64) {
	w.b = binary.LittleEndian.AppendUint64(w.b, v)
	w.n++
}

// Uint64 returns item i of a message of numbers.
func (m *Message) Uint64(i int) uint64 { return binary.LittleEndian.Uint64(m.Body[i*8:]) }

// A Greeting is what runsc says of a sandbox.
type Greeting struct {
	Version int `json:"version"`
	// Name is the sandbox's, for people.
	Name string `json:"name"`
	// Sandbox tells the sandbox from all others of the host. A connection
	// replaces an earlier one of the same sandbox. It may be empty in tests.
	Sandbox string `json:"sandbox,omitempty"`
	// Domain is the tenant's key, 1 to MaxDomain bytes.
	Domain string `json:"domain"`
	// Template is the digest of the sandbox's template in hexadecimal, and
	// TemplateDir the folder that it is in; empty without one.
	Template    string `json:"template,omitempty"`
	TemplateDir string `json:"template_dir,omitempty"`
}

// Hello makes the message that greets the pool.
func (g *Greeting) Hello(w *Writer) error {
	b, err := json.Marshal(g)
	if err != nil {
		return err
	}
	if len(b) > 16<<10 {
		return fmt.Errorf("greeting of %d bytes is too long", len(b))
	}
	w.Begin(Hello, 0)
	w.Body(b)
	return nil
}

// Greeting returns the content of a Hello.
func (m *Message) Greeting() (*Greeting, error) {
	g := new(Greeting)
	if err := json.Unmarshal(m.Body, g); err != nil {
		return nil, fmt.Errorf("%w: hello: %v", ErrMessage, err)
	}
	if g.Version != Version {
		return nil, fmt.Errorf("the sandbox speaks version %d of the pool's protocol, the pool %d: run the same version of runsc-agentzip for both", g.Version, Version)
	}
	if len(g.Domain) == 0 || len(g.Domain) > MaxDomain {
		return nil, fmt.Errorf("domain of %d bytes: want 1 to %d", len(g.Domain), MaxDomain)
	}
	return g, nil
}

// HashSize is the size of a Hash.
const HashSize = 16

// A Hash names the content of a page within a domain: the first half of
// SHA-256 over the domain's key, zeros up to the size of a block, and the page.
type Hash [HashSize]byte

// A Key is that of a domain's hashes. The pool chooses it at random.
type Key [32]byte

// A Hasher computes hashes. It is for one goroutine at a time.
type Hasher struct {
	h   hash.Hash
	key [sha256.BlockSize]byte
	sum [sha256.Size]byte
}

// NewHasher returns a Hasher with the key.
func NewHasher(k *Key) *Hasher {
	h := &Hasher{h: sha256.New()}
	copy(h.key[:], k[:])
	return h
}

// Sum returns the hash of p. 2.6 us.
func (h *Hasher) Sum(p *codec.Page) Hash {
	h.h.Reset()
	h.h.Write(h.key[:])
	h.h.Write(p[:])
	return Hash(h.h.Sum(h.sum[:0])[:HashSize])
}

// A Loc says where the pool has a page: the number of a segment and the offset
// in it in units of Align.
type Loc uint64

// LocSize is the size of a Loc in a message.
const LocSize = 8

// MakeLoc returns the location at a byte offset in a segment.
func MakeLoc(segment uint32, off uint64) Loc { return Loc(segment)<<32 | Loc(off/Align) }

// Segment is the segment's number.
func (l Loc) Segment() uint32 { return uint32(l >> 32) }

// Offset is the byte offset in the segment.
func (l Loc) Offset() uint64 { return uint64(uint32(l)) * Align }

// Loc appends an item of Ref, Unref or Alone.
func (w *Writer) Loc(l Loc) { w.Uint64(uint64(l)) }

// Loc returns item i of a Ref, Unref or Alone.
func (m *Message) Loc(i int) Loc { return Loc(m.Uint64(i)) }

// A Page is a page that a sandbox has offered. The cookie is what the sandbox
// calls it.
type Page struct {
	Hash   Hash
	Cookie uint32
	// Base is set in a Want if nobody else is known to have the page, and it is
	// to serve as a base: it takes its whole size from the pool, so that it is
	// given only if it takes as much where it is.
	Base bool
}

// PageSize is the size of a Page in a message.
const PageSize = HashSize + 8

// Page appends an item of Offer or Want.
func (w *Writer) Page(p Page) {
	w.b = append(w.b, p.Hash[:]...)
	w.b = binary.LittleEndian.AppendUint32(w.b, p.Cookie)
	w.b = append(w.b, flag(p.Base), 0, 0, 0)
	w.n++
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// Page returns item i of an Offer or Want.
func (m *Message) Page(i int) Page {
	b := m.Body[i*PageSize:]
	return Page{Hash(b[:HashSize]), binary.LittleEndian.Uint32(b[HashSize:]), b[HashSize+4] == 1}
}

// A Sketched is a page that a sandbox has offered, with its sketch.
type Sketched struct {
	Page
	Sketch dedup.Sketch
	// Alone is set if the sandbox stores the page without a base: it may serve as
	// one. Others only look for one.
	Alone bool
}

// SketchedSize is the size of a Sketched in a message.
const SketchedSize = PageSize + 4*dedup.Features

// Sketched appends an item of Resemble.
func (w *Writer) Sketched(s *Sketched) {
	w.b = append(w.b, s.Hash[:]...)
	w.b = binary.LittleEndian.AppendUint32(w.b, s.Cookie)
	w.b = append(w.b, byte(s.Sketch.N), flag(s.Alone), 0, 0)
	for _, f := range s.Sketch.Feature {
		w.b = binary.LittleEndian.AppendUint32(w.b, f)
	}
	w.n++
}

// Sketched returns item i of a Resemble. A sketch of too many features has none.
func (m *Message) Sketched(i int) Sketched {
	b := m.Body[i*SketchedSize:]
	s := Sketched{Page: Page{Hash: Hash(b[:HashSize]), Cookie: binary.LittleEndian.Uint32(b[HashSize:])}, Alone: b[HashSize+5] == 1}
	if n := b[HashSize+4]; n <= dedup.Features {
		s.Sketch.N = int(n)
	}
	for j := range s.Sketch.Feature {
		s.Sketch.Feature[j] = binary.LittleEndian.Uint32(b[PageSize+4*j:])
	}
	return s
}

// A Content is a page that was wanted. Template is the number of the template's
// page at the same place, or NoPage: likely a good base.
type Content struct {
	Page
	Template uint32
	// Data is valid as long as the message, or as what was appended.
	Data *codec.Page
}

// ContentSize is the size of a Content in a message.
const ContentSize = HashSize + 8 + codec.PageSize

// Content appends an item of Publish.
func (w *Writer) Content(c Content) {
	w.b = append(w.b, c.Hash[:]...)
	w.b = binary.LittleEndian.AppendUint32(w.b, c.Cookie)
	w.b = binary.LittleEndian.AppendUint32(w.b, c.Template)
	w.b = append(w.b, c.Data[:]...)
	w.n++
}

// Content returns item i of a Publish.
func (m *Message) Content(i int) Content {
	b := m.Body[i*ContentSize:]
	return Content{
		Page:     Page{Hash: Hash(b[:HashSize]), Cookie: binary.LittleEndian.Uint32(b[HashSize:])},
		Template: binary.LittleEndian.Uint32(b[HashSize+4:]),
		Data:     (*codec.Page)(b[HashSize+8:]),
	}
}

// A Place says where the pool has a page that the sandbox has offered.
type Place struct {
	Page
	Loc Loc
}

// PlaceSize is the size of a Place in a message.
const PlaceSize = PageSize + LocSize

// Place appends an item of Published.
func (w *Writer) Place(p Place) {
	w.Page(p.Page)
	w.b = binary.LittleEndian.AppendUint64(w.b, uint64(p.Loc))
}

// Place returns item i of a Published.
func (m *Message) Place(i int) Place {
	b := m.Body[i*PlaceSize:]
	return Place{Page{Hash: Hash(b[:HashSize]), Cookie: binary.LittleEndian.Uint32(b[HashSize:])}, Loc(binary.LittleEndian.Uint64(b[PageSize:]))}
}

// Sharing is what a sandbox costs the pool, in bytes.
type Sharing struct {
	// Pages is the sandbox's share of the pages it refers to: each page's size
	// divided by how many sandboxes refer to it.
	Pages uint64
	// Overhead is its share of everything else the pool holds for the domain.
	Overhead uint64
}

// Sharing appends the items of a Share.
func (w *Writer) Sharing(s Sharing) {
	w.Uint64(s.Pages)
	w.Uint64(s.Overhead)
}

// Sharing returns the content of a Share.
func (m *Message) Sharing() (Sharing, error) {
	if m.N != 2 {
		return Sharing{}, fmt.Errorf("%w: share of %d items", ErrMessage, m.N)
	}
	return Sharing{m.Uint64(0), m.Uint64(1)}, nil
}
