//! The disks under test: made, filled, checked, and gone afterwards.
//!
//! | `type` | what it is | who frees it after `kill -9` |
//! |---|---|---|
//! | `file` | files full of data, which are removed | the [reaper](crate::process::ProcessReaper) |
//! | `loop` | a loop device over such a file in memory | the kernel: it detaches itself with its last user |
//! | `device` | the user's block device | nobody needs to |
//! | on other `hosts` | a device there, or a file that fio makes and removes | fio |
//! | behind an NBD server, in a Ceph cluster | a copy, or another way to the same disk | the reaper |
//! | `null` | nothing: each server has its own | nobody needs to |

mod elsewhere;
mod loop_device;
mod precondition;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egret_loadgen::random::mix;
use rustix::fs::{Advice, OFlags, fadvise, statvfs};

use crate::plan::{Backend, Bytes, DiskKind, DiskPlan, Load, Plan, Stack, Subject};
use crate::process::{ProcessReaper, Scratch};
use crate::results::Warning;
use crate::stack::Disk;

pub use elsewhere::{check_backend, lacks};
pub use loop_device::LoopDevice;
pub use precondition::precondition;

/// The size of a disk where the plan names none.
pub const SIZE: u64 = 256 << 20;
/// Where files in memory are.
const MEMORY: &str = "/dev/shm";
/// What a warning is about that the report has in red.
const NOT_PRECONDITIONED: &str = "not-preconditioned";
/// How much is left free of a file system or of memory, at least.
const RESERVE: u64 = 64 << 20;

/// The disks of a run; gone when dropped.
pub struct Disks {
    /// As many as the largest load uses.
    pub disks: Vec<Disk>,
    elsewhere: elsewhere::Elsewhere,
    /// Why the disk is not of the type that the plan asks for, where it is not.
    pub warnings: Vec<Warning>,
    _devices: Vec<LoopDevice>,
    _places: Vec<Scratch>,
}

/// How many disks a plan's loads use at the same time, at most.
fn count(plan: &Plan) -> usize {
    plan.loads.iter().map(|load| load.disks).max().unwrap_or(1).into()
}

/// Whether any of a plan's loads writes.
pub fn writes(plan: &Plan) -> bool {
    plan.loads.iter().any(Load::writes)
}

/// How large a plan's disks are, where the lab makes them.
pub(crate) fn size(plan: &DiskPlan) -> u64 {
    plan.size.map_or(SIZE, |size| size.0).checked_next_multiple_of(1 << 20).unwrap_or(u64::MAX)
}

/// Checks that a plan writes to no device.
///
/// # Errors
/// It does, and what would let it, in one line.
pub fn check_writes_no_device(plan: &Plan) -> Result<(), String> {
    let over_ssh = |load: &Load| {
        let mut there = plan.subjects.iter().filter(|one| one.stack == Stack::Ssh && load.is_put_on(&one.name));
        there.next().map(|subject| subject.disks().first().cloned().unwrap_or_default())
    };
    if let Some(path) = plan.loads.iter().filter(|load| load.writes()).find_map(over_ssh) {
        return Err(format!("the plan writes to {} over ssh: --write-device lets it", path.display()));
    }
    match plan.disk.place() {
        Some(path) if plan.disk.kind == DiskKind::Device && writes(plan) => {
            Err(format!("the plan writes to {}: --write-device lets it", path.display()))
        }
        _ => Ok(()),
    }
}

/// Checks whether a plan's device can be [preconditioned](precondition()), and writes nothing.
///
/// # Errors
/// What is in the way, in one line.
pub fn check_precondition(plan: &Plan, write_device: bool) -> Result<(), String> {
    precondition::check(plan, write_device)?;
    check_devices(&plan.disk, true, count(plan))
}

/// Checks whether the disks can be had, and makes none. `directory` is where files go that have no place.
///
/// # Errors
/// What is wrong, and what would be right, in one line.
pub fn check(plan: &Plan, directory: &Path) -> Result<(), String> {
    if !plan.hosts.is_empty() {
        return check_remote(plan);
    }
    match plan.disk.kind {
        DiskKind::Device => check_devices(&plan.disk, writes(plan), count(plan)),
        DiskKind::Null | DiskKind::File | DiskKind::Loop => check_space(plan, directory),
    }
}

/// Has a plan's disks be as large as they were `before` where there is too little space for what a profile asks for, and says so
/// in one line. `directory` is where files go that have no place.
pub fn make_room(plan: &mut Plan, before: Option<Bytes>, directory: &Path) -> Option<String> {
    if plan.disk.size == before || !plan.hosts.is_empty() {
        return None;
    }
    let why = check_space(plan, directory).err()?;
    let asked = std::mem::replace(&mut plan.disk.size, before);
    let [asked, before] = [asked, before].map(|size| size.unwrap_or(Bytes(SIZE)));
    Some(format!("disks of {before} and not of the profile's {asked}: {why}"))
}

/// Nobody here can look at them.
fn check_remote(plan: &Plan) -> Result<(), String> {
    let device = plan.disk.kind == DiskKind::Device;
    if device && writes(plan) && !plan.disk.destroy {
        return Err("the plan writes to devices of other hosts; say destroy = true if their data may be lost".into());
    }
    if device && count(plan) > plan.disk.paths().len() {
        return Err(too_few(&plan.disk, count(plan)));
    }
    Ok(())
}

fn remote(plan: &Plan) -> Vec<Disk> {
    let place = plan.disk.place().unwrap_or(Path::new(""));
    match plan.disk.kind {
        DiskKind::Device => plan.disk.paths().iter().map(|path| Disk::Remote(path.clone(), None)).collect(),
        _ => {
            let file = |number| Disk::Remote(place.join(format!("egret-bench-disk{number}")), Some(size(&plan.disk)));
            (0..count(plan)).map(file).collect()
        }
    }
}

fn check_space(plan: &Plan, directory: &Path) -> Result<(), String> {
    // As far as it is there already.
    let directory = directory.ancestors().find(|place| place.is_dir()).unwrap_or(Path::new("."));
    let place = match plan.disk.kind {
        DiskKind::Null | DiskKind::Device => return Ok(()),
        DiskKind::File => plan.disk.place().unwrap_or(directory),
        DiskKind::Loop if loop_device::may_be_had() => Path::new(MEMORY),
        DiskKind::Loop => directory,
    };
    let needed = size(&plan.disk).saturating_mul(count(plan) as u64).saturating_add(RESERVE);
    let there = statvfs(place).map_err(|error| format!("{}: {error}", place.display()))?;
    let free = there.f_bavail * there.f_frsize;
    if free < needed {
        let (needed, free) = (needed.div_ceil(1 << 20), free >> 20);
        return Err(format!(
            "too little space in {}: the plan's disks need {needed} MiB, and {free} MiB are free; --scale shrinks them",
            place.display()
        ));
    }
    Ok(())
}

fn too_few(plan: &DiskPlan, count: usize) -> String {
    let shown = plan.paths().iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    format!(
        "the plan loads {count} disks at once, and there are {}: {shown}; type 'file' makes several",
        plan.paths().len()
    )
}

fn check_devices(plan: &DiskPlan, writes: bool, count: usize) -> Result<(), String> {
    let paths = plan.paths();
    if paths.is_empty() {
        return Err("a disk of type 'device' needs its path".into());
    }
    paths.iter().try_for_each(|path| check_device(path, plan.destroy, writes))?;
    let mut seen = BTreeSet::new();
    if let Some(twice) = paths.iter().find(|path| !seen.insert(path.canonicalize().unwrap_or_default())) {
        return Err(format!("{} is a disk already: several disks are several devices", twice.display()));
    }
    if paths.len() < count { Err(too_few(plan, count)) } else { Ok(()) }
}

fn check_device(path: &Path, destroy: bool, writes: bool) -> Result<(), String> {
    let shown = path.display();
    let kind = fs::metadata(path).map_err(|error| format!("{shown}: {error}"))?.file_type();
    if !kind.is_block_device() {
        return Err(format!("{shown} is no block device; a disk of type 'file' makes a file"));
    }
    let open = |flags: OFlags| File::options().read(true).write(writes).custom_flags(flags.bits() as i32).open(path);
    let denied = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
            format!("no permission for {shown}: be root, or in the group that it belongs to")
        }
        _ => format!("{shown}: {error}"),
    };
    if !writes {
        return open(OFlags::empty()).map(drop).map_err(denied);
    }
    if let Some(place) = mounted_at(path) {
        return Err(format!("{shown} is in use{place}, and the plan writes to it"));
    }
    // O_EXCL fails if a file system, swap, RAID or the device mapper uses the device.
    let mut device = open(OFlags::EXCL).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => format!("{shown} is in use, and the plan writes to it"),
        _ => denied(error),
    })?;
    if !destroy && !is_empty(&mut device).map_err(|error| format!("{shown}: {error}"))? {
        return Err(format!(
            "{shown} is not empty, and the plan writes to it; say destroy = true if its data may be lost"
        ));
    }
    Ok(())
}

/// That a device was not written full before it is measured is to be said of one that is written to, and of one that is
/// read where nothing was written.
fn as_it_was_found(plan: &Plan) -> Option<Warning> {
    let path = plan.disk.place().filter(|_| !plan.disk.preconditioned)?;
    let looks_empty = |path: &PathBuf| File::open(path).and_then(|mut device| is_empty(&mut device)).unwrap_or(false);
    let why = match writes(plan) {
        true => "flash that was not written full is faster than it will be",
        false if plan.disk.paths().iter().any(looks_empty) => {
            "it looks empty, and flash that was never written is not even read"
        }
        false => return None,
    };
    let text = format!(
        "{} was measured as it was found: {why}. --precondition writes it full, and preconditioned = true says that \
         somebody did",
        path.display()
    );
    Some(Warning { about: NOT_PRECONDITIONED.into(), text })
}

/// The same of devices that nobody here can look at, where a load writes to them: over ssh, and of other hosts.
fn as_they_were_found_elsewhere(plan: &Plan) -> Option<Warning> {
    let written = |subject: &&Subject| plan.loads.iter().any(|load| load.writes() && load.is_put_on(&subject.name));
    let over_ssh = plan.subjects.iter().filter(|one| one.stack == Stack::Ssh).filter(written).flat_map(Subject::disks);
    let is_of_hosts = !plan.hosts.is_empty() && plan.disk.kind == DiskKind::Device && writes(plan);
    let of_hosts = plan.disk.paths().iter().filter(|_| is_of_hosts);
    // The others are files, which are not flash that nobody has written.
    let devices = over_ssh.chain(of_hosts).filter(|path| path.starts_with("/dev") && !plan.disk.preconditioned);
    let devices: BTreeSet<String> = devices.map(|path| path.display().to_string()).collect();
    if devices.is_empty() {
        return None;
    }
    let text = format!(
        "{} elsewhere was measured as it was found: flash that was not written full is faster than it will be. \
         --precondition does not reach it, and preconditioned = true says that somebody wrote it full",
        devices.into_iter().collect::<Vec<_>>().join(", ")
    );
    Some(Warning { about: NOT_PRECONDITIONED.into(), text })
}

/// Where it, or a partition of it, is mounted. The kernel would refuse the device too; this makes a better error.
fn mounted_at(device: &Path) -> Option<String> {
    let device = device.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    let place = mounts.lines().find_map(|line| {
        let (source, rest) = line.split_once(' ')?;
        let rest_of_name = source.strip_prefix(device.to_str()?)?;
        let is_part = rest_of_name.chars().all(|c| c.is_ascii_digit() || c == 'p');
        is_part.then(|| rest.split(' ').next())?
    })?;
    Some(format!(": mounted at {place}"))
}

/// Whether the first and the last MiB are zeroes: every partition table and file system has something there.
fn is_empty(device: &mut File) -> io::Result<bool> {
    let size = device.seek(SeekFrom::End(0))?;
    let mut piece = vec![0; 1 << 20];
    for at in [0, size.saturating_sub(1 << 20)] {
        device.seek(SeekFrom::Start(at))?;
        let mut len = 0;
        while len < piece.len() {
            match device.read(&mut piece[len..])? {
                0 => break,
                read => len += read,
            }
        }
        if piece[..len].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Disks {
    /// Makes the disks of a plan. `directory` is where files go that have no place.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn make(plan: &Plan, directory: &Path, reaper: &Arc<ProcessReaper>) -> io::Result<Self> {
        let mut new = Self {
            disks: Vec::new(),
            elsewhere: Default::default(),
            warnings: Vec::new(),
            _devices: Vec::new(),
            _places: Vec::new(),
        };
        new.warnings.extend(as_they_were_found_elsewhere(plan));
        let size = size(&plan.disk);
        if !plan.hosts.is_empty() {
            new.disks = remote(plan);
            return Ok(new);
        }
        match plan.disk.kind {
            DiskKind::Null => new.disks = vec![Disk::Null(size); count(plan)],
            DiskKind::Device => {
                new.warnings.extend(as_it_was_found(plan));
                new.disks = plan.disk.paths().iter().cloned().map(Disk::Device).collect();
            }
            DiskKind::File => {
                let place = plan.disk.place().unwrap_or(directory);
                new.disks = new.files(place, count(plan), size, reaper)?.into_iter().map(Disk::File).collect();
            }
            DiskKind::Loop => new.loops(plan, directory, size, reaper)?,
        }
        new.elsewhere.make(plan, &new.disks, reaper)?;
        Ok(new)
    }

    /// The disks as a subject gets at them.
    ///
    /// # Errors
    /// They could not be made so, and why.
    pub fn of(&self, backend: &Backend) -> Result<&[Disk], &str> {
        if *backend == Backend::Local { Ok(&self.disks) } else { self.elsewhere.of(backend) }
    }

    /// That the files that the lab has made are as long as they were, as a job file may have fio make others in their places, which
    /// have no data where nothing was written since. Fills those anew, when whoever may have one open that was there before has
    /// let go of it, as it takes up its space until then.
    ///
    /// # Errors
    /// One was not, and how long it was.
    pub fn restore(&self, plan: &DiskPlan, let_go: impl FnOnce()) -> io::Result<()> {
        let made = size(plan);
        for (number, disk) in (0..).zip(&self.disks) {
            let Disk::File(path) = disk else { continue };
            let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
            let now = fs::metadata(path).map_err(named)?.len();
            if now != made {
                let_go();
                let filled = fs::remove_file(path).and_then(|()| fill(path, made, number));
                // None is better than a short one, on which others would be measured.
                filled.inspect_err(|_| drop(fs::remove_file(path))).map_err(named)?;
                return Err(io::Error::other(format!("the disk had {made} bytes before, and {now} afterwards")));
            }
        }
        Ok(())
    }

    fn loops(&mut self, plan: &Plan, directory: &Path, size: u64, reaper: &ProcessReaper) -> io::Result<()> {
        let tried = if loop_device::may_be_had() {
            self.files(Path::new(MEMORY), count(plan), size, reaper)
                .and_then(|files| files.iter().map(|file| LoopDevice::over(file)).collect::<io::Result<Vec<_>>>())
        } else {
            Err(io::Error::other("it needs root and /dev/loop-control"))
        };
        match tried {
            Ok(devices) => {
                self.disks = devices.iter().map(|device| Disk::Device(device.path().to_owned())).collect();
                self._devices = devices;
            }
            Err(error) => {
                let text = format!("no loop device over memory ({error}): files in {} instead", directory.display());
                self.warnings.push(Warning { about: "disk".into(), text });
                self.disks = self.files(directory, count(plan), size, reaper)?.into_iter().map(Disk::File).collect();
            }
        }
        Ok(())
    }

    fn files(&mut self, place: &Path, count: usize, size: u64, reaper: &ProcessReaper) -> io::Result<Vec<PathBuf>> {
        let scratch = Scratch::new(place, reaper)?;
        let paths: Vec<PathBuf> = (0..count).map(|number| scratch.path().join(format!("disk{number}"))).collect();
        self._places.push(scratch);
        for (number, path) in (0..).zip(&paths) {
            reaper.go_on()?;
            fill(path, size, number)?;
        }
        Ok(paths)
    }
}

/// Makes a file of data that neither a file system nor a device can take for less than it is, by whatever is in it twice,
/// and keeps it out of the page cache.
fn fill(path: &Path, size: u64, seed: u64) -> io::Result<()> {
    const WORDS: u64 = 1 << 17;
    let mut file = File::options().write(true).create_new(true).open(path)?;
    let mut piece = vec![0; 8 * WORDS as usize];
    let first = mix(seed);
    for at in 0..size >> 20 {
        for (number, word) in (at * WORDS..).zip(piece.chunks_exact_mut(8)) {
            word.copy_from_slice(&mix(first.wrapping_add(number)).to_le_bytes());
        }
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    // Direct I/O should not find the file in the page cache.
    let _ = fadvise(file.as_fd(), 0, None, Advice::DontNeed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    use super::*;

    fn plan(disk: &str) -> Plan {
        let text = format!(
            "name = 'p'\ntitle = 't'\n[disk]\n{disk}\n[[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\nrw = 'write'\ndisks = [1, 3]\n"
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn files_are_full_of_data_and_vanish() {
        let place = tempfile::tempdir().unwrap();
        let reaper = ProcessReaper::new().unwrap();
        let disks = Disks::make(&plan("type = 'file'\nsize = '2M'"), place.path(), &reaper).unwrap();
        let paths: Vec<_> = disks.disks.iter().map(|disk| disk.path().unwrap().to_owned()).collect();
        assert_eq!(paths.len(), 3);
        let bytes = paths.iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>().concat();
        assert_eq!(bytes.len(), 6 << 20);
        // A device that has what is in it twice but once has a thousandth of it otherwise.
        let blocks: BTreeSet<&[u8]> = bytes.chunks(512).collect();
        assert_eq!(blocks.len(), bytes.len() / 512);
        let made = plan("type = 'file'\nsize = '2M'").disk;
        let nobody = || panic!("nobody has to let go of a disk that is as it was");
        assert!(disks.restore(&made, nobody).is_ok());
        // As fio makes a longer one in its place.
        fs::remove_file(&paths[1]).unwrap();
        File::create_new(&paths[1]).unwrap().set_len(3 << 20).unwrap();
        let error = disks.restore(&made, || ()).unwrap_err().to_string();
        assert_eq!(error, "the disk had 2097152 bytes before, and 3145728 afterwards");
        assert!(disks.restore(&made, nobody).is_ok());
        assert!(fs::read(&paths[1]).unwrap() == bytes[2 << 20..4 << 20], "it has its data again");
        fs::remove_file(&paths[1]).unwrap();
        let error = disks.restore(&made, nobody).unwrap_err().to_string();
        assert!(error.starts_with(paths[1].to_str().unwrap()), "{error}");
        drop(disks);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_disk_that_is_filled_anew_has_the_room_of_the_one_before_and_none_is_left_where_that_is_too_little() {
        let place = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=3m", "tmpfs"]).arg(place.path()).output();
        if !mounted.is_ok_and(|mounted| mounted.status.success()) {
            return egret_needs::this_test_lacks("root for a file system");
        }
        // From now on it is gone with whoever has it open.
        let folder = File::open(place.path()).unwrap();
        assert!(Command::new("umount").arg("--lazy").arg(place.path()).status().unwrap().success());
        let plan = plan("type = 'file'\nsize = '2M'").disk;
        let path = PathBuf::from(format!("/proc/self/fd/{}/disk0", folder.as_raw_fd()));
        let disks = Disks {
            disks: vec![Disk::File(path.clone())],
            elsewhere: Default::default(),
            warnings: Vec::new(),
            _devices: Vec::new(),
            _places: Vec::new(),
        };
        let outgrown = || {
            let _ = fs::remove_file(&path);
            fill(&path, 2 << 20, 0).unwrap();
            let before = File::open(&path).unwrap();
            // As fio does.
            fs::remove_file(&path).unwrap();
            File::create_new(&path).unwrap().set_len(3 << 20).unwrap();
            before
        };
        let before = outgrown();
        let error = disks.restore(&plan, || drop(before)).unwrap_err().to_string();
        assert_eq!(error, "the disk had 2097152 bytes before, and 3145728 afterwards");
        assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 20);
        let _before = outgrown();
        let error = disks.restore(&plan, || ()).unwrap_err();
        assert_eq!((error.kind(), path.exists()), (io::ErrorKind::StorageFull, false), "{error}");
    }

    #[test]
    fn devices_of_other_machines_that_are_written_to_are_warned_of() {
        let warned = |head: &str, disk: &str, more: &str| {
            let text = format!("name = 'p'\ntitle = 't'\n{head}\n[disk]\n{disk}\n{more}");
            let plan: Plan = toml::from_str(&text).unwrap();
            let disks = Disks::make(&plan, Path::new("/"), &ProcessReaper::new().unwrap()).unwrap();
            assert!(disks.warnings.iter().all(|one| one.about == "not-preconditioned"), "{:?}", disks.warnings);
            let paths = |one: &Warning| one.text.split(" elsewhere").next().unwrap().to_owned();
            disks.warnings.iter().map(paths).collect::<Vec<_>>().concat()
        };
        let ssh = "[[subject]]\nname = 's'\nstack = 'ssh'\nclient = 'ssh:h'\ndisk = ['/dev/a', '/dev/b', '/srv/c']\n\
                   [[subject]]\nname = 'e'\nstack = 'egret'\n";
        let load = |rw: &str, on: &str| format!("{ssh}[[load]]\nrw = '{rw}'\nsubjects = ['{on}']\n");
        let null = "type = 'null'";
        assert_eq!(warned("", null, &load("randrw", "s")), "/dev/a, /dev/b");
        assert_eq!(warned("", null, &load("randread", "s")), "");
        assert_eq!(warned("", null, &load("randrw", "e")), "");
        assert_eq!(warned("", "type = 'null'\npreconditioned = true", &load("randrw", "s")), "");
        let host = "[[subject]]\nname = 's'\nstack = 'host'\n[[load]]\nrw = 'write'\n";
        assert_eq!(warned("hosts = ['x']", "type = 'device'\npath = '/dev/x'", host), "/dev/x");
        assert_eq!(warned("hosts = ['x']", "type = 'file'\npath = '/dev/shm'", host), "");
    }

    #[test]
    fn too_little_space_is_said_before_anything_is_made() {
        let place = tempfile::tempdir().unwrap();
        let error = check(&plan("type = 'file'\nsize = '4096T'"), place.path()).unwrap_err();
        assert!(error.starts_with("too little space in "), "{error}");
        assert_eq!(check(&plan("type = 'file'\nsize = '1M'"), place.path()), Ok(()));
    }

    #[test]
    fn disks_that_a_profile_has_no_room_for_are_as_large_as_the_plans_own_which_is_said() {
        let place = tempfile::tempdir().unwrap();
        let made = |disk: &str, asked: u64| {
            let mut plan = plan(disk);
            let before = plan.disk.size.replace(Bytes(asked));
            let said = make_room(&mut plan, before, place.path());
            (said, plan.disk.size)
        };
        let (own, far_too_much) = (Some(Bytes(2 << 20)), 4096 << 40);
        let (said, size) = made("type = 'file'\nsize = '2M'", far_too_much);
        let said = said.unwrap();
        assert!(said.starts_with("disks of 2M and not of the profile's 4096T: too little space in "), "{said}");
        assert_eq!((size, said.lines().count()), (own, 1));
        let (said, size) = made("type = 'file'", far_too_much);
        assert!(size.is_none() && said.unwrap().starts_with("disks of 256M and not of "));
        assert_eq!(made("type = 'file'\nsize = '2M'", 1 << 20), (None, Some(Bytes(1 << 20))));
        assert_eq!(made("type = 'null'\nsize = '2M'", far_too_much), (None, Some(Bytes(far_too_much))));
    }

    #[test]
    fn a_device_is_a_device() {
        let place = tempfile::NamedTempFile::new().unwrap();
        let path = place.path().display();
        let error = check(&plan(&format!("type = 'device'\npath = '{path}'")), Path::new("/")).unwrap_err();
        assert_eq!(error, format!("{path} is no block device; a disk of type 'file' makes a file"));
        let error = check(&plan("type = 'device'"), Path::new("/")).unwrap_err();
        assert_eq!(error, "a disk of type 'device' needs its path");
    }

    #[test]
    fn what_is_not_zero_at_its_ends_is_not_empty() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        assert!(is_empty(&mut file).unwrap());
        file.seek(SeekFrom::Start((8 << 20) - 512)).unwrap();
        file.write_all(b"EFI PART").unwrap();
        assert!(!is_empty(&mut file).unwrap());
    }
}
