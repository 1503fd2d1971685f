package soak

import (
	"fmt"
	"math/rand/v2"
)

// What guest/soaker.c answers, computed here from what it was asked only.

const pageWords = 4096 / 8

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// guestRand is the guest's source of random numbers.
type guestRand uint64

func (r *guestRand) next() uint64 {
	*r += 0x9e3779b97f4a7c15
	return mix(uint64(*r))
}

func (r *guestRand) below(n int) int { return int(r.next() % uint64(n)) }

// word is word k of what has the key h.
func word(h uint64, k int) uint64 {
	switch h & 3 {
	case 0:
		if k%64 != 0 {
			return 0
		}
		return mix(h + uint64(k))
	case 1:
		return h + uint64(k/64*16)
	case 2:
		return mix(h + uint64(k))
	}
	return (h >> 8 & 0xff) * 0x0101010101010101
}

// look adds n words to a sum.
func look(n int, h, sum uint64) uint64 {
	for k := range n {
		sum = (sum ^ word(h, k)) * 0x9e3779b97f4a7c15
	}
	return sum
}

// result is what the short process, or other part of a step, with the number i has.
func result(seed uint64, i int) uint64 { return mix(mix(seed) ^ uint64(i)) }

// model is a guest's memory: how often each page was written.
type model []uint32

func newModel(mib int) model { return make(model, mib*256) }

func (m model) page(i int, sum uint64) uint64 {
	return look(pageWords, mix(mix(uint64(i))^uint64(m[i])), sum)
}

// A step is a request and its answer.
type step struct {
	request string
	answer  uint64
}

func (m model) sum() step {
	var sum uint64
	for i := range m {
		sum = m.page(i, sum)
	}
	return step{"sum", sum}
}

func (m model) write(seed uint64, n int) step {
	g := guestRand(seed)
	var sum uint64
	for range n {
		i := g.below(len(m))
		for run := 1 + g.below(16); run > 0 && i < len(m); run-- {
			sum = m.page(i, sum)
			m[i]++
			i++
		}
	}
	return step{fmt.Sprintf("write %d %d", seed, n), sum}
}

// results is the sum of n results.
func results(seed uint64, n int) (sum uint64) {
	for i := range n {
		sum += result(seed, i)
	}
	return sum
}

func burst(seed uint64, n, wide int) step {
	return step{fmt.Sprintf("burst %d %d %d", seed, n, wide), results(seed, n)}
}

// crowd has more processes at once than any other step, one that becomes another
// program counting twice. The platform keeps the stubs of processes that have ended for
// others, as many as there ever were at once: after a crowd it needs no more.
func crowd(seed uint64) step {
	const n = 3 * widest
	return step{fmt.Sprintf("crowd %d %d", seed, n), results(seed, n)}
}

func files(seed uint64, n int) step {
	g := guestRand(seed)
	var sum uint64
	for range n {
		words := 1 + g.below(16*pageWords)
		sum = look(words, g.next(), sum)
	}
	return step{fmt.Sprintf("files %d %d", seed, n), sum}
}

func threads(seed uint64, n int) step {
	var sum uint64
	for i := range n {
		sum += look(8*pageWords, result(seed, i), 0)
	}
	return step{fmt.Sprintf("threads %d %d", seed, n), sum}
}

func pipes(seed uint64, n int) step {
	var sum uint64
	for i := range n {
		sum = mix(sum ^ mix(result(seed, i)))
	}
	return step{fmt.Sprintf("pipes %d %d", seed, n), sum}
}

// widest is how many processes a step of a soak has at once, at most.
const widest = 8

// kinds are the steps of a soak.
var kinds = []func(m model, seed uint64, r *rand.Rand) step{
	func(m model, seed uint64, r *rand.Rand) step { return burst(seed, 16+r.IntN(49), widest) },
	func(m model, seed uint64, r *rand.Rand) step { return threads(seed, 32) },
	func(m model, seed uint64, r *rand.Rand) step { return m.write(seed, 1+r.IntN(60)) },
	func(m model, seed uint64, r *rand.Rand) step { return files(seed, 4+r.IntN(29)) },
	func(m model, seed uint64, r *rand.Rand) step { return pipes(seed, 100+r.IntN(900)) },
	func(m model, seed uint64, r *rand.Rand) step { return m.sum() },
}
