package main

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDensityFlags(t *testing.T) {
	c, err := parseDensityFlags([]string{"--memory", "400MiB", "--keep", "1GiB", "--systems", "stock,agentzip-nopool", "--max", "7", "--wait", "3s"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, uint64(400<<20), c.memory)
	require.Equal(t, uint64(1<<30), c.keep)
	require.Equal(t, 7, c.max)
	require.Equal(t, 3*time.Second, c.wait)
	require.Equal(t, []string{"stock", "agentzip-nopool"}, []string{c.systems[0].name, c.systems[1].name})
	for _, bad := range [][]string{{"-memory", "4G"}, {"-keep", "-1MiB"}, {"-systems", "x"}, {"-max", "0"}, {"-wait", "-1s"}, {"x"}} {
		var msg bytes.Buffer
		_, err := parseDensityFlags(bad, &msg)
		require.ErrorIs(t, err, errUsage, "%v", bad)
		require.Contains(t, msg.String(), "agentbench density: ", "%v", bad)
	}
}

func TestParseBytes(t *testing.T) {
	for s, want := range map[string]uint64{"1": 1, "123456": 123456, "4GiB": 4 << 30, "1.5 MiB": 3 << 19, "2KiB": 2048, "1TiB": 1 << 40} {
		got, err := parseBytes(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got, s)
	}
	for _, s := range []string{"", "GiB", "0", "-1", "NaN", "Inf", "1e300", "4GB", "4 gib", "1GiBx", "9999999TiB"} {
		_, err := parseBytes(s)
		require.Error(t, err, s)
	}
}

// Whatever each takes, as many are found to fit as do, and hardly any more are
// started.
func TestFill(t *testing.T) {
	const limit = 1000
	for _, shared := range []uint64{0, 1, 150, 999, 1000} {
		for _, each := range []uint64{1, 3, 7, 50, 333, 500, 501, 1000, 1001} {
			for _, most := range []int{1, 5, 400, 5000} {
				var points []densityPoint
				calls := 0
				at := func(n int) (densityPoint, error) {
					require.GreaterOrEqual(t, n, 1)
					require.LessOrEqual(t, n, most)
					calls++
					// By the other measure each takes half.
					return densityPoint{Clones: n, Sum: shared + each*uint64(n), Drop: shared + each*uint64(n)/2}, nil
				}
				fits := func(each uint64) (int, bool) {
					n := int((limit - min(limit, shared)) / each)
					return min(n, most), n >= most
				}
				got, err := fill(limit, most, &points, sumOfPoint, at)
				require.NoError(t, err)
				want, atLeast := fits(each)
				require.Equal(t, want, got.Clones, "%d and %d each, at most %d", shared, each, most)
				require.Equal(t, atLeast, got.AtLeast, "%d and %d each, at most %d", shared, each, most)
				for _, p := range points {
					require.LessOrEqual(t, p.Clones, want+1)
				}
				if want > 0 {
					require.Equal(t, shared+each*uint64(want), got.Bytes)
				}
				if each%2 == 0 {
					got, err = fill(limit, most, &points, dropOfPoint, at)
					require.NoError(t, err)
					want, atLeast = fits(each / 2)
					require.Equal(t, want, got.Clones)
					require.Equal(t, atLeast, got.AtLeast)
				}
				require.Less(t, calls, 60)
			}
		}
	}
}

// What is measured jumps about, as the memory of a host does that others use.
func TestFillEnds(t *testing.T) {
	for seed := range uint64(200) {
		var points []densityPoint
		calls, x := uint64(0), seed
		at := func(n int) (densityPoint, error) {
			calls++
			x = x*6364136223846793005 + 1442695040888963407
			return densityPoint{Clones: n, Sum: x >> 33 % 2000, Drop: x >> 44 % 2000}, nil
		}
		for _, of := range []func(densityPoint) uint64{sumOfPoint, dropOfPoint} {
			got, err := fill(1000, 50, &points, of, at)
			require.NoError(t, err)
			require.LessOrEqual(t, got.Clones, 50)
		}
		require.Less(t, calls, uint64(200))
	}
	broken := errors.New("broken")
	_, err := fill(1000, 50, &[]densityPoint{}, sumOfPoint, func(int) (densityPoint, error) { return densityPoint{}, broken })
	require.ErrorIs(t, err, broken)
}

func TestFillStopsForTheHost(t *testing.T) {
	got, err := fill(1000, 50, &[]densityPoint{}, sumOfPoint, func(n int) (densityPoint, error) {
		if n > 3 {
			return densityPoint{}, errHostFull
		}
		return densityPoint{Clones: n, Sum: uint64(400 - 100/n)}, nil
	})
	require.NoError(t, err)
	require.True(t, got.AtLeast)
	require.LessOrEqual(t, got.Clones, 3)
}

func TestPrintDensity(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, printDensity(&out, &densityReport{Memory: 4 << 30, Systems: []densityResult{
		{System: "stock", FitsSum: densityCount{Clones: 16, Bytes: 4000 << 20}, FitsDrop: densityCount{Clones: 15, Bytes: 3900 << 20}, Asked: 17, Answered: 17, Restores: []float64{0.25}},
		{System: "agentzip", FitsSum: densityCount{Clones: 120, Bytes: 4080 << 20, AtLeast: true}, Asked: 120, Answered: 119},
	}}))
	require.Contains(t, out.String(), `
    system           by the sum       each  by available memory       each    answered  restore
     stock                   16  250.0 MiB                   15  260.0 MiB    17 of 17   0.25 s
  agentzip  at least 120 (7.5x)   34.0 MiB             0 (0.0x)          -  119 of 120   0.00 s
`)
}
