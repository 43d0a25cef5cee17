# Two commands do all the set-up: `make demo` serves a disk and loads it, `make test` runs every test there is; `make` and
# `make install` install it.
CARGO ?= cargo

SCRIPTS = $(filter-out %/guest-tests,$(wildcard scripts/*)) $(wildcard scripts/guest-tests/*) .ci/run \
          crates/egret/src/completions/keys.bash

.PHONY: build install package demo test test-release mutants soak soak-at-random proof suites bench bench-polling bench-live bench-neighbours fuzz lint miri tsan kani deps guest

build:
	$(CARGO) build --locked --release --bin egret

# Installs what `make build` has built, or EGRET names, with its manual, completions and units: under PREFIX, all of it in
# DESTDIR for who makes a package. It builds nothing, because root need have no Rust. Everybody may read it, whatever root's umask.
PREFIX ?= /usr/local
ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
EGRET ?= target/release/egret
SHARE = $(DESTDIR)$(PREFIX)/share
LIB = $(DESTDIR)$(PREFIX)/lib

install:
	@test -x "$(EGRET)" || { echo "there is no $(EGRET): make build makes it" >&2; exit 1; }
	install -D -m 0755 "$(EGRET)" "$(DESTDIR)$(PREFIX)/bin/egret"
	umask 022; "$(EGRET)" man "$(SHARE)/man/man1"
	umask 022; install -d "$(SHARE)/bash-completion/completions" "$(DESTDIR)$(ZSHDIR)" "$(SHARE)/fish/vendor_completions.d" "$(LIB)/systemd/system"
	umask 022; "$(EGRET)" completions bash > "$(SHARE)/bash-completion/completions/egret"
	umask 022; "$(EGRET)" completions zsh > "$(DESTDIR)$(ZSHDIR)/_egret"
	umask 022; "$(EGRET)" completions fish > "$(SHARE)/fish/vendor_completions.d/egret.fish"
	umask 022; for unit in egret.service egret.socket egret@.service egret@.socket; do \
	sed 's,/usr/bin/egret,$(PREFIX)/bin/egret,' contrib/systemd/$$unit > "$(LIB)/systemd/system/$$unit" || exit; done
	install -D -m 0644 contrib/systemd/egret.sysusers "$(LIB)/sysusers.d/egret.conf"
	install -D -m 0644 LICENSE "$(SHARE)/doc/egret/copyright"

# A Debian package of that, in target/.
package: build
	scripts/make-package

# Serves a file, loads it with a real client, and prints that next to the host's own figure; then has the lab compare
# the I/O modes, in short runs, and write a report.
demo:
	$(CARGO) bench --locked -p egret --bench demo
	$(CARGO) run -q --locked --release --bin egret -- bench quick --scale 0.25

# What the tests need from Debian: QEMU, fio, a kernel for the guest. Asks for root only where something is missing.
deps:
	scripts/install-test-deps

guest: deps
	scripts/make-guest
	scripts/make-apps

# What takes too long for every change: nine thousand losses of power and ends of the daemon, fifty ends of one whose disk is
# in a cluster, and thirty thousand migrations, in some minutes each; two hundred losses of power under a Linux guest, and five
# hundred migrations of such, in an hour each; what threads share under ThreadSanitizer; and then a soak for HOURS=1.
soak: guest
	EGRET_POWER_LOSSES=$(or $(LOSSES),50) $(CARGO) test --locked -p egret --test power
	EGRET_RBD_KILLS=$(or $(KILLS),50) $(CARGO) test --locked -p egret --test rbd killed_under_load
	EGRET_GUEST_POWER_LOSSES=$(or $(GUEST_LOSSES),200) $(CARGO) test --locked -p egret --test guest a_database -- --nocapture
	EGRET_MIGRATIONS=$(or $(MIGRATIONS),500) $(CARGO) test --locked -p egret --test migration -- --skip guests::
	EGRET_MIGRATIONS=$(or $(GUEST_MIGRATIONS),32) $(CARGO) test --locked -p egret --test migration guests:: -- --nocapture
	$(MAKE) suites tsan soak-at-random

# Whatever may happen to a daemon, one thing after another, for HOURS=1; it ends with a table of what did. SEED=2 has other
# things happen.
soak-at-random:
	EGRET_SOAK_SECONDS=$$(awk 'BEGIN { print int(3600 * $(or $(HOURS),1)) }') EGRET_SOAK_SEED=$(or $(SEED),1) \
	$(CARGO) test --locked -p egret --test soak -- --nocapture

# xfstests and blktests on disks of a guest, where XFSTESTS and BLKTESTS name folders with them, built, and QEMU's own tests of
# vhost-user-blk, where QEMU_SOURCES names QEMU's sources. TESTS="-g quick" SECONDS=36000 is a whole group.
suites: build guest
	@if [ -n "$$XFSTESTS" ]; then for fs in ext4 xfs; do scripts/run-suites --seconds $(or $(SECONDS),1800) $$fs $(TESTS) || exit; done; \
	else echo "XFSTESTS names no folder: xfstests was not run"; fi
	@if [ -n "$$BLKTESTS" ]; then scripts/run-suites block; else echo "BLKTESTS names no folder: blktests was not run"; fi
	@if [ -n "$$QEMU_SOURCES" ]; then scripts/run-qtest "$$QEMU_SOURCES"; else echo "QEMU_SOURCES names no folder: QEMU's tests were not run"; fi

# A thousand ends of the daemon by SIGKILL and a thousand losses of power under verified load, among all else that may
# happen: KILLS=1000 LOSSES=1000. It ends with a table. SEED=2 has another thousand happen.
proof:
	EGRET_SOAK_KILLS=$(or $(KILLS),1000) EGRET_SOAK_LOSSES=$(or $(LOSSES),1000) EGRET_SOAK_SEED=$(or $(SEED),1) \
	$(CARGO) test --locked -p egret --test soak -- --nocapture

test: guest
	$(CARGO) test --locked --workspace --no-fail-fast

# What is released, without the checks of a debug build and as the optimiser has it: the daemon in the tests that start
# one, but for guests that migrate, which takes them a minute; and what threads share in its own tests.
PROCESS_TESTS = access activation descriptors examples failures hostile libblkio life limits live locks migration monitors \
                pinned power qmp reserve soak stopped takeover
SHARED = egret-disk egret-event-loop egret-export egret-scsi egret-virtio egret-vring

test-release: build
	EGRET_TEST_BINARY=$(CURDIR)/target/release/egret \
	$(CARGO) test --locked -p egret --no-fail-fast $(PROCESS_TESTS:%=--test %) -- --skip guests::
	CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	$(CARGO) test --locked --release --target-dir target/optimised --lib $(SHARED:%=-p %)

# Whether the tests of these crates would notice a change, one place after another: CRATES="scsi virtio". Hours.
mutants:
	scripts/mutants $(or $(CRATES),polling event-loop vring disk scsi virtio export)

# BENCH may be of several lines: without `strip` make would run the second as a command of its own.

# egret against qemu-storage-daemon, interleaved, in one run: ratios. BENCH="--quick" shortens it.
bench: deps build
	$(CARGO) bench -q --locked -p egret --bench peers -- $(strip $(BENCH))

# Polling policies side by side, and against their goals. BENCH="--quick", or BENCH='--only "loop QD1"', shortens it.
bench-polling: build
	$(CARGO) bench -q --locked -p egret --bench polling -- $(strip $(BENCH))

# How long queues wait when they move, and when their disk is reopened, under load.
bench-live: build
	$(CARGO) bench -q --locked -p egret --bench live -- $(strip $(BENCH))

# What a hostile tenant costs its neighbour on the same I/O thread. BENCH="--quick" shortens it.
bench-neighbours: build
	$(CARGO) bench -q --locked -p egret --bench neighbours -- $(strip $(BENCH))

# What hostile guests and clients can send, made up, for so many minutes each: MINUTES=10, and TARGETS="qmp session".
fuzz:
	scripts/fuzz $(or $(MINUTES),1) $(TARGETS)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items
	scripts/check-msrv
	scripts/check-dependencies
	@if command -v shellcheck >/dev/null; then shellcheck -x $(SCRIPTS); \
	else echo "shellcheck is missing: the scripts were not looked at"; test -z "$$CI"; fi

# What a check lacks is told, and fails it where CI is set: nobody reads there what went well.

# What threads share, under ThreadSanitizer, which sees two that race. It knows no fences: rings are for Miri.
TSAN = egret-event-loop egret-disk egret-export

tsan:
	@if rustup component list --toolchain nightly --installed 2>/dev/null | grep -q rust-src || timeout 300 \
	rustup toolchain install nightly --profile minimal --component rust-src >/dev/null; then \
	RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS="suppressions=$(CURDIR)/.cargo/tsan-suppressions.txt" PROPTEST_CASES=4 \
	$(CARGO) +nightly test --locked -Zbuild-std --target $$(rustc +nightly --print host-tuple) --target-dir target/tsan \
	--lib --tests $(TSAN:%=-p %); \
	else echo "a nightly Rust with its sources is missing and cannot be had: nothing was run under ThreadSanitizer"; test -z "$$CI"; fi

# Guest memory and rings under Miri, which sees an access that memory does not allow, and one that races with another's.
# The clock is the host's, proptest reads files, and a queue that goes away early leaves its map behind for good.
miri:
	@if $(CARGO) +nightly miri setup >/dev/null 2>&1 || timeout 300 \
	rustup toolchain install nightly --profile minimal --component miri --component rust-src >/dev/null; then \
	MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" PROPTEST_CASES=4 \
	$(CARGO) +nightly miri test --locked -p egret-vring --lib; \
	else echo "a nightly Rust with Miri is missing and cannot be had: guest memory and rings were not run under it"; test -z "$$CI"; fi

# What holds of all numbers and addresses: proofs for Kani.
KANI = egret-vring

kani:
	@if $(CARGO) kani --version >/dev/null 2>&1; then \
	$(CARGO) kani $(KANI:%=-p %) --output-format=terse -j 2; \
	else echo "cargo-kani is missing (https://model-checking.github.io/kani): nothing was proved"; test -z "$$CI"; fi
