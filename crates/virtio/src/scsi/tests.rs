//! Request by request, what virtio 1.3 says the driver is told.

mod device;
mod hostile;
mod managed;
mod moved;
mod scratch;
mod shared;
mod told;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::Wake;

use egret_disk::{Completion, Op, Request};
use egret_scsi::{LogicalUnit, LunConfig};
use egret_vring::memory::Buffers;
use egret_vring::ring::{Chain, DriverConfig, Piece};
use egret_vring::testing::{DATA, Guest, piece};
use rustix::io::Errno;

use super::queue::TRIES_A_TURN;
use super::*;
use crate::{Completed, Malformed, Next};

const OK: u8 = 0;
const OVERRUN: u8 = 1;
const ABORTED: u8 = 2;
const BAD_TARGET: u8 = 3;
const RESET: u8 = 4;
const FAILURE: u8 = 9;
const SUCCEEDED: u8 = 10;
const REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

const HEADER: u64 = DATA;
const RESPONSE: u64 = DATA + 0x800;
const BUFFER: u64 = DATA + 0x1000;

/// The worker's index on its loop.
const SOURCE: u32 = 7;
const BLOCKS: u64 = 1000;

const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };
const FAR: LunAddress = LunAddress { target: 9, lun: 300 };

fn unit() -> Arc<LogicalUnit> {
    let config = LunConfig { capacity_bytes: BLOCKS * 512, serial: "s".into(), ..LunConfig::default() };
    Arc::new(LogicalUnit::new(config).unwrap())
}

/// A device with two units, whose power on is no news any more.
fn device() -> Arc<Scsi> {
    let scsi = Scsi::new(ScsiConfig { num_queues: 2, queue_size: 64 }, "guest").unwrap();
    for address in [FIRST, FAR] {
        scsi.add(scsi.prepare(address, unit()).unwrap()).unwrap();
    }
    scsi.set_features(FEATURES).unwrap();
    scsi
}

/// A queue and its driver.
struct Line {
    guest: Guest,
    model: Model,
    chain: Chain,
    woken: Arc<Woken>,
    /// Whether the worker says that it has shown what was done.
    shows: bool,
}

/// A waker that only says that it was woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// What the driver finds in a response.
#[derive(Debug)]
struct Told {
    response: u8,
    status: u8,
    residual: u32,
    /// Key, code, qualifier.
    sense: Option<(u8, u8, u8)>,
    ended: Completed,
}

impl Line {
    fn new(scsi: &Arc<Scsi>, index: u16) -> Self {
        Self::of_size(scsi, index, 64)
    }

    fn of_size(scsi: &Arc<Scsi>, index: u16, size: u16) -> Self {
        let guest = Guest::new(DriverConfig { size, packed: false, event_idx: false, indirect: None, base: 0 });
        let mut model = Arc::clone(scsi).model(index, guest.queue.size());
        let woken = Arc::<Woken>::default();
        model.set_waker(Some(Arc::clone(&woken).into()));
        Self { guest, model, chain: Chain::new(), woken, shows: true }
    }

    /// A request queue whose units have told their news.
    fn requests(scsi: &Arc<Scsi>) -> Self {
        let mut line = Self::new(scsi, 2);
        line.hear_news(scsi);
        line
    }

    fn hear_news(&mut self, scsi: &Arc<Scsi>) {
        for address in scsi.addresses() {
            while self.done(address, &[0], &[], &[]).status == CHECK_CONDITION {}
        }
    }

    fn offer(&mut self, readable: &[Piece], writable: &[Piece]) -> Result<Next, Malformed> {
        self.guest.driver.add(readable, writable, 1).unwrap();
        self.guest.driver.publish();
        assert!(self.guest.queue.pop(&mut self.chain).unwrap());
        let next = self.model.begin(&self.guest.memory, &mut self.chain, SOURCE);
        match &next {
            Ok(Next::Complete(ended)) => self.use_up(*ended),
            Ok(_) => {}
            Err(_) => self.guest.queue.abandon(self.chain.head()),
        }
        next
    }

    fn use_up(&mut self, ended: Completed) {
        self.guest.queue.add_used(ended.head, ended.written);
        self.guest.queue.publish_used();
        assert_eq!(self.guest.driver.reap().unwrap().unwrap().written, ended.written);
        self.show();
    }

    fn show(&mut self) {
        if self.shows {
            self.model.caught_up();
        }
    }

    fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::SeqCst)
    }

    /// A turn of the worker in which nothing came but what woke it, if anything did: what became of what had waited.
    fn resume(&mut self) -> Vec<Next> {
        let mut resumed = Vec::new();
        if self.woken.0.swap(false, Ordering::SeqCst) {
            self.model.resume(&self.guest.memory, &mut resumed);
        }
        for next in &resumed {
            if let Next::Complete(ended) = next {
                self.use_up(*ended);
            }
        }
        self.show();
        resumed
    }

    /// As [`resume`](Self::resume), where one chain goes on.
    #[track_caller]
    fn resumed(&mut self) -> Next {
        let mut resumed = self.resume();
        assert_eq!(resumed.len(), 1, "{resumed:?}");
        resumed.remove(0)
    }

    fn header(&self, lun: [u8; 8], tag: u64, cdb: &[u8]) -> Piece {
        let mut header = [0; 51];
        header[..8].copy_from_slice(&lun);
        header[8..16].copy_from_slice(&tag.to_le_bytes());
        header[19..19 + cdb.len()].copy_from_slice(cdb);
        self.guest.write(HEADER, &header);
        self.guest.write(RESPONSE, &[0xee; 108]);
        piece(HEADER, 51)
    }

    fn command(
        &mut self,
        at: LunAddress,
        tag: u64,
        cdb: &[u8],
        out: &[Piece],
        room: &[Piece],
    ) -> Result<Next, Malformed> {
        let header = self.header(at.to_bytes(), tag, cdb);
        self.offer(&[&[header], out].concat(), &[&[piece(RESPONSE, 108)], room].concat())
    }

    fn told(&self, ended: Completed) -> Told {
        let bytes: [u8; 108] = self.guest.read(RESPONSE);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let sense = (word(0) > 0).then(|| (bytes[14], bytes[24], bytes[25]));
        Told { response: bytes[11], status: bytes[10], residual: word(4), sense, ended }
    }

    #[track_caller]
    fn done(&mut self, at: LunAddress, cdb: &[u8], out: &[Piece], room: &[Piece]) -> Told {
        match self.command(at, 1, cdb, out, room).unwrap() {
            Next::Complete(ended) => self.told(ended),
            other => panic!("not done: {other:?}"),
        }
    }

    #[track_caller]
    fn submitted(
        &mut self,
        at: LunAddress,
        tag: u64,
        cdb: &[u8],
        out: &[Piece],
        room: &[Piece],
    ) -> (DiskKey, Request<Buffers>) {
        match self.command(at, tag, cdb, out, room).unwrap() {
            Next::Submit(disk, request) => (disk, request),
            other => panic!("nothing for the disk: {other:?}"),
        }
    }

    fn end(&mut self, request: Request<Buffers>, result: Result<(), Errno>) -> Next {
        let Request { token, buffers, .. } = request;
        assert_eq!(token.source(), SOURCE);
        let next = self.model.end(&self.guest.memory, Completion { token, result, buffers });
        if let Next::Complete(ended) = &next {
            self.use_up(*ended);
        }
        next
    }

    #[track_caller]
    fn ended(&mut self, request: Request<Buffers>, result: Result<(), Errno>) -> Told {
        match self.end(request, result) {
            Next::Complete(ended) => self.told(ended),
            other => panic!("not done: {other:?}"),
        }
    }
}

fn read10(lba: u32, blocks: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (lba.to_be_bytes(), blocks.to_be_bytes());
    [0x28, 0, a, b, c, d, 0, e, f, 0]
}

fn write10(lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = read10(lba, blocks);
    cdb[0] = 0x2a;
    cdb
}

#[test]
fn a_read_fills_the_driver_s_buffers_and_the_rest_of_them_is_residual() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let room = [piece(BUFFER, 1000), piece(BUFFER + 0x1000, 1000)];
    let (disk, request) = line.submitted(FAR, 1, &read10(5, 3), &[], &room);
    assert_eq!((disk, request.op, request.offset, request.len), (DiskKey(1), Op::Read, 5 * 512, 3 * 512));
    let lengths: Vec<_> = request.buffers.iter().map(|piece| piece.len()).collect();
    assert_eq!(lengths, [1000, 536]);
    assert_eq!(line.guest.queue.in_flight(), 1);
    let told = line.ended(request, Ok(()));
    assert_eq!((told.response, told.status, told.residual), (OK, GOOD, 2000 - 1536));
    assert_eq!(
        (told.ended.written, told.ended.request_type, told.ended.bytes),
        (108 + 1536, crate::RequestType::Read, 1536)
    );
    assert_eq!((line.guest.queue.in_flight(), told.ended.status), (0, crate::Status::Ok));
}

#[test]
fn a_read_that_has_the_cache_written_first_counts_as_a_read() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let mut cdb = read10(5, 1);
    cdb[1] = 0x08;
    let (_, flush) = line.submitted(FIRST, 1, &cdb, &[], &[piece(BUFFER, 512)]);
    assert_eq!((flush.op, flush.len), (Op::Flush, 0));
    let Next::Submit(_, read) = line.end(flush, Ok(())) else { panic!("it reads") };
    assert_eq!((read.op, read.offset, read.len), (Op::Read, 5 * 512, 512));
    let told = line.ended(read, Ok(()));
    assert_eq!((told.status, told.ended.request_type, told.ended.bytes), (GOOD, crate::RequestType::Read, 512));
}

#[test]
fn a_write_takes_what_follows_the_header_wherever_that_ends() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let header = line.header(FIRST.to_bytes(), 1, &write10(0, 1));
    // Header and data share a buffer, and the response is in pieces: framing is the driver's business.
    let readable = [piece(header.addr, 10), piece(header.addr + 10, 41 + 12), piece(BUFFER, 600)];
    let writable = [piece(RESPONSE, 5), piece(RESPONSE + 5, 103)];
    let Ok(Next::Submit(disk, request)) = line.offer(&readable, &writable) else { panic!("nothing for the disk") };
    assert_eq!((disk, request.op, request.len), (DiskKey(0), Op::Write { fua: false }, 512));
    let lengths: Vec<_> = request.buffers.iter().map(|piece| piece.len()).collect();
    assert_eq!(lengths, [12, 500]);
    let told = line.ended(request, Ok(()));
    assert_eq!((told.status, told.residual, told.ended.written), (GOOD, 100, 108));
}

#[test]
fn header_and_response_may_be_aligned_to_anything() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    for at in 0..16 {
        let Piece { addr: header, .. } = line.header(FAR.to_bytes(), 1, &read10(at, 1));
        let bytes: [u8; 51] = line.guest.read(header);
        line.guest.write(header + 0x100 + u64::from(at), &bytes);
        line.guest.write(RESPONSE, &[0xee; 200]);
        let response = RESPONSE + 1 + u64::from(at);
        let writable = [piece(response, 108), piece(BUFFER, 512 + at)];
        let Ok(Next::Submit(_, request)) = line.offer(&[piece(header + 0x100 + u64::from(at), 51)], &writable) else {
            panic!("nothing for the disk");
        };
        assert_eq!(request.offset, u64::from(at) * 512);
        line.ended(request, Ok(()));
        let bytes: [u8; 110] = line.guest.read(response - 1);
        assert_eq!(bytes[..9], [0xee, 0, 0, 0, 0, at as u8, 0, 0, 0]);
        assert_eq!((&bytes[9..109], bytes[109]), (&[0; 100][..], 0xee));
    }
}

#[test]
fn buffers_that_are_shorter_than_the_cdb_says_are_an_overrun() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let told = line.done(FIRST, &read10(0, 2), &[], &[piece(BUFFER, 1023)]);
    assert_eq!((told.response, told.residual), (OVERRUN, 1023));
    let told = line.done(FIRST, &write10(0, 2), &[piece(BUFFER, 1023)], &[]);
    assert_eq!((told.response, told.residual), (OVERRUN, 1023));
    // READ CAPACITY, whose data no disk has.
    line.guest.write(BUFFER, &[0xee; 8]);
    let told = line.done(FIRST, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], &[piece(BUFFER, 4)]);
    assert_eq!((told.response, told.residual, told.ended.written), (OVERRUN, 4, 108));
    assert_eq!(line.guest.read::<8>(BUFFER), [0xee; 8], "nothing is moved");
}

#[test]
fn data_in_both_directions_is_a_failure() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let told = line.done(FIRST, &read10(0, 1), &[piece(BUFFER, 512)], &[piece(BUFFER, 512)]);
    assert_eq!(told.response, FAILURE);
}

#[test]
fn a_target_without_units_is_a_bad_target_and_a_unit_that_is_not_there_is_scsi_s_business() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    assert_eq!(line.done(LunAddress { target: 1, lun: 0 }, &[0], &[], &[]).response, BAD_TARGET);
    let told = line.done(LunAddress { target: 9, lun: 0 }, &[0], &[], &[]);
    assert_eq!((told.response, told.status, told.sense), (OK, CHECK_CONDITION, Some((5, 0x25, 0))));
    for (cdb, out, room) in
        [(read10(0, 1), &[][..], &[piece(BUFFER, 512)][..]), (write10(0, 1), &[piece(BUFFER, 512)], &[])]
    {
        let told = line.done(LunAddress { target: 9, lun: 0 }, &cdb, out, room);
        assert_eq!((told.response, told.sense, told.residual), (OK, Some((5, 0x25, 0)), 512));
    }
    // REPORT LUNS of the target, through a unit that is not there and one that is; and of the device, through the one
    // that is for that.
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    for lun in [0, 300] {
        line.guest.write(BUFFER, &[0xee; 16]);
        line.done(LunAddress { target: 9, lun }, &report, &[], &[piece(BUFFER, 64)]);
        assert_eq!(line.guest.read::<16>(BUFFER), [0, 0, 0, 8, 0, 0, 0, 0, 0x41, 0x2c, 0, 0, 0, 0, 0, 0]);
    }
    let header = line.header([0xc1, 1, 0, 0, 0, 0, 0, 0], 1, &report);
    let Ok(Next::Complete(ended)) = line.offer(&[header], &[piece(RESPONSE, 108), piece(BUFFER, 64)]) else { panic!() };
    assert_eq!((line.told(ended).response, ended.written), (OK, 108 + 24));
    assert_eq!(line.guest.read::<8>(BUFFER + 16), FAR.to_bytes());
}

#[test]
fn sense_data_comes_with_the_response() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let told = line.done(FIRST, &read10(BLOCKS as u32, 1), &[], &[piece(BUFFER, 512)]);
    assert_eq!((told.status, told.sense, told.residual), (CHECK_CONDITION, Some((5, 0x21, 0)), 512));
    assert_eq!(told.ended.status, crate::Status::Unsupported);
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    let told = line.ended(request, Err(Errno::IO));
    assert_eq!((told.status, told.sense), (CHECK_CONDITION, Some((3, 0x11, 0))));
    assert_eq!(told.ended.status, crate::Status::IoError);
}

#[test]
fn data_that_no_disk_has_is_copied_behind_the_response() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let told = line.done(FIRST, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], &[piece(BUFFER, 3), piece(BUFFER + 3, 9)]);
    assert_eq!((told.residual, told.ended.written), (4, 108 + 8));
    assert_eq!(line.guest.read::<8>(BUFFER), [0, 0, 3, 0xe7, 0, 0, 2, 0]);
}

#[test]
fn a_command_of_several_operations_goes_on_until_it_is_done() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    line.guest.write(BUFFER, &[0; 1024]);
    let (_, read) = line.submitted(FIRST, 1, &compare_and_write(0), &[piece(BUFFER, 1024)], &[]);
    assert_eq!((read.op, read.buffers.len()), (Op::Read, 1));
    // Meanwhile nobody writes to the block.
    assert!(matches!(line.command(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
    assert!(line.resume().is_empty());
    let Next::Submit(_, write) = line.end(read, Ok(())) else { panic!("the write follows") };
    assert_eq!((write.op, write.len), (Op::Write { fua: false }, 512));
    let told = line.ended(write, Ok(()));
    assert_eq!((told.status, told.ended.request_type, told.ended.bytes), (GOOD, crate::RequestType::Write, 512));
    let Next::Submit(_, write) = line.resumed() else { panic!("its turn has come") };
    assert_eq!(line.ended(write, Ok(())).status, GOOD);
    assert_eq!(line.guest.queue.in_flight(), 0);
}

#[test]
fn what_is_read_after_it_was_written_counts_as_written_alone() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    line.guest.write(BUFFER, &[0; 1024]);
    // WRITE AND VERIFY of two blocks, by their bytes.
    let mut cdb = write10(0, 2);
    (cdb[0], cdb[1]) = (0x2e, 0x02);
    let (_, write) = line.submitted(FIRST, 1, &cdb, &[piece(BUFFER, 1024)], &[]);
    assert_eq!((write.op, write.len), (Op::Write { fua: true }, 1024));
    let Next::Submit(_, read) = line.end(write, Ok(())) else { panic!("it is verified") };
    assert_eq!((read.op, read.len), (Op::Read, 1024));
    let told = line.ended(read, Ok(()));
    assert_eq!((told.status, told.ended.request_type, told.ended.bytes), (GOOD, crate::RequestType::Write, 1024));
}

#[test]
fn a_comparison_that_finds_something_else_counts_as_a_read() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    line.guest.write(BUFFER, &[1; 1024]);
    let (_, read) = line.submitted(FIRST, 1, &compare_and_write(0), &[piece(BUFFER, 1024)], &[]);
    let told = line.ended(read, Ok(()));
    assert_eq!((told.status, told.ended.request_type), (CHECK_CONDITION, crate::RequestType::Read));
}

/// A queue with COMPARE AND WRITEs of these blocks, of which these are the reads, and `count` writes of block 0 that wait.
fn waiting_writes<const N: usize>(held: [u8; N], count: usize) -> (Line, [Request<Buffers>; N]) {
    let scsi = device();
    let mut line = Line::of_size(&scsi, 2, 1024);
    line.hear_news(&scsi);
    let held = held.map(|block| line.submitted(FIRST, 1, &compare_and_write(block), &[piece(BUFFER, 1024)], &[]).1);
    for _ in 0..count {
        assert!(matches!(line.command(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
    }
    (line, held)
}

fn compare_and_write(block: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[9], cdb[13]) = (0x89, block, 1);
    cdb
}

#[test]
fn commands_that_wait_are_tried_again_some_a_turn_until_all_have_been() {
    let (mut line, [held]) = waiting_writes([0], 2 * TRIES_A_TURN + 5);
    assert!(!line.is_woken());
    assert_eq!(line.ended(held, Err(Errno::IO)).status, CHECK_CONDITION);
    let mut turns = Vec::new();
    while line.is_woken() {
        let resumed = line.resume();
        turns.push(resumed.len());
        for next in resumed {
            let Next::Submit(_, write) = next else { panic!("nobody is in the way: {next:?}") };
            assert_eq!(line.ended(write, Ok(())).status, GOOD);
        }
    }
    assert_eq!(turns, [TRIES_A_TURN, TRIES_A_TURN, 5]);
    assert_eq!(line.guest.queue.in_flight(), 0);
}

#[test]
fn each_command_that_waits_has_its_turn_however_often_all_are_woken_meanwhile() {
    let (mut line, [_held, other, elsewhere, beside]) = waiting_writes([0, 5, 8, 9], 2 * TRIES_A_TURN);
    assert!(matches!(line.command(FIRST, 2, &write10(5, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
    line.ended(other, Err(Errno::IO));
    for wakes_all in [elsewhere, beside] {
        assert!(line.resume().is_empty(), "these wait in vain");
        line.ended(wakes_all, Err(Errno::IO));
    }
    let Next::Submit(_, write) = line.resumed() else { panic!("nobody is in its way") };
    assert_eq!(write.offset, 5 * 512);
    line.ended(write, Ok(()));
}

#[test]
fn a_request_without_header_or_room_for_its_response_breaks_the_queue() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let header = line.header(FIRST.to_bytes(), 1, &[0]);
    let short = line.offer(&[piece(header.addr, 50)], &[piece(RESPONSE, 108)]);
    assert!(matches!(short, Err(Malformed::ShortHeader { len: 50, needed: 51 })));
    assert!(matches!(line.offer(&[header], &[piece(RESPONSE, 107)]), Err(Malformed::NoStatus)));
}

#[test]
fn the_driver_may_choose_the_sizes_of_cdb_and_sense() {
    let scsi = device();
    scsi.write_config(20, &4u32.to_le_bytes()).unwrap();
    scsi.write_config(24, &16u32.to_le_bytes()).unwrap();
    let mut space = [0; 36];
    scsi.read_config(0, &mut space);
    assert_eq!(space[20..28], [4, 0, 0, 0, 16, 0, 0, 0]);
    assert_eq!(space[30..36], [255, 0, 0xff, 0x3f, 0, 0]);
    for (offset, bytes) in [(20, vec![0, 1, 0, 0]), (24, vec![15, 0, 0, 0]), (0, vec![1, 0, 0, 0]), (20, vec![1])] {
        assert!(scsi.write_config(offset, &bytes).is_err());
    }
    let mut line = Line::new(&scsi, 2);
    line.header(FIRST.to_bytes(), 1, &[0]);
    let Ok(Next::Complete(ended)) = line.offer(&[piece(HEADER, 19 + 16)], &[piece(RESPONSE, 16)]) else { panic!() };
    assert_eq!(ended.written, 16);
    let response = line.guest.read::<17>(RESPONSE);
    assert_eq!((&response[..4], &response[12..]), (&[4, 0, 0, 0][..], &[0x70, 0, 6, 0, 0xee][..]));
    scsi.reset();
    scsi.read_config(20, &mut space[..8]);
    assert_eq!(space[..8], [96, 0, 0, 0, 32, 0, 0, 0]);
}
