# Runs in the test guest after exercise.sh and a reboot: the file system on /dev/vda is as it was left, and both disks
# still answer. Ends with the same "EGRET-SHA256 DISK HASH" lines.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "after the reboot"
e2fsck -fn /dev/vda || fail "the file system on vda is damaged"
mount /dev/vda /mnt || fail "vda does not mount"
(cd /mnt/tree && sha256sum -c -s ../SHA256SUMS) || fail "a file on vda changed over the reboot"
echo "vda still holds its $(wc -l </mnt/SHA256SUMS) files"
cp /mnt/SHA256SUMS /mnt/after-reboot
umount /mnt
yes "egret after the reboot" | head -c 1048576 |
  dd of=/dev/vdb bs=64k iflag=fullblock oflag=direct conv=fsync,notrunc 2>/dev/null || fail "vdb cannot be written"

tell_hash vda vda
tell_hash vdb vdb
