"""Go packages, tests and binaries, by the machine's own go command.

The rules run `go test` and `go build` as local actions in the source tree, so
that go's build cache is shared with `make`. What bazel contributes is knowing
when there is nothing to do: each target lists every Go file that it is built
from, directly or through deps, and go.mod and go.sum stand for the rest. The
BUILD.bazel files are written by //tools/bazel/buildgen.
"""

_TESTS = ["*_test.go", "testdata/**"]

def go_package(name, deps = []):
    """A package's files, without its tests, and those of the packages it imports.

    Args:
      name: the package's, by convention its folder's.
      deps: go_packages that it imports.
    """
    native.filegroup(
        name = name,
        srcs = native.glob(["**"], exclude = _TESTS + ["BUILD.bazel"]) + deps + ["//:module"],
        visibility = ["//visibility:public"],
    )

def go_test(name, deps, size = "medium", tags = []):
    """The package's tests, by go test.

    Args:
      name: the target's.
      deps: the package under test and the go_packages that only tests import.
      size: bazel's, decides the time-out.
      tags: bazel's; "local" is added.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//tools/bazel:gotest.sh"],
        args = ["./" + native.package_name()],
        data = native.glob(_TESTS, allow_empty = True) + deps + ["//:module"],
        tags = tags + ["local"],
    )

def go_binary(name, deps, flags = [], patched = False, tags = []):
    """A static binary of this package: bazel-bin/PACKAGE/NAME_/NAME.

    Args:
      name: the target's and the file's.
      deps: the main package.
      flags: further flags of go build.
      patched: whether it has the patched gVisor in it, which weave makes first.
      tags: bazel's.
    """
    native.genrule(
        name = name,
        srcs = deps + ["//:module"],
        outs = [name + "_/" + name],
        cmd = " ".join((["WEAVE=1"] if patched else []) + ["$(location //tools/bazel:gobuild.sh) $@ ./" + native.package_name()] + flags),
        executable = True,
        local = True,
        tags = tags,
        tools = ["//tools/bazel:gobuild.sh"],
    )
