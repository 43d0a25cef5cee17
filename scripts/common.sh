# Shared by the scripts beside it, which source it; it only defines names.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Whatever the scripts fetch or build. Nothing outside it is touched, and deleting it is always safe.
# shellcheck disable=SC2034  # for the scripts that source this
cache=${EGRET_CACHE:-$root/.cache}

# mkfs, e2fsck and losetup are there, and an ordinary user's PATH is not.
PATH=$PATH:/usr/sbin:/sbin

say() { echo "${0##*/}: $*" >&2; }
die() { say "$@"; exit 1; }
# What was not done for want of something: a line for a user, a failure where CI is set, as egret_needs has it for tests.
lacks() { say "$@"; test -z "${CI:-}"; }
