# Runs in the test guest: a virtio-scsi device has 64 logical units, called disk0 to disk63; all are found, each is the
# one that it says it is, and each answers while the others are read.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "probing"
until_true has_units 64

for disk in /sys/block/sd*; do
  tail -c +5 "$disk/device/vpd_pg80"
  echo
done | sort >/tmp/found
number=0
while [ $number -lt 64 ]; do
  echo disk$number
  number=$((number + 1))
done | sort >/tmp/expected
cmp /tmp/found /tmp/expected || { cat /tmp/found; fail "the disks are not who they should be"; }

begin "reading and writing"
for disk in /sys/block/sd*; do
  dd if="/dev/${disk##*/}" of=/dev/null bs=64k count=64 iflag=direct 2>/dev/null &
done
for disk in /sys/block/sd*; do
  dd if=/dev/zero of="/dev/${disk##*/}" bs=4k count=4 oflag=direct 2>/dev/null || fail "${disk##*/} cannot be written"
done
wait
for disk in /sys/block/sd*; do
  [ "$(awk '{ print ($1 >= 64) }' "$disk/stat")" = 1 ] || fail "${disk##*/} was not read"
done
dmesg -r | grep -E '^<[0-4]>' | grep -E 'sd |scsi|virtio' | grep -v 'Power-on or device reset occurred' &&
  fail "the kernel complains"
echo "64 disks answer"
