package main

import (
	"encoding/json"
	"slices"
	"strings"

	"runsc-agentzip/tools/agentbench/report"
)

// answerSheet compares the answers of an episode's clones with those of the
// reference system, once both are there. It forgets them when all systems have
// had their turn.
type answerSheet struct {
	reference string
	// turn is the episode that all systems take now, without a system.
	turn  report.Key
	turns map[string]turnAnswers
}

type turnAnswers struct {
	kinds   [][]string
	answers [][]string
}

func newAnswerSheet(reference string) *answerSheet {
	return &answerSheet{reference: reference}
}

// kindsOf lists the kinds of each clone's steps, in order.
func kindsOf(steps []report.Step) [][]string {
	var out [][]string
	for _, s := range steps {
		for len(out) <= s.Clone {
			out = append(out, nil)
		}
		out[s.Clone] = append(out[s.Clone], s.Kind)
	}
	return out
}

// add takes the answers of an episode, for each clone one for each step and one
// for its state, and returns the differences that show by now.
func (a *answerSheet) add(key report.Key, kinds, answers [][]string) []report.Mismatch {
	turn := key
	turn.System = ""
	if a.turns == nil || a.turn != turn {
		a.turn, a.turns = turn, make(map[string]turnAnswers)
	}
	a.turns[key.System] = turnAnswers{kinds, answers}
	want, ok := a.turns[a.reference]
	if !ok {
		return nil
	}
	var out []report.Mismatch
	systems := []string{key.System}
	if key.System == a.reference {
		// Those that had their turn before the reference.
		systems = systems[:0]
		for s := range a.turns {
			if s != a.reference {
				systems = append(systems, s)
			}
		}
		slices.Sort(systems)
	}
	for _, s := range systems {
		k := key
		k.System = s
		out = append(out, a.compare(k, want, a.turns[s])...)
	}
	return out
}

func (a *answerSheet) compare(key report.Key, want, got turnAnswers) []report.Mismatch {
	var out []report.Mismatch
	for clone := range max(len(want.answers), len(got.answers)) {
		w, g := at(want.answers, clone), at(got.answers, clone)
		for i := range max(len(w), len(g)) {
			if i < len(w) && i < len(g) && w[i] == g[i] {
				continue
			}
			kind := stateKind
			if k := at(want.kinds, clone); i < len(k) {
				kind = k[i]
			}
			wa, ga := shortened(at(w, i), at(g, i))
			out = append(out, report.Mismatch{Key: key, Clone: clone, Index: i, Kind: kind, Reference: a.reference, Want: wa, Got: ga})
		}
	}
	return out
}

// at is a list's element, the zero value where it ends before.
func at[T any](list []T, i int) T {
	if i < len(list) {
		return list[i]
	}
	var zero T
	return zero
}

// longestShown is the most of an answer that a report holds.
const longestShown = 4000

// shortened returns two different answers as JSON. Of long ones it shows the
// part where the difference begins, as text.
func shortened(want, got string) (w, g json.RawMessage) {
	if len(want) <= longestShown && len(got) <= longestShown {
		return asJSON(want), asJSON(got)
	}
	same := 0
	for same < min(len(want), len(got)) && want[same] == got[same] {
		same++
	}
	// Something to find the place by.
	from := max(0, same-longestShown/4)
	cut := func(s string) json.RawMessage {
		to := min(len(s), from+longestShown)
		part := s[min(from, len(s)):to]
		if from > 0 {
			part = "..." + part
		}
		if to < len(s) {
			part += "..."
		}
		return quoted(part)
	}
	return cut(want), cut(got)
}

// asJSON is an answer as it is, or quoted if it is not JSON.
func asJSON(answer string) json.RawMessage {
	switch {
	case answer == "":
		return json.RawMessage("null") // there was none
	case json.Valid([]byte(answer)):
		return json.RawMessage(answer)
	}
	return quoted(answer)
}

func quoted(s string) json.RawMessage {
	b, err := json.Marshal(strings.ToValidUTF8(s, "\uFFFD"))
	if err != nil {
		panic(err) // a string
	}
	return b
}
