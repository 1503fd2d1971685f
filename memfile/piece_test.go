package memfile

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPieces writes the pages of a window as letters: t for the template's, r for
// one that is restored already, s for one that is stored.
func TestPieces(t *testing.T) {
	long, short := strings.Repeat("t", pieceMin+1), strings.Repeat("t", pieceMin)
	for _, c := range []struct {
		pages string
		// want has a piece per word, in capitals if it is mapped from the template.
		want string
	}{
		{"t", "T"},
		{short, strings.ToUpper(short)},
		{"s", "s"},
		{"rs", "rs"},
		{long + "r", strings.ToUpper(long) + " r"},
		{short + "r", short + "r"},
		{"r" + short, "r" + short},
		{"r" + long, "r " + strings.ToUpper(long)},
		{"r" + short + "s", "r" + short + "s"},
		{"r" + long + "s", "r " + strings.ToUpper(long) + " s"},
		{"r" + long + "s" + short + "r" + long, "r " + strings.ToUpper(long) + " s" + short + "r " + strings.ToUpper(long)},
	} {
		opts := DefaultOptions()
		h := newFakeHost(t, 512, &opts)
		b := h.backend
		h.template = make(fakeTemplate, 512)
		b.SetTemplate(h.template, true)
		lo := h.lo << pageShift
		end := lo + uint64(len(c.pages))<<pageShift
		require.NoError(t, b.Adopt(Range{lo, end}, 8*PageSize))
		for i, l := range c.pages {
			p := h.lo + uint64(i)
			switch l {
			case 'r':
				b.table.store(p, resident)
			case 's':
				b.table.store(p, b.table.load(p)&^(0xff<<tagShift)|1<<tagShift)
			}
		}
		var got []string
		for start := lo; start < end; {
			e, template := b.Piece(start, end)
			piece := c.pages[(start-lo)>>pageShift : (e-lo)>>pageShift]
			if template {
				off, ok := b.MapTemplate(start, e)
				require.True(t, ok)
				require.Equal(t, 8*PageSize+start-lo, off)
				piece = strings.ToUpper(piece)
			} else if strings.Contains(piece, "s") || strings.Contains(piece, "r") {
				_, ok := b.MapTemplate(start, e)
				require.False(t, ok, "not all of it is the template's")
			}
			got = append(got, piece)
			start = e
		}
		require.Equal(t, c.want, strings.Join(got, " "), "pieces of %s", c.pages)

		// Without mapping, all is restored.
		b.mapTemplate = false
		e, template := b.Piece(lo, end)
		require.Equal(t, end, e)
		require.False(t, template)
	}
}

func TestReadTemplate(t *testing.T) {
	opts := DefaultOptions()
	h := newFakeHost(t, 512, &opts)
	b := h.backend
	h.template = make(fakeTemplate, 64)
	for i := range h.template {
		h.template[i] = uint64(i)
	}
	lo := h.lo << pageShift
	buf := make([]byte, 16*PageSize)
	require.Zero(t, b.ReadTemplate(buf, lo), "there is no template")
	b.SetTemplate(h.template, false)
	require.NoError(t, b.Adopt(Range{lo, lo + 8*PageSize}, 4*PageSize))
	want := make([]byte, 8*PageSize)
	require.NoError(t, h.template.ReadPages(want, 4))

	require.EqualValues(t, 8*PageSize, b.ReadTemplate(buf, lo), "as far as the template goes")
	require.Equal(t, want, buf[:8*PageSize])
	require.EqualValues(t, 2*PageSize, b.ReadTemplate(buf[:2*PageSize], lo+PageSize), "as far as there is room")
	require.Equal(t, want[PageSize:3*PageSize], buf[:2*PageSize])
	b.table.store(h.lo+3, resident)
	require.EqualValues(t, 3*PageSize, b.ReadTemplate(buf, lo), "as far as it is not in the file")
	require.Zero(t, b.ReadTemplate(buf, lo+3*PageSize))
	require.Zero(t, b.ReadTemplate(buf, lo+8*PageSize))
}
