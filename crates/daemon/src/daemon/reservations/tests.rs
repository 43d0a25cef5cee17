use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;

use egret_export::LogicalUnit;

use super::*;

const A: NexusId = NexusId { initiator: 0xa, port: 1 };
const B: NexusId = NexusId { initiator: 0xb, port: 1 };

fn table(aptpl: bool) -> Registered {
    Registered { aptpl, registrations: vec![(A, u64::MAX), (B, 2)], reservation: Some((5, B)) }
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("d0.pr");
    (place, path)
}

fn open_in(path: &Path, unit: &str, boot: &str) -> Result<(Registered, Arc<dyn Keeper>), String> {
    let opened = PrFile::open(path, unit.to_owned(), boot.to_owned());
    opened.map_err(|cause| PrFileError { path: "d0.pr".into(), cause }.to_string())
}

/// Has a file with `table`, written during a boot.
fn write(path: &Path, table: &Registered, boot: &str) {
    std::fs::write(path, Stored::new("u", boot, table).text()).unwrap();
}

/// Why the contents are refused.
fn refused(text: &str) -> String {
    let (_place, path) = place();
    std::fs::write(&path, text).unwrap();
    let line = open_in(&path, "u", "1").unwrap_err();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "what is refused stays as it is");
    line
}

#[test]
fn a_file_that_is_not_there_is_made_for_its_owner_alone_and_has_no_reservations() {
    let (_place, path) = place();
    let (found, _keeper) = open_in(&path, "u", "1").unwrap();
    assert_eq!(found, Registered::default());
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn what_was_stored_is_found_again_and_without_aptpl_until_the_host_is_started_anew() {
    for (aptpl, boot, expected) in
        [(true, "1", table(true)), (true, "2", table(true)), (false, "1", table(false)), (false, "2", <_>::default())]
    {
        let (_place, path) = place();
        write(&path, &table(aptpl), "1");
        assert_eq!(open_in(&path, "u", boot).unwrap().0, expected, "{aptpl} {boot}");
        // What was found counts as of this boot from here on.
        assert_eq!(Stored::parse(&std::fs::read_to_string(&path).unwrap()).unwrap().boot, boot);
    }
}

#[test]
fn a_file_belongs_to_one_unit_until_that_is_gone() {
    let (_place, path) = place();
    let (_, keeper) = open_in(&path, "u", "1").unwrap();
    let locked = PrFile { path: path.clone(), unit: "u".into(), boot: "1".into(), locked: None, is_new: false };
    let lock = |file: &PrFile| flock(File::open(&file.path).unwrap(), FlockOperation::NonBlockingLockExclusive);
    assert_eq!(lock(&locked), Err(Errno::WOULDBLOCK));
    drop(keeper);
    // Waits until the thread has let go of it.
    open_in(&path, "u", "1").unwrap();
}

#[test]
fn a_file_of_another_unit_is_refused() {
    let (_place, path) = place();
    write(&path, &table(true), "1");
    let line = open_in(&path, "v", "1").unwrap_err();
    assert_eq!(line, "pr-file 'd0.pr' has the reservations of unit 'u', and this is unit 'v'");
}

#[test]
fn any_byte_that_is_damaged_is_found() {
    let text = Stored::new("u", "1", &table(true)).text();
    for at in (0..text.len()).filter(|at| !text.as_bytes()[*at].is_ascii_whitespace()) {
        let mut damaged = text.clone().into_bytes();
        damaged[at] ^= 1;
        let Ok(damaged) = String::from_utf8(damaged) else { continue };
        assert!(Stored::parse(&damaged).is_err(), "{damaged}");
    }
    for len in 0..text.trim_end().len() {
        assert!(Stored::parse(&text[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn a_file_that_is_damaged_or_of_the_future_is_refused_with_a_line_that_says_what_to_do() {
    let text = Stored::new("u", "1", &table(true)).text();
    let line = refused(&text.replace("\"key\": 2", "\"key\": 3"));
    assert_eq!(
        line,
        "pr-file 'd0.pr' is damaged (its checksum is of something else); put back a copy of it, or remove it to let \
         everybody in who was fenced and have nobody registered"
    );
    assert!(refused("").starts_with("pr-file 'd0.pr' is damaged (EOF"));
    assert!(refused("[]").starts_with("pr-file 'd0.pr' is damaged ("));
    assert_eq!(
        refused("{\"egret-reservations\": 2, \"fences\": []}"),
        "pr-file 'd0.pr' is of format 2, and this egret knows format 1 alone: start the one that wrote it"
    );
}

#[test]
fn what_is_no_file_or_cannot_be_written_is_refused() {
    let (place, path) = place();
    assert_eq!(open_in(place.path(), "u", "1").unwrap_err(), "pr-file 'd0.pr' is not a regular file");
    let line = open_in(&path.join("beyond"), "u", "1").unwrap_err();
    assert_eq!(line, "pr-file 'd0.pr' cannot be written: No such file or directory (os error 2)");
    rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert_eq!(open_in(&path, "u", "1").unwrap_err(), "pr-file 'd0.pr' is not a regular file");
}

#[test]
fn a_link_stays_and_the_file_that_it_leads_to_is_replaced() {
    let (place, path) = place();
    write(&path, &table(true), "1");
    let link = place.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let before = path.metadata().unwrap().ino();
    assert_eq!(open_in(&link, "u", "1").unwrap().0, table(true));
    assert!(link.is_symlink());
    assert_ne!(path.metadata().unwrap().ino(), before);
}

/// A unit, with the waker of a command that waits.
fn unit(path: &Path) -> LogicalUnit {
    let (registered, keeper) = open_in(path, "u", "1").unwrap();
    let config = LunConfig { capacity_bytes: 1 << 20, serial: "u".into(), ..LunConfig::default() };
    LogicalUnit::kept(config, &registered, keeper).unwrap()
}

/// Registers a key for A, and says whether that went well.
fn register(unit: &LogicalUnit, key: u64) -> bool {
    use egret_scsi::{Command, Status, Step, Task};
    struct Bell(mpsc::Sender<()>);
    impl std::task::Wake for Bell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }
    let (ring, rung) = mpsc::channel();
    let waker = Arc::new(Bell(ring)).into();
    let nexus = unit.attach(A);
    let list = [&[0; 8][..], &key.to_be_bytes(), &[0, 0, 0, 0, 1, 0, 0, 0]].concat();
    let cdb = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    let task = Task { cdb: &cdb, nexus: &nexus, luns: &[0], data_in: 0, data_out: 24, lane: 0, waker: &waker };
    let mut command = Command::new();
    loop {
        match unit.begin(&mut command, &task, &&list[..]) {
            // The power on.
            Step::Done(done) if done.sense.is_some_and(|sense| sense.key == egret_scsi::Key::UnitAttention) => {}
            Step::Wait => break,
            step => panic!("{step:?}"),
        }
    }
    loop {
        rung.recv().unwrap();
        match unit.retry(&mut command, &nexus, &waker) {
            Step::Wait => {}
            Step::Done(done) => break done.status == Status::Good,
            step => panic!("{step:?}"),
        }
    }
}

#[test]
fn a_command_ends_when_the_file_has_what_it_did() {
    let (_place, path) = place();
    let unit = unit(&path);
    for key in 1..4 {
        assert!(register(&unit, key));
        let stored = Stored::parse(&std::fs::read_to_string(&path).unwrap()).unwrap().table();
        assert_eq!(stored, Registered { aptpl: true, registrations: vec![(A, key)], reservation: None });
    }
}

#[test]
fn a_command_whose_file_cannot_be_written_fails_and_the_next_one_may_succeed() {
    let (place, path) = place();
    let unit = unit(&path);
    assert!(register(&unit, 1));
    // Nothing can be made in the place of a directory.
    let in_the_way = place.path().join("d0.pr.new");
    std::fs::create_dir(&in_the_way).unwrap();
    assert!(!register(&unit, 2));
    std::fs::remove_dir(&in_the_way).unwrap();
    let stored = || Stored::parse(&std::fs::read_to_string(&path).unwrap()).unwrap().table();
    assert_eq!(stored().registrations, [(A, 1)]);
    assert!(register(&unit, 3));
    assert_eq!(stored().registrations, [(A, 3)]);
}
