//! The map, region by region.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use super::*;

const PAGE: u64 = 4096;

/// A region of one byte value for each of its pages: its own number, counted from `first`.
fn numbered(guest_addr: u64, pages: u64, first: u8) -> Region {
    let mut region = Region::anonymous(guest_addr, pages * PAGE).unwrap();
    let bytes: Vec<u8> = (0..pages).flat_map(|page| [first + page as u8; PAGE as usize]).collect();
    rustix::io::pwrite(&region.file, &bytes, 0).unwrap();
    region.user_addr = guest_addr + 0x7000_0000;
    region
}

fn read<const N: usize>(memory: &GuestMemory, guest_addr: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    memory.read(guest_addr, &mut bytes).then_some(bytes)
}

fn refused(memory: &GuestMemory, region: Region) -> String {
    memory.with(region).unwrap_err().to_string()
}

#[test]
fn an_empty_map_has_nothing() {
    let memory = GuestMemory::empty();
    assert!(memory.slice(0, 1).is_none());
    assert!(memory.slice(u64::MAX, 1).is_none());
    assert!(!memory.iovecs(0, 1, &mut Vec::new()));
    assert_eq!(memory.guest_address(0), None);
    assert!(!memory.is_truncated());
}

#[test]
fn an_address_is_found_in_the_region_that_has_it() {
    let memory = GuestMemory::empty().with(numbered(0x10_0000, 2, 10)).unwrap();
    let memory = memory.with(numbered(0, 2, 20)).unwrap().with(numbered(0x20_0000, 1, 30)).unwrap();
    assert_eq!(memory.regions(), 3);
    assert_eq!(read(&memory, 0x10_0000 + PAGE - 1), Some([10, 11]));
    assert_eq!(read(&memory, 0), Some([20]));
    assert_eq!(read(&memory, 0x20_0000 + PAGE - 1), Some([30]));
    for outside in [2 * PAGE, 0xf_ffff, 0x10_0000 + 2 * PAGE, 0x20_0000 + PAGE, u64::MAX] {
        assert_eq!(read::<1>(&memory, outside), None, "{outside:#x}");
        assert!(memory.slice(outside, 1).is_none(), "{outside:#x}");
    }
}

#[test]
fn a_slice_lies_wholly_inside_one_region() {
    let memory = GuestMemory::empty().with(numbered(PAGE, 2, 0)).unwrap();
    assert_eq!(memory.slice(PAGE, 2 * PAGE as usize).unwrap().len(), 2 * PAGE as usize);
    assert!(memory.slice(PAGE, 2 * PAGE as usize + 1).is_none());
    assert!(memory.slice(3 * PAGE - 1, 2).is_none());
    assert!(memory.slice(PAGE - 1, 1).is_none());
    assert!(memory.slice(3 * PAGE - 1, usize::MAX).is_none());
}

#[test]
fn a_buffer_across_adjacent_regions_is_a_piece_of_each() {
    let memory = GuestMemory::empty().with(numbered(0, 1, 1)).unwrap().with(numbered(PAGE, 1, 2)).unwrap();
    let memory = memory.with(numbered(2 * PAGE, 1, 3)).unwrap();
    let mut pieces = Vec::new();
    assert!(memory.iovecs(PAGE - 8, PAGE as usize + 16, &mut pieces));
    assert_eq!(pieces.iter().map(IoVec::len).collect::<Vec<_>>(), [8, PAGE as usize, 8]);
    assert_eq!(iovecs::total(&pieces), PAGE + 16);
    assert_eq!(read(&memory, 2 * PAGE - 1), Some([2, 3]));
    assert!(memory.write(PAGE - 1, &[8, 9]));
    assert_eq!(read(&memory, PAGE - 1), Some([8, 9]));
    // One byte more than there is leaves what was there before.
    assert!(!memory.iovecs(2 * PAGE, PAGE as usize + 1, &mut pieces));
    assert_eq!(pieces.len(), 3);
}

#[test]
fn bytes_arrive_whole_whatever_their_alignment_and_length() {
    let memory = GuestMemory::empty().with(Region::anonymous(0, PAGE).unwrap()).unwrap();
    let bytes: Vec<u8> = (1..=40).collect();
    for at in 0..16 {
        for len in 0..=bytes.len() {
            assert!(memory.write(0, &[0; 64]));
            assert!(memory.write(at, &bytes[..len]));
            let mut found = [0xEE; 64];
            assert!(memory.read(0, &mut found));
            let (before, rest) = found.split_at(at as usize);
            assert!(before.iter().all(|&byte| byte == 0), "{len} bytes at {at}");
            assert_eq!(rest[..len], bytes[..len], "{len} bytes at {at}");
            assert!(rest[len..].iter().all(|&byte| byte == 0), "{len} bytes at {at}");
        }
    }
}

#[test]
fn zeroes_are_written_and_found_whatever_their_alignment_and_length() {
    let memory = GuestMemory::empty().with(Region::anonymous(0, PAGE).unwrap()).unwrap();
    let at = |addr| memory.slice(addr, 1).unwrap().base();
    for start in 0..9 {
        for len in (0..24).chain([63, 64, 65, 71, 72, 73, 80, 128, 130]) {
            assert!(memory.write(0, &[0xEE; 256]));
            // SAFETY: the page is mapped.
            unsafe { volatile::zero(at(start), len) };
            let mut found = [0; 256];
            assert!(memory.read(0, &mut found));
            let zeroes = start as usize..start as usize + len;
            assert!((0..256).all(|at| (found[at] == 0) == zeroes.contains(&at)), "{len} bytes at {start}: {found:x?}");
            // SAFETY: likewise.
            let is_zero = || unsafe { volatile::is_zero(at(start), len) };
            assert!(is_zero(), "{len} bytes at {start}");
            for other in zeroes {
                assert!(memory.write(other as u64, &[1]));
                assert!(!is_zero(), "{len} bytes at {start} with another at {other}");
                assert!(memory.write(other as u64, &[0]));
            }
        }
    }
}

#[test]
fn nothing_is_noted_behind_the_end_of_a_log() {
    let file = Region::anonymous(0, PAGE).unwrap().file;
    let log = DirtyLog::map(&file, 1, 2, &MemoryRules::default()).unwrap();
    let bits = |from: u64| {
        let mut bits = [0; 4];
        rustix::io::pread(&file, &mut bits, from).unwrap();
        bits
    };
    assert_eq!(log.end(), 16 * LOG_PAGE);
    log.mark(15 * LOG_PAGE, u64::MAX);
    assert_eq!(bits(0), [0, 0, 0x80, 0]);
    log.mark(16 * LOG_PAGE, 1);
    assert_eq!(bits(0), [0, 0, 0x80, 0]);
    log.mark(0, u64::MAX);
    assert_eq!(bits(0), [0, 0xff, 0xff, 0]);
}

#[test]
fn a_map_keeps_its_log_when_regions_come_and_go() {
    let file = Region::anonymous(0, PAGE).unwrap().file;
    let log = Arc::new(DirtyLog::map(&file, 0, 1, &MemoryRules::default()).unwrap());
    let memory = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap().logging(Some(log));
    let more = memory.with(numbered(PAGE, 1, 0)).unwrap();
    assert!(more.write(PAGE, &[1]));
    let fewer = more.without(0, PAGE, 0x7000_0000).unwrap();
    assert!(fewer.write(PAGE, &[1]) && fewer.log().is_some());
    assert!(fewer.logging(None).log().is_none());
    let mut bits = [0; 2];
    rustix::io::pread(&file, &mut bits, 0).unwrap();
    assert_eq!(bits, [2, 0]);
}

#[test]
fn pages_of_one_s_own_are_lent_again_and_again() {
    let mut buffers = Buffers::pages();
    assert!(buffers.is_own() && buffers.is_empty());
    assert_eq!((buffers.capacity(), buffers.bytes().len(), buffers.bytes_mut().len()), (0, 0, 0));
    buffers.resize(100);
    assert_eq!(buffers.bytes(), [0; 100]);
    assert!((buffers[0].base() as u64).is_multiple_of(PAGE), "as direct I/O likes them");
    assert!(buffers.capacity() >= 4096 && buffers.capacity().is_multiple_of(4096));
    buffers.bytes_mut().fill(7);
    assert_eq!(buffers.bytes_mut().len(), 100);
    let base = buffers[0].base();
    for len in [4096, 50, 4096, 100] {
        buffers.resize(len);
        assert_eq!((buffers[0].base(), buffers.bytes().len()), (base, len), "there is a page, and it stays");
        assert!(buffers.bytes()[..50].iter().all(|&byte| byte == 7), "they hold what they held");
    }
    buffers.resize(4097);
    assert_eq!((&buffers.bytes()[..100], &buffers.bytes()[100..]), (&[7; 100][..], &[0; 3997][..]));
    assert!(buffers.capacity() >= 8192);
    buffers.bytes_mut()[4096] = 9;
    buffers.resize(12);
    assert!(buffers.capacity() >= 8192, "what there is stays");
    buffers.resize(4097);
    assert_eq!(buffers.bytes()[4096], 9, "also behind where the list ended");
    buffers.resize(12);

    let lent = Lent::of_pages(buffers);
    assert_eq!(lent.iter().map(IoVec::len).collect::<Vec<_>>(), [12]);
    let back = lent.into_pages();
    assert_eq!(back.bytes(), [7; 12]);
    let none = Lent::of_pages(Buffers::default()).into_pages();
    assert!(none.is_empty() && !none.is_own());

    let mut bytes = Buffers::own(vec![5; 3], Vec::new());
    assert_eq!((bytes.bytes().len(), bytes.bytes_mut().len(), bytes.capacity()), (0, 0, 0), "these are no pages");
    assert!(bytes.is_own());
    assert_eq!(back.into_parts().1, None);
}

#[test]
#[should_panic(expected = "its memory goes along")]
fn what_goes_along_is_lent_as_pages_only_if_it_is_pages() {
    Lent::of_pages(Buffers::own(vec![0; 3], Vec::new()));
}

#[test]
fn a_region_may_begin_anywhere_in_its_file() {
    let mut region = numbered(0x1234, 3, 5);
    region.offset = PAGE + 100;
    region.size = PAGE;
    let memory = GuestMemory::empty().with(region).unwrap();
    assert_eq!(read(&memory, 0x1234), Some([6]));
    assert_eq!(read(&memory, 0x1234 + PAGE - 101), Some([6, 7]));
    assert_eq!(read::<2>(&memory, 0x1234 + PAGE - 1), None);
}

#[test]
fn a_region_may_end_where_its_address_space_does() {
    for change in [|r: &mut Region| r.guest_addr = u64::MAX - PAGE, |r: &mut Region| r.user_addr = u64::MAX - PAGE] {
        let mut region = numbered(0, 1, 4);
        change(&mut region);
        let (guest_addr, user_addr) = (region.guest_addr, region.user_addr);
        let memory = GuestMemory::empty().with(region).unwrap();
        assert_eq!(read(&memory, guest_addr + PAGE - 1), Some([4]));
        assert_eq!(memory.guest_address(user_addr + PAGE - 1), Some(guest_addr + PAGE - 1));
        assert_eq!(memory.guest_address(user_addr.wrapping_add(PAGE)), None);
    }
}

#[test]
fn a_map_ends_where_its_last_region_does() {
    let memory = GuestMemory::empty();
    assert_eq!(memory.end(), 0);
    let memory = memory.with(numbered(0x10_0000, 2, 0)).unwrap();
    assert_eq!(memory.end(), 0x10_0000 + 2 * PAGE);
    let memory = memory.with(numbered(0x1000, 3, 0)).unwrap();
    assert_eq!(memory.end(), 0x10_0000 + 2 * PAGE);
}

#[test]
fn front_end_addresses_become_guest_addresses() {
    let memory = GuestMemory::empty().with(numbered(0x1000, 1, 0)).unwrap().with(numbered(0x8000, 1, 0)).unwrap();
    assert_eq!(memory.guest_address(0x7000_1000), Some(0x1000));
    assert_eq!(memory.guest_address(0x7000_8fff), Some(0x8fff));
    assert_eq!(memory.guest_address(0x7000_9000), None);
    assert_eq!(memory.guest_address(0x1000), None);
}

#[test]
fn regions_that_cannot_be_are_refused_and_change_nothing() {
    let memory = GuestMemory::empty().with(numbered(0x1000, 2, 0)).unwrap();
    let with = |change: &dyn Fn(&mut Region)| {
        let mut region = numbered(0x10_0000, 1, 0);
        change(&mut region);
        refused(&memory, region)
    };
    assert!(with(&|r| r.size = 0).contains("has no length"));
    assert!(with(&|r| r.guest_addr = u64::MAX - 10).contains("overflows its guest addresses"));
    assert!(with(&|r| r.user_addr = u64::MAX - 10).contains("overflows its front-end addresses"));
    assert!(with(&|r| r.offset = u64::MAX - 10).contains("overflows its file"));
    assert!(with(&|r| r.offset = i64::MAX as u64).contains("overflows its file"));
    assert!(with(&|r| r.size = PAGE + 1).contains("needs a file of 0x1001 bytes, its file has 0x1000"));
    assert!(with(&|r| r.offset = 1).contains("needs a file of 0x1001"));
    for overlapping in [0x1000, 0x1001, 0xfff, 0x2fff, 0x1] {
        assert!(with(&|r| r.guest_addr = overlapping).contains("overlaps the one at 0x1000"), "{overlapping:#x}");
    }
    assert_eq!(memory.regions(), 1);
    memory.with(numbered(0, 1, 0)).unwrap().with(numbered(0x3000, 1, 0)).unwrap();
}

#[test]
fn a_region_is_removed_by_exactly_its_numbers() {
    let memory = GuestMemory::empty().with(numbered(0x1000, 1, 1)).unwrap().with(numbered(0x8000, 1, 2)).unwrap();
    assert!(matches!(memory.without(0x1000, 2 * PAGE, 0x7000_1000), Err(MemoryError::Unknown { .. })));
    assert!(matches!(memory.without(0x1000, PAGE, 0x7000_0000), Err(MemoryError::Unknown { .. })));
    let less = memory.without(0x1000, PAGE, 0x7000_1000).unwrap();
    assert_eq!(read::<1>(&less, 0x1000), None);
    assert_eq!(read(&less, 0x8000), Some([2]));
    assert_eq!(read(&memory, 0x1000), Some([1]), "the old epoch still has it");
}

/// Whether a file with this inode is mapped into the process.
fn is_mapped(inode: u64) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode.to_string()))
}

#[test]
fn a_mapping_is_shared_by_epochs_and_goes_with_the_last() {
    let region = numbered(0x1000, 1, 1);
    let inode = region.file.metadata().unwrap().ino();
    let old = GuestMemory::empty().with(region).unwrap();
    let new = old.with(numbered(0x8000, 1, 2)).unwrap();
    assert_eq!(old.slice(0x1000, 1).unwrap().base(), new.slice(0x1000, 1).unwrap().base());
    let newer = new.without(0x1000, PAGE, 0x7000_1000).unwrap();
    drop(old);
    assert!(is_mapped(inode));
    drop(new);
    assert!(!is_mapped(inode));
    assert_eq!(newer.regions(), 1);
}

#[test]
fn pieces_of_another_map_are_not_touched() {
    let (ours, theirs) = (numbered(0, 1, 1), numbered(0, 1, 2));
    let ours = GuestMemory::empty().with(ours).unwrap();
    let theirs = GuestMemory::empty().with(theirs).unwrap();
    let piece = theirs.slice(0, 8).unwrap();
    assert!(theirs.holds(&piece) && !ours.holds(&piece));
    assert_eq!(ours.gather(&[piece], &mut [0; 8]), 0);
    assert_eq!(ours.scatter(&[piece], &[9; 8]), 0);
    assert_eq!(read(&theirs, 0), Some([2]));
    assert_eq!(theirs.scatter(&[piece, piece], &[9; 9]), 9);
    assert_eq!(theirs.gather(&[piece], &mut [0; 9]), 8, "as much as there is");
}

/// `len` bytes that are `skip` bytes behind where an iovec begins, wherever that is.
fn behind(iovec: IoVec, skip: usize, len: usize) -> IoVec {
    // SAFETY: no data is moved by it where the map does not hold it, which is what this is about.
    unsafe { IoVec::new(iovec.base().wrapping_add(skip), len) }
}

/// Four regions of two pages and of three, of which a map has only two at hand.
fn of_four_regions() -> GuestMemory {
    let map = GuestMemory::empty();
    (0..4).fold(map, |map, at| map.with(numbered(0x10_0000 * at, 2 + at % 2, 10 * at as u8)).unwrap())
}

#[test]
fn a_map_holds_what_is_wholly_inside_of_a_region() {
    let memory = of_four_regions();
    for at in 0..4 {
        let len = ((2 + at % 2) * PAGE) as usize;
        let all = memory.slice(0x10_0000 * at, len).unwrap();
        assert!(memory.holds(&all));
        assert!(memory.holds(&behind(all, len - 1, 1)));
        assert!(memory.holds(&behind(all, len - 1, 0)));
        assert!(!memory.holds(&behind(all, 0, len + 1)), "it ends behind region {at}");
        assert!(!memory.holds(&behind(all, 100, len - 99)), "it ends behind region {at}");
        assert!(!memory.holds(&behind(all, 0, usize::MAX)));
    }
    let alone = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    let all = alone.slice(0, PAGE as usize).unwrap();
    assert!(!alone.holds(&behind(all, PAGE as usize, 0)), "nothing, behind the end");
    assert!(!alone.holds(&behind(all, PAGE as usize, 1)));
    assert!(!alone.holds(&behind(all, usize::MAX, 1)), "the byte before");
}

#[test]
fn words_are_read_where_a_map_has_as_many_and_they_are_aligned() {
    let memory = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    let bytes: Vec<u8> = (1..=40).collect();
    assert!(memory.write(0, &bytes));
    let word = |at: u8| u64::from_le_bytes(std::array::from_fn(|byte| at + byte as u8));
    let at = |addr, len| memory.slice(addr, len).unwrap();
    assert_eq!(memory.words(&at(0, 16)), Some([word(1), word(9)]));
    assert_eq!(memory.words(&at(8, 40)), Some([word(9), word(17)]), "of more, the first");
    assert_eq!(memory.words::<2>(&at(0, 15)), None, "one byte too few");
    assert_eq!(memory.words::<2>(&at(0, 9)), None);
    assert_eq!(memory.words::<1>(&at(4, 16)), None, "between two words");
    let theirs = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    assert_eq!(theirs.words::<1>(&at(0, 8)), None, "of another map");
}

#[test]
fn bytes_go_behind_the_first_of_some_iovecs_and_come_from_there() {
    let memory = of_four_regions();
    let lens = [3, 0, 5, 1, 4];
    let total: usize = lens.iter().sum();
    // Apart from each other, and so that a byte too many would be seen.
    let places: Vec<_> = (0..).zip(lens).map(|(at, len)| (at % 4 * 0x10_0000 + at * 0x100, len)).collect();
    let iovecs: Vec<_> = places.iter().map(|&(at, len)| memory.slice(at, len).unwrap()).collect();
    let all: Vec<u8> = (1..=total as u8).collect();
    for skip in 0..=total + 1 {
        for len in 0..=total + 1 {
            assert_eq!(memory.scatter(&iovecs, &vec![0; total]), total);
            let bytes = vec![0xAA; len];
            let expected = len.min(total.saturating_sub(skip));
            assert_eq!(memory.scatter_after(&iovecs, skip, &bytes), expected, "{len} behind {skip}");
            let mut found = vec![0xEE; total];
            assert_eq!(memory.gather(&iovecs, &mut found), total);
            let written: Vec<_> = (0..total).map(|at| at >= skip && at < skip + expected).collect();
            assert!(found.iter().map(|&byte| byte == 0xAA).eq(written), "{len} behind {skip}: {found:x?}");

            assert_eq!(memory.scatter(&iovecs, &all), total);
            let mut found = vec![0xEE; len];
            assert_eq!(memory.gather_after(&iovecs, skip, &mut found), expected, "{len} behind {skip}");
            assert_eq!(found[..expected], all[skip.min(total)..][..expected], "{len} behind {skip}");
            assert!(found[expected..].iter().all(|&byte| byte == 0xEE), "{len} behind {skip}");
        }
    }
    let ends: Vec<_> = places.iter().map(|&(at, len)| read::<1>(&memory, at + len as u64)).collect();
    assert_eq!(ends, [0, 10, 20, 30, 0].map(|byte| Some([byte])));
}

#[test]
fn bytes_stop_at_an_iovec_that_is_of_another_map() {
    let ours = GuestMemory::empty().with(numbered(0, 1, 1)).unwrap();
    let theirs = GuestMemory::empty().with(numbered(0, 1, 2)).unwrap();
    let iovecs = [ours.slice(0, 4).unwrap(), theirs.slice(0, 4).unwrap(), ours.slice(8, 4).unwrap()];
    let mut found = [0xEE; 12];
    assert_eq!((ours.gather(&iovecs, &mut found), found[..5].to_vec()), (4, vec![1, 1, 1, 1, 0xEE]));
    assert_eq!(ours.scatter(&iovecs, &[9; 12]), 4);
    assert_eq!((read(&ours, 0), read(&theirs, 0)), (Some([9, 9, 9, 9, 1, 1, 1, 1, 1]), Some([2; 4])));
    // Likewise where it is skipped in part.
    assert_eq!(ours.gather_after(&iovecs, 6, &mut found), 0);
    assert_eq!(ours.scatter_after(&iovecs, 6, &[9; 12]), 0);
    assert_eq!((read(&ours, 8), read(&theirs, 0)), (Some([1; 4]), Some([2; 4])));
}

#[test]
fn pieces_are_narrowed_from_either_end() {
    let memory = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    let of = |lens: &[usize]| lens.iter().map(|&len| memory.slice(0, len).unwrap()).collect::<Vec<_>>();
    let lens = |pieces: &[IoVec]| pieces.iter().map(IoVec::len).collect::<Vec<_>>();
    let mut all = of(&[2, 1, 0]);
    assert_eq!(iovecs::take_last_byte(&mut all).unwrap().base(), memory.slice(0, 1).unwrap().base());
    assert_eq!(lens(&all), [2]);
    assert_eq!(iovecs::take_last_byte(&mut all).unwrap().base(), memory.slice(1, 1).unwrap().base());
    assert_eq!(lens(&all), [1]);
    assert!(iovecs::take_last_byte(&mut of(&[0, 0])).is_none());
    for (skip, left) in [(0, vec![4, 0, 6]), (1, vec![3, 0, 6]), (4, vec![6]), (9, vec![1]), (10, vec![]), (11, vec![])]
    {
        let mut rest = Vec::new();
        iovecs::append_after(&of(&[4, 0, 6]), skip, &mut rest);
        assert_eq!(lens(&rest), left, "{skip}");
    }
}

#[test]
fn a_range_of_bytes_is_the_same_pieces_whoever_asks() {
    let memory = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    // Apart from each other, with an empty one between and one at the end.
    let all = [(0x100, 4), (0x200, 0), (0x300, 6), (0x400, 0)].map(|(at, len)| memory.slice(at, len).unwrap());
    let bytes: Vec<_> = (0x100..0x104).chain(0x300..0x306).map(|at| memory.slice(at, 1).unwrap().base()).collect();
    let bytes_of = |pieces: &[(*mut u8, usize)]| -> Vec<_> {
        assert!(pieces.iter().all(|&(_, len)| len > 0));
        pieces.iter().flat_map(|&(base, len)| (0..len).map(move |at| base.wrapping_add(at))).collect()
    };
    for skip in 0..=11 {
        for len in 0..=11 {
            let expected: Vec<_> = bytes.iter().copied().skip(skip).take(len).collect();
            let mut pieces = Vec::new();
            iovecs::pieces(&all, skip as u64, len as u64, |base, len| pieces.push((base, len)));
            assert_eq!(bytes_of(&pieces), expected, "{len} behind {skip}");
            let mut range = vec![all[1]];
            iovecs::append_range(&all, skip, len, &mut range);
            assert_eq!(range.remove(0).base(), all[1].base(), "what was there stays");
            let range: Vec<_> = range.iter().map(|piece| (piece.base(), piece.len())).collect();
            assert_eq!(range, pieces, "{len} behind {skip}");
        }
    }
}

#[test]
fn the_first_bytes_are_a_piece_where_they_are_in_the_first_iovec() {
    let memory = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    let all = [(0x100, 4), (0x200, 8)].map(|(at, len)| memory.slice(at, len).unwrap());
    let first = |len| iovecs::first(&all, len).map(|piece| (piece.base(), piece.len()));
    assert_eq!(first(3), Some((all[0].base(), 3)));
    assert_eq!(first(4), Some((all[0].base(), 4)));
    assert_eq!(first(5), None);
    assert!(iovecs::first(&[], 0).is_none());
    assert!(memory.slice(0, 0).unwrap().is_empty() && !all[0].is_empty());
}

#[test]
fn memory_that_is_taken_away_reads_as_zeroes_and_tears_the_map() {
    let truncated = numbered(0x1000, 3, 1);
    let file = truncated.file.try_clone().unwrap();
    let whole = GuestMemory::empty().with(numbered(0x10_0000, 1, 7)).unwrap();
    let memory = whole.with(truncated).unwrap();
    assert_eq!(read(&memory, 0x2000), Some([2]));
    assert!(!memory.is_truncated());

    rustix::fs::ftruncate(file.as_fd(), PAGE).unwrap();
    assert_eq!(read(&memory, 0x1000), Some([1]), "what is left is the guest's");
    assert!(!memory.is_truncated(), "nobody has noticed yet");
    assert_eq!(read(&memory, 0x2000), Some([0; 16]));
    assert!(memory.is_truncated());
    assert!(memory.write(0x3000, &[5; 100]), "writes go to nobody");
    assert_eq!(read(&memory, 0x3000), Some([5; 100]));
    assert_eq!(read(&memory, 0x1000), Some([0]), "with one page all of the region is gone");

    assert!(!whole.is_truncated(), "a map without that region is as good as ever");
    assert!(!memory.without(0x1000, 3 * PAGE, 0x7000_1000).unwrap().is_truncated());
    drop(memory);
    // The slot of the truncated region serves the next one.
    let next = GuestMemory::empty().with(numbered(0, 1, 3)).unwrap();
    assert!(!next.is_truncated());
}

/// How many mappings the process has at `addresses`.
fn mappings_at(addresses: std::ops::Range<usize>) -> usize {
    let hexadecimal = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().map(|line| line.split_once(' ').unwrap().0.split_once('-').unwrap());
    ranges.filter(|(start, end)| hexadecimal(start) < addresses.end && hexadecimal(end) > addresses.start).count()
}

#[test]
fn memory_that_is_gone_stays_one_mapping_however_much_of_it_is_touched() {
    const BYTES: u64 = 64 << 20;
    let region = Region::anonymous(0, BYTES).unwrap();
    let file = region.file.try_clone().unwrap();
    let memory = GuestMemory::empty().with(region).unwrap();
    let base = memory.slice(0, 1).unwrap().base() as usize;
    let addresses = base..base + BYTES as usize;
    assert_eq!(mappings_at(addresses.clone()), 1);
    rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for page in (0..BYTES / PAGE).step_by(2) {
                    assert_eq!(read(&memory, page * PAGE), Some([0]));
                }
            });
        }
    });
    assert!(memory.is_truncated());
    // It may have been joined with what is beside it, which splits nothing.
    assert_eq!(mappings_at(addresses), 1);
}

/// A region of so many MiB, its file, and where it is mapped.
fn large(mib: u64) -> (Arc<GuestMemory>, fs::File, std::ops::Range<usize>) {
    let region = Region::anonymous(0, mib << 20).unwrap();
    let file = region.file.try_clone().unwrap();
    let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
    let base = memory.slice(0, 1).unwrap().base() as usize;
    (memory, file, base..base + (mib << 20) as usize)
}

#[test]
fn a_page_that_is_gone_leaves_the_others_as_they_were_until_there_is_one_for_each_mebibyte() {
    let (memory, file, addresses) = large(8);
    assert!(memory.write(0, &[7; 8]));
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    for gone in 1..=8 {
        assert_eq!(read(&memory, 2 * gone * PAGE), Some([0]));
        assert!(memory.is_truncated());
        assert_eq!(read(&memory, 0), Some([7; 8]));
        // A page is between each two, and after the last.
        assert_eq!(mappings_at(addresses.clone()), 1 + 2 * gone as usize);
    }
    assert_eq!(read(&memory, 2 * 9 * PAGE), Some([0]));
    assert_eq!(read(&memory, 0), Some([0]), "now all of it is gone");
    assert_eq!(mappings_at(addresses), 1);
}

#[test]
fn pages_of_their_own_are_so_many_in_all_regions_together() {
    assert!(in_a_process_of_its_own("child_whose_regions_are_gone").contains("exit status: 0"));
}

#[test]
#[ignore = "nobody else in its process may have memory taken away; run by another test"]
fn child_whose_regions_are_gone() {
    let is_split = |pages: u64| {
        let (memory, file, addresses) = large(2048);
        rustix::fs::ftruncate(&file, 0).unwrap();
        (0..pages).for_each(|page| assert_eq!(read(&memory, 2 * page * PAGE), Some([0])));
        (mappings_at(addresses) > 1, memory)
    };
    for _ in 0..2 {
        // Four have all there are, and give them back.
        let regions = [2048; 4].map(is_split);
        assert!(regions.iter().all(|(is_split, _)| *is_split));
        assert!(!is_split(1).0);
    }
}

#[test]
fn huge_pages_that_are_gone_are_replaced_like_others() {
    use rustix::fs::{MemfdFlags, memfd_create};
    const HUGE: u64 = 2 << 20;
    let Ok(file) = memfd_create("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) else {
        egret_needs::this_test_lacks("a kernel with hugetlbfs");
        return;
    };
    rustix::fs::ftruncate(&file, 2 * HUGE).unwrap();
    let their_file = file.try_clone().unwrap();
    let region = Region { guest_addr: 0, size: HUGE, user_addr: 0, file, offset: PAGE };
    let memory = GuestMemory::empty().with(region).unwrap();
    rustix::fs::ftruncate(their_file, 0).unwrap();
    for page in 0..4 {
        assert_eq!(read(&memory, page * PAGE), Some([0; 8]));
        assert!(memory.write(page * PAGE, &[1; 8]));
    }
    assert!(memory.is_truncated());
}

#[test]
fn memory_of_others_that_is_gone_costs_a_map_one_look() {
    let neighbour = GuestMemory::empty().with(numbered(0, 1, 1)).unwrap();
    let region = numbered(0, 1, 1);
    let file = region.file.try_clone().unwrap();
    let memory = GuestMemory::empty().with(region).unwrap();
    rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
    assert_eq!(read(&memory, 0), Some([0]));
    let truncations = fault::truncations();
    assert!(!neighbour.is_truncated());
    assert!(neighbour.whole_at.load(Ordering::Relaxed) >= truncations, "it does not look again for this one");
    assert!(memory.is_truncated() && memory.is_truncated(), "which stays truncated");
}

#[test]
fn there_is_room_for_the_regions_of_many_exports() {
    let file = Region::anonymous(0, PAGE).unwrap().file;
    let region = || Region { guest_addr: 0, size: PAGE, user_addr: 0, file: file.as_fd(), offset: 0 };
    let map = || Mapping::new(region(), &MemoryRules::default()).unwrap();
    // Two epochs of 64 regions of 100 exports.
    let mappings: Vec<_> = (0..2 * 64 * 100).map(|_| map()).collect();
    rustix::fs::ftruncate(&file, 0).unwrap();
    let newest = mappings.last().unwrap();
    // SAFETY: a page is mapped there.
    assert_eq!(unsafe { newest.base().read_volatile() }, 0);
    assert!(newest.is_truncated() && !mappings[0].is_truncated());
}

/// Runs one test of this module in a process of its own, where it may die, and says which signal or code it ended with.
fn in_a_process_of_its_own(test: &str) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("memory::tests::{test}"), "--ignored"]).env("RUST_TEST_THREADS", "1");
    child.output().unwrap().status.to_string()
}

#[test]
fn a_fault_that_is_nobodys_ends_the_process_as_ever() {
    assert!(in_a_process_of_its_own("child_that_faults_elsewhere").contains("SIGBUS"));
}

#[test]
fn a_fault_that_is_nobodys_goes_to_the_handler_before_ours() {
    assert!(in_a_process_of_its_own("child_with_a_handler").contains("exit status: 42"));
    assert!(in_a_process_of_its_own("child_that_is_sent_a_signal").contains("exit status: 42"));
    assert!(in_a_process_of_its_own("child_that_is_sent_a_signal_as_a_process").contains("exit status: 42"));
}

#[test]
fn memory_that_the_system_does_not_grant_at_once_is_replaced_page_by_page() {
    assert!(in_a_process_of_its_own("child_that_may_have_little_memory").contains("exit status: 0"));
}

/// Has the kernel refuse this thread mappings of `bytes`, as if it granted memory strictly.
fn refuse_mappings_of(bytes: u32) {
    let load =
        |at| libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at };
    let unless = |k, jf| libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: 0, jf, k };
    let answer = |k| libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k };
    let refusal = libc::SECCOMP_RET_ERRNO | libc::ENOMEM as u32;
    // Of `seccomp_data`, the call's number and the low half of its second argument.
    let (number, len) = (0, 24 + u32::from(cfg!(target_endian = "big")) * 4);
    let mut filter =
        [load(number), unless(libc::SYS_mmap as u32, 3), load(len), unless(bytes, 1), answer(refusal), answer(ALLOW)];
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter are there for as long as the calls take.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

#[test]
#[ignore = "limits its process; run by another test"]
fn child_that_may_have_little_memory() {
    const BYTES: u64 = 1 << 30;
    let region = Region::anonymous(0, BYTES).unwrap();
    let file = region.file.try_clone().unwrap();
    let memory = GuestMemory::empty().with(region).unwrap();
    rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
    refuse_mappings_of(BYTES as u32);
    for at in [0, 1, BYTES - 8] {
        assert_eq!(read(&memory, at), Some([0; 8]));
    }
    assert!(memory.is_truncated());
}

/// Touches memory that no region watches and whose file is gone, beside a region.
fn fault_elsewhere() {
    let _watched = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    let file = Region::anonymous(0, PAGE).unwrap().file;
    let prot = rustix::mm::ProtFlags::READ;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), PAGE as usize, prot, rustix::mm::MapFlags::SHARED, &file, 0).unwrap()
    };
    rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
    // SAFETY: mapped just above; the fault is what this is about.
    unsafe { mapped.cast::<u8>().read_volatile() };
}

#[test]
#[ignore = "dies; run by another test"]
fn child_that_faults_elsewhere() {
    fault_elsewhere();
}

/// Installs a handler that exits with 42, before ours.
fn exit_on_a_fault() {
    extern "C" fn exit(_signal: libc::c_int) {
        // SAFETY: `_exit` may be called anywhere.
        unsafe { libc::_exit(42) }
    }
    // SAFETY: the handler only exits.
    unsafe { libc::signal(libc::SIGBUS, exit as *const () as usize) };
}

#[test]
#[ignore = "exits; run by another test"]
fn child_with_a_handler() {
    exit_on_a_fault();
    fault_elsewhere();
}

#[test]
#[ignore = "exits; run by another test"]
fn child_that_is_sent_a_signal() {
    exit_on_a_fault();
    let _watched = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    // SAFETY: no memory is involved.
    unsafe { libc::raise(libc::SIGBUS) };
}

/// By `kill`, whose code is 0, and not that of a signal to a thread. Any thread may take it, so this one waits to be ended.
#[test]
#[ignore = "exits; run by another test"]
fn child_that_is_sent_a_signal_as_a_process() {
    exit_on_a_fault();
    let _watched = GuestMemory::empty().with(numbered(0, 1, 0)).unwrap();
    // SAFETY: no memory is involved. The handler before ours ends the process from whichever thread takes the signal.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGBUS);
        libc::sleep(60);
    }
}

/// A file that is no shared memory, if the directory of this program is on a disk.
fn file_on_disk() -> Option<fs::File> {
    let path = std::env::current_exe().unwrap().with_extension(format!("memory-{}", std::process::id()));
    let file = fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    fs::remove_file(path).unwrap();
    file.set_len(PAGE).unwrap();
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    (rustix::fs::fstatfs(&file).unwrap().f_type as i64 != TMPFS_MAGIC).then_some(file)
}

fn of(file: fs::File) -> Region {
    Region { guest_addr: 0, size: PAGE, user_addr: 0, file, offset: 0 }
}

#[test]
fn what_lives_in_the_kernels_memory_is_guest_memory_and_other_files_only_where_they_are_allowed() {
    let shared = GuestMemory::empty();
    let any = GuestMemory::under(MemoryRules { files: MemoryFiles::Any, ..MemoryRules::default() });
    shared.with(Region::anonymous(0, PAGE).unwrap()).unwrap();
    let on_tmpfs = rustix::fs::open("/dev/shm", rustix::fs::OFlags::RDWR | rustix::fs::OFlags::TMPFILE, 0o600.into());
    match on_tmpfs.map(fs::File::from) {
        Ok(file) => {
            file.set_len(PAGE).unwrap();
            shared.with(of(file)).unwrap();
        }
        Err(e) => egret_needs::this_test_lacks(format_args!("a tmpfs at /dev/shm: {e}")),
    }
    let devices = ["/dev/zero", "/dev/null", "/proc/self/exe", "/proc/self/mem"];
    for file in devices.map(|path| fs::File::open(path).unwrap()).into_iter().chain(file_on_disk()) {
        let told = refused(&shared, of(file));
        assert!(told.contains("is not shared memory") && told.contains("memory-files=any"), "{told}");
    }
    let not_writable = fs::File::open("/proc/self/exe").unwrap();
    assert!(refused(&any, of(not_writable)).contains("cannot map"));
    if let Some(file) = file_on_disk() {
        any.with(of(file)).unwrap();
    }
}

/// A budget for an export within one for all.
fn budgets(whole: u64, part: u64) -> (Arc<MemoryBudget>, Arc<MemoryBudget>) {
    let limits = |bytes| MemoryLimits { bytes, regions: 3 };
    let whole = MemoryBudget::new(limits(whole), "daemon", "--memory-max");
    let part = whole.part(limits(part), "export", "its memory-max");
    (whole, part)
}

fn under(budget: &Arc<MemoryBudget>) -> GuestMemory {
    GuestMemory::under(MemoryRules { budget: Some(Arc::clone(budget)), ..MemoryRules::default() })
}

#[test]
fn no_more_is_mapped_than_a_budget_has_and_the_error_says_which() {
    let (whole, part) = budgets(3 * PAGE, 2 * PAGE);
    let memory = under(&part).with(numbered(0, 1, 0)).unwrap();
    assert_eq!(
        refused(&memory, numbered(PAGE, 2, 0)),
        "memory region at 0x1000: 8K more where 4K of 8K are mapped for the export; its memory-max sets the limit"
    );
    let other = whole.part(MemoryLimits { bytes: u64::MAX, regions: 3 }, "export", "its memory-max");
    let other = under(&other).with(numbered(0, 1, 0)).unwrap();
    assert_eq!(
        refused(&other, numbered(PAGE, 2, 0)),
        "memory region at 0x1000: 8K more where 8K of 12K are mapped for the daemon; --memory-max sets the limit"
    );
    // What was refused was not charged.
    let other = other.with(numbered(PAGE, 1, 0)).unwrap();
    assert_eq!(whole.used(), MemoryLimits { bytes: 3 * PAGE, regions: 3 });
    assert!(
        refused(&other, numbered(2 * PAGE, 1, 0)).contains("the daemon has 3 regions mapped, and may have no more")
    );
    assert_eq!(part.used(), MemoryLimits { bytes: PAGE, regions: 1 });
    let (_, none) = budgets(0, 0);
    let told = refused(&under(&none), numbered(0, 1, 0));
    assert!(told.contains("4K more where 0 bytes of 0 bytes are mapped for the export"), "{told}");
}

#[test]
fn a_budget_has_back_what_the_last_epoch_lets_go_of() {
    let (whole, part) = budgets(2 * PAGE, 2 * PAGE);
    let old = under(&part).with(numbered(0, 1, 0)).unwrap();
    let both = old.with(numbered(PAGE, 1, 0)).unwrap();
    assert_eq!(part.used(), MemoryLimits { bytes: 2 * PAGE, regions: 2 }, "what epochs share is charged once");
    let new = both.without(0, PAGE, 0x7000_0000).unwrap();
    drop(both);
    assert!(refused(&new, numbered(2 * PAGE, 1, 0)).contains("8K of 8K"), "the old epoch has it still");
    drop(old);
    drop(new.with(numbered(2 * PAGE, 1, 0)).unwrap());
    drop(new);
    assert_eq!(
        (whole.used(), part.used()),
        (MemoryLimits { bytes: 0, regions: 0 }, MemoryLimits { bytes: 0, regions: 0 })
    );
}

#[test]
fn a_region_that_cannot_be_mapped_is_not_charged() {
    let (_, part) = budgets(u64::MAX, u64::MAX);
    let memory = under(&part);
    let read_only = rustix::fs::memfd_create("read-only", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&read_only, PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&read_only, rustix::fs::SealFlags::WRITE).unwrap();
    assert!(refused(&memory, of(read_only.into())).contains("cannot map"));
    assert_eq!(part.used(), MemoryLimits { bytes: 0, regions: 0 });
}
