//! Request by request, what virtio 1.3 says the driver is told.

mod device;
mod random;
mod space;

use std::sync::Arc;

use egret_disk::{Completion, Op, Request};
use egret_vring::memory::Buffers;
use egret_vring::ring::{Chain, DriverConfig, Piece};
use egret_vring::testing::{DATA, Guest, piece};
use rustix::io::Errno;

use super::*;
use crate::{Completed, Malformed, Next, RequestModel, RequestType, Status};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
/// Nobody wrote a status.
const UNTOUCHED: u8 = 0xee;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const F_FLUSH: u64 = 1 << 9;
const F_CONFIG_WCE: u64 = 1 << 11;

/// Where tests put a request's parts.
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 0x800;
const BUFFER: u64 = DATA + 0x1000;

const SECTORS: u64 = 1000;
/// The worker's index on its loop.
const SOURCE: u32 = 7;

pub fn config() -> BlkConfig {
    BlkConfig {
        capacity_bytes: SECTORS * SECTOR,
        logical_block_size: 512,
        physical_block_size: 4096,
        optimal_io_size: 64 << 10,
        num_queues: 4,
        queue_size: 128,
        read_only: false,
        serial: "egret-0001".into(),
        writethrough: false,
        discard: Some(DiscardLimits { max_sectors: 256, alignment: 8 }),
        write_zeroes: Some(WriteZeroesLimits { max_sectors: 512, may_unmap: true }),
    }
}

struct Disk {
    guest: Guest,
    blk: Arc<Blk>,
    model: BlkQueue,
    chain: Chain,
}

/// What became of a chain, and the status byte that the driver found.
#[derive(Debug)]
enum Outcome {
    Submitted(Request<Buffers>),
    Done(Completed, u8),
    Broken(Malformed),
}

impl Disk {
    fn new(config: BlkConfig) -> Self {
        let guest = Guest::new(DriverConfig { size: 64, packed: false, event_idx: false, indirect: None, base: 0 });
        let blk = Blk::new(config).unwrap();
        blk.set_features(blk.features()).unwrap();
        let model = blk.queue(guest.queue.size());
        Self { guest, blk, model, chain: Chain::new() }
    }

    fn header(&self, request: u32, sector: u64) -> Piece {
        self.guest.write(HEADER, &request.to_le_bytes());
        self.guest.write(HEADER + 4, &[0; 4]);
        self.guest.write(HEADER + 8, &sector.to_le_bytes());
        piece(HEADER, 16)
    }

    fn status(&self) -> Piece {
        self.guest.write(STATUS, &[UNTOUCHED]);
        piece(STATUS, 1)
    }

    fn begin(&mut self, readable: &[Piece], writable: &[Piece]) -> Outcome {
        self.guest.driver.add(readable, writable, 1).unwrap();
        self.guest.driver.publish();
        assert!(self.guest.queue.pop(&mut self.chain).unwrap());
        match self.model.begin(&self.guest.memory, &mut self.chain, SOURCE) {
            Ok(Next::Submit(_, request)) => Outcome::Submitted(request),
            Ok(Next::Complete(ended)) => {
                self.guest.queue.add_used(ended.head, ended.written);
                self.guest.queue.publish_used();
                assert_eq!(self.guest.driver.reap().unwrap().unwrap().written, ended.written);
                let [status] = self.guest.read(STATUS);
                Outcome::Done(ended, status)
            }
            Err(reason) => {
                self.guest.queue.abandon(self.chain.head());
                Outcome::Broken(reason)
            }
            Ok(Next::Wait) => panic!("nothing to wait for"),
        }
    }

    fn end(&mut self, request: Request<Buffers>, result: Result<(), Errno>) -> (Completed, u8) {
        let Request { token, buffers, .. } = request;
        assert_eq!(token.source(), SOURCE);
        let Next::Complete(ended) = self.model.end(&self.guest.memory, Completion { token, result, buffers }) else {
            panic!("not done")
        };
        self.guest.queue.add_used(ended.head, ended.written);
        self.guest.queue.publish_used();
        assert_eq!(self.guest.driver.reap().unwrap().unwrap().written, ended.written);
        let [status] = self.guest.read(STATUS);
        (ended, status)
    }

    /// A request with a header and `readable` and `writable` data around it.
    fn ask(&mut self, request: u32, sector: u64, readable: &[Piece], writable: &[Piece]) -> Outcome {
        let readable = [&[self.header(request, sector)], readable].concat();
        let writable = [writable, &[self.status()]].concat();
        self.begin(&readable, &writable)
    }

    /// A discard or write-zeroes of these segments: sector, sectors, flags.
    fn ask_ranges(&mut self, request: u32, segments: &[(u64, u32, u32)]) -> Outcome {
        for (at, (sector, sectors, flags)) in (BUFFER..).step_by(16).zip(segments) {
            self.guest.write(at, &sector.to_le_bytes());
            self.guest.write(at + 8, &sectors.to_le_bytes());
            self.guest.write(at + 12, &flags.to_le_bytes());
        }
        let data = piece(BUFFER, 16 * segments.len() as u32);
        self.ask(request, 0, &[data], &[])
    }
}

fn submitted(outcome: Outcome) -> Request<Buffers> {
    match outcome {
        Outcome::Submitted(request) => request,
        other => panic!("not submitted: {other:?}"),
    }
}

fn status(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Done(ended, status) => {
            let told = match ended.status {
                Status::Ok => OK,
                Status::IoError => IOERR,
                Status::Unsupported => UNSUPP,
            };
            assert_eq!(status, told);
            status
        }
        other => panic!("not done: {other:?}"),
    }
}

fn lengths(request: &Request<Buffers>) -> Vec<usize> {
    request.buffers.iter().map(|piece| piece.len()).collect()
}

#[test]
fn a_read_fills_the_data_and_its_written_length_is_data_and_status() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask(IN, 3, &[], &[piece(BUFFER, 4096), piece(BUFFER + 8192, 512)]));
    assert_eq!((request.op, request.offset, request.len), (Op::Read, 3 * 512, 4608));
    assert_eq!(lengths(&request), [4096, 512]);
    assert_eq!(disk.guest.queue.in_flight(), 1);
    assert_eq!(disk.guest.memory.scatter(&request.buffers, &[0x5a; 4608]), 4608);
    let (ended, told) = disk.end(request, Ok(()));
    assert_eq!(told, OK);
    assert_eq!((ended.written, ended.request_type, ended.bytes), (4609, RequestType::Read, 4608));
    assert_eq!(disk.guest.read::<512>(BUFFER + 8192), [0x5a; 512]);
    assert_eq!(disk.guest.queue.in_flight(), 0);
}

#[test]
fn a_read_that_fails_is_an_ioerr_of_one_byte() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask(IN, 0, &[], &[piece(BUFFER, 512)]));
    let (ended, told) = disk.end(request, Err(Errno::NOSPC));
    assert_eq!((told, ended.status, ended.written, ended.bytes), (IOERR, Status::IoError, 1, 512));
}

#[test]
fn a_write_takes_the_data_behind_the_header() {
    let mut disk = Disk::new(config());
    disk.guest.write(BUFFER, b"data");
    let request = submitted(disk.ask(OUT, 8, &[piece(BUFFER, 1024)], &[]));
    assert_eq!((request.op, request.offset, request.len), (Op::Write { fua: false }, 4096, 1024));
    let mut data = [0; 4];
    disk.guest.memory.gather(&request.buffers, &mut data);
    assert_eq!(&data, b"data");
    assert_eq!(request.token.slot(), 0);
    let (ended, told) = disk.end(request, Ok(()));
    assert_eq!((told, ended.written, ended.request_type, ended.bytes), (OK, 1, RequestType::Write, 1024));
}

#[test]
fn the_header_may_be_split_in_any_way_and_share_a_descriptor_with_the_data() {
    for cut in 1..16 {
        let mut disk = Disk::new(config());
        disk.header(OUT, 5);
        disk.guest.write(HEADER + 16, &[0x77; 512]);
        let status = disk.status();
        let readable = [piece(HEADER, cut), piece(HEADER + u64::from(cut), 16 + 512 - cut)];
        let request = submitted(disk.begin(&readable, &[status]));
        assert_eq!((request.offset, request.len, lengths(&request)), (5 * 512, 512, vec![512]));
        let mut data = [0; 512];
        disk.guest.memory.gather(&request.buffers, &mut data);
        assert_eq!(data, [0x77; 512]);
        disk.end(request, Ok(()));
    }
    let mut disk = Disk::new(config());
    disk.header(IN, 5);
    let bytes: Vec<Piece> = (0..16).map(|at| piece(HEADER + at, 1)).collect();
    let status = disk.status();
    let request = submitted(disk.begin(&bytes, &[piece(BUFFER, 512), status]));
    assert_eq!((request.offset, request.len), (5 * 512, 512));
    disk.end(request, Ok(()));
}

#[test]
fn the_status_is_the_last_writable_byte_wherever_it_lies() {
    let mut disk = Disk::new(config());
    let header = disk.header(IN, 0);
    disk.status();
    // The data ends right before the status, in one descriptor with it; and an empty descriptor is behind.
    let all = piece(STATUS - 64, 65);
    let request = submitted(disk.begin(&[header], &[piece(BUFFER, 512 - 64), all, piece(BUFFER, 0)]));
    assert_eq!(lengths(&request), [448, 64]);
    let (ended, told) = disk.end(request, Ok(()));
    assert_eq!((told, ended.written), (OK, 513));
}

#[test]
fn a_request_without_room_for_a_status_breaks_the_queue() {
    let mut disk = Disk::new(config());
    let header = disk.header(OUT, 0);
    assert!(matches!(disk.begin(&[header, piece(BUFFER, 512)], &[]), Outcome::Broken(Malformed::NoStatus)));
    assert!(matches!(disk.begin(&[header], &[piece(BUFFER, 0)]), Outcome::Broken(Malformed::NoStatus)));
}

#[test]
fn a_request_shorter_than_a_header_breaks_the_queue() {
    let mut disk = Disk::new(config());
    disk.header(IN, 0);
    let status = disk.status();
    let outcome = disk.begin(&[piece(HEADER, 15)], &[status]);
    assert!(matches!(outcome, Outcome::Broken(Malformed::ShortHeader { len: 15, needed: 16 })));
}

#[test]
fn a_range_past_the_end_is_an_ioerr() {
    let mut disk = Disk::new(config());
    let data = [piece(BUFFER, 1024)];
    for sector in [SECTORS - 1, SECTORS, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 63, u64::MAX - 1, u64::MAX] {
        assert_eq!(status(disk.ask(IN, sector, &[], &data)), IOERR);
        assert_eq!(status(disk.ask(OUT, sector, &data, &[])), IOERR);
    }
    let last = submitted(disk.ask(IN, SECTORS - 2, &[], &data));
    disk.end(last, Ok(()));
}

#[test]
fn data_that_is_no_multiple_of_a_sector_is_an_ioerr() {
    let mut disk = Disk::new(config());
    for len in [1, 511, 513, 1000] {
        assert_eq!(status(disk.ask(IN, 0, &[], &[piece(BUFFER, len)])), IOERR);
        assert_eq!(status(disk.ask(OUT, 0, &[piece(BUFFER, len)], &[])), IOERR);
    }
}

#[test]
fn no_data_at_all_is_done_without_the_disk() {
    let mut disk = Disk::new(config());
    assert_eq!(status(disk.ask(IN, 0, &[], &[])), OK);
    assert_eq!(status(disk.ask(OUT, SECTORS, &[], &[])), OK);
    assert_eq!(status(disk.ask(OUT, SECTORS + 1, &[], &[])), IOERR);
}

#[test]
fn a_read_only_disk_answers_writes_with_ioerr_and_still_reads() {
    let mut disk = Disk::new(BlkConfig { read_only: true, ..config() });
    assert_eq!(disk.blk.features() & 1 << 5, 1 << 5);
    assert_eq!(disk.blk.features() & (1 << 13 | 1 << 14), 0);
    assert_eq!(status(disk.ask(OUT, 0, &[piece(BUFFER, 512)], &[])), IOERR);
    assert_eq!(status(disk.ask_ranges(DISCARD, &[(0, 8, 0)])), UNSUPP);
    assert_eq!(status(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, 0)])), UNSUPP);
    let read = submitted(disk.ask(IN, 0, &[], &[piece(BUFFER, 512)]));
    disk.end(read, Ok(()));
}

#[test]
fn an_unknown_type_is_unsupported() {
    let mut disk = Disk::new(config());
    for request in [2, 3, 7, 9, 10, 12, 14, 15, 16, 26, 0x100, 0x8000_0002, u32::MAX] {
        assert_eq!(status(disk.ask(request, 0, &[], &[piece(BUFFER, 512)])), UNSUPP, "type {request}");
    }
}

#[test]
fn a_flush_goes_to_the_disk() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask(FLUSH, 0, &[], &[]));
    assert_eq!((request.op, request.offset, request.len), (Op::Flush, 0, 0));
    assert!(request.buffers.is_empty());
    let (ended, told) = disk.end(request, Err(Errno::IO));
    assert_eq!((told, ended.request_type, ended.written), (IOERR, RequestType::Flush, 1));
}

#[test]
fn types_as_older_drivers_and_firmware_spell_them_are_what_they_mean() {
    const BARRIER: u32 = 1 << 31;
    const FLUSH_OUT: u32 = 5;
    let data = [piece(BUFFER, 512)];
    let mut disk = Disk::new(config());
    for flush in [FLUSH_OUT, FLUSH | BARRIER, FLUSH_OUT | BARRIER] {
        assert_eq!(submitted(disk.ask(flush, 0, &[], &[])).op, Op::Flush, "type {flush}");
    }
    assert_eq!(submitted(disk.ask(IN | BARRIER, 0, &[], &data)).op, Op::Read);
    assert_eq!(submitted(disk.ask(OUT | BARRIER, 0, &data, &[])).op, Op::Write { fua: false });
    let mut disk = Disk::new(BlkConfig { read_only: true, ..config() });
    assert_eq!(status(disk.ask(OUT | BARRIER, 0, &data, &[])), IOERR);
}

#[test]
fn get_id_is_padded_with_nuls_and_not_terminated_when_full() {
    let mut disk = Disk::new(config());
    disk.guest.write(BUFFER, &[0xff; 32]);
    let Outcome::Done(ended, told) = disk.ask(GET_ID, 0, &[], &[piece(BUFFER, 20)]) else { panic!("not done") };
    assert_eq!((told, ended.written, ended.request_type), (OK, 21, RequestType::Other));
    assert_eq!(&disk.guest.read::<21>(BUFFER), b"egret-0001\0\0\0\0\0\0\0\0\0\0\xff");

    let serial: String = "01234567890123456789".into();
    let mut disk = Disk::new(BlkConfig { serial, ..config() });
    disk.guest.write(BUFFER, &[0xff; 32]);
    // In pieces, as any data may be.
    let pieces = [piece(BUFFER, 7), piece(BUFFER + 7, 13)];
    assert_eq!(status(disk.ask(GET_ID, 0, &[], &pieces)), OK);
    assert_eq!(&disk.guest.read::<21>(BUFFER), b"01234567890123456789\xff");
}

#[test]
fn a_discard_goes_to_the_disk_as_one_range() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask_ranges(DISCARD, &[(16, 256, 0)]));
    assert_eq!((request.op, request.offset, request.len), (Op::Discard, 16 * 512, 256 * 512));
    assert!(request.buffers.is_empty());
    let (ended, told) = disk.end(request, Ok(()));
    assert_eq!((told, ended.request_type, ended.bytes, ended.written), (OK, RequestType::Discard, 256 * 512, 1));
}

#[test]
fn write_zeroes_may_unmap_when_asked_to_and_able_to() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask_ranges(WRITE_ZEROES, &[(0, 512, 1)]));
    assert_eq!((request.op, request.len), (Op::WriteZeroes { unmap: true, fua: false }, 512 * 512));
    disk.end(request, Ok(()));
    let request = submitted(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, 0)]));
    assert_eq!(request.op, Op::WriteZeroes { unmap: false, fua: false });
    disk.end(request, Ok(()));

    let write_zeroes = Some(WriteZeroesLimits { max_sectors: 512, may_unmap: false });
    let mut disk = Disk::new(BlkConfig { write_zeroes, ..config() });
    let request = submitted(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, 1)]));
    assert_eq!(request.op, Op::WriteZeroes { unmap: false, fua: false });
    disk.end(request, Ok(()));
}

#[test]
fn unknown_flags_and_a_discard_with_unmap_are_unsupported() {
    let mut disk = Disk::new(config());
    for flags in [1, 2, 0x8000_0000, 3] {
        assert_eq!(status(disk.ask_ranges(DISCARD, &[(0, 8, flags)])), UNSUPP, "discard {flags:#x}");
    }
    for flags in [2, 3, 0x8000_0001] {
        assert_eq!(status(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, flags)])), UNSUPP, "write zeroes {flags:#x}");
        // Also where the range is wrong too.
        assert_eq!(status(disk.ask_ranges(WRITE_ZEROES, &[(SECTORS, 8, flags)])), UNSUPP);
    }
}

#[test]
fn more_segments_than_one_are_unsupported() {
    let mut disk = Disk::new(config());
    for request in [DISCARD, WRITE_ZEROES] {
        assert_eq!(status(disk.ask_ranges(request, &[(0, 8, 0), (8, 8, 0)])), UNSUPP);
    }
}

#[test]
fn a_range_that_is_too_long_or_outside_or_half_a_segment_is_an_ioerr() {
    let mut disk = Disk::new(config());
    for (request, max) in [(DISCARD, 256), (WRITE_ZEROES, 512)] {
        assert_eq!(status(disk.ask_ranges(request, &[(0, max + 1, 0)])), IOERR);
        assert_eq!(status(disk.ask_ranges(request, &[(SECTORS - 7, 8, 0)])), IOERR);
        assert_eq!(status(disk.ask_ranges(request, &[(u64::MAX, 8, 0)])), IOERR);
        assert_eq!(status(disk.ask_ranges(request, &[(0, u32::MAX, 0)])), IOERR);
        assert_eq!(status(disk.ask(request, 0, &[piece(BUFFER, 15)], &[])), IOERR);
        assert_eq!(status(disk.ask(request, 0, &[], &[])), IOERR);
        assert_eq!(status(disk.ask_ranges(request, &[(0, 0, 0)])), OK);
    }
}

#[test]
fn what_is_not_offered_is_unsupported() {
    let mut disk = Disk::new(BlkConfig { discard: None, write_zeroes: None, ..config() });
    assert_eq!(disk.blk.features() & (1 << 13 | 1 << 14), 0);
    assert_eq!(status(disk.ask_ranges(DISCARD, &[(0, 8, 0)])), UNSUPP);
    assert_eq!(status(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, 0)])), UNSUPP);
}

#[test]
fn writes_are_stable_at_once_when_the_driver_has_no_cache_to_flush() {
    let fua = |features: u64, writeback: Option<u8>, writethrough: bool| {
        let mut disk = Disk::new(BlkConfig { writethrough, ..config() });
        disk.blk.set_features(features).unwrap();
        if let Some(writeback) = writeback {
            disk.blk.write_config(32, &[writeback]).unwrap();
        }
        let write = submitted(disk.ask(OUT, 0, &[piece(BUFFER, 512)], &[])).op;
        let zeroes = submitted(disk.ask_ranges(WRITE_ZEROES, &[(0, 8, 0)])).op;
        match (write, zeroes) {
            (Op::Write { fua }, Op::WriteZeroes { fua: zeroes, .. }) if fua == zeroes => fua,
            other => panic!("not a write and zeroes alike: {other:?}"),
        }
    };
    // 5.2.6.2, the three conditions of a stable write.
    assert!(fua(0, None, false), "neither CONFIG_WCE nor FLUSH");
    assert!(!fua(F_FLUSH, None, false), "FLUSH alone");
    assert!(!fua(F_FLUSH | F_CONFIG_WCE, None, false));
    assert!(fua(F_FLUSH | F_CONFIG_WCE, Some(0), false), "writeback off");
    assert!(!fua(F_FLUSH | F_CONFIG_WCE, Some(1), false));
    // 5.2.5.2: CONFIG_WCE without FLUSH begins with writeback 0. What it turns on it could not flush.
    assert!(fua(F_CONFIG_WCE, None, false));
    assert!(fua(F_CONFIG_WCE, Some(1), false));
    // And what the operator asked for holds until the driver says otherwise.
    assert!(fua(F_FLUSH, None, true));
    assert!(fua(F_FLUSH | F_CONFIG_WCE, None, true));
    assert!(!fua(F_FLUSH | F_CONFIG_WCE, Some(1), true));
}

#[test]
fn the_cache_mode_that_a_driver_has_chosen_is_what_the_next_one_is_told_until_the_front_end_has_gone() {
    let told = |blk: &Blk| {
        let mut writeback = [0xff];
        blk.read_config(32, &mut writeback);
        writeback[0]
    };
    let features = F_FLUSH | F_CONFIG_WCE;
    for (writethrough, writeback) in [(false, 0), (true, 1)] {
        let blk = Blk::new(BlkConfig { writethrough, ..config() }).unwrap();
        assert_eq!(told(&blk), 1 - writeback);
        blk.set_features(features).unwrap();
        blk.write_config(32, &[writeback]).unwrap();
        // Drivers of firmware and of a system, which begin anew with or without a reset.
        for between in [0, F_FLUSH, F_CONFIG_WCE, features | EVENT_IDX] {
            blk.set_features(between).unwrap();
            let can_flush = between & F_FLUSH != 0;
            assert!(can_flush || blk.is_write_through(), "nobody would flush");
            assert_eq!(told(&blk), if between == F_CONFIG_WCE { 0 } else { writeback });
            for reset in [false, true] {
                if reset {
                    blk.reset();
                }
                blk.set_features(features).unwrap();
                assert_eq!((told(&blk), blk.is_write_through()), (writeback, writeback == 0), "after {between:#x}");
            }
        }
        blk.write_config(32, &[1 - writeback]).unwrap();
        assert_eq!((told(&blk), blk.is_write_through()), (1 - writeback, writeback == 1));
        blk.write_config(32, &[writeback]).unwrap();
        blk.forget_choices();
        assert_eq!((told(&blk), blk.is_write_through()), (1 - writeback, writeback == 1), "as configured");
    }
}

#[test]
fn features_that_were_not_offered_are_refused_and_change_nothing_and_those_that_were_taken_are_forgotten() {
    let blk = Blk::new(config()).unwrap();
    blk.set_features(F_FLUSH).unwrap();
    assert_eq!(blk.set_features(1 << 40), Err(DriverError::NotOffered(1 << 40)));
    assert_eq!(blk.acked.load(Ordering::Relaxed), F_FLUSH);
    blk.reset();
    assert_eq!(blk.acked.load(Ordering::Relaxed), 0, "the next driver has chosen nothing");
}

#[test]
fn a_change_of_capacity_holds_for_the_next_request() {
    let mut disk = Disk::new(config());
    assert_eq!(status(disk.ask(IN, SECTORS, &[], &[piece(BUFFER, 512)])), IOERR);
    disk.blk.resize(DiskKey(0), (SECTORS + 1) * SECTOR + 511);
    assert_eq!(disk.blk.sectors(), SECTORS + 1);
    let request = submitted(disk.ask(IN, SECTORS, &[], &[piece(BUFFER, 512)]));
    disk.end(request, Ok(()));
}

#[test]
#[should_panic(expected = "a completion is of a request that is out")]
fn a_completion_comes_once() {
    let mut disk = Disk::new(config());
    let request = submitted(disk.ask(FLUSH, 0, &[], &[]));
    let token = request.token;
    disk.end(request, Ok(()));
    disk.model.end(&disk.guest.memory, Completion { token, result: Ok(()), buffers: Buffers::default() });
}

#[test]
fn buffers_are_used_again() {
    let mut disk = Disk::new(config());
    for _ in 0..100 {
        let read = submitted(disk.ask(IN, 0, &[], &[piece(BUFFER, 512)]));
        disk.end(read, Ok(()));
        let write = submitted(disk.ask(OUT, 0, &[piece(BUFFER, 512)], &[]));
        disk.end(write, Ok(()));
    }
    assert_eq!(disk.guest.queue.in_flight(), 0);
}
