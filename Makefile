# The two commands a newcomer needs are `make demo` and `make test`; `make help`
# lists the rest. Debian packages that a target needs and the machine lacks are
# installed by it.

# How many compilers, tests or bazel actions run at once.
JOBS ?= 2
# How much of each fuzz target `make test` runs: inputs (20000x) rather than a time
# (5s), since go test fails now and then when a time is over (golang.org/issue/75804).
FUZZTIME ?= 20000x
# Further flags for bin/agentbench demo, for go test on the benchmarks and for
# bin/agentbench run.
DEMO_FLAGS ?=
BENCH_FLAGS ?=
AGENTS_FLAGS ?=

# Go's own installer puts it where PATH does not point by itself. The scripts and
# programs that we start call go too.
export PATH := $(PATH):/usr/local/go/bin
GO ?= go

# Both runscs carry the pinned gVisor's version: a checkpoint can be restored only
# by a runsc with the version that wrote it, and our hooks leave its format alone.
VERSION ?= $(shell sed -n 's/.*gvisor\.dev\/gvisor \(v[^ ]*\).*/\1/p' go.mod)

# -trimpath and CGO_ENABLED=0 are part of the build cache's key: whatever compiles
# gVisor must agree on them, or it is compiled once more.
STATIC    = CGO_ENABLED=0 $(GO)
BUILD     = -p $(JOBS) -trimpath -buildvcs=false
LDFLAGS   = -ldflags "-X gvisor.dev/gvisor/runsc/version.version=$(VERSION)"
TEST      = -p $(JOBS) -count=1 -buildvcs=false
# The packages that do not have gVisor in them, and all. Not ./...: out/ holds
# whatever the demo puts there, root filesystems with Go sources included.
PURE      = ./memfile/... ./pkg/...
ALL       = $(PURE) ./runsc-agentzip/... ./test/... ./tools/...
RUNTIME   = $(CURDIR)/bin/runsc-agentzip
STOCK     = $(CURDIR)/bin/runsc-stock
# The tests that start sandboxes, one package after the other (-p 1): they measure
# and they wait. -require: a missing tool is a failure, not a skipped test.
SANDBOX   = CGO_ENABLED=0 $(GO) test -p 1 -count=1 -trimpath -buildvcs=false
RUNTIMES  = -runtime=$(RUNTIME) -stock=$(STOCK) -require

INSTALL            = .ci/install-packages
BUILD_PACKAGES     = ca-certificates git
UNIT_PACKAGES      = gcc libc6-dev
DOCKER_PACKAGES    = docker.io busybox-static
CONTAINERD_PACKAGES = $(DOCKER_PACKAGES) podman
README_PACKAGES    = $(DOCKER_PACKAGES) $(EROFS_PACKAGES) docker-registry
BAZEL_PACKAGES     = bazel-bootstrap bazel-skylib bazel-platforms bazel-rules-java bazel-rules-proto
PHASE_PACKAGES     = python3
INTEGRITY_PACKAGES = stress-ng memtester redis-server sqlite3 git python3 libpython3.11-testsuite gcc g++ make libc6-dev procps
DEMO_PACKAGES      = debootstrap
EROFS_PACKAGES     = erofs-utils python3

.DEFAULT_GOAL := build
# Targets share the build cache, the machine's cores and dpkg's lock.
.NOTPARALLEL:

.PHONY: help build stock vendor demo test test-long check unit fuzz fleet-test docker-test containerd-test readme-test integrity-test template-test pool-test phase-test pressure-test observe-test soak-test erofs-test cloud-test sandbox-test agentbench-test linux-test bazel-test buildgen bench bench-agents bench-codec deps clean check-go check-root

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '  make %-15s %s\n' "$$t" "$$d"; done

build: vendor | bin ## Build bin/runsc-agentzip and bin/agentbench (the default)
	$(STATIC) build $(BUILD) $(LDFLAGS) -o bin/ ./runsc-agentzip ./tools/agentbench

# -mod=readonly: the module cache's gVisor, not the patched one in vendor/.
stock: check-go | bin ## Build bin/runsc-stock, the unpatched runsc of the same version
	$(STATIC) build $(BUILD) $(LDFLAGS) -mod=readonly -o bin/ ./tools/runsc-stock

# -mod=readonly: weave is what repairs a vendor/ that go.mod has left behind.
vendor: check-go ## Generate vendor/ with the patched gVisor
	@$(INSTALL) $(BUILD_PACKAGES)
	$(GO) run -mod=readonly ./tools/weave

# The Sentry covers the host's /tmp with its own: a binary below it could not
# execute itself. In a clone below /tmp, bin/ leads elsewhere.
bin:
	@case "$(realpath $(CURDIR))/" in \
	/tmp/*) dir=$$(mktemp -d /var/tmp/runsc-agentzip-bin.XXXXXX) && chmod 755 "$$dir" && ln -sfn "$$dir" bin && \
		echo "make: this folder is below /tmp, so bin/ leads to $$dir" ;; \
	*) mkdir -p bin ;; \
	esac

demo: check-root build stock ## Build, then show the main job on real sandboxes
	@$(INSTALL) $(DEMO_PACKAGES)
	bin/agentbench demo $(DEMO_FLAGS)

test: check-root deps check unit fuzz build stock bazel-test fleet-test agentbench-test linux-test docker-test containerd-test readme-test sandbox-test pressure-test cloud-test pool-test phase-test integrity-test ## Run everything that CI runs

check: vendor ## Check formatting, BUILD.bazel files and go vet
	@files=$$(find . \( -path ./vendor -o -path ./out \) -prune -o -name '*.go' -print | xargs gofmt -l); \
	if [ -n "$$files" ]; then echo "not formatted, run gofmt -w on:"; echo "$$files"; exit 1; fi
	$(GO) run ./tools/bazel/buildgen -check
	$(STATIC) vet -p $(JOBS) -trimpath -buildvcs=false $(ALL)

unit: vendor ## Run the unit tests, those without gVisor in them under -race
	@$(INSTALL) $(UNIT_PACKAGES)
	CGO_ENABLED=1 $(GO) test $(TEST) -race $(PURE) ./test/harness
	$(STATIC) test $(TEST) -trimpath ./pkg/pool/client
	$(STATIC) test $(TEST) -trimpath ./runsc-agentzip/... ./tools/...

fuzz: vendor ## Run every fuzz target for FUZZTIME
	@GO="$(GO)" .ci/fuzz $(FUZZTIME) $(JOBS) $(PURE)

fleet-test: build stock check-root
	FLEET_RUNSC=$(STOCK) $(SANDBOX) -run EndToEnd ./pkg/fleet
	FLEET_RUNSC=$(RUNTIME) $(SANDBOX) -run EndToEnd ./pkg/fleet

docker-test: build check-root ## Run containers through a real dockerd
	@$(INSTALL) $(DOCKER_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/docker -runtime=$(RUNTIME)

containerd-test: build check-root ## Run containers through a real containerd, and podman
	@$(INSTALL) $(CONTAINERD_PACKAGES)
	$(SANDBOX) -timeout 5m ./test/containerd/stage
	$(SANDBOX) -timeout 10m ./test/containerd -runtime=$(RUNTIME) -require

readme-test: build check-root ## Run the commands of README.md
	@$(INSTALL) $(README_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/readme -runtime=$(RUNTIME) -require

integrity-test: build stock check-root ## Run real programs under continuous eviction
	@$(INSTALL) $(INTEGRITY_PACKAGES)
	$(SANDBOX) -timeout 40m ./test/integrity $(RUNTIMES)

template-test: build stock check-root ## Restore sandboxes that share a template
	@$(INSTALL) $(UNIT_PACKAGES)
	$(SANDBOX) -timeout 20m ./test/template $(RUNTIMES)

pool-test: build check-root ## Share pages among sandboxes, and kill the pool meanwhile
	@$(INSTALL) $(UNIT_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/pool -runtime=$(RUNTIME) -require

phase-test: build check-root ## Recognise the waits and resumes of programs of many shapes
	@$(INSTALL) $(PHASE_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/phase -runtime=$(RUNTIME) -require

pressure-test: build stock check-root ## Run sandboxes in less memory than they use
	@$(INSTALL) $(UNIT_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/pressure $(RUNTIMES)

observe-test: build check-root ## Observe sandboxes of which some do not answer
	$(SANDBOX) -timeout 10m ./test/observe -runtime=$(RUNTIME) -require

soak-test: build check-root ## Have sandboxes work and wait again and again
	@$(INSTALL) $(UNIT_PACKAGES)
	$(SANDBOX) -timeout 20m ./test/soak -runtime=$(RUNTIME) -require

erofs-test: build check-root ## Run sandboxes whose root is an EROFS image, without a gofer
	@$(INSTALL) $(EROFS_PACKAGES)
	$(SANDBOX) -timeout 10m ./test/erofs -runtime=$(RUNTIME) -require

cloud-test: build stock check-root ## Drive sandboxes as a scheduler does, from Go and a shell
	$(SANDBOX) -timeout 20m ./test/cloud $(RUNTIMES)

# The suites that a busy machine does not put off, as many at once as there are jobs,
# the longest first: sandboxes wait as much as they work. The others recognise waits,
# compare times, or have little memory.
sandbox-test: build stock check-root ## Run template, soak, erofs and observe, side by side
	@$(INSTALL) $(UNIT_PACKAGES) $(EROFS_PACKAGES)
	$(SANDBOX) -p $(JOBS) -timeout 30m ./test/template ./test/soak ./test/erofs ./test/observe $(RUNTIMES)

# A machine without zram, or with swap in use, does without the system linux.
agentbench-test: build stock check-root ## Run a small benchmark of agents
	@$(INSTALL) $(DEMO_PACKAGES)
	AGENTBENCH_RUNTIME=$(RUNTIME) AGENTBENCH_STOCK=$(STOCK) $(SANDBOX) -timeout 10m -run EndToEnd ./tools/agentbench
	bin/agentbench run --workload swe --clones 4 --steps 10 --wait-scale 0.3 --systems stock,linux,agentzip --skip-unavailable \
		--json out/agentbench-test.json --html out/agentbench-test.html
	bin/agentbench idle --clones 2 --waits 1s,3s --rounds 2
	bin/agentbench density --memory 400MiB --max 3 --wait 1s --systems stock,agentzip

# A killed test leaves its record of what it changed on the host in this folder,
# where .ci/run finds it.
linux-test: stock check-root ## Test the set-up of zram, KSM and cgroups on this machine
	@if ! [ -w /sys/class/zram-control/hot_remove ] || ! [ -w /sys/kernel/mm/ksm/run ]; then \
		echo "make: this machine lacks zram or KSM: the tests that set them up are skipped"; \
	elif [ "$$(wc -l </proc/swaps)" -gt 1 ]; then \
		echo "make: this machine has swap in use: the tests that set swap up are skipped"; \
	else \
		dir=$$(mktemp -d /var/tmp/linuxmem-test-XXXXXX) && \
		LINUXMEM_E2E=1 FLEET_RUNSC=$(STOCK) TMPDIR=$$dir $(SANDBOX) -timeout 15m ./tools/agentbench/linuxmem && \
		rm -rf "$$dir"; \
	fi

test-long: test ## Also run the sandbox tests that take long
	$(SANDBOX) -timeout 6h ./test/integrity ./test/template $(RUNTIMES) -long
	$(SANDBOX) -timeout 20m ./test/pool -runtime=$(RUNTIME) -require -kills=50
	$(SANDBOX) -timeout 2h ./test/soak -runtime=$(RUNTIME) -require -long

# --batch: no bazel server is left behind.
bazel-test: vendor ## Run the unit tests through bazel
	@$(INSTALL) $(BAZEL_PACKAGES)
	bazel --batch test --jobs=$(JOBS) //...

buildgen: check-go ## Write the BUILD.bazel files anew
	$(GO) run ./tools/bazel/buildgen

bench: check-root build stock ## Run the benchmarks
	$(STATIC) test $(TEST) -trimpath -run '^$$' -bench . -benchmem $(BENCH_FLAGS) $(PURE)
	bin/agentbench micro
	$(SANDBOX) -timeout 30m ./test/template -run '^$$' -bench . -benchtime 3x $(RUNTIMES)

# The full benchmark, about two hours. Nothing else should run on the machine. The
# first run compares the systems, the second the runtime with its own parts
# switched off.
bench-agents: check-root build stock ## Measure what agents' sandboxes cost, side by side
	@$(INSTALL) $(DEMO_PACKAGES)
	bin/agentbench run --workload all --clones 8,16 --systems stock,linux,agentzip \
		--json out/agents.json --html out/agents.html $(AGENTS_FLAGS)
	bin/agentbench run --workload swe --clones 8 --systems stock,ablation \
		--json out/agents-ablation.json --html out/agents-ablation.html $(AGENTS_FLAGS)

# AGENTZIP_PAGES: a folder with the sample pages (b_tmpl.bin, b_c0.bin, ...).
# AGENTZIP_DUMPS: a folder with memory files of sandboxes, NAME_c0.mem, and of their
# templates, NAME_tmpl.mem, as pkg/fleet's SnapshotGuest writes them.
bench-codec: check-go ## Compare stored forms on the pages in AGENTZIP_PAGES and AGENTZIP_DUMPS
	@[ -n "$(AGENTZIP_PAGES)$(AGENTZIP_DUMPS)" ] || { \
		echo "make: set AGENTZIP_PAGES to a folder of sample pages, AGENTZIP_DUMPS to one of memory files, or both" >&2; exit 1; }
	$(STATIC) test $(TEST) -trimpath -run '^$$' -bench 'SampleBase|Forms|Candidates' -benchmem $(BENCH_FLAGS) ./memfile/codec
	$(STATIC) test $(TEST) -trimpath -timeout 30m -run TestPipeline -v ./memfile

deps: ## Install every Debian package that some target needs
	@$(INSTALL) $(sort $(BUILD_PACKAGES) $(UNIT_PACKAGES) $(CONTAINERD_PACKAGES) $(BAZEL_PACKAGES) $(PHASE_PACKAGES) $(INTEGRITY_PACKAGES) $(DEMO_PACKAGES) $(README_PACKAGES))

clean: ## Remove everything that was generated
	@if [ -L bin ]; then rm -rf "$$(readlink bin)"; fi
	rm -rf bin out vendor
	rm -f bazel-bin bazel-out bazel-testlogs "bazel-$(notdir $(CURDIR))"

check-go:
	@command -v $(GO) >/dev/null || { \
		echo "make: there is no go command in PATH. Install Go $(shell sed -n 's/^go //p' go.mod) or newer from https://go.dev/dl/ (Debian 12's own is too old)." >&2; exit 1; }

check-root:
	@[ "$$(id -u)" = 0 ] || { \
		echo "make: sandboxes, dockerd and apt need root. Run it as root: sudo make $(firstword $(MAKECMDGOALS))" >&2; exit 1; }
