# Debian's packages, for the scripts that fetch some; it only defines names. Wants common.sh sourced before.
# shellcheck shell=bash

# apt with backports beside the machine's own sources, and with its lists and archives in our cache: the machine's
# configuration stays as it was, and looking up or downloading a package needs no root.
apt=(
  -q -o Dir::Etc::SourceList="$cache/apt/sources.list" -o Dir::State::Lists="$cache/apt/lists"
  -o Dir::Cache="$cache/apt" -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=300
  -o APT::Keep-Downloaded-Packages=false
)

update_lists() {
  local codename mirror
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  # The mirror, from whichever of apt's two formats the machine's sources are written in.
  # shellcheck disable=SC2016  # apt expands $(REPO_URI), not the shell
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $codename" | sed -n 1p)
  [ -n "$mirror" ] || die "apt has no source for '$codename': is this Debian?"

  mkdir -p "$cache"/apt/{lists,archives}/partial
  cat /etc/apt/sources.list >"$cache/apt/sources.list" 2>/dev/null || true
  suite=$codename
  if [ "$codename" = bookworm ]; then # trixie has QEMU 10 and Linux 6.12 in main
    suite=bookworm-backports
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >>"$cache/apt/sources.list"
  fi
  apt-get "${apt[@]}" update || say "some package lists could not be read; going on with the others"
}

# Unpacks packages of another suite in a folder, which is emptied, with all that they need, the C library too: below $1/root. Nothing
# is installed, and no root is needed.
unpack_beside() {
  local place=$1 of=$2 mirror package closed
  shift 2
  command -v apt-get >/dev/null || die "apt-get is missing: is this Debian?"
  # shellcheck disable=SC2016  # apt expands $(REPO_URI), not the shell
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | sed -n 1p)
  [ -n "$mirror" ] || die "apt has no Debian mirror"
  rm -rf "$place"
  mkdir -p "$place"/{lists,cache/archives}/partial "$place/root"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $of main" >"$place/sources.list"
  # As if nothing were installed.
  touch "$place/status"
  closed=(
    -qq -o Dir::Etc::SourceList="$place/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$place/lists"
    -o Dir::State::status="$place/status" -o Dir::Cache="$place/cache" -o APT::Sandbox::User=root
  )
  apt-get "${closed[@]}" update >&2 || die "the package lists cannot be read"
  apt-get "${closed[@]}" install -y --no-install-recommends --download-only "$@" >&2 || die "$of has no $*"
  for package in "$place"/cache/archives/*.deb; do dpkg-deb -x "$package" "$place/root"; done
  rm -r "$place"/{lists,cache}
}
