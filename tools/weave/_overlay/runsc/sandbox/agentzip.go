package sandbox

// Call calls a method on the sandbox's control socket.
func (s *Sandbox) Call(method string, arg, result any) error {
	return s.call(method, arg, result)
}
