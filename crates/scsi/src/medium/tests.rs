use std::task::Waker;

use rustix::io::Errno;

use super::*;
use crate::step::MAX_SCRATCH;
use crate::testing::{BLOCK, BLOCKS, Rig, cdb10, cdb12, cdb16, config};
use crate::{Command, LunConfig, Status};

const WRITE: Op = Op::Write { fua: false };
const FUA_WRITE: Op = Op::Write { fua: true };

fn rig() -> Rig {
    Rig::new(config())
}

/// Data that is not on the disk.
fn pattern(blocks: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| (i * 7 + i / BLOCK) as u8).collect()
}

fn out_of_range(lba: u64) -> Sense {
    Sense::illegal(Code::LBA_RANGE).with(lba)
}

fn compare_and_write(lba: u64, blocks: u8, flags: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x89, flags, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// SBC-4, READ commands.
#[test]
fn every_read_returns_the_blocks_it_names() {
    let mut rig = rig();
    for cdb in [
        &[0x08, 0, 0, 3, 2, 0][..],
        &cdb10(0x28, 0, 3, 2),
        &cdb10(0x28, 0x10, 3, 2),
        &cdb12(0xa8, 0, 3, 2),
        &cdb16(0x88, 0, 3, 2),
    ] {
        let reply = rig.run(cdb, &[], 2 * BLOCK);
        assert_eq!(reply.moved, 2 * BLOCK as u64);
        assert_eq!(reply.good(), rig.blocks(3, 2));
        assert_eq!(rig.ops, [(Op::Read, 3 * BLOCK as u64, 2 * BLOCK as u64)]);
    }
}

/// SBC-4, READ (10) command: what a cache has that is newer than the medium is written first.
#[test]
fn a_read_that_is_of_the_medium_has_the_cache_written_first_where_there_is_one() {
    let read = (Op::Read, 3 * BLOCK as u64, 2 * BLOCK as u64);
    let flush = (Op::Flush, 0, 0);
    for cdb in [&cdb10(0x28, 0x08, 3, 2)[..], &cdb12(0xa8, 0x18, 3, 2), &cdb16(0x88, 0x08, 3, 2)] {
        for (write_cache, read_only, ops) in
            [(true, false, &[flush, read][..]), (false, false, &[read]), (true, true, &[read])]
        {
            let mut rig = Rig::new(LunConfig { write_cache, read_only, ..config() });
            let reply = rig.run(cdb, &[], 2 * BLOCK);
            assert_eq!((reply.moved, reply.good()), (2 * BLOCK as u64, rig.blocks(3, 2).to_vec()));
            assert_eq!(rig.ops, ops, "{cdb:02x?}, cache: {write_cache}, read only: {read_only}");
        }
        // As long as something may be in it.
        let mut rig = rig();
        rig.unit.go_on_without_cache(rig.nexus.id());
        rig.unit.state().turned_off += 1;
        rig.run(cdb, &[], 2 * BLOCK).good();
        assert_eq!(rig.ops, [flush, read], "{cdb:02x?}");
        // What cannot be flushed is not read.
        rig.fails = Some((0, Errno::IO));
        assert_eq!(rig.run(cdb, &[], 2 * BLOCK).status, Status::CheckCondition);
        assert_eq!(rig.ops, [flush], "{cdb:02x?}");
    }
    // There it is a part of the address.
    let mut rig = rig();
    rig.run(&[0x08, 0x08, 0, 0, 1, 0], &[], BLOCK).sense();
    assert_eq!(rig.ops, []);
}

/// SBC-4, READ (6) command.
#[test]
fn read_6_of_no_blocks_is_of_256() {
    let mut rig = rig();
    assert_eq!(rig.run(&[0x08, 0, 0, 1, 0, 0], &[], 256 * BLOCK).good(), rig.blocks(1, 256));
}

/// SBC-4, WRITE commands.
#[test]
fn every_write_writes_the_blocks_it_names() {
    let data = pattern(2);
    for (cdb, op) in [
        (&[0x0a, 0, 0, 3, 2, 0][..], WRITE),
        (&cdb10(0x2a, 0, 3, 2), WRITE),
        (&cdb12(0xaa, 0, 3, 2), WRITE),
        (&cdb16(0x8a, 0, 3, 2), WRITE),
        (&cdb10(0x2a, 0x08, 3, 2), FUA_WRITE),
        (&cdb12(0xaa, 0x08, 3, 2), FUA_WRITE),
        (&cdb16(0x8a, 0x18, 3, 2), FUA_WRITE),
    ] {
        let mut rig = rig();
        assert_eq!(rig.run(cdb, &data, 0).moved, 2 * BLOCK as u64);
        assert_eq!(rig.blocks(3, 2), data);
        assert_eq!(rig.ops, [(op, 3 * BLOCK as u64, 2 * BLOCK as u64)]);
    }
}

/// SBC-4, caching mode page.
#[test]
fn without_the_write_cache_every_write_is_on_the_medium() {
    let mut rig = Rig::new(LunConfig { write_cache: false, ..config() });
    let (data, zeroes) = (pattern(1), vec![0; BLOCK]);
    rig.run(&[0x0a, 0x08, 0, 0, 1, 0], &data, 0).sense();
    rig.run(&[0x0a, 0, 0, 3, 1, 0], &data, 0).good();
    assert_eq!(rig.ops[0].0, FUA_WRITE);
    rig.run(&cdb10(0x41, 0, 3, 1), &data, 0).good();
    assert_eq!(rig.ops[0].0, FUA_WRITE);
    rig.run(&cdb10(0x41, 0, 3, 1), &zeroes, 0).good();
    assert_eq!(rig.ops, [(Op::WriteZeroes { unmap: false, fua: true }, 3 * BLOCK as u64, BLOCK as u64)]);
    let mut both = data.clone();
    both.splice(..0, zeroes);
    rig.run(&compare_and_write(3, 1, 0), &both, 0).good();
    assert_eq!(rig.ops[1].0, FUA_WRITE);
}

#[test]
fn what_is_not_on_the_medium_is_out_of_range_and_the_first_such_address_is_told() {
    let mut rig = rig();
    let last = BLOCKS as u32;
    for code in [0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x41] {
        assert_eq!(rig.run(&cdb10(code, 0, last, 1), &[], 0).sense(), out_of_range(1024), "{code:#x}");
        assert_eq!(rig.run(&cdb10(code, 0, last - 1, 2), &[], 0).sense(), out_of_range(1024), "{code:#x}");
        assert_eq!(rig.run(&cdb10(code, 0, last + 7, 0), &[], 0).sense(), out_of_range(1031), "{code:#x}");
    }
    for code in [0x88, 0x8a, 0x8e, 0x8f, 0x91, 0x93] {
        assert_eq!(rig.run(&cdb16(code, 0, u64::MAX, 2), &[], 0).sense(), out_of_range(u64::MAX), "{code:#x}");
    }
    assert_eq!(rig.run(&compare_and_write(1024, 1, 0), &[], 0).sense(), out_of_range(1024));
    assert_eq!(rig.ops, []);
}

/// SBC-4, TRANSFER LENGTH of READ (10).
#[test]
fn a_length_of_zero_is_good_and_does_nothing() {
    let mut rig = rig();
    let length_10 = |code, flags| cdb10(code, flags, BLOCKS as u32, 0);
    for cdb in [
        &length_10(0x28, 0)[..],
        &length_10(0x2a, 0),
        &length_10(0x2e, 0),
        &length_10(0x2f, 0),
        &length_10(0x2f, 0x02),
        &length_10(0x2f, 0x06),
        &compare_and_write(0, 0, 0),
    ] {
        assert_eq!(rig.run(cdb, &[], 0).good(), [], "{cdb:02x?}");
        assert_eq!(rig.ops, [], "{cdb:02x?}");
    }
}

#[test]
fn buffers_that_are_too_short_are_an_overrun_and_nothing_happens() {
    let mut rig = rig();
    let two = 2 * BLOCK as u64;
    assert_eq!(rig.overrun(&cdb10(0x28, 0, 0, 2), &[], 2 * BLOCK - 1), two);
    assert_eq!(rig.overrun(&cdb10(0x2a, 0, 0, 2), &pattern(1), 4096), two);
    assert_eq!(rig.overrun(&cdb10(0x2e, 0, 0, 2), &pattern(1), 0), two);
    assert_eq!(rig.overrun(&cdb10(0x2f, 0x02, 0, 2), &pattern(1), 0), two);
    assert_eq!(rig.overrun(&cdb10(0x2f, 0x06, 0, 2), &[1], 0), BLOCK as u64);
    assert_eq!(rig.overrun(&cdb10(0x41, 0, 0, 2), &[1], 0), BLOCK as u64);
    assert_eq!(rig.overrun(&compare_and_write(0, 1, 0), &pattern(2)[1..], 0), two);
    assert_eq!(rig.overrun(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 23], 0), 24);
    assert_eq!(rig.ops, []);
}

/// SBC-4, block limits VPD page.
#[test]
fn more_than_the_maximum_transfer_length_is_refused() {
    let mut rig = Rig::new(LunConfig { max_transfer_bytes: 4096, ..config() });
    rig.run(&cdb10(0x28, 0, 9, 8), &[], 4096).good();
    assert_eq!(rig.run(&[0x08, 0, 0, 0, 9, 0], &[], 8192).sense(), Sense::cdb(4));
    assert_eq!(rig.run(&cdb10(0x28, 0, 0, 9), &[], 8192).sense(), Sense::cdb(7));
    assert_eq!(rig.run(&cdb12(0xaf, 0, 0, 9), &[], 0).sense(), Sense::cdb(6));
    assert_eq!(rig.run(&cdb16(0x8a, 0, 0, 9), &pattern(9), 0).sense(), Sense::cdb(10));
}

/// SBC-4, RDPROTECT and WRPROTECT.
#[test]
fn protection_information_is_refused_because_there_is_none() {
    let mut rig = rig();
    for code in [0x28, 0x2a, 0x2e, 0x2f, 0x41] {
        assert_eq!(rig.run(&cdb10(code, 0x20, 0, 1), &pattern(1), BLOCK).sense(), Sense::cdb(1).bit(5));
    }
}

#[test]
fn nothing_writes_to_a_unit_that_is_write_protected() {
    let mut rig = Rig::new(LunConfig { read_only: true, ..config() });
    let protected = Sense::new(Key::DataProtect, Code::WRITE_PROTECTED);
    for cdb in [
        &[0x0a, 0, 0, 0, 1, 0][..],
        &cdb10(0x2a, 0, 0, 1),
        &cdb10(0x2e, 0, 0, 1),
        &cdb10(0x41, 0, 0, 1),
        &cdb16(0x93, 0x01, 0, 1),
        &compare_and_write(0, 1, 0),
        &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0],
    ] {
        assert_eq!(rig.run(cdb, &pattern(2), 0).sense(), protected, "{cdb:02x?}");
    }
    assert_eq!(rig.ops, []);
    rig.run(&cdb10(0x28, 0, 0, 1), &[], BLOCK).good();
}

#[test]
fn a_failure_of_the_disk_ends_the_command_and_lets_others_go_on() {
    let mut rig = rig();
    rig.fails = Some((0, Errno::IO));
    let unreadable = Sense::new(Key::MediumError, Code::READ_ERROR);
    assert_eq!(rig.run(&cdb10(0x28, 0, 0, 1), &[], BLOCK).sense(), unreadable);
    assert_eq!(rig.run(&compare_and_write(0, 1, 0), &pattern(2), 0).sense(), unreadable);
    let unwritable = Sense::new(Key::MediumError, Code::WRITE_ERROR);
    assert_eq!(rig.run(&cdb10(0x2a, 0, 0, 1), &pattern(1), 0).sense(), unwritable);
    rig.fails = Some((0, Errno::AGAIN));
    assert_eq!(rig.run(&cdb10(0x28, 0, 0, 1), &[], BLOCK).status, Status::Busy);
    // Only if every hold on the fence has been given back does this not wait.
    rig.fails = None;
    let same = [rig.blocks(0, 1), rig.blocks(0, 1)].concat();
    rig.run(&compare_and_write(0, 1, 0), &same, 0).good();
    rig.run(&cdb10(0x2a, 0, 0, 1), &pattern(1), 0).good();
}

/// SBC-4, VERIFY (10) command.
#[test]
fn verify_reads_all_of_the_medium_piece_by_piece() {
    let mut rig = rig();
    assert_eq!(rig.run(&cdb10(0x2f, 0, 0, BLOCKS as u16), &[], 0).moved, 0);
    let pieces: Vec<_> = (0..8).map(|i| (Op::Read, i * MAX_SCRATCH, MAX_SCRATCH)).collect();
    assert_eq!(rig.ops, pieces);
    rig.fails = Some((1, Errno::IO));
    assert_eq!(rig.run(&cdb16(0x8f, 0, 0, 1024), &[], 0).sense().code, Code::READ_ERROR);
}

/// SBC-4, VERIFY (10) command.
#[test]
fn verify_compares_with_the_data_given_and_names_the_block_that_differs() {
    let mut rig = rig();
    let mut data = rig.blocks(10, 600).to_vec();
    for cdb in [&cdb10(0x2f, 0x02, 10, 600)[..], &cdb12(0xaf, 0x02, 10, 600), &cdb16(0x8f, 0x12, 10, 600)] {
        assert_eq!(rig.run(cdb, &data, 0).moved, data.len() as u64);
    }
    data[599 * BLOCK + 5] ^= 1;
    let miscompare = Sense::new(Key::Miscompare, Code::MISCOMPARE).with(609);
    assert_eq!(rig.run(&cdb10(0x2f, 0x02, 10, 600), &data, 0).sense(), miscompare);
}

/// SBC-4, VERIFY (10) command.
#[test]
fn verify_with_bytchk_11b_compares_every_block_with_one() {
    let mut rig = rig();
    let block = pattern(1);
    for i in 100..200 {
        rig.disk[i * BLOCK..(i + 1) * BLOCK].copy_from_slice(&block);
    }
    assert_eq!(rig.run(&cdb10(0x2f, 0x06, 100, 100), &block, 0).moved, BLOCK as u64);
    let miscompare = Sense::new(Key::Miscompare, Code::MISCOMPARE).with(200);
    assert_eq!(rig.run(&cdb10(0x2f, 0x06, 100, 101), &block, 0).sense(), miscompare);
}

/// SBC-4, VERIFY (10) command.
#[test]
fn the_first_block_that_differs_is_named_wherever_in_its_block_the_difference_is() {
    const LONG: usize = 8192;
    let mut rig =
        Rig::new(LunConfig { logical_block_bytes: LONG as u32, physical_block_bytes: LONG as u32, ..config() });
    let block: Vec<u8> = (0..LONG).map(|i| (i % 251) as u8).collect();
    rig.disk.chunks_mut(LONG).for_each(|place| place.copy_from_slice(&block));
    // Near its end, where the next block is different near its beginning.
    rig.disk[3 * LONG + 8000] ^= 1;
    rig.disk[4 * LONG + 5] ^= 1;
    let miscompare = Sense::new(Key::Miscompare, Code::MISCOMPARE);
    for from in 0..=3 {
        assert_eq!(rig.run(&cdb10(0x2f, 0x06, from, 8), &block, 0).sense(), miscompare.with(3));
    }
    assert_eq!(rig.run(&cdb10(0x2f, 0x06, 4, 8), &block, 0).sense(), miscompare.with(4));
    rig.run(&cdb10(0x2f, 0x06, 5, 40), &block, 0).good();
}

/// SBC-4, VERIFY (10) command.
#[test]
fn the_reserved_byte_check_is_refused() {
    let mut rig = rig();
    let refused = Sense::cdb(1).bit(2);
    assert_eq!(rig.run(&cdb10(0x2f, 0x04, 0, 1), &pattern(1), 0).sense(), refused);
    assert_eq!(rig.run(&cdb10(0x2e, 0x04, 0, 1), &pattern(1), 0).sense(), refused);
    // One block for all has nothing to write.
    assert_eq!(rig.run(&cdb10(0x2e, 0x06, 0, 1), &pattern(1), 0).sense(), refused);
}

/// SBC-4, WRITE AND VERIFY (10) command.
#[test]
fn write_and_verify_writes_to_the_medium_and_reads_it_back() {
    let data = pattern(3);
    for cdb in [&cdb10(0x2e, 0, 5, 3)[..], &cdb12(0xae, 0x02, 5, 3), &cdb16(0x8e, 0x12, 5, 3)] {
        let mut rig = rig();
        assert_eq!(rig.run(cdb, &data, 0).moved, data.len() as u64);
        assert_eq!(rig.blocks(5, 3), data);
        let (offset, len) = (5 * BLOCK as u64, data.len() as u64);
        assert_eq!(rig.ops, [(FUA_WRITE, offset, len), (Op::Read, offset, len)]);
    }
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn compare_and_write_writes_if_and_only_if_all_is_equal() {
    let mut rig = rig();
    let mut data = rig.blocks(7, 2).to_vec();
    data.extend(pattern(2));
    assert_eq!(rig.run(&compare_and_write(7, 2, 0), &data, 0).moved, data.len() as u64);
    assert_eq!(rig.blocks(7, 2), pattern(2));
    let (offset, len) = (7 * BLOCK as u64, 2 * BLOCK as u64);
    assert_eq!(rig.ops, [(Op::Read, offset, len), (WRITE, offset, len)]);

    data[..2 * BLOCK].copy_from_slice(&pattern(2));
    data[BLOCK + 9] ^= 1;
    let miscompare = Sense::new(Key::Miscompare, Code::MISCOMPARE).with(BLOCK as u64 + 9);
    assert_eq!(rig.run(&compare_and_write(7, 2, 0), &data, 0).sense(), miscompare);
    assert_eq!(rig.blocks(7, 2), pattern(2));
    data[BLOCK + 9] ^= 1;
    rig.run(&compare_and_write(7, 2, 0x08), &data, 0).good();
    assert_eq!(rig.ops[1].0, FUA_WRITE);
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn compare_and_write_compares_piece_by_piece_and_writes_at_once() {
    let most = LunConfig { max_compare_and_write_blocks: 255, ..config() };
    let mut rig = Rig::new(most);
    let mut data = [rig.blocks(1, 255), &pattern(255)].concat();
    let (offset, len) = (BLOCK as u64, 255 * BLOCK as u64);
    let reads = [(Op::Read, offset, MAX_SCRATCH), (Op::Read, offset + MAX_SCRATCH, len - MAX_SCRATCH)];
    data[200 * BLOCK] ^= 1;
    let miscompare = Sense::new(Key::Miscompare, Code::MISCOMPARE).with(200 * BLOCK as u64);
    assert_eq!(rig.run(&compare_and_write(1, 255, 0), &data, 0).sense(), miscompare);
    assert_eq!(rig.ops, reads);
    data[200 * BLOCK] ^= 1;
    rig.run(&compare_and_write(1, 255, 0), &data, 0).good();
    assert_eq!(rig.ops, [reads[0], reads[1], (WRITE, offset, len)]);
    assert_eq!(rig.blocks(1, 255), pattern(255));
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn compare_and_write_of_too_much_is_refused_and_absent_where_the_limit_is_zero() {
    let mut rig = rig();
    assert_eq!(rig.run(&compare_and_write(0, 129, 0), &[], 0).sense(), Sense::cdb(13));
    let mut rig = Rig::new(LunConfig { max_transfer_bytes: 4096, ..config() });
    assert_eq!(rig.run(&compare_and_write(0, 9, 0), &[], 0).sense(), Sense::cdb(13));
    let mut rig = Rig::new(LunConfig { max_compare_and_write_blocks: 0, ..config() });
    let unknown = Sense::illegal(Code::OPERATION_CODE);
    assert_eq!(rig.run(&compare_and_write(0, 1, 0), &[], 0).sense(), unknown);
}

/// SBC-4, SYNCHRONIZE CACHE (10) command.
#[test]
fn synchronize_cache_flushes_whatever_the_range() {
    let mut rig = rig();
    for cdb in [&cdb10(0x35, 0, 0, 0)[..], &cdb10(0x35, 0x02, 5, 9), &cdb16(0x91, 0, 0, 0)] {
        rig.run(cdb, &[], 0).good();
        assert_eq!(rig.ops, [(Op::Flush, 0, 0)]);
    }
}

/// SBC-4, WRITE SAME (10) command.
#[test]
fn write_same_of_zeroes_writes_zeroes_as_the_disk_can() {
    let zeroes = vec![0; BLOCK];
    for (cdb, out, unmap) in [
        (&cdb10(0x41, 0, 8, 600)[..], &zeroes[..], false),
        (&cdb10(0x41, 0x08, 8, 600), &zeroes, true),
        (&cdb16(0x93, 0, 8, 600), &zeroes, false),
        (&cdb16(0x93, 0x01, 8, 600), &[], false),
        (&cdb16(0x93, 0x09, 8, 600), &[], true),
    ] {
        let mut rig = rig();
        assert_eq!(rig.run(cdb, out, 0).moved, out.len() as u64);
        assert!(rig.blocks(8, 600).iter().all(|b| *b == 0));
        let (op, k) = (Op::WriteZeroes { unmap, fua: false }, 1024);
        assert_eq!(rig.ops, [(op, 4 * k, 128 * k), (op, 132 * k, 128 * k), (op, 260 * k, 44 * k)]);
    }
}

/// SBC-4, WRITE SAME (10) command.
#[test]
fn write_same_of_anything_else_writes_it_over_and_over() {
    let mut rig = rig();
    let block = pattern(1);
    rig.run(&cdb16(0x93, 0x08, 8, 600), &block, 0).good();
    assert!(rig.blocks(8, 600).chunks(BLOCK).all(|b| b == block));
    let whole = (0..4).map(|i| (WRITE, 4096 + i * MAX_SCRATCH, MAX_SCRATCH));
    let rest = (WRITE, 4096 + 4 * MAX_SCRATCH, 600 * BLOCK as u64 - 4 * MAX_SCRATCH);
    assert_eq!(rig.ops, whole.chain([rest]).collect::<Vec<_>>());
}

/// SBC-4, WRITE SAME (10) command.
#[test]
fn write_same_of_no_blocks_or_too_many_or_without_unmapping_is_refused() {
    let mut rig = rig();
    let out = pattern(1);
    assert_eq!(rig.run(&cdb10(0x41, 0, 0, 0), &out, 0).sense(), Sense::cdb(7));
    assert_eq!(rig.run(&cdb16(0x93, 0, 0, 0), &out, 0).sense(), Sense::cdb(10));
    // ANCHOR.
    assert_eq!(rig.run(&cdb16(0x93, 0x18, 0, 1), &out, 0).sense(), Sense::cdb(1).bit(4));
    let mut rig = Rig::new(LunConfig { max_write_same_bytes: 4096, discard: None, ..config() });
    assert_eq!(rig.run(&cdb16(0x93, 0, 0, 9), &out, 0).sense(), Sense::cdb(10));
    rig.run(&cdb16(0x93, 0, 0, 8), &out, 0).good();
    assert_eq!(rig.run(&cdb16(0x93, 0x08, 0, 1), &out, 0).sense(), Sense::cdb(1).bit(3));
}

/// A parameter list for UNMAP, and its CDB.
fn unmap(ranges: &[(u64, u32)]) -> ([u8; 10], Vec<u8>) {
    let len = 16 * ranges.len() as u16;
    let mut list = [(len + 6).to_be_bytes(), len.to_be_bytes(), [0; 2], [0; 2]].concat();
    for (lba, blocks) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    let [high, low] = (list.len() as u16).to_be_bytes();
    ([0x42, 0, 0, 0, 0, 0, 0, high, low, 0], list)
}

/// SBC-4, UNMAP command.
#[test]
fn unmap_discards_every_range_in_turn_and_no_more_at_once_than_the_disk_takes() {
    let mut rig = rig();
    let (cdb, list) = unmap(&[(100, 200), (7, 0), (0, 1)]);
    assert_eq!(rig.run(&cdb, &list, 0).moved, list.len() as u64);
    let (op, k) = (Op::Discard, 1024);
    assert_eq!(rig.ops, [(op, 50 * k, 64 * k), (op, 114 * k, 36 * k), (op, 0, 512)]);
    // As much as one UNMAP may have, and as far as the medium goes.
    let (cdb, list) = unmap(&[(512, 256), (768, 256)]);
    rig.run(&cdb, &list, 0).good();
    assert_eq!(rig.ops, [256, 320, 384, 448].map(|at| (op, at * k, 64 * k)));
}

/// SBC-4, UNMAP command.
#[test]
fn an_unmap_list_that_is_wrong_anywhere_unmaps_nothing() {
    let mut rig = rig();
    let mut run = |ranges: &[(u64, u32)]| {
        let (cdb, list) = unmap(ranges);
        let reply = rig.run(&cdb, &list, 0);
        assert_eq!(rig.ops, []);
        reply
    };
    assert_eq!(run(&[(0, 1), (1023, 2)]).sense(), out_of_range(1024));
    assert_eq!(run(&[(0, 1); 5]).sense(), Sense::list(2));
    // Four ranges of 64 KiB are 512 blocks.
    assert_eq!(run(&[(0, 256), (256, 257)]).sense(), Sense::list(8 + 16 + 8));
    assert_eq!(run(&[]).good(), []);
    assert_eq!(run(&[(5, 0)]).good(), []);
}

/// SBC-4, UNMAP command.
#[test]
fn an_unmap_list_that_is_cut_off_is_a_parameter_list_length_error() {
    let mut rig = rig();
    let (mut cdb, mut list) = unmap(&[(0, 1), (2, 1)]);
    let wrong = Sense::illegal(Code::PARAMETER_LIST_LENGTH);
    for len in [1, 7, 8, 39] {
        cdb[8] = len;
        assert_eq!(rig.run(&cdb, &list, 0).sense(), wrong, "{len}");
    }
    cdb[8] = 0;
    rig.run(&cdb, &[], 0).good();
    assert_eq!(rig.ops, []);
    // The header, not the end of the list, says where the last whole descriptor ends.
    (cdb[8], list[3]) = (40, 31);
    rig.run(&cdb, &list, 0).good();
    assert_eq!(rig.ops, [(Op::Discard, 0, 512)]);
}

#[test]
fn without_discard_there_is_no_unmap() {
    let mut rig = Rig::new(LunConfig { discard: None, ..config() });
    let (cdb, list) = unmap(&[(0, 1)]);
    assert_eq!(rig.run(&cdb, &list, 0).sense(), Sense::illegal(Code::OPERATION_CODE));
}

const fn start_stop(bits: u8) -> [u8; 6] {
    [0x1b, 0, 0, 0, bits, 0]
}

/// SBC-4, START STOP UNIT command.
#[test]
fn a_unit_that_is_stopped_has_flushed_and_stays_ready_for_all_who_have_it() {
    let mut rig = rig();
    let other = rig.other(2);
    // The power conditions go up to 0xb, and with one of them the other bits mean nothing.
    for bits in [0, 0x10, 0x20, 0x30, 0x70, 0xa0, 0xb0, 0xb3] {
        for immediate in [0, 1] {
            let mut stop = start_stop(bits);
            stop[1] = immediate;
            rig.run(&stop, &[], 0).good();
            assert_eq!(rig.ops, [(Op::Flush, 0, 0)], "{stop:02x?}");
            for nexus in [rig.nexus.clone(), other.clone()] {
                rig.run_as(&nexus, &[0; 6], &[], 0).good();
                rig.run_as(&nexus, &cdb10(0x28, 0, 0, 1), &[], BLOCK).good();
                rig.run_as(&nexus, &cdb10(0x2a, 0, 0, 1), &pattern(1), 0).good();
            }
        }
    }
    for flushes_nothing in [1, 4, 0x34] {
        rig.run(&start_stop(flushes_nothing), &[], 0).good();
        assert_eq!(rig.ops, [], "{flushes_nothing:#x}");
    }
}

/// SPC-5, SEND DIAGNOSTIC command.
#[test]
fn the_default_self_test_passes_and_there_is_no_other() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    for flags in [0, 4, 0x14, 7] {
        rig.run(&[0x1d, flags, 0, 0, 0, 0], &[], 0).good();
    }
    // In the background, and with a list of parameters.
    assert_eq!(rig.run(&[0x1d, 0x20, 0, 0, 0, 0], &[], 0).sense(), Sense::cdb(1).bit(7));
    assert_eq!(rig.run(&[0x1d, 0x10, 0, 0, 4, 0], &[0; 4], 0).sense(), Sense::cdb(4).bit(2));
    rig.run(&start_stop(2), &[], 0).good();
    rig.run(&[0x1d, 4, 0, 0, 0, 0], &[], 0).good();
}

/// SBC-4, START STOP UNIT command.
#[test]
fn only_a_removable_medium_can_be_ejected_and_only_if_nobody_prevents_it() {
    let mut rig = rig();
    assert_eq!(rig.run(&start_stop(2), &[], 0).sense(), Sense::cdb(4).bit(1));
    assert_eq!(rig.run(&[0x1e, 0, 0, 0, 1, 0], &[], 0).sense(), Sense::illegal(Code::OPERATION_CODE));

    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    let other = rig.other(2);
    rig.run_as(&other, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
    assert_eq!(rig.run(&start_stop(2), &[], 0).sense(), Sense::illegal(Code::REMOVAL_PREVENTED));
    for ejects_nothing in [3, 0, 1, 0x12] {
        rig.run(&start_stop(ejects_nothing), &[], 0).good();
    }
    rig.run_as(&other, &[0x1e, 0, 0, 0, 0, 0], &[], 0).good();
    rig.run(&start_stop(2), &[], 0).good();
    let gone = Sense::new(Key::NotReady, Code::NO_MEDIUM);
    assert_eq!(rig.run(&[0; 6], &[], 0).sense(), gone);
    assert_eq!(rig.run(&[3, 0, 0, 0, 18, 0], &[], 18).good(), gone.to_bytes());
    rig.run(&[0x12, 0, 0, 0, 36, 0], &[], 36).good();
    rig.run(&start_stop(0), &[], 0).good();
    assert_eq!(rig.run(&start_stop(1), &[], 0).sense(), gone);
    rig.run(&start_stop(3), &[], 0).good();
    rig.run(&[0; 6], &[], 0).good();
    // Who has gone for good prevents nothing.
    rig.run_as(&other, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
    rig.unit.detach(other.id());
    rig.run(&start_stop(2), &[], 0).good();
}

#[test]
fn a_medium_stays_whose_removal_is_prevented_while_its_cache_is_written_for_it() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    let other = rig.other(2);
    let (cdb, mut command) = (start_stop(2), Command::new());
    let nexus = rig.nexus.clone();
    let task = Task { cdb: &cdb, nexus: &nexus, luns: &[], data_in: 0, data_out: 0, lane: 0, waker: Waker::noop() };
    let nothing: &[u8] = &[];
    assert_eq!(rig.unit.begin(&mut command, &task, &nothing), Step::Disk(DiskOp::FLUSH));
    rig.run_as(&other, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
    let ended = rig.unit.step(&mut command, Ok(()), &nothing, &nexus, Waker::noop());
    assert_eq!(ended, Sense::illegal(Code::REMOVAL_PREVENTED).into());
    rig.run(&[0; 6], &[], 0).good();
}

/// SPC-5, PREVENT ALLOW MEDIUM REMOVAL command.
#[test]
fn a_removal_that_is_prevented_stays_so_after_a_command_with_an_invalid_field() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    rig.run(&[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
    for prevent in [2, 3] {
        assert_eq!(rig.run(&[0x1e, 0, 0, 0, prevent, 0], &[], 0).sense(), Sense::cdb(4).bit(1));
        assert_eq!(rig.run(&start_stop(2), &[], 0).sense(), Sense::illegal(Code::REMOVAL_PREVENTED));
    }
}
