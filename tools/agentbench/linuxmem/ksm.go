package linuxmem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

const ksmDir = "/sys/kernel/mm/ksm"

// ksmPace is how many pages KSM looks at each time it wakes up, every 20 ms by
// default: a pass over a gigabyte then takes 10 s, instead of 50 s with the
// kernel's default.
const ksmPace = "500"

// The values of KSM's run file.
const (
	ksmStop    = "0"
	ksmRun     = "1"
	ksmUnmerge = "2"
)

// ksmState is how KSM was set before, and how it is set by us.
type ksmState struct {
	Before ksmSettings `json:"before"`
	Ours   ksmSettings `json:"ours"`
}

// ksmSettings are the contents of KSM's files; "" leaves one alone.
type ksmSettings struct {
	Run            string `json:"run"`
	PagesToScan    string `json:"pages_to_scan,omitempty"`
	SleepMillisecs string `json:"sleep_millisecs,omitempty"`
}

func checkKSM() error {
	if err := unix.Access(filepath.Join(ksmDir, "run"), unix.W_OK); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("linuxmem: no KSM here (%s is missing): use a kernel that has CONFIG_KSM", ksmDir)
		}
		return fmt.Errorf("linuxmem: %s cannot be written to (%w): run it on the host or in a privileged container", ksmDir, err)
	}
	// Merging has to be switched on for programs that know nothing of it.
	if _, err := unix.PrctlRetInt(unix.PR_GET_MEMORY_MERGE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("linuxmem: KSM cannot be switched on for a process here (prctl PR_SET_MEMORY_MERGE: %w): use Linux 6.7 or newer", err)
	}
	return nil
}

// planKSM reads the settings and decides on ours.
func planKSM() (ksmState, error) {
	s := ksmState{Ours: ksmSettings{Run: ksmRun, PagesToScan: ksmPace, SleepMillisecs: "20"}}
	for _, f := range []struct {
		name string
		to   *string
	}{
		{"run", &s.Before.Run},
		{"pages_to_scan", &s.Before.PagesToScan},
		{"sleep_millisecs", &s.Before.SleepMillisecs},
	} {
		var err error
		if *f.to, err = readTrimmed(filepath.Join(ksmDir, f.name)); err != nil {
			return s, err
		}
	}
	// An operator who runs KSM has settings of their own, and the advisor, where
	// it is on, sets the pace itself.
	advisor, err := readTrimmed(filepath.Join(ksmDir, "advisor_mode"))
	if s.Before.Run == ksmRun || err == nil && advisor != "[none] scan-time" {
		s.Ours.PagesToScan, s.Ours.SleepMillisecs = "", ""
	}
	return s, nil
}

// apply switches KSM on.
func (s *ksmState) apply(step func(string)) error {
	for _, f := range s.files() {
		if f.ours == "" || f.ours == f.before {
			continue
		}
		if err := writeKernel(f.path, f.ours); err != nil {
			return err
		}
		step("KSM's " + filepath.Base(f.path) + " set")
	}
	return nil
}

// undo puts back what still is as we set it.
func (s *ksmState) undo(step func(string)) error {
	for _, f := range s.files() {
		if f.ours == "" || f.ours == f.before {
			continue
		}
		now, err := readTrimmed(f.path)
		if err != nil {
			return err
		}
		run := filepath.Base(f.path) == "run"
		// Unmerging may be as far as an earlier attempt came.
		if now != f.ours && !(run && now == ksmUnmerge) {
			continue
		}
		if run {
			if err := writeKernel(f.path, ksmUnmerge); err != nil {
				return err
			}
			step("KSM unmerged")
		}
		if err := writeKernel(f.path, f.before); err != nil {
			return err
		}
		step("KSM's " + filepath.Base(f.path) + " restored")
	}
	return nil
}

type ksmFile struct{ path, before, ours string }

// files lists the settings, run last.
func (s *ksmState) files() []ksmFile {
	return []ksmFile{
		{filepath.Join(ksmDir, "pages_to_scan"), s.Before.PagesToScan, s.Ours.PagesToScan},
		{filepath.Join(ksmDir, "sleep_millisecs"), s.Before.SleepMillisecs, s.Ours.SleepMillisecs},
		{filepath.Join(ksmDir, "run"), s.Before.Run, s.Ours.Run},
	}
}

func readKSMUsage(u *HostUsage) error {
	page := int64(os.Getpagesize())
	read := func(name string) (int64, error) {
		s, err := readTrimmed(filepath.Join(ksmDir, name))
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("linuxmem: KSM's %s: %w", name, err)
		}
		return n, nil
	}
	shared, err := read("pages_shared")
	if err != nil {
		return err
	}
	sharing, err := read("pages_sharing")
	if err != nil {
		return err
	}
	u.KSMShared, u.KSMSharing = uint64(shared*page), uint64(sharing*page)
	// Already in bytes.
	u.KSMProfit, err = read("general_profit")
	return err
}
