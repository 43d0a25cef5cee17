//! Images that are locked while somebody has them active.

use super::cached::{cached_pages, evict};
use super::*;
use crate::{Active, Locking};

/// An image that two processes, as it were, have open, and each may have active.
struct Shared {
    image: Image,
    options: Options,
}

impl Shared {
    fn new(content: &[u8]) -> Self {
        let image = Image::beside_the_build(content);
        let options = Options { allow_inactive: true, ..image.options() };
        Self { image, options }
    }

    fn open(&self) -> Arc<Disk> {
        Arc::new(Disk::open(&self.options).unwrap())
    }
}

/// Why a disk cannot become active.
fn refused(disk: &Arc<Disk>) -> String {
    let error = disk.activate().expect_err("it is somebody else's");
    assert!(error.is_locked() && !disk.is_active());
    error.to_string()
}

#[test]
fn an_image_that_may_be_inactive_is_locked_from_its_first_user_to_its_last() {
    let shared = Shared::new(&[0; 65536]);
    let [here, there] = [shared.open(), shared.open()];
    assert!(!here.is_active() && !there.is_active());
    let first = here.activate().unwrap();
    let second = here.activate().unwrap();
    assert!(here.is_active());
    let line = refused(&there);
    assert!(line.starts_with("blockdev 'disk0': '") && line.contains("holds its write lock"), "{line}");
    drop(first);
    refused(&there);
    assert!(Disk::open(&shared.image.options()).is_err(), "nor is one let in that locks what it opens");
    drop(second);
    assert!(!here.is_active());
    drop(there.activate().unwrap());
    drop(here.activate().unwrap());
    // The other way round.
    let locked = Disk::open(&shared.image.options()).unwrap();
    assert!(locked.is_active());
    refused(&here);
    drop(locked);
    drop(here.activate().unwrap());
}

#[test]
fn readers_are_active_side_by_side_and_whoever_does_not_lock_is_always_let_in() {
    let mut shared = Shared::new(&[0; 65536]);
    let writer = shared.open();
    shared.options.locking = Locking::Off;
    let careless = shared.open();
    shared.options = Options { locking: Locking::On, read_only: true, ..shared.options };
    let [one, two] = [shared.open(), shared.open()].map(|reader| (reader.activate().unwrap(), reader));
    refused(&writer);
    let _active = careless.activate().unwrap();
    assert!(careless.is_active());
    drop((one, two));
    let _active = writer.activate().unwrap();
}

#[test]
fn an_image_that_is_open_without_locks_is_locked_in_passing_and_no_longer() {
    let mut shared = Shared::new(&[0; 65536]);
    let other = shared.open();
    shared.options = Options { locking: Locking::Off, allow_inactive: false, ..shared.options };
    let unlocked = shared.open();
    let locked = unlocked.lock_for_now(Locking::On).unwrap();
    refused(&other);
    drop(locked);
    let _active = other.activate().unwrap();
    assert!(unlocked.lock_for_now(Locking::On).unwrap_err().is_locked());
}

#[test]
fn what_others_have_made_of_an_image_is_found_when_it_becomes_active() {
    let mut shared = Shared::new(&[0; 65536]);
    let disk = shared.open();
    let grow = |len| File::options().write(true).open(&shared.image.path).unwrap().set_len(len).unwrap();
    grow(1 << 20);
    let active = disk.activate().unwrap();
    assert_eq!((disk.size(), disk.standing().size()), (1 << 20, 1 << 20));
    // Nobody else changes one that is active.
    grow(2 << 20);
    let second = disk.activate().unwrap();
    assert_eq!(disk.size(), 1 << 20);
    drop((active, second));

    if !evict(&shared.image.path) {
        return;
    }
    for (drop_cache, direct) in [(true, false), (false, false), (true, true)] {
        (shared.options.drop_cache, shared.options.direct) = (drop_cache, direct);
        let disk = shared.open();
        // A page that the kernel has in its hands at the moment stays, once.
        let is_dropped = (0..10).any(|_| {
            std::fs::read(&shared.image.path).unwrap();
            assert_ne!(cached_pages(&shared.image.path), 0);
            let _active = disk.activate().unwrap();
            cached_pages(&shared.image.path) == 0
        });
        assert_eq!(is_dropped, drop_cache && !direct, "drop_cache={drop_cache} direct={direct}");
    }
}

#[test]
fn one_that_is_reopened_while_it_is_active_stays_so_and_one_that_is_not_does_not() {
    let shared = Shared::new(&[0; 65536]);
    let [old, other] = [shared.open(), shared.open()];
    let reopened =
        |old: &Arc<Disk>| Arc::new(old.reopen(&Options { no_flush: true, ..old.options().clone() }).unwrap());
    let new = reopened(&old);
    new.share_locks_of(&old).unwrap();
    assert!(!new.is_active());

    let active = old.activate().unwrap();
    let given_up = reopened(&old);
    given_up.share_locks_of(&old).unwrap();
    drop(given_up);
    assert!(old.is_active());
    refused(&other);

    let new = reopened(&old);
    new.share_locks_of(&old).unwrap();
    assert!(new.is_active());
    let handed_over: Active = new.activate().unwrap();
    drop(active);
    assert!(!old.is_active());
    refused(&other);
    drop(old);
    refused(&other);
    drop(handed_over);
    let _active = other.activate().unwrap();
    assert!(!new.is_active());
}

#[test]
fn of_those_who_serve_a_disk_the_last_to_leave_is_to_have_it_written_out_though_others_have_it_active() {
    let shared = Shared::new(&[0; 65536]);
    let disk = shared.open();
    let held = disk.activate().unwrap();
    let served = |disk: &Arc<Disk>| {
        let mut active = disk.activate().unwrap();
        active.serve();
        active
    };
    let [mut first, mut second, gone] = [served(&disk), served(&disk), served(&disk)];
    second.serve();
    drop(gone);
    assert!(!first.leave());
    assert_eq!([&held, &first, &second].map(Active::serves), [false, false, true]);
    assert!(second.leave(), "the other one is about to go, though it is there");
    assert!(first.leave(), "nobody serves it by now");
    first.serve();
    assert!(!second.leave(), "once more");

    // One that is served is so in the place of another, too.
    let new = shared.open();
    new.share_locks_of(&disk).unwrap();
    second.hand_over(&new);
    assert!(second.leave());
    first.hand_over(&new);
    assert!(first.serves() && !second.leave() && first.leave());
    assert!(disk.activate().unwrap().leave());
}

#[test]
fn a_disk_without_an_image_is_active_whenever_it_is_to_be() {
    let driver = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let disk = Arc::new(Disk::open(&Options { allow_inactive: true, ..Options::new("null", driver) }).unwrap());
    let active = disk.activate().unwrap();
    assert!(disk.is_active());
    drop(active);
    assert!(!disk.is_active());
}
