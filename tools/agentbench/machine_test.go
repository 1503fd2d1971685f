package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDescribeMachine(t *testing.T) {
	m := describeMachine()
	require.NotEmpty(t, m.Kernel)
	require.Positive(t, m.CPUs)
	require.Positive(t, m.MapTouchNS)
	t.Logf("first access to a page mapped again: %.0f ns", m.MapTouchNS)
}
