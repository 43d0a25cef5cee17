# Runs in the test guest: tests of xfstests or blktests, from the first disk, on the others. What it is to run comes before
# this text: SUITE, a file system or "block", TESTS, and the LIMIT in seconds after which no other is begun. Says of each
# "EGRET-TEST NAME OUTCOME": pass, fail or not-run.
# shellcheck shell=dash
# shellcheck source=scripts/guest-tests/prelude.sh
. /sys/firmware/qemu_fw_cfg/by_name/opt/egret/prelude/raw

begin "the disk of suites"
mount -o ro /dev/vda /mnt
for folder in proc sys dev; do mount -o bind /$folder /mnt/$folder; done
for folder in tmp run var/tmp root; do mount -t tmpfs tmp /mnt/$folder; done
mount -t debugfs debug /mnt/sys/kernel/debug || true
mount -t devpts pts /mnt/dev/pts 2>/dev/null || { mkdir /mnt/dev/pts && mount -t devpts pts /mnt/dev/pts; }
[ -d /mnt/dev/shm ] || mkdir /mnt/dev/shm
mount -t tmpfs shm /mnt/dev/shm
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd

# A test fails for whatever the kernel calls a bug meanwhile, and that an emulated processor got no time of its host's is none.
for set in 0:/proc/sys/kernel/watchdog 1:/sys/module/rcupdate/parameters/rcu_cpu_stall_suppress; do
  [ ! -e "${set#*:}" ] || echo "${set%%:*}" >"${set#*:}"
done

begin "$SUITE"
# A test that fails is told of by its line, and so is what the kernel said of it.
chroot /mnt /usr/bin/env -i PATH=/usr/sbin:/usr/bin HOME=/root TERM=dumb DM_DISABLE_UDEV=1 SUITE="$SUITE" TESTS="$TESTS" LIMIT="$LIMIT" bash <<'END' || true
hostname guest
modprobe -a loop dm-mod dm-flakey 2>/dev/null
if [ "$SUITE" = block ]; then
  mkdir /tmp/blktests && cp -r /blktests/. /tmp/blktests && cd /tmp/blktests
  echo 'TEST_DEVS=(/dev/vdb) TIMEOUT=10 QUICK_RUN=1' >config
  # shellcheck disable=SC2086
  ./check $TESTS
  for result in results/*/*/[0-9]*[0-9]; do
    status=$(sed -n 's/^status[[:space:]]*//p' "$result")
    echo "EGRET-TEST ${result#results/*/} ${status/ /-}"
  done
else
  modprobe -a "$SUITE" overlay 2>/dev/null
  # Some tests write beside themselves.
  mkdir /tmp/written /tmp/overlay
  mount -t overlay -o lowerdir=/xfstests,upperdir=/tmp/written,workdir=/tmp/overlay xfstests /xfstests
  # There is no udev, which would have made /dev/mapper/NAME a link to the device whose name the kernel's files in /sys have.
  mkdir /tmp/bin && PATH=/tmp/bin:$PATH
  cat >/tmp/bin/dmsetup <<'SH'
#!/bin/bash
/usr/sbin/dmsetup "$@"
status=$?
for node in /dev/mapper/*; do
  if [ -b "$node" ] && [ ! -L "$node" ]; then ln -sf "../dm-$((0x$(stat -c %T "$node")))" "$node"; fi
done
exit $status
SH
  chmod +x /tmp/bin/dmsetup
  export FSTYP=$SUITE TEST_DEV=/dev/vdb TEST_DIR=/mnt/test SCRATCH_DEV=/dev/vdc SCRATCH_MNT=/mnt/scratch
  export RESULT_BASE=/tmp/results HOST_OPTIONS=/tmp/none
  touch /tmp/none
  mkfs -t "$SUITE" -q "$TEST_DEV"
  cd /xfstests
  # It ends, with what it writes at the end, when the test that runs has ended.
  # shellcheck disable=SC2086
  timeout --foreground "$LIMIT" ./check $TESTS
  listed() { sed -n "s/^$1: *//p" /tmp/results/check.log; }
  ran=" $(listed Ran)"
  # What the last of them came to it has then not written.
  if grep -q '^Interrupted!' /tmp/results/check.log; then ran=${ran% *} && printf '\nEGRET-TIME-UP\n'; fi
  for test in $ran $(listed 'Not run'); do echo "$test"; done | sort -u | while read -r test; do
    outcome=pass
    case " $(listed 'Not run') " in *" $test "*) outcome=not-run ;; esac
    case " $(listed Failures) " in *" $test "*) outcome=fail ;; esac
    echo "EGRET-TEST $test $outcome"
  done
fi
END
dmesg -c >/tmp/dmesg
