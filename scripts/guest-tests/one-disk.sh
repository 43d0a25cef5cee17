# Runs in the test guest: writes to /dev/vda on every processor at once, with a file system and without, and ends with
# an "EGRET-SHA256 vda HASH" line. For a guest whose disk was attached in a way that is itself in question.
#
# "EGRET-ASKS kill" has the host kill the disk's daemon and start another, which nothing in here may notice.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

echo "vda bytes $(($(cat /sys/block/vda/size) * 512))"
echo "vda features $(cat /sys/block/vda/device/features)"
echo "vda queues $(find /sys/block/vda/mq -mindepth 1 -maxdepth 1 | wc -l)"

begin "the daemon is killed"
disturbed 5 vda verifies vda 16 --iodepth=32 --bssplit=4k/60:20k/20:64k/20 --fsync=64

begin "a file system, on every processor"
mkfs.ext4 -q -F /dev/vda
mount /dev/vda /mnt
cpus=$(seq "$(nproc)")
for cpu in $cpus; do
  yes "egret on $cpu" | head -c 4194304 >"/tmp/$cpu"
  { taskset "$(printf %x $((1 << (cpu - 1))))" dd if="/tmp/$cpu" of="/mnt/$cpu" bs=64k conv=fsync 2>/dev/null ||
    echo "$cpu" >>/tmp/failed; } &
done
wait
[ ! -e /tmp/failed ] || fail "a write failed on processors $(cat /tmp/failed)"
umount /mnt
e2fsck -fn /dev/vda || fail "the file system on vda is damaged"
mount -o ro /dev/vda /mnt
for cpu in $cpus; do
  cmp "/tmp/$cpu" "/mnt/$cpu" || fail "what processor $cpu wrote has changed"
done
umount /mnt
tell_hash vda vda
