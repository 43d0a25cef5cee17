# Runs in the test guest: asks of a virtio-scsi device with two logical units all that they can do, and prints what they
# then hold.
#
# LUN 0 gets a file system with a tree of files, LUN 1 raw I/O. Each has 64 MiB or more. The last lines are
# "EGRET-SHA256 DISK HASH" over the whole of each disk, read past the guest's cache, for the host to compare with its
# images. Disks are called lun0 and lun1: their names in the guest depend on which of them answers first.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

# lun NUMBER: what the kernel calls the disk.
lun() { basename /sys/bus/scsi/devices/*:0:0:"$1"/block/*; }
# runs COMMAND...: the command succeeds, whatever it says.
runs() {
  status=0
  "$@" >/tmp/said 2>&1 || status=$?
  [ $status = 0 ] || { cat /tmp/said; fail "$* exited with $status"; }
}
# says WORDS COMMAND...: the command succeeds, and what it says has these words in it.
says() {
  words=$1; shift
  runs "$@"
  grep -qF -- "$words" /tmp/said || { cat /tmp/said; fail "$* did not say '$words'"; }
}
# refused STATUS COMMAND...: the command exits with this status of sg3-utils.
refused() {
  status=0 expected=$1; shift
  "$@" >/tmp/said 2>&1 || status=$?
  [ $status = "$expected" ] || { cat /tmp/said; fail "$* exited with $status, not $expected"; }
}

begin "probing"
# A unit attention for the power on is how every SCSI disk greets; anything else at this level is a complaint.
dmesg -r | grep -E '^<[0-4]>' | grep -E 'sd|scsi|virtio' | grep -v 'Power-on or device reset occurred' &&
  fail "the kernel complains"
a=$(lun 0) b=$(lun 1)
# One digit for each virtio feature that driver and device agreed on, from feature 0.
echo "scsi features $(cat /sys/bus/virtio/drivers/virtio_scsi/virtio*/features)"
for disk in lun0 lun1; do
  cd "/sys/block/$(lun ${disk#lun})"
  echo "$disk bytes $(($(cat size) * 512))"
  echo "$disk queues $(find mq -mindepth 1 -maxdepth 1 | wc -l)"
  echo "$disk cache-type $(cat device/scsi_disk/*/cache_type)"
  for name in logical_block_size physical_block_size max_segments max_hw_sectors_kb discard_max_bytes \
    discard_granularity write_zeroes_max_bytes fua rotational; do
    echo "$disk $name $(cat queue/$name)"
  done
done
cd /
[ "$(cat "/sys/block/$b/queue/discard_max_bytes")" != 0 ] || fail "LUN 1 does not offer discard"

begin "identity"
says "EGRET" sg_inq "/dev/$a"
says "Unit serial number: second" sg_vpd --page=sn "/dev/$b"
says "0x5000c50015ea71ac" sg_vpd --page=di "/dev/$a"
says "Maximum compare and write length" sg_vpd --page=bl "/dev/$a"
says "Unmap command supported (LBPU): 1" sg_vpd --page=lbpv "/dev/$a"
says "SIMPSUP=1" sg_vpd --page=ei "/dev/$a"
says "Policy page code: 0x3f" sg_vpd --page=mpp "/dev/$a"
says "Relative port=1" sg_vpd --page=sp "/dev/$a"
runs sg_vpd --all "/dev/$a"
says "Informational exceptions" sg_modes --all "/dev/$a"
says "Last LBA" sg_readcap --16 "/dev/$a"
says "Lun list length = 16" sg_luns "/dev/$a"
says "Unmap" sg_opcodes "/dev/$a"
says "Persistent reserve in" sg_opcodes "/dev/$a"

begin "unmap, write same, compare and write"
pattern sg $MiB | dd of="/dev/$b" bs=64k iflag=fullblock oflag=direct conv=fsync,notrunc 2>/dev/null
runs sg_write_same --10 --num=8 --lba=16 --in=/dev/zero --xferlen=512 "/dev/$b"
[ "$(read_at "$b" 8192 4096 | hash)" = "$(head -c 4096 /dev/zero | hash)" ] || fail "WRITE SAME did not write zeroes"
runs sg_unmap --force --lba=64 --num=64 "/dev/$b"
read_at "$b" 0 512 >/tmp/compare
pattern new 512 >>/tmp/compare
runs sg_compare_and_write --in=/tmp/compare --lba=0 --num=1 "/dev/$b"
[ "$(read_at "$b" 0 512 | hash)" = "$(pattern new 512 | hash)" ] || fail "COMPARE AND WRITE did not write"
refused 14 sg_compare_and_write --in=/tmp/compare --lba=0 --num=1 "/dev/$b"
refused 22 sg_unmap --force --lba=0xffffffff --num=1 "/dev/$b"

begin "reservations"
runs sg_persist --out --register --param-sark=0x1234 "/dev/$a"
runs sg_persist --out --reserve --param-rk=0x1234 --prout-type=1 "/dev/$a"
says "Key=0x1234" sg_persist --in --read-reservation "/dev/$a"
runs sg_persist --out --release --param-rk=0x1234 --prout-type=1 "/dev/$a"
runs sg_persist --out --register --param-rk=0x1234 --param-sark=0 "/dev/$a"
runs sg_raw "/dev/$a" 16 00 00 00 00 00
refused 24 sg_persist --in --read-keys "/dev/$a"
runs sg_raw "/dev/$a" 17 00 00 00 00 00

begin "fio on one, beside a file system on the other"
fio --name=verify --filename="/dev/$b" --ioengine=libaio --direct=1 --iodepth=32 \
  --numjobs=2 --size=15m --offset_increment=15m --rw=randwrite --bssplit=512/20:4k/50:20k/15:128k/15 --fsync=64 \
  --verify=crc32c --verify_fatal=1 --randseed=1 --group_reporting >/tmp/fio.log 2>&1 &
fio=$!
keeps_files "$a"
wait $fio || { cat /tmp/fio.log; fail "fio exited with $?"; }
grep -E '^ +(read|write):|err=' /tmp/fio.log
runs sg_reset --device "/dev/$b"
[ "$(read_at "$b" 0 4096 | wc -c)" = 4096 ] || fail "LUN 1 does not answer after a reset"

begin "discard and zeroes"
at=$((32 * MiB))
pattern before $((8 * MiB)) >/tmp/expected
dd if=/tmp/expected of="/dev/$b" bs=64k seek=$at oflag=direct,seek_bytes conv=fsync,notrunc 2>/dev/null
blkdiscard -o $((at + MiB)) -l $((2 * MiB)) "/dev/$b"
[ "$(read_at "$b" $at $MiB | hash)" = "$(head -c $MiB /tmp/expected | hash)" ] || fail "a discard hit its neighbours"
blkdiscard -z -o $((at + 5 * MiB)) -l $MiB "/dev/$b"
[ "$(read_at "$b" $((at + 5 * MiB)) $MiB | hash)" = "$(head -c $MiB /dev/zero | hash)" ] || fail "zeroes are not zero"

begin "hashes"
sync
tell_hash lun0 "$a"
tell_hash lun1 "$b"
