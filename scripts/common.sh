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

# Installs a version of a PyPI package into the cache, once for all who ask at the same time, and prints the environment
# that has it. When it is there already nothing is touched, not even the network.
from_pypi() {
  local package=$1 version=$2 venv=$cache/$1-$2 lock
  mkdir -p "$cache"
  exec {lock}>"$cache/$package.lock"
  flock "$lock"
  if [ ! -e "$venv/ready" ]; then
    command -v python3 >/dev/null || die "needs python3, 3.9 or later"
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || die "needs Python's venv (Debian: python3-venv)"
    "$venv/bin/pip" -q --disable-pip-version-check install "$package==$version" >&2 || die "cannot install $package"
    touch "$venv/ready"
  fi
  echo "$venv"
}
