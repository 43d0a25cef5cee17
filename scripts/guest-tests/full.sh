# Runs in the test guest: writes to a virtio-blk disk that fills up and to a virtio-scsi one that fails, and reads back.
# "EGRET-ASKS help" has the host free space and heal the other, which nothing in here may notice. Ends with an
# "EGRET-SHA256 NAME HASH" line for each disk: "full" and "failing".
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "the disks are found"
until_true has_units 1
begin "they fill up and fail"
for disk in vda sda; do
  { fio --name=verify --filename="/dev/$disk" --ioengine=libaio --direct=1 --iodepth=16 --numjobs=2 --size=20m \
    --offset_increment=20m --rw=randwrite --bs=64k --fsync=64 --verify=crc32c --verify_fatal=1 --group_reporting \
    >"/tmp/log-$disk" 2>&1 || touch "/tmp/failed-$disk"; } &
done
asks help
wait
for disk in vda sda; do
  [ ! -e "/tmp/failed-$disk" ] || { cat "/tmp/log-$disk"; fail "$disk noticed"; }
done
tell_hash full vda
tell_hash failing sda
