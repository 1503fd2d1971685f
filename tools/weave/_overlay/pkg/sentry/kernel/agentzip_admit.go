package kernel

import "golang.org/x/sys/unix"

// freesMemory tells whether the system call that the task makes may free memory and
// takes next to none. A call that is unknown does not.
//
// Preconditions: the caller must be running on the task goroutine, in doSyscall.
func (t *Task) freesMemory() bool {
	switch t.Arch().SyscallNo() {
	case unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_SHMDT, unix.SYS_CLOSE,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_TGKILL:
		return true
	}
	return false
}
