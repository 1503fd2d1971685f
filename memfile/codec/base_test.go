package codec

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

// pair is a page and its base.
type pair struct {
	page, base *Page
	at         int // which page of the template
}

// roundTripBase encodes p against base in every tier and checks everything
// that must hold.
func roundTripBase(t interface{ Fatalf(string, ...any) }, e *Encoder, d *Decoder, p, base *Page) {
	before, beforeBase := *p, *base
	against(t, e, d, p, base)
	for _, tier := range tiers {
		var buf, alone [MaxEncoded]byte
		tag, n, why := e.Encode(buf[:], Input{Page: p, Base: base, Tier: tier})
		if *p != before || *base != beforeBase {
			t.Fatalf("%v: Encode changed its input", tier)
		}
		if (why == RejectNone) != (tag != TagInvalid) {
			t.Fatalf("%v: tag %v with cause %v", tier, tag, why)
		}
		if why == RejectForm {
			t.Fatalf("%v: unknown form", tier)
		}
		if (tag == TagTemplate) != (*p == *base) {
			t.Fatalf("%v: %v, equal is %v", tier, tag, *p == *base)
		}
		_, m, whyAlone := e.Encode(alone[:], Input{Page: p, Tier: tier})
		if whyAlone == RejectNone && (why != RejectNone || n > max(allowed(tier, tag), m)) {
			t.Fatalf("%v: %v, %d bytes (%v) with base, %d without", tier, tag, n, why, m)
		}
		if why != RejectNone {
			continue
		}
		if n > MaxProfitable || (n == 0) != (tag == TagZero || tag == TagTemplate) {
			t.Fatalf("%v: %v of %d bytes", tier, tag, n)
		}
		got := Page(bytes.Repeat([]byte{0x55}, PageSize))
		if err := d.Decode(&got, tag, buf[:n], base); err != nil {
			t.Fatalf("%v: %v of %d bytes: %v", tier, tag, n, err)
		}
		if got != *p {
			t.Fatalf("%v: %v of %d bytes restores another page", tier, tag, n)
		}
		if *base != beforeBase {
			t.Fatalf("%v: Decode changed the base", tier)
		}
		if tag == TagTemplate || tag == TagWordDelta || tag == TagZstdBase {
			if err := d.Decode(&got, tag, buf[:n], nil); !errors.Is(err, ErrNoBase) {
				t.Fatalf("%v: %v without base: %v", tier, tag, err)
			}
		}
	}
}

// against does the same with EncodeAgainst, within several limits.
func against(t interface{ Fatalf(string, ...any) }, e *Encoder, d *Decoder, p, base *Page) {
	before, beforeBase := *p, *base
	limit := MaxEncoded + 100
	for limit > 0 {
		var buf [MaxEncoded + 100]byte
		tag, n := e.EncodeAgainst(buf[:], p, base, limit)
		if *p != before || *base != beforeBase {
			t.Fatalf("EncodeAgainst changed its input")
		}
		if tag == TagInvalid {
			if n != 0 {
				t.Fatalf("nothing in %d bytes", n)
			}
			return
		}
		if tag != TagWordDelta && tag != TagZstdBase || n < 1 || n > limit || n > MaxEncoded {
			t.Fatalf("%v of %d bytes, limit %d", tag, n, limit)
		}
		if *p == *base && n > 8 {
			t.Fatalf("%v of %d bytes for a page that equals its base", tag, n)
		}
		var got Page
		if err := d.Decode(&got, tag, buf[:n], base); err != nil || got != *p {
			t.Fatalf("%v of %d bytes restores another page (%v)", tag, n, err)
		}
		limit = n - 1
	}
}

// changed returns p with a few differences of the kinds that guests make.
func changed(p *Page, r *rand.Rand, kind, n int) *Page {
	q := *p
	switch kind {
	case 0: // equal
	case 1: // single bytes
		for range n {
			q[r.IntN(PageSize)] += byte(1 + r.IntN(3))
		}
	case 2: // words, some of them moved by the same amount
		d := r.Uint64N(1<<20) * 8
		for range n {
			i := r.IntN(PageSize / 8)
			if r.IntN(3) == 0 {
				putWord(&q, i, word(&q, i)^r.Uint64N(1<<48))
			} else {
				putWord(&q, i, word(&q, i)+d)
			}
		}
	case 3: // shifted content
		k := r.IntN(PageSize)
		copy(q[k:], p[:])
		copy(q[:k], p[PageSize-k:])
	case 4: // a new part
		i := r.IntN(PageSize)
		for j := i; j < min(PageSize, i+n); j++ {
			q[j] = byte(r.Uint32())
		}
	case 5: // everything
		for j := range q {
			q[j] = byte(r.Uint32())
		}
	}
	return &q
}

// allowed is the length up to which a form is taken although a page may be
// shorter without a base.
func allowed(tier Tier, tag Tag) int {
	switch {
	case tag != TagWordDelta:
		return 0
	case tier == TierFast:
		return acceptFast
	case tier == TierMid:
		return acceptMid
	}
	return acceptDeep
}

func TestBaseSynthetic(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	all := synthetic()
	r := rand.New(rand.NewPCG(9, 10))
	for _, p := range all {
		for _, base := range all {
			roundTripBase(t, e, d, p, base)
		}
		for kind := range 6 {
			for _, n := range []int{1, 3, 20, 400} {
				roundTripBase(t, e, d, changed(p, r, kind, n), p)
			}
		}
	}
}

func TestBaseProperty(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	rapid.Check(t, func(t *rapid.T) {
		base := genPage(t)
		var p *Page
		if rapid.IntRange(0, 3).Draw(t, "related") > 0 {
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
			p = changed(base, r, rapid.IntRange(0, 5).Draw(t, "change"), rapid.IntRange(1, 600).Draw(t, "changes"))
		} else {
			p = genPage(t)
		}
		roundTripBase(t, e, d, p, base)
	})
}

// samplePairs reads pages of clones with the template's page at the same
// place: those that differ from it and those that do not. Pages of zeros are
// left out.
func samplePairs(t testing.TB) (differ, same []pair) {
	dir := os.Getenv("AGENTZIP_PAGES")
	if dir == "" {
		t.Skip("AGENTZIP_PAGES names no folder of pages")
	}
	template, err := os.ReadFile(filepath.Join(dir, "b_tmpl.bin"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "b_c*.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no b_c*.bin files in %s (%v)", dir, err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+PageSize <= min(len(raw), len(template)); i += PageSize {
			p := pair{(*Page)(raw[i:]), (*Page)(template[i:]), i / PageSize}
			switch {
			case IsZero(p.page):
			case *p.page == *p.base:
				same = append(same, p)
			default:
				differ = append(differ, p)
			}
		}
	}
	return differ, same
}

func TestSampleBase(t *testing.T) {
	pairs, _ := samplePairs(t)
	e, d := NewEncoder(), NewDecoder()
	for _, p := range pairs {
		roundTripBase(t, e, d, p.page, p.base)
	}
	for _, tier := range tiers {
		var count, bytes [NumTags]int
		total := 0
		for _, p := range pairs {
			var buf [MaxEncoded]byte
			tag, n, why := e.Encode(buf[:], Input{Page: p.page, Base: p.base, Tier: tier})
			if why != RejectNone {
				n = PageSize
			}
			count[tag]++
			bytes[tag] += n
			total += n
		}
		t.Logf("%-4v %d pages: %.1f bytes/page (rejected ones count whole)", tier, len(pairs), float64(total)/float64(len(pairs)))
		for tag := range count {
			if count[tag] > 0 {
				t.Logf("     %-10v %5d pages, %4d bytes/page", Tag(tag), count[tag], bytes[tag]/count[tag])
			}
		}
	}
}

// TestModelIsStable: blobs written with other tables cannot be read. Whoever
// trains the models anew must be sure that no such blobs are left, or use new
// tags.
func TestModelIsStable(t *testing.T) {
	if got := xxh3.HashString(deltaTables + deltaWidths + wordsTables + wordsWidths); got != 0xe1a45b665163d2e {
		t.Errorf("the models have changed: %#x", got)
	}
}
