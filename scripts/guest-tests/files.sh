# Runs in the test guest, user-mode Linux as well: two disks keep files and what fio writes. Ends with "EGRET-SHA256 DISK HASH" lines.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

for disk in vda vdb; do
  begin "files on $disk"
  keeps_files $disk
  begin "fio on $disk"
  verifies $disk 16 --rw=randrw --bs=4k --iodepth=16 || fail "what was written is not there"
  tell_hash $disk $disk
done
