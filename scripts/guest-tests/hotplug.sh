# Runs in the test guest: a virtio-scsi device begins with one disk of 64 MiB, LUN 0, and this asks the host for more:
# "EGRET-ASKS WHAT" on the console is such a wish, and the host does what it says.
#
# LUN 1, 8 MiB, comes, grows to 16 MiB and goes, twice, while LUN 0 is read; the kernel's driver finds out by itself.
# At the end "EGRET-ASKS kill" has the daemon killed and another started, under load that must not notice.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

fail() { echo "EGRET-FAIL: $step: $*"; cat /tmp/uevents; dmesg | tail -n 40; trap - EXIT; exit 1; }
unit() { find /sys/bus/scsi/devices/*:0:0:"$1"/block/* -maxdepth 0 2>/dev/null; }
is_there() { [ -n "$(unit 1)" ] && [ -b "/dev/$(basename "$(unit 1)")" ]; }
is_gone() { [ ! -e "/sys/block/$disk" ] && [ ! -e "/dev/$disk" ]; }
has_bytes() { [ "$(cat "/sys/block/$disk/size")" = $(($1 / 512)) ]; }
# An event is a paragraph of NAME=VALUE lines, action and path first.
is_told() { grep -q "^$1 .*/block/$disk RESIZE=1" /tmp/uevents; }

begin "probing"
: >/tmp/uevents
# Each event as one line: its action, its path, and whether it is of a new size.
# shellcheck disable=SC2016  # the variables are the other shell's
uevent sh -c 'echo "$ACTION $DEVPATH RESIZE=${RESIZE:-}" >>/tmp/uevents' &
uevents=$!
until_true has_units 1
keeper=$(basename "$(unit 0)")
[ -z "$(unit 1)" ] || fail "LUN 1 is there before it was asked for"
while :; do dd if="/dev/$keeper" of=/dev/null bs=64k count=64 iflag=direct 2>/dev/null || echo failed >/tmp/keeper; done &
reader=$!

for round in first second; do
  begin "$round round: a disk comes"
  asks add $round
  until_true is_there
  disk=$(basename "$(unit 1)")
  has_bytes $((8 * MiB)) || fail "it has $(cat "/sys/block/$disk/size") sectors"
  [ "$(tail -c +5 "/sys/block/$disk/device/vpd_pg80")" = $round ] || fail "it is another disk"
  yes $round | head -c $((8 * MiB)) >/tmp/pattern
  dd if=/tmp/pattern of="/dev/$disk" bs=64k oflag=direct conv=fsync 2>/dev/null

  begin "$round round: it grows"
  : >/tmp/uevents
  asks grow $round
  until_true has_bytes $((16 * MiB))
  until_true is_told change
  dd if=/tmp/pattern of="/dev/$disk" bs=64k seek=$((8 * MiB)) oflag=direct,seek_bytes conv=fsync 2>/dev/null
  whole=$(dd if="/dev/$disk" bs=64k iflag=direct 2>/dev/null | hash)
  [ "$whole" = "$(cat /tmp/pattern /tmp/pattern | hash)" ] || fail "it does not hold what was written"
  echo "EGRET-SHA256 $round $whole"

  begin "$round round: it goes"
  asks remove $round
  until_true is_gone
done

begin "the other disk"
kill $reader $uevents
[ ! -e /tmp/keeper ] || fail "LUN 0 could not be read meanwhile"
has_units 1 || fail "there are other disks than LUN 0"

begin "the daemon is killed"
disturbed 3 "$keeper" verifies "$keeper" 16 --iodepth=16 --bs=4k
tell_hash keeper "$keeper"

begin "the kernel's log"
# These are the unit attentions by which any target tells such news.
dmesg -r | grep -E '^<[0-4]>' | grep -E 'sd |scsi|virtio' |
  grep -vE 'Power-on or device reset occurred|Capacity data has changed|LUN assignments on this target have changed' &&
  fail "the kernel complains"
echo "disks came and went"
