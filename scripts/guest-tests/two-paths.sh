# Runs in the test guest: two virtio-scsi devices with one disk, as two guests of a cluster would have it. What is
# reserved by one way keeps the other out, until it is taken over.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "probing"
until_true has_units 2
until_true test -b /dev/sdb
cmp /sys/block/sda/device/wwid /sys/block/sdb/device/wwid || fail "they are not one disk"

# conflict YES-OR-NO COMMAND...: whether it ends in what sg3-utils calls a reservation conflict.
conflict() {
  expected=$1 status=0; shift
  "$@" >/tmp/said 2>&1 || status=$?
  case $expected-$status in
    yes-24 | no-0) ;;
    *) cat /tmp/said; fail "$* exited with $status; a conflict was expected: $expected" ;;
  esac
}
# A write of a block of zeroes.
writes() { conflict "$1" sg_raw --send 512 --infile /dev/zero "$2" 2a 00 00 00 00 00 00 00 01 00; }

begin "persistent reservations"
sg_persist --in --report-capabilities /dev/sda >/tmp/said || fail "no capabilities"
grep -q '(PTPL_C): 1' /tmp/said || { cat /tmp/said; fail "nothing outlasts the power"; }
conflict no sg_persist --out --register --param-sark=0xa --param-aptpl /dev/sda
sg_persist --in --report-capabilities /dev/sdb | grep -q '(PTPL_A): 1' ||
  fail "what was registered does not outlast the power"
conflict no sg_persist --out --register --param-sark=0xb /dev/sdb
sg_persist --in --read-full-status /dev/sda | grep -c 'Key=0x' | grep -qx 2 || fail "they have not both registered"
conflict no sg_persist --out --reserve --param-rk=0xa --prout-type=1 /dev/sda
writes no /dev/sda
writes yes /dev/sdb
dd if=/dev/zero of=/dev/sdb bs=4k count=1 oflag=direct 2>/dev/null && fail "it is reserved, and can be written"
conflict yes sg_persist --out --reserve --param-rk=0xb --prout-type=1 /dev/sdb
conflict no sg_persist --out --preempt-abort --param-rk=0xb --param-sark=0xa --prout-type=1 /dev/sdb
sg_raw /dev/sda 00 00 00 00 00 00 >/dev/null 2>&1 && fail "whoever is preempted is not told"
writes yes /dev/sda
writes no /dev/sdb
conflict no sg_persist --out --clear --param-rk=0xb /dev/sdb
writes no /dev/sda

begin "a reservation of the old kind"
conflict no sg_raw /dev/sda 16 00 00 00 00 00
writes yes /dev/sdb
conflict yes sg_persist --out --register --param-sark=0xb /dev/sdb
conflict no sg_raw /dev/sda 17 00 00 00 00 00
writes no /dev/sdb
echo "one disk, two ways to it"
