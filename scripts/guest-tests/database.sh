# Runs in the test guest, whose one disk may have lost its power when it ran last: looks whether the file system and the
# database on it are whole, and says which transactions are there: "EGRET-HOLDS LAST". Then it commits one after the other,
# and says so: "EGRET-COMMITTED NUMBER". When the disk fails, it says "EGRET-POWER-LOST".
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

sql() { sqlite3 -batch -bail /mnt/database "$@"; }
# What the row of that number has in it, up to 2 KiB.
content() { echo "replace(hex(zeroblob($1 % 256)), '00', printf('%08d', $1))"; }

begin "the file system"
until_true sh -c 'ls /dev/[vs]da'
disk=$(echo /dev/[vs]da)
case $(dd if="$disk" bs=4096 count=1 2>/dev/null | od -An -tx2 -j1080 -N2) in
  *ef53*) ;;
  # With blocks that are not smaller than the disk's may be another time.
  *) mkfs.ext4 -q -F -b 4096 "$disk" ;;
esac
# The journal is replayed, and then nothing is to be cured.
mount "$disk" /mnt
umount /mnt
e2fsck -fn "$disk" >/tmp/said || { cat /tmp/said; fail "the file system is damaged"; }
mount "$disk" /mnt

begin "the database"
sql "create table if not exists t (id integer primary key, data text)"
[ "$(sql 'pragma integrity_check')" = ok ] || { sql 'pragma integrity_check'; fail "the database is damaged"; }
last=$(sql 'select coalesce(max(id), 0) from t')
[ "$(sql "select count(*) from t where data = $(content id)")" = "$last" ] || fail "of $last rows not all are as written"
mode=delete
[ $((last % 2)) = 0 ] || mode=wal
# As many transactions as there may be until the power goes. With less than "extra" SQLite does not wait until the directory
# is stable from which it has removed the journal, and may lose the last one.
{
  echo "pragma journal_mode = $mode; pragma synchronous = extra; select 'EGRET-HOLDS $last';"
  while :; do
    last=$((last + 1))
    echo "insert into t values ($last, $(content $last)); select 'EGRET-COMMITTED $last';"
  done
} | sql || true
echo "EGRET-POWER-LOST"
sleep 60 # until the host has cut this machine's power, too
