package wire

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// errMany is what a message with descriptors that nobody expects fails with.
var errMany = fmt.Errorf("%w: too long, or with more than one descriptor", ErrMessage)

// Send sends a message on a socket, and a descriptor with it unless fd is
// negative. It never blocks: with unix.EAGAIN the message was not sent.
//
// The flags of Send and Receive are those that gVisor's seccomp filters allow.
func Send(socket int, msg []byte, fd int) error {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	for {
		n, err := unix.SendmsgN(socket, msg, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n != len(msg):
			return fmt.Errorf("sent %d of %d bytes of a message", n, len(msg))
		}
		return nil
	}
}

// Receive receives a message into buf, which has MaxMessage bytes, and the
// descriptor that came with it, or -1. It never blocks: with unix.EAGAIN there
// is none. At the end of the connection it returns io.EOF.
func Receive(socket int, buf []byte) (n, fd int, err error) {
	var oob [64]byte
	for {
		n, oobn, flags, _, err := unix.Recvmsg(socket, buf, oob[:], unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, -1, err
		}
		fd, err := descriptor(oob[:oobn])
		if err == nil && (flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || n > len(buf)) {
			err = errMany
		}
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil {
			if fd >= 0 {
				unix.Close(fd)
			}
			return 0, -1, err
		}
		return n, fd, nil
	}
}

// descriptor returns the only descriptor in a control message, or -1. It closes
// those that it does not return.
func descriptor(oob []byte) (int, error) {
	if len(oob) == 0 {
		return -1, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1, err
	}
	fd := -1
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, f := range fds {
			if fd >= 0 {
				unix.Close(f)
				err = errMany
				continue
			}
			fd = f
		}
		if err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

// Wait blocks until a socket has something to receive, or its end is reached.
func Wait(socket int) error {
	for {
		fds := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLIN}}
		_, err := unix.Ppoll(fds, nil, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err
	}
}
