# What the scripts beside it begin with: how they tell the host how it goes, and how they look at disks.
# shellcheck shell=dash
set -eu

# shellcheck disable=SC2034  # for the scripts
MiB=1048576

# begin STEP...: what comes now, and what it is that fails if something does.
begin() { step=$*; echo "== $(cut -d ' ' -f 1 /proc/uptime) $step"; }
fail() { echo "EGRET-FAIL: $step: $*"; trap - EXIT; exit 1; }
# With set -e a command that fails ends the script, and this says where.
trap '[ $? = 0 ] || echo "EGRET-FAIL: $step"' EXIT
step=beginning

asks() { echo "EGRET-ASKS $*"; }
# until_true COMMAND...: waits for what the host or the kernel does in its own time.
until_true() {
  tries=0
  until "$@"; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || fail "waited in vain for: $*"
    sleep 0.1
  done
}
# has_units COUNT: the disks of virtio-scsi devices, which are looked for side by side, and all of them after the device.
has_units() { [ "$(find /sys/block -name 'sd*' | wc -l)" = "$1" ]; }

hash() { sha256sum | cut -d ' ' -f 1; }
# pattern WORD LENGTH: bytes that anybody can make again.
pattern() { yes "egret $1" | head -c "$2"; }
# read_at DISK OFFSET LENGTH: what the disk holds, not what the cache does.
read_at() { dd if="/dev/$1" iflag=direct,skip_bytes,count_bytes bs=64k skip="$2" count="$3" 2>/dev/null; }
# tell_hash NAME DISK: of the whole of the disk, which the host knows by this name and compares with its image.
tell_hash() { echo "EGRET-SHA256 $1 $(dd if="/dev/$2" bs=1M iflag=direct 2>/dev/null | hash)"; }

# keeps_files DISK: makes a file system on the disk, puts this guest's own files there, and looks for them again when it is
# mounted anew. They stay in tree, beside their SHA256SUMS.
keeps_files() {
  mkfs.ext4 -q -F "/dev/$1"
  mount "/dev/$1" /mnt
  cd /
  find bin etc init lib lib64 modules usr -type f -size -2000k | sort >/tmp/tree
  xargs sha256sum </tmp/tree >/mnt/SHA256SUMS
  mkdir /mnt/tree
  cpio -o -H newc </tmp/tree | (cd /mnt/tree && cpio -i -d)
  fstrim -v /mnt
  sync
  umount /mnt
  e2fsck -fn "/dev/$1"
  mount -o ro "/dev/$1" /mnt
  (cd /mnt/tree && sha256sum -c -s ../SHA256SUMS) || fail "a file changed on its way through $1"
  echo "$1 holds $(wc -l </tmp/tree) files, $(du -sm /mnt/tree | cut -f 1) MiB"
  umount /mnt
}

# verifies DISK MIB FIO-OPTION...: writes to the first MiB of the disk, and verifies that. It begins with zeroes: a run of fio
# writes what the one before it has written, whose blocks would pass for those of a write that was lost.
verifies() {
  on=/dev/$1 mib=$2; shift 2
  blkdiscard -z -l $((mib * MiB)) "$on" &&
    fio --name=verify --filename="$on" --ioengine=libaio --direct=1 --numjobs=2 --size=$((mib / 2))m \
      --offset_increment=$((mib / 2))m --rw=randwrite --verify=crc32c --verify_fatal=1 --group_reporting "$@"
}

completed() { awk '{ print $1 + $5 }' "/sys/block/$1/stat"; }
# disturbed TIMES DISK COMMAND...: runs the command again and again until the disk's daemon has been killed so many
# times, each time after some more of its requests.
disturbed() {
  times=$1 disk=$2; shift 2
  rm -f /tmp/enough
  until [ -e /tmp/enough ]; do "$@" >/tmp/log 2>&1 || { touch /tmp/failed; break; }; done &
  for _ in $(seq "$times"); do
    before=$(completed "$disk")
    until [ $(($(completed "$disk") - before)) -gt 500 ] || [ -e /tmp/failed ]; do sleep 0.1; done
    asks kill
  done
  touch /tmp/enough
  wait $!
  [ ! -e /tmp/failed ] || { cat /tmp/log; fail "$disk noticed that the daemon was killed"; }
}
