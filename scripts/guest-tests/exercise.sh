# Runs in the test guest: asks of two virtio-blk disks all that they can do, and prints what they then hold.
#
# /dev/vda gets a file system with a tree of files, which after-reboot.sh looks at again; /dev/vdb gets raw I/O. Each
# has 64 MiB or more. The last lines are "EGRET-SHA256 DISK HASH" over the whole of each disk, read past the guest's
# cache, for the host to compare with its images.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "facts"
for disk in vda vdb; do
  cd "/sys/block/$disk"
  echo "$disk bytes $(($(cat size) * 512))"
  echo "$disk read-only $(cat ro)"
  echo "$disk serial $(cat serial)"
  echo "$disk cache-type $(cat cache_type)"
  echo "$disk queues $(find mq -mindepth 1 -maxdepth 1 | wc -l)"
  for name in logical_block_size physical_block_size minimum_io_size optimal_io_size max_segments max_segment_size \
    max_hw_sectors_kb nr_requests discard_max_bytes discard_granularity write_zeroes_max_bytes fua; do
    echo "$disk $name $(cat queue/$name)"
  done
  # One digit for each virtio feature that driver and device agreed on, from feature 0.
  echo "$disk features $(cat device/features)"
done
cd /
block=$(cat /sys/block/vdb/queue/logical_block_size)
[ "$(cat /sys/block/vdb/queue/discard_max_bytes)" != 0 ] || fail "vdb does not offer discard"
[ "$(cat /sys/block/vdb/queue/write_zeroes_max_bytes)" != 0 ] || fail "vdb does not offer write-zeroes"

begin "cache mode"
if [ "$(stat -c %a /sys/block/vdb/cache_type)" = 644 ]; then # the device lets its driver choose
  for mode in "write through" "write back"; do
    for disk in vda vdb; do
      echo "$mode" >/sys/block/$disk/cache_type
      [ "$(cat /sys/block/$disk/cache_type)" = "$mode" ] || fail "$disk did not go to '$mode'"
    done
    pattern "$mode" $MiB | dd of=/dev/vdb bs=64k iflag=fullblock oflag=direct conv=fsync,notrunc 2>/dev/null
    [ "$(read_at vdb 0 $MiB | hash)" = "$(pattern "$mode" $MiB | hash)" ] || fail "'$mode' lost data"
  done
else
  echo "fixed by the device"
fi

begin "fio on vdb, beside the file system on vda"
fio --name=verify --filename=/dev/vdb --ioengine=libaio --direct=1 --iodepth=32 \
  --numjobs=2 --size=15m --offset_increment=15m --rw=randwrite --bssplit="$block/20:4k/50:20k/15:128k/15" --fsync=64 \
  --verify=crc32c --verify_fatal=1 --randseed=1 --group_reporting >/tmp/fio.log 2>&1 &
fio=$!
keeps_files vda
wait $fio || { cat /tmp/fio.log; fail "fio exited with $?"; }
grep -E '^ +(read|write):|err=' /tmp/fio.log

# The rest of vdb's story takes place in 8 MiB at 32 MiB; /tmp/expected is what they should hold.
at=$((32 * MiB))
pattern before $((8 * MiB)) >/tmp/expected
# expect OFFSET LENGTH
expect() {
  [ "$(read_at vdb $((at + $1)) "$2" | hash)" = "$(tail -c +$(($1 + 1)) /tmp/expected | head -c "$2" | hash)" ] ||
    fail "bytes $((at + $1)) to $((at + $1 + $2)) of vdb are not as they should be"
}

begin "write and flush"
dd if=/tmp/expected of=/dev/vdb bs=64k seek=$at oflag=direct,seek_bytes conv=fsync,notrunc 2>/dev/null
expect 0 $((8 * MiB))

begin "discard"
blkdiscard -o $((at + MiB)) -l $((2 * MiB)) /dev/vdb
expect 0 $MiB
expect $((3 * MiB)) $((5 * MiB))
# What was discarded reads as anything, until it is written again.
dd if=/tmp/expected of=/dev/vdb bs=64k iflag=skip_bytes,count_bytes skip=$MiB count=$((2 * MiB)) \
  seek=$((at + MiB)) oflag=direct,seek_bytes conv=fsync,notrunc 2>/dev/null
expect 0 $((8 * MiB))

begin "write zeroes, off the host's page boundaries where the blocks allow"
zero=$((5 * MiB + block)) length=$((2 * MiB + block))
blkdiscard -z -o $((at + zero)) -l $length /dev/vdb
dd if=/dev/zero of=/tmp/expected bs="$block" seek=$((zero / block)) count=$((length / block)) conv=notrunc 2>/dev/null
expect 0 $((8 * MiB))

begin "counters"
for disk in vda vdb; do
  awk -v disk=$disk '{ print disk " reads " $1 " writes " $5 " discards " $12 " flushes " $16 }' /sys/block/$disk/stat
  [ "$(cat /sys/block/$disk/cache_type)" = "write through" ] || [ "$(awk '{ print $16 }' /sys/block/$disk/stat)" != 0 ] ||
    fail "$disk was never asked to flush"
done

begin "hashes"
sync
tell_hash vda vda
tell_hash vdb vdb
