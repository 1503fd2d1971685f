package main

import "testing"

func TestGenerate(t *testing.T) {
	describe := func(path string, edit func(*pkg)) pkg {
		p := pkg{ImportPath: "m/" + path, Name: "x"}
		p.Module.Path = "m"
		edit(&p)
		return p
	}
	for _, test := range []struct {
		name string
		pkg  pkg
		want string
	}{
		{"imports of ours, and those of tests alone", describe("pkg/x", func(p *pkg) {
			p.Imports = []string{"fmt", "m/pkg/b", "m/pkg/a"}
			p.TestGoFiles = []string{"x_test.go"}
			p.TestImports = []string{"testing", "m/pkg/b"}
			p.XTestImports = []string{"m/pkg/x", "m/pkg/c"}
		}), `load("//tools/bazel:go.bzl", "go_package", "go_test")

go_package(
    name = "x",
    deps = [
        "//pkg/a",
        "//pkg/b",
    ],
)

go_test(
    name = "x_test",
    deps = [
        ":x",
        "//pkg/b",
        "//pkg/c",
    ],
)
`},
		{"a program with gVisor in it, through a package of ours", describe("tools/x", func(p *pkg) {
			p.Name = "main"
			p.Imports = []string{"m/pkg/a"}
			p.Deps = []string{"m/pkg/a", "gvisor.dev/gvisor/runsc/cli/maincli"}
		}), `load("//tools/bazel:go.bzl", "go_binary", "go_package")

go_package(
    name = "x_package",
    deps = ["//pkg/a"],
)

go_binary(
    name = "x",
    patched = True,
    tags = ["manual"],
    deps = [":x_package"],
)
`},
		{"a package that imports gVisor depends on what patches it", describe("pkg/x", func(p *pkg) {
			p.Imports = []string{"gvisor.dev/gvisor/pkg/log", "gvisor.dev/gvisor/pkg/abi"}
		}), `load("//tools/bazel:go.bzl", "go_package")

go_package(
    name = "x",
    deps = ["//tools/weave:weave_package"],
)
`},
		{"end-to-end tests run only by name, and always", describe("test/x", func(p *pkg) {
			p.TestGoFiles = []string{"x_test.go"}
		}), `load("//tools/bazel:go.bzl", "go_package", "go_test")

go_package(
    name = "x",
)

go_test(
    name = "x_test",
    size = "large",
    tags = [
        "exclusive",
        "external",
        "manual",
        "sandbox",
    ],
    deps = [":x"],
)
`},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := generate(test.pkg); got != header+test.want {
				t.Errorf("got\n%s\nwant\n%s", got, header+test.want)
			}
		})
	}
}
