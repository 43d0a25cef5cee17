//! Who may write to an image.

use std::time::Instant;

use egret_needs::{Ceph, Part};

use super::*;

#[test]
fn a_second_writer_is_refused_until_the_first_has_left() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create mine --size 8M");
    let mine = options(ceph, "mine");
    let disk = open(&mine).unwrap();
    let owner = ceph.run("rbd lock ls mine --format json");
    // As a disk that is reopened.
    drop(open(&mine).unwrap());
    assert_eq!(ceph.run("rbd lock ls mine --format json"), owner, "it is the first one's still");
    let other = RbdOptions { node_name: "disk1".to_owned(), ..mine.clone() };
    let line = line(open(&other));
    let start = "blockdev 'disk0': cannot open 'rbd/mine': this daemon has its exclusive lock already: ";
    assert!(line.starts_with(start), "{line}");
    let mut reader = mine.clone();
    reader.image.read_only = true;
    Rig::new(&open(&reader).unwrap()).read(0, 512);
    drop(disk);
    let again = open(&other).unwrap();
    Rig::new(&again).write(0, &[1; 512]).unwrap();
    let mut unlocked = mine;
    unlocked.locking = Locking::Off;
    drop(open(&unlocked).unwrap());
}

#[test]
fn an_image_without_the_feature_is_locked_by_nobody_unless_that_is_asked_for() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create plain --size 8M --image-feature layering");
    let mut plain = options(ceph, "plain");
    let both = [open(&plain).unwrap(), open(&plain).unwrap()];
    drop(both);
    plain.locking = Locking::On;
    assert_eq!(
        line(open(&plain)),
        "blockdev 'disk0': cannot open 'rbd/plain': it has not the feature exclusive-lock; enable it with: rbd feature enable \
         rbd/plain exclusive-lock, or use locking=off"
    );
}

/// Takes an image's lock away from whoever has it, as an administrator does, who has the client put on the block list.
fn take_lock_away(ceph: &Ceph, image: &str) {
    let locks = ceph.run(&format!("rbd lock ls {image} --format json"));
    let field = |name: &str| {
        let rest = locks.split_once(&format!("\"{name}\":\"")).unwrap().1;
        rest.split('"').next().unwrap().to_owned()
    };
    let (id, locker) = (field("id"), field("locker"));
    let mut remove = std::process::Command::new("rbd");
    remove.env("CEPH_CONF", ceph.conf()).args(["lock", "remove", image, &id, &locker]);
    assert!(remove.status().unwrap().success());
}

#[test]
fn a_lock_that_was_taken_away_is_had_again_by_opening_anew_unless_another_has_had_it() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create taken --size 8M");
    let taken = with_cache(options(ceph, "taken"), "false");
    let disk = open(&taken).unwrap();
    let mut rig = Rig::new(&disk);
    rig.write(0, &[1; 512]).unwrap();
    assert!(!disk.is_lost());
    take_lock_away(ceph, "taken");
    assert!(rig.write(0, &[2; 512]).is_err() && disk.is_lost());
    // The same, on another connection. What reads is refused as well on the old one, where it is on the block list.
    let again = open(&taken).unwrap();
    assert!(!again.is_lost());
    let mut new = Rig::new(&again);
    assert_eq!(new.read(0, 512), [1; 512]);
    new.write(0, &[3; 512]).unwrap();
    drop((rig, disk));
    take_lock_away(ceph, "taken");
    rig = new;
    rig.begin(Op::Read, 0, 512, vec![0; 512], 512);
    assert_eq!(rig.wait().pop().unwrap().0, Err(Errno::SHUTDOWN));
    assert!(again.is_lost());
    let other = RbdOptions { node_name: "disk1".to_owned(), ..taken.clone() };
    drop(open(&other).unwrap());
    let refused = line(open(&taken));
    assert!(refused.contains("another daemon has had its exclusive lock since this one lost it"), "{refused}");
    assert_eq!(ceph.run("rbd lock ls taken"), "", "it is not kept for that");
    // Where nothing of it is left nothing can be written over what the other wrote.
    drop((rig, again));
    drop(open(&taken).unwrap());

    let cached = with_cache(taken, "true");
    let disk = open(&cached).unwrap();
    take_lock_away(ceph, "taken");
    assert!(Rig::new(&disk).write(0, &[2; 512]).is_err() || disk.flush().is_err());
    assert!(disk.is_lost());
    let refused = line(open(&cached));
    assert!(refused.contains("librbd's cache (rbd_cache) may have acknowledged writes that are lost"), "{refused}");
}

#[test]
fn what_is_written_without_the_lock_is_refused_and_taken_for_a_lock_that_is_lost() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create given --size 8M");
    let disk = open_inactive(&options(ceph, "given"));
    drop(disk.activate().unwrap());
    disk.flush().expect("there is nothing that was not written out with the lock");
    assert!(!disk.is_lost());
    assert_eq!(Rig::new(&disk).write(0, &[1; 512]), Err(Errno::ROFS));
    assert!(disk.is_lost());
}

#[test]
fn a_disk_that_takes_another_s_place_keeps_its_lock_when_the_other_goes() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create passed --size 8M");
    let passed = options(ceph, "passed");
    let is_locked = || !ceph.run("rbd lock ls passed").is_empty();
    let old = open_inactive(&passed);
    assert!(!is_locked());
    let active = old.activate().unwrap();
    assert!(is_locked());
    let new = open_inactive(&passed);
    new.share_locks_of(&old).unwrap();
    let handed_over = new.activate().unwrap();
    drop((active, old));
    assert!(is_locked(), "it is the new one's");
    Rig::new(&new).write(0, &[1; 512]).unwrap();
    drop(handed_over);
    assert!(!is_locked());
    // What is asked for again is had again.
    drop(new.activate().unwrap());
    assert!(!is_locked());
}

#[test]
fn a_lock_that_comes_after_it_was_waited_for_is_given_back() {
    let Some(ceph) = Ceph::start() else { return };
    ceph.run("rbd create late --size 8M");
    let mut late = options(&ceph, "late");
    late.cluster.connect_timeout = Duration::from_secs(15);
    let disk = open_inactive(&late);
    ceph.kill(Part::Osd);
    let error = disk.activate().unwrap_err().to_string();
    assert!(error.contains("the cluster has not answered for 15 s (locking an image)"), "{error}");
    ceph.revive(Part::Osd);
    let other = RbdOptions { node_name: "disk1".to_owned(), ..options(&ceph, "late") };
    let other = open_inactive(&other);
    let until = Instant::now() + Duration::from_secs(60);
    // The call that nobody waits for any more goes on, and has the lock for a moment: then there is a note.
    while !ceph.run("rbd image-meta ls late").contains("egret.lock") {
        assert!(Instant::now() < until, "the call has not gone on");
    }
    let active = loop {
        match other.activate() {
            Ok(active) => break active,
            Err(e) => assert!(Instant::now() < until, "the other has kept it: {e}"),
        }
    };
    drop(active);
    drop(disk.activate().unwrap());
}

#[test]
fn as_many_images_share_a_connection_as_are_to() {
    let Some(ceph) = shared() else { return };
    let address = |image: &str| {
        let locks = ceph.run(&format!("rbd lock ls {image} --format json"));
        locks.split_once("\"address\":\"").unwrap().1.split('"').next().unwrap().to_owned()
    };
    let open = |image: &str| {
        ceph.run(&format!("rbd create {image} --size 8M"));
        let mut options = options(ceph, image);
        // So that no other test's images are among them.
        options.cluster.settings = vec![("rados_osd_op_timeout".to_owned(), "61".to_owned())];
        options.cluster.images = 2;
        open(&options).unwrap()
    };
    let images = ["shared0", "shared1", "shared2"];
    let _disks = images.map(open);
    let [first, second, third] = images.map(address);
    assert_eq!(first, second);
    assert_ne!(second, third);
}
