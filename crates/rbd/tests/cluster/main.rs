//! Images of a cluster that these tests start, as disks.

mod locks;
mod seen;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use egret_disk::{
    Discard, Disk, DiskSlot, Driver, EngineOptions, EngineSet, Locking, Op, OpenError, Options, RemoteDisk, Request,
    RequestToken,
};
use egret_event_loop::{Backend as _, EventNotifier, clock};
use egret_needs::{Ceph, Part};
use egret_rbd::{ClusterOptions, ImageOptions, Luks, RbdDisk, RbdOptions, Secret};
use egret_vring::memory::{IoVec, Lent};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

const MIB: u64 = 1 << 20;

/// The cluster of tests that leave it alone.
fn shared() -> Option<&'static Ceph> {
    static CLUSTER: OnceLock<Option<Ceph>> = OnceLock::new();
    CLUSTER.get_or_init(Ceph::start).as_ref()
}

fn options(ceph: &Ceph, image: &str) -> RbdOptions {
    RbdOptions {
        node_name: "disk0".to_owned(),
        cluster: ClusterOptions {
            conf: Some(ceph.conf().to_str().unwrap().to_owned()),
            user: None,
            key: None,
            monitors: Vec::new(),
            auth: Vec::new(),
            settings: Vec::new(),
            connect_timeout: Duration::from_secs(30),
            images: 4,
        },
        image: ImageOptions {
            pool: "rbd".to_owned(),
            namespace: String::new(),
            image: image.to_owned(),
            snapshot: None,
            read_only: false,
            encryption: None,
        },
        locking: Locking::Auto,
    }
}

fn open(options: &RbdOptions) -> Result<Arc<Disk>, OpenError> {
    let remote = RemoteDisk::new(RbdDisk::new(options.clone()));
    let read_only = options.image.read_only;
    let options = Options { discard: Discard::Unmap, read_only, ..Options::new("disk0", Driver::Remote(remote)) };
    Disk::open(&options).map(Arc::new)
}

/// A disk that is locked while it is active alone.
fn open_inactive(options: &RbdOptions) -> Arc<Disk> {
    let driver = Driver::Remote(RemoteDisk::new(RbdDisk::new(options.clone())));
    Arc::new(Disk::open(&Options { allow_inactive: true, ..Options::new("disk0", driver) }).unwrap())
}

fn with_cache(mut options: RbdOptions, cache: &str) -> RbdOptions {
    let settings = [("rbd_cache", cache), ("rbd_cache_policy", "writethrough")];
    options.cluster.settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    options
}

/// An I/O thread's part of it.
struct Rig {
    engines: EngineSet,
    slot: DiskSlot,
    in_flight: Vec<Vec<u8>>,
}

impl Rig {
    fn new(disk: &Arc<Disk>) -> Self {
        let mut engines = EngineSet::new(EngineOptions::default());
        let slot = engines.attach(disk).unwrap();
        Self { engines, slot, in_flight: Vec::new() }
    }

    /// Has a request begun; its memory is `bytes`, in pieces of `piece`.
    fn begin(&mut self, op: Op, offset: u64, len: u64, bytes: Vec<u8>, piece: usize) {
        let token = RequestToken(self.in_flight.len() as u64);
        self.in_flight.push(bytes);
        let bytes = self.in_flight.last_mut().unwrap();
        // SAFETY: the memory stays where it is until the rig is dropped; what is still in flight then is leaked.
        let buffers = unsafe {
            let pieces = bytes.chunks_mut(piece.max(1)).map(|piece| IoVec::new(piece.as_mut_ptr(), piece.len()));
            Lent::assume(pieces.collect())
        };
        self.engines.push(self.slot, Request { op, offset, len, buffers, token });
        self.engines.submit(clock::now());
    }

    /// Waits until all is done; the results, in the order in which the requests began.
    fn wait(&mut self) -> Vec<(Result<(), Errno>, Vec<u8>)> {
        let mut results = vec![None; self.in_flight.len()];
        while results.contains(&None) {
            assert!(self.turn(60, &mut results), "no completion in a minute");
        }
        results.into_iter().map(Option::unwrap).zip(std::mem::take(&mut self.in_flight)).collect()
    }

    /// Waits until something is done; false after so many seconds.
    fn turn(&mut self, seconds: i64, results: &mut [Option<Result<(), Errno>>]) -> bool {
        if self.engines.arm() {
            // SAFETY: the engine keeps its descriptor open.
            let fds: Vec<_> =
                self.engines.descriptors().iter().map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect();
            let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let timeout = rustix::event::Timespec { tv_sec: seconds, tv_nsec: 0 };
            if poll(&mut fds, Some(&timeout)).unwrap() == 0 {
                return false;
            }
            // They are watched level by level here.
            for fd in self.engines.descriptors() {
                // SAFETY: as above.
                let _ = rustix::io::read(unsafe { BorrowedFd::borrow_raw(fd) }, &mut [0; 8]);
            }
        }
        self.engines.reap(clock::now(), &mut |ended| {
            results[ended.completion.token.0 as usize] = Some(ended.completion.result);
        });
        self.engines.submit(clock::now());
        true
    }

    fn run(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Errno> {
        self.begin(op, offset, len, Vec::new(), 1);
        self.wait().pop().unwrap().0
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.begin(Op::Write { fua: false }, offset, bytes.len() as u64, bytes.to_vec(), 5000);
        self.wait().pop().unwrap().0
    }

    fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        self.begin(Op::Read, offset, len, vec![0xee; len as usize], 7000);
        let (result, bytes) = self.wait().pop().unwrap();
        result.unwrap();
        bytes
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.in_flight));
    }
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) as u8).collect()
}

fn line(result: Result<Arc<Disk>, OpenError>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

#[test]
fn requests_of_every_kind_do_what_they_say() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create kinds --size 64M");
    let disk = open(&options(ceph, "kinds")).unwrap();
    assert_eq!((disk.size(), disk.discard_granularity(), disk.optimal_io_size()), (64 * MIB, 4 << 20, 4 << 20));
    let mut rig = Rig::new(&disk);
    // One that lies across objects and is moved in several parts, and one of a sector.
    let long = pattern(9 * MIB + 512, 1);
    rig.write(3 * MIB + 512, &long).unwrap();
    assert!(rig.read(3 * MIB + 512, long.len() as u64) == long);
    rig.write(0, &[7; 512]).unwrap();
    assert_eq!(rig.read(0, 1024), [[7; 512], [0; 512]].concat());
    rig.begin(Op::Write { fua: true }, MIB, 4096, vec![9; 4096], 4096);
    rig.begin(Op::Flush, 0, 0, Vec::new(), 1);
    assert!(rig.wait().into_iter().all(|(result, _)| result == Ok(())));
    for unmap in [false, true] {
        rig.write(16 * MIB, &pattern(8 * MIB, 2)).unwrap();
        rig.run(Op::WriteZeroes { unmap, fua: true }, 16 * MIB + 512, 6 * MIB).unwrap();
        assert!(rig.read(16 * MIB + 512, 6 * MIB).iter().all(|&byte| byte == 0));
        assert!(
            rig.read(22 * MIB + 512, MIB) == pattern(8 * MIB, 2)[(6 * MIB + 512) as usize..(7 * MIB + 512) as usize]
        );
    }
    rig.run(Op::Discard, 4 * MIB, 4 * MIB).unwrap();
    assert!(rig.read(4 * MIB, 4 * MIB).iter().all(|&byte| byte == 0), "a whole object is gone");
    // Everything that was written is there for others, and many requests are in flight at a time.
    for at in 0..64 {
        rig.begin(Op::Write { fua: false }, 32 * MIB + at * 4096, 4096, pattern(4096, at), 512);
    }
    assert!(rig.wait().into_iter().all(|(result, _)| result == Ok(())));
    drop((rig, disk));
    let disk = open(&options(ceph, "kinds")).unwrap();
    let mut rig = Rig::new(&disk);
    assert!((0..64).all(|at| rig.read(32 * MIB + at * 4096, 4096) == pattern(4096, at)));
}

#[test]
fn the_threads_that_serve_a_disk_each_get_their_own_completions() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create threads --size 64M");
    let disk = open(&options(ceph, "threads")).unwrap();
    let served = Arc::<AtomicUsize>::default();
    let serve = |number: u64| {
        let (disk, served) = (Arc::clone(&disk), Arc::clone(&served));
        std::thread::spawn(move || {
            let mut rig = Rig::new(&disk);
            for turn in 0.. {
                // All of them are served while all are there; then they leave one after the other.
                served.fetch_add(usize::from(turn == 20), Ordering::Relaxed);
                if turn >= 20 + 20 * number && served.load(Ordering::Relaxed) == 3 {
                    break;
                }
                assert!(turn < 10_000, "another one has not been served");
                for at in 0..8 {
                    let bytes = pattern(4096, turn * 8 + at);
                    rig.begin(Op::Write { fua: false }, number * 16 * MIB + at * 4096, 4096, bytes, 4096);
                }
                assert!(rig.wait().into_iter().all(|(result, _)| result == Ok(())));
                let back = rig.read(number * 16 * MIB, 8 * 4096);
                assert!(back == (0..8).flat_map(|at| pattern(4096, turn * 8 + at)).collect::<Vec<_>>());
            }
        })
    };
    // Those that leave first are those where completions were announced.
    [0, 1, 2].map(serve).into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn what_is_not_there_is_named_and_said_what_to_look_at() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create named --size 8M");
    let named = options(ceph, "named");
    let mut other = options(ceph, "nothing");
    assert_eq!(
        line(open(&other)),
        "blockdev 'disk0': cannot open 'rbd/nothing': cannot open it: No such file or directory (os error 2); check pool, \
         namespace, image and snapshot (rbd ls, rbd snap ls)"
    );
    other.image.pool = "pond".to_owned();
    assert_eq!(
        line(open(&other)),
        "blockdev 'disk0': cannot open 'pond/nothing': cannot open the pool 'pond': No such file or directory (os error 2); \
         ceph osd pool ls lists those that there are"
    );
    let mut other = named.clone();
    other.cluster.conf = Some("/nowhere/ceph.conf".to_owned());
    assert_eq!(
        line(open(&other)),
        "blockdev 'disk0': cannot open 'rbd/named': cannot read '/nowhere/ceph.conf': No such file or directory (os error \
         2); conf names the cluster's ceph.conf"
    );
    let mut other = named.clone();
    other.cluster.settings = vec![("rados_osd_op_timeuot".to_owned(), "3".to_owned())];
    assert_eq!(
        line(open(&other)),
        "blockdev 'disk0': cannot open 'rbd/named': cannot set rados_osd_op_timeuot: No such file or directory (os error 2); \
         this Ceph has no such setting"
    );
    let mut other = named;
    other.cluster.user = Some("nobody".to_owned());
    let line = line(open(&other));
    assert!(line.starts_with("blockdev 'disk0': cannot open 'rbd/named': cannot connect to the cluster: "), "{line}");
}

#[test]
fn a_snapshot_is_read_as_it_was_and_never_written() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create snapped --size 8M");
    let now = options(ceph, "snapped");
    let disk = open(&now).unwrap();
    let mut rig = Rig::new(&disk);
    rig.write(0, &[1; 4096]).unwrap();
    rig.run(Op::Flush, 0, 0).unwrap();
    ceph.run("rbd snap create rbd/snapped@then");
    rig.write(0, &[2; 4096]).unwrap();
    let mut then = now.clone();
    (then.image.snapshot, then.image.read_only) = (Some("then".to_owned()), true);
    let old = open(&then).unwrap();
    let mut reader = Rig::new(&old);
    assert_eq!(reader.read(0, 4096), [1; 4096]);
    assert_eq!(reader.write(0, &[3; 512]), Err(Errno::ROFS));
    assert_eq!(rig.read(0, 4096), [2; 4096]);
}

#[test]
fn a_disk_can_be_made_longer_here_and_elsewhere() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create sized --size 8M");
    let disk = open(&options(ceph, "sized")).unwrap();
    assert_eq!(disk.grow(16 * MIB).unwrap(), 16 * MIB);
    assert!(ceph.run("rbd info sized").contains("size 16 MiB"));
    let mut rig = Rig::new(&disk);
    rig.write(12 * MIB, &[1; 512]).unwrap();
    ceph.run("rbd resize sized --size 32M --no-progress");
    assert_eq!(disk.refresh_size().unwrap(), 32 * MIB);
    rig.write(31 * MIB, &[1; 512]).unwrap();
    ceph.run("rbd resize sized --size 24M --allow-shrink --no-progress");
    assert_eq!(disk.refresh_size().unwrap(), 24 * MIB);
    // Who wants less than somebody else has made of it changes nothing.
    ceph.run("rbd resize sized --size 64M --no-progress");
    assert_eq!(disk.grow(32 * MIB).unwrap(), 64 * MIB);
    let Driver::Remote(remote) = &disk.options().driver else { unreachable!("it is in a cluster") };
    assert!(remote.resize(32 * MIB).unwrap_err().to_string().starts_with("cannot make it longer: "));
    assert_eq!(disk.refresh_size().unwrap(), 64 * MIB);
}

#[test]
fn who_watches_hears_of_a_size_that_an_image_got_while_nobody_did() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create unwatched --size 8M");
    let remote = || RemoteDisk::new(RbdDisk::new(options(ceph, "unwatched")));
    let options = || Options::new("disk0", Driver::Remote(remote()));
    let old = Disk::open(&options()).unwrap();
    ceph.run("rbd resize unwatched --size 16M --no-progress");
    let disk = old.reopen(&options()).unwrap();
    assert_eq!(disk.size(), 8 * MIB, "as its guest knows it");
    let bell = EventNotifier::new().unwrap();
    disk.watch_size(&bell);
    assert!(bell.clear());
    assert_eq!(disk.take_new_size(), Some(16 * MIB));
}

#[test]
fn requests_wait_out_an_outage_and_nothing_that_waits_for_the_cluster_waits_for_ever() {
    let Some(ceph) = Ceph::start() else { return };
    ceph.run("rbd create kept --size 16M");
    let mut kept = options(&ceph, "kept");
    kept.cluster.connect_timeout = Duration::from_secs(15);
    let disk = open(&kept).unwrap();
    let mut rig = Rig::new(&disk);
    rig.write(0, &[1; 4096]).unwrap();
    ceph.kill(Part::Osd);
    rig.begin(Op::Write { fua: true }, 4096, 4096, vec![2; 4096], 4096);
    assert!(!rig.turn(1, &mut [None]), "nobody could have done it");
    assert_eq!(disk.flush().unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
    ceph.kill(Part::Mon);
    let mut new = kept;
    // On a connection of its own.
    new.cluster.images = 1;
    let line = line(open(&new));
    assert!(line.contains("cannot connect to the cluster: Connection timed out"), "{line}");
    ceph.revive(Part::Mon);
    ceph.revive(Part::Osd);
    assert_eq!(rig.wait().pop().unwrap().0, Ok(()));
    assert_eq!(rig.read(0, 8192), [[1; 4096], [2; 4096]].concat());
    // A thread that ends with requests at librbd leaves them, with their memory.
    ceph.kill(Part::Osd);
    rig.begin(Op::Read, 0, 4096, vec![0; 4096], 4096);
    drop(rig);
    ceph.revive(Part::Osd);
    assert_eq!(Rig::new(&disk).read(0, 4096), [1; 4096]);
}

#[test]
fn in_an_outage_librbd_takes_all_requests_without_waiting_and_no_more_bytes_than_it_may() {
    let Some(ceph) = Ceph::start() else { return };
    ceph.run("rbd create many --size 256M");
    let client = ceph.dir().join("client.asok");
    let mut many = options(&ceph, "many");
    many.cluster.settings = vec![("admin_socket".to_owned(), client.display().to_string())];
    let disk = open(&many).unwrap();
    Rig::new(&disk).write(0, &[1; 4096]).unwrap();
    ceph.kill(Part::Osd);
    let waiting = || {
        let said = ceph.run(&format!("ceph --admin-daemon {} objecter_requests", client.display()));
        // But for what it says time and again because it watches the image.
        said.matches("\"tid\"").count() - said.matches("\"watch ").count()
    };
    let before = waiting();
    // More than librados takes of its own accord, 1024; by a thread, because it would hang.
    let (begun, all_begun) = std::sync::mpsc::channel();
    let (go_on, may_go_on) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut rig = Rig::new(&disk);
        for block in 0..1500 {
            // All of one object: librbd knows by itself which are not there.
            rig.begin(Op::Read, block % 1024 * 4096, 4096, vec![9; 4096], 4096);
        }
        for part in 0..60 {
            rig.begin(Op::Write { fua: false }, (4 + part * 4) * MIB, 2 * MIB, vec![3; 2 << 20], 2 << 20);
        }
        begun.send(()).unwrap();
        may_go_on.recv().unwrap();
        assert!(rig.wait().iter().all(|(result, _)| *result == Ok(())));
        assert_eq!(rig.read(240 * MIB, 512), [3; 512]);
    });
    all_begun.recv_timeout(Duration::from_secs(60)).expect("a request was waited for");
    // 32 MiB, of which 1500 reads are 6; threads of librbd's hand them on.
    let until = Instant::now() + Duration::from_secs(60);
    while waiting() != before + 1500 + 14 {
        assert!(Instant::now() < until, "{} wait", waiting() - before);
    }
    ceph.revive(Part::Osd);
    go_on.send(()).unwrap();
    thread.join().unwrap();
}

#[test]
fn an_encrypted_image_reads_as_it_was_written_zeroes_among_it() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create sealed --size 64M");
    let pass = ceph.dir().join("pass");
    std::fs::write(&pass, "open").unwrap();
    ceph.run(&format!("rbd encryption format rbd/sealed luks1 {}", pass.display()));
    let mut sealed = options(ceph, "sealed");
    sealed.image.encryption = Some((Luks::One, Secret(b"open".to_vec())));
    let disk = open(&sealed).unwrap();
    assert!(disk.size() < 64 * MIB, "the header is not the guest's");
    let mut rig = Rig::new(&disk);
    rig.write(MIB, &pattern(4 * MIB, 3)).unwrap();
    for (unmap, at) in [(false, MIB), (true, 3 * MIB)] {
        rig.run(Op::WriteZeroes { unmap, fua: true }, at, MIB).unwrap();
        assert!(rig.read(at, MIB).iter().all(|&byte| byte == 0));
        assert!(rig.read(at + MIB, MIB) == pattern(4 * MIB, 3)[at as usize..at as usize + MIB as usize]);
    }
    drop((rig, disk));
    sealed.image.encryption = Some((Luks::One, Secret(b"shut".to_vec())));
    let line = line(open(&sealed));
    assert!(line.contains("the passphrase of encrypt.key-secret does not open it"), "{line}");
}
