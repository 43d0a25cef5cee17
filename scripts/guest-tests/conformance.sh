# Runs in the test guest: suites of SCSI commands that others wrote. There are three virtio-scsi devices with a disk each,
# known by their serial numbers: two with the disk "small", which has blocks of 512 bytes; and "large", whose medium is
# removable and has blocks of 4096.
#
# Of libiscsi's suite this prints "DISK: SUITE.TEST OUTCOME" for each test: passed, failed or skipped; and "DISK: TOTAL N",
# which is how many the suite says that there are. sg3-utils' tools end
# with a status that says how the command did: 0, 5 for something in it that is not supported, 9 for a command that is not
# there, and some others.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "probing"
until_true has_units 3
# disks NAME: the devices of the disks with this serial number. Not those of the driver for disks, which locks a medium
# that is removable.
disks() {
  for disk in /sys/block/sd*; do
    [ "$(tail -c +5 "$disk/device/vpd_pg80")" != "$1" ] || echo "/dev/$(basename "$disk"/device/scsi_generic/*)"
  done
}

# suite NAME FAMILY PATH...: runs libiscsi's suite, or part of it, over the ways to that disk.
suite() {
  name=$1 family=$2; shift 2
  begin "libiscsi's $family on $name"
  iscsi-test-cu --dataloss --verbose --test "$family" "$@" >/tmp/log 2>&1 || true
  grep -q '^Run Summary' /tmp/log || { cat /tmp/log; fail "the suite did not end"; }
  # What a test says is shown if it failed.
  awk -v disk="$name" '
    function tell() {
      if (test == "") return
      print disk ": " test, outcome
      if (outcome == "failed") printf "%s", said
    }
    /^Suite: |^Run Summary/ { tell(); test = ""; suite = $2 }
    $1 == "tests" { print disk ": TOTAL", $2 }
    /^  Test: / { tell(); test = suite "." $2; outcome = "passed"; said = "" }
    { said = said $0 "\n" }
    /\[SKIPPED\]/ { outcome = "skipped" }
    /FAILED$/ { outcome = "failed" }
    END { tell() }' /tmp/log
}
for disk in small large; do until_true test -n "$(disks $disk)"; done
# shellcheck disable=SC2046  # one or two of them
suite small SCSI $(disks small)
suite large SCSI "$(disks large)"

# ends STATUS COMMAND...: how the tool ends.
ends() {
  expected=$1 status=0; shift
  "$@" >/tmp/said 2>&1 || status=$?
  [ $status = "$expected" ] || { cat /tmp/said; fail "$* exited with $status, not $expected"; }
}
begin "sg3-utils"
d=$(disks small | head -n 1)
head -c 4096 /dev/zero >/tmp/zeroes
pattern sg 4096 >/tmp/data
cat /tmp/zeroes /tmp/data >/tmp/pair
# reads_back: whether what a tool has read is what was written.
reads_back() { cmp /tmp/data /tmp/read && rm /tmp/read; }
# It may have something to tell.
sg_turs "$d" >/tmp/said 2>&1 || true
while read -r status command; do
  [ "$status" != '#' ] || continue
  case $command in *DISK*) command=$(echo "$command" | sed "s|DISK|$d|g") ;; *) command="$command $d" ;; esac
  # shellcheck disable=SC2086  # it is a list of words
  ends "$status" $command </dev/null
done <<END
# The disk, which is the last word unless DISK says where it goes. What is there:
0 sg_turs -n 3
0 sg_requests
0 sg_inq
0 sg_inq --vpd
0 sg_vpd --all
83 sg_vpd -p 0xb3
0 sg_readcap
0 sg_readcap --16
0 sg_luns --select=2
0 sg_luns --select=0x10
0 sg_opcodes --mask --rctd
0 sg_opcodes --tmf
0 sg_opcodes --opcode=0x9e,0x10
0 sg_modes --all
0 sg_modes --page=8 -6
0 sg_wr_mode --page=8
0 sg_logs --all
5 sg_logs --page=ie
0 sg_senddiag --test
0 sg_sync
0 sg_sync --16
0 sg_sync --immed
0 sg_write_verify --lba=0 --num=8 --in=/tmp/data --ilen=4096
0 sg_write_verify --16 --lba=0 --num=8 --in=/tmp/data --ilen=4096
0 sg_verify --lba=0 --count=8
0 sg_verify --16 --lba=0 --count=8
0 sg_verify --bytchk=1 --ndo=4096 --lba=0 --count=8 --in=/tmp/data
14 sg_verify --bytchk=1 --ndo=4096 --lba=0 --count=8 --in=/tmp/zeroes
22 sg_verify --lba=131072 --count=1
0 sg_write_x --normal --16 --lba=0 --num=8 --in=/tmp/data
0 sg_dd if=/tmp/data of=DISK bs=512 count=8 oflag=fua cdbsz=16
0 sg_dd --verify if=/tmp/data of=DISK bs=512 count=8
0 sg_dd if=DISK of=/tmp/read bs=512 count=8 cdbsz=6
0 reads_back
0 sg_dd if=DISK of=DISK bs=512 count=8 seek=64
0 sgm_dd if=/tmp/data of=DISK bs=512 count=8 seek=128
0 sgm_dd if=DISK of=/tmp/read bs=512 count=8 skip=128
0 reads_back
0 sgp_dd if=/tmp/data of=DISK bs=512 count=8 seek=192 thr=2
0 sgp_dd if=DISK of=/tmp/read bs=512 count=8 skip=192 thr=2
0 reads_back
0 sg_read if=DISK bs=512 count=8 cdbsz=12
0 sg_read if=DISK bs=512 count=8 cdbsz=16 fua=1 dpo=1
14 sg_compare_and_write --in=/tmp/pair --lba=0 --num=8 --xferlen=8192
0 sg_dd if=/tmp/zeroes of=DISK bs=512 count=8
0 sg_compare_and_write --in=/tmp/pair --lba=0 --num=8 --xferlen=8192
0 sg_dd --verify if=/tmp/data of=DISK bs=512 count=8
0 sg_raw --request=96 DISK 12 00 00 00 60 00
0 sg_scan
0 sg_map26
0 sginfo -a
0 sg_write_same --10 --num=8 --lba=0 --in=/tmp/data --xferlen=512
0 sg_write_same --16 --num=8 --lba=0 --in=/tmp/data --xferlen=512
0 sg_write_same --16 --unmap --num=8 --lba=0 --in=/dev/zero --xferlen=512
0 sg_write_same --16 --ndob --num=8 --lba=0
5 sg_write_same --16 --num=0 --lba=0 --in=/tmp/data --xferlen=512
5 sg_write_same --16 --wrprotect=1 --num=8 --lba=0 --in=/tmp/data --xferlen=512
0 sg_unmap --force --lba=0 --num=8
0 sg_unmap --force --all=64,128
5 sg_unmap --force --lba=0 --num=8 --anchor
22 sg_unmap --force --lba=131071 --num=2
0 sg_start --stop
0 sg_turs
0 sg_start --pc=3
0 sg_turs
0 sg_start --start
5 sg_start --eject
0 sg_persist --in --read-keys
0 sg_persist --in --read-full-status
0 sg_persist --out --register --param-sark=1
0 sg_persist --out --register-ignore --param-sark=2
0 sg_persist --out --reserve --param-rk=2 --prout-type=5
5 sg_persist --out --release --param-rk=2 --prout-type=1
0 sg_persist --out --release --param-rk=2 --prout-type=5
5 sg_persist --out --reserve --param-rk=2 --prout-type=2
0 sg_persist --out --clear --param-rk=2
0 sg_reset --device
6 sg_turs
# What a disk need not have, and this one has not.
5 sg_get_lba_status --lba=0
5 sg_rtpg
5 sg_timestamp
5 sg_ident
5 sg_referrals
5 sg_get_elem_status
5 sg_stream_ctl --get
5 sg_rep_pip
5 sg_bg_ctl --ctl=1
5 sg_stpg --optimized
72 sg_xcopy if=DISK of=DISK bs=512 count=8 seek=64
9 sg_read_attr
9 sg_rbuf --size=512
9 sg_test_rwbuf --size=512
9 sg_zone --open --zone=0
9 sg_reset_wp --zone=0
9 sg_rmsn
9 sg_prevent --allow
9 sg_read_buffer --mode=desc
9 sg_write_buffer --mode=data --length=512 --in=/tmp/data
9 sg_write_x --or --16 --lba=0 --num=8 --in=/tmp/data
9 sg_write_x --atomic=0 --16 --lba=0 --num=8 --in=/tmp/data
9 sg_write_same --32 --num=8 --lba=0 --in=/tmp/data --xferlen=512
9 sg_sanitize --overwrite --quick --zero
9 sg_copy_results --params
9 sg_reassign --grown
9 sg_read_long --lba=0
9 sg_write_long --lba=0 --in=/tmp/data
9 sg_rep_zones
9 sg_ses
9 sg_seek --lba=0 --num=8
5 sg_senddiag --list
# What is for other devices: CDs, tapes, enclosures, ATA disks, and arrays of two makers.
9 sg_get_config
9 sg_read_block_limits
9 sg_safte
9 sg_ses_microcode --mode=dmc_offs --in=/tmp/data
9 sg_sat_identify
9 sg_sat_phy_event
9 sg_sat_read_gplog
9 sg_sat_set_features --feature=0x2
5 sg_emc_trespass
5 sg_rdac -6
# What the standard has every disk have, and this one has not.
9 sg_format --format --quick
END
