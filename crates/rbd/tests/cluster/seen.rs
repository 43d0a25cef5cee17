//! What others see of what a disk was asked for.

use super::*;

#[test]
fn what_another_has_written_meanwhile_is_read_and_not_what_was_cached() {
    let Some(ceph) = shared() else { return };
    // An image without locks: librbd empties its cache itself when it gives one back.
    ceph.run("rbd create cached --size 8M --image-feature layering");
    let here = with_cache(options(ceph, "cached"), "true");
    let there = RbdOptions { node_name: "disk1".to_owned(), ..here.clone() };
    let disks = [&here, &there].map(open_inactive);
    let mut rigs = disks.each_ref().map(Rig::new);
    for (round, at) in [0, 1, 0, 1].into_iter().enumerate() {
        let _active = disks[at].activate().unwrap();
        assert_eq!(rigs[at].read(0, 512), [round as u8; 512]);
        rigs[at].write(0, &[round as u8 + 1; 512]).unwrap();
        assert_eq!(rigs[at].read(0, 512), [round as u8 + 1; 512]);
        disks[at].write_out().unwrap();
    }
}

#[test]
fn what_is_to_be_stable_is_seen_by_others_and_what_is_cached_is_not() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create stable --size 16M --image-feature layering");
    let mut stable = with_cache(options(ceph, "stable"), "true");
    for (name, value) in [
        ("rbd_cache_policy", "writeback"),
        ("rbd_cache_writethrough_until_flush", "false"),
        ("rbd_cache_max_dirty_age", "600"),
    ] {
        stable.cluster.settings.push((name.to_owned(), value.to_owned()));
    }
    let disk = open(&stable).unwrap();
    let mut rig = Rig::new(&disk);
    let copy = ceph.dir().join("stable.copy");
    let byte = |at: u64| {
        let _ = std::fs::remove_file(&copy);
        ceph.run(&format!("rbd export --no-progress rbd/stable {}", copy.display()));
        std::fs::read(&copy).unwrap()[at as usize]
    };
    rig.write(0, &[1; 512]).unwrap();
    assert_eq!(byte(0), 0, "it is in the cache");
    rig.run(Op::Flush, 0, 0).unwrap();
    assert_eq!(byte(0), 1);
    rig.begin(Op::Write { fua: true }, 4096, 512, vec![2; 512], 512);
    assert_eq!(rig.wait().pop().unwrap().0, Ok(()));
    assert_eq!(byte(4096), 2);
    // One of several parts.
    let long = vec![3; 5 << 20];
    rig.begin(Op::Write { fua: true }, MIB, 5 * MIB, long, 1 << 20);
    assert_eq!(rig.wait().pop().unwrap().0, Ok(()));
    assert_eq!((byte(MIB), byte(6 * MIB - 1)), (3, 3));
    rig.run(Op::WriteZeroes { unmap: false, fua: true }, MIB, 512).unwrap();
    assert_eq!(byte(MIB), 0);
    rig.write(8192, &[4; 512]).unwrap();
    disk.flush().unwrap();
    assert_eq!(byte(8192), 4);
}

#[test]
fn zeroes_keep_their_place_or_give_it_back_as_they_are_asked_to_and_discards_give_it_back() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create thick --size 16M");
    let disk = open(&options(ceph, "thick")).unwrap();
    let mut rig = Rig::new(&disk);
    let info = ceph.run("rbd info thick --format json");
    let prefix = info.split_once("\"block_name_prefix\":\"").unwrap().1.split('"').next().unwrap().to_owned();
    let objects = || ceph.run("rados -p rbd ls").lines().filter(|name| name.starts_with(&prefix)).count();
    for (op, left) in [(Op::WriteZeroes { unmap: true, fua: false }, 0), (Op::Discard, 0)] {
        rig.run(Op::WriteZeroes { unmap: false, fua: false }, 4 * MIB, 4 * MIB).unwrap();
        assert_eq!(objects(), 1, "zeroes are written");
        rig.run(op, 4 * MIB, 4 * MIB).unwrap();
        assert_eq!(objects(), left, "{op:?}");
    }
}

#[test]
fn what_is_read_beyond_the_end_of_an_image_that_has_shrunk_fails() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create shrunk --size 8M");
    let disk = open(&options(ceph, "shrunk")).unwrap();
    let mut rig = Rig::new(&disk);
    rig.write(4 * MIB - 512, &[1; 1024]).unwrap();
    ceph.run("rbd resize shrunk --size 4M --allow-shrink --no-progress");
    // Some of it, all of it, and some of a later part of a longer one.
    for (at, len) in [(4 * MIB - 512, 1024), (4 * MIB, 512), (MIB, 4 * MIB)] {
        rig.begin(Op::Read, at, len, vec![0xee; len as usize], 512);
        assert!(rig.wait().pop().unwrap().0.is_err(), "{len} bytes at {at}");
    }
    assert_eq!(rig.read(4 * MIB - 512, 512), [1; 512]);
}

#[test]
fn what_nobody_has_written_reads_as_zeroes_wherever_an_object_or_a_parent_ends() {
    let Some(ceph) = shared() else { return };
    for command in [
        "rbd create --size 6M parent",
        "rbd snap create --no-progress parent@then",
        "rbd clone --rbd-default-clone-format 2 parent@then child",
        "rbd resize --no-progress child --size 16M",
    ] {
        ceph.run(command);
    }
    let disk = open(&options(ceph, "child")).unwrap();
    let mut rig = Rig::new(&disk);
    let mut expected = vec![0; 16 << 20];
    assert!(rig.read(0, 16 * MIB) == expected);
    // Its objects end where this ends; the last one begins with a hole.
    for at in [5 * MIB, 9 * MIB, 15 * MIB] {
        rig.write(at, &[7; 512]).unwrap();
        expected[at as usize..][..512].fill(7);
    }
    for (at, len) in [(0, 16 * MIB), (5 * MIB, 3 * MIB), (9 * MIB, MIB), (15 * MIB - 512, MIB + 512)] {
        let (from, to) = (at as usize, (at + len) as usize);
        assert!(rig.read(at, len) == expected[from..to], "{len} bytes at {at}");
    }
}
