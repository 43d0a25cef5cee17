# Runs in the test guest: writes to all disks and reads back while the guest migrates, as often as the host says: it answers
# "EGRET-ASKS move" with a line when the guest is elsewhere, and the line "enough" is the last one. Ends with an
# "EGRET-SHA256 NAME HASH" line for each disk.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

# name DISK: what the host calls it, which is its serial number.
name() { cat "/sys/block/$1/serial" 2>/dev/null || tail -c +5 "/sys/block/$1/device/vpd_pg80"; }

begin "the disks are found"
until_true has_units 2
disks=$(cd /sys/block && echo vd* sd*)
for disk in $disks; do
  echo "$(name "$disk") queues $(find "/sys/block/$disk/mq" -mindepth 1 -maxdepth 1 | wc -l)"
done

begin "the guest migrates"
for disk in $disks; do
  until [ -e /tmp/enough ]; do
    verifies "$disk" 8 --iodepth=16 --bssplit=4k/60:20k/20:64k/20 --fsync=64 >"/tmp/log-$disk" 2>&1 ||
      { touch "/tmp/failed-$disk"; break; }
  done &
done
word=
while [ "$word" != enough ]; do
  for disk in $disks; do
    before=$(completed "$disk")
    until [ $(($(completed "$disk") - before)) -gt 100 ] || [ -e "/tmp/failed-$disk" ]; do sleep 0.1; done
  done
  asks move
  read -r word </dev/console
done
touch /tmp/enough
wait
for disk in $disks; do
  [ ! -e "/tmp/failed-$disk" ] || { cat "/tmp/log-$disk"; fail "$disk noticed that the guest migrated"; }
  tell_hash "$(name "$disk")" "$disk"
done
