//! Outside of what it tests, which `tests/workers.rs` has in a crate of its own.

use std::sync::Arc;

use egret_event_loop::Nanos;

use super::turns::Turns;
use crate::disk::Disk;
use crate::{Driver, Options};

/// So many places, and disks with as many jobs waiting as they are given. Jobs are named by their disk.
fn turns(places: u32, waiting: &[usize]) -> (Turns<usize>, Vec<Arc<Disk>>) {
    let mut turns = Turns::new(places);
    let mut disks = Vec::new();
    for (at, &count) in waiting.iter().enumerate() {
        let disk = null_disk();
        assert_eq!(turns.open(&disk), at);
        disks.push(disk);
        (0..count).for_each(|_| turns.put(at, at));
    }
    (turns, disks)
}

fn null_disk() -> Arc<Disk> {
    let driver = Driver::Null { size: 4096, latency: Nanos::ZERO, read_zeroes: false };
    Arc::new(Disk::open(&Options::new("null", driver)).unwrap())
}

/// Takes what can be taken, and says whose it was.
fn take_all(turns: &mut Turns<usize>) -> Vec<usize> {
    std::iter::from_fn(|| turns.take()).map(|(at, what)| if at == what { at } else { usize::MAX }).collect()
}

#[test]
fn disks_have_their_turns_one_after_the_other() {
    let (mut turns, _disks) = turns(100, &[4, 1, 2]);
    assert!(!turns.is_empty());
    assert_eq!(take_all(&mut turns), [0, 1, 2, 0, 2, 0, 0]);
    assert!(turns.is_empty());
    assert_eq!(turns.taken(), 7);
}

#[test]
fn a_disk_takes_no_more_than_it_leaves_free_and_leaves_one_if_it_is_alone() {
    for (places, first, second) in [(8, 4, 2), (64, 32, 16), (2, 1, 1), (3, 2, 1), (1, 1, 0)] {
        let (mut turns, _disks) = turns(places, &[100, 0, 0]);
        assert_eq!(turns.wanted(1000), first);
        assert_eq!(take_all(&mut turns).len(), first as usize, "of {places}");
        (0..100).for_each(|_| turns.put(1, 1));
        assert_eq!(take_all(&mut turns).len(), second as usize, "of {places}");
        // The third disk finds one, however long the others keep theirs.
        turns.put(2, 2);
        assert_eq!(turns.take().is_some(), places > first + second);
    }
    for (places, alone, later) in [(64, 63, 1), (3, 2, 1), (2, 2, 0), (1, 1, 0)] {
        let (mut turns, mut disks) = turns(places, &[100]);
        assert_eq!((turns.wanted(1000), turns.wanted(10)), (alone, alone.min(10)));
        assert_eq!(take_all(&mut turns).len(), alone as usize);
        // It keeps them when another comes.
        disks.push(null_disk());
        let newcomer = turns.open(&disks[1]);
        (0..100).for_each(|_| turns.put(newcomer, newcomer));
        assert_eq!(take_all(&mut turns), vec![newcomer; later], "of {places}");
    }
}

#[test]
fn a_disk_that_leaves_makes_room_for_those_that_stay() {
    let (mut turns, disks) = turns(8, &[100, 0]);
    assert_eq!(take_all(&mut turns).len(), 4);
    assert_eq!(turns.open(&disks[1]), 1, "the same disk at another slot has the same line");
    turns.close(1);
    assert_eq!(take_all(&mut turns).len(), 0);
    turns.close(1);
    assert_eq!(take_all(&mut turns).len(), 3);
    turns.set_places(10);
    assert_eq!(take_all(&mut turns).len(), 2, "there are more now");
}

#[test]
fn large_jobs_of_a_disk_have_one_place_at_a_time_unless_it_is_alone() {
    let (mut turns, disks) = turns(64, &[2, 0]);
    turns.set_beside_others(true);
    let large = turns.open_large(&disks[0]);
    (0..10).for_each(|_| turns.put(large, large));
    assert_eq!(turns.wanted(1000), 3);
    assert_eq!(take_all(&mut turns), [0, large, 0]);
    turns.leave(large);
    assert_eq!(take_all(&mut turns), [large]);
    turns.close(1);
    turns.leave(large);
    assert_eq!(take_all(&mut turns), [large], "another disk takes no turns here");
    turns.set_beside_others(false);
    assert_eq!(take_all(&mut turns).len(), 7, "it is alone");
    turns.close(large);
    turns.close(0);
    let at = turns.open(&disks[1]);
    (0..100).for_each(|_| turns.put(at, at));
    let free = 64 - turns.taken();
    assert_eq!(turns.wanted(1000), free - 1, "no other is left");
    turns.open(&disks[0]);
    assert!(turns.wanted(1000) < free, "there is another");
}

#[test]
fn what_is_put_first_is_the_next() {
    let (mut turns, _disks) = turns(100, &[0, 0]);
    turns.put(0, 1);
    turns.put(1, 2);
    turns.put_first(1, 3);
    turns.put_first(0, 4);
    let order: Vec<usize> = std::iter::from_fn(|| turns.take()).map(|(_, what)| what).collect();
    assert_eq!(order, [4, 3, 1, 2]);
    turns.leave(0);
    assert_eq!(turns.taken(), 3);
}

#[test]
fn a_line_whose_batches_are_limited_goes_on_in_the_next_one_and_holds_up_no_other() {
    let (mut turns, _disks) = turns(100, &[5, 3]);
    turns.limit_batches(0, 2);
    for expected in [vec![0, 1, 0, 1, 1], vec![0, 0], vec![0], vec![]] {
        turns.begin_batch();
        assert_eq!(take_all(&mut turns), expected);
        assert_eq!(turns.wanted(10), 0, "of this batch");
    }
    (0..3).for_each(|_| turns.put(0, 0));
    turns.limit_batches(0, 0);
    assert_eq!(take_all(&mut turns), [0, 0, 0], "0 is no limit");
}
