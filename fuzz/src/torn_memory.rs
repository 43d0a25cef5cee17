//! Memory whose file is truncated, grown and replaced while a ring in it is served.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::Chain;

use crate::blk_ring::{REGIONS, descriptor, device, end, ring, serve};
use crate::input::Input;

/// A program: what is written where, how long the files are, when the device looks, and when it gets another map.
///
/// # Panics
/// When the device does what it must not; and a process that dies of SIGBUS is what this is about.
pub fn torn_memory(data: &[u8]) {
    let mut input = Input(data);
    let mut files = REGIONS.map(|(_, len)| Region::anonymous(0, len).expect("memory").file);
    let mut memory = map(&files);
    let config = ring(&mut input);
    let at = config.queue(REGIONS[0].0);
    let mut queue = at.start(&memory).expect("a queue");
    let mut model = device(input.u8()).queue(config.size);
    let (mut chain, mut out, mut index) = (Chain::new(), Vec::new(), config.base);
    while !input.is_over() {
        match input.u8() % 8 {
            0 => {
                let (at, len) = (u64::from(input.u16() % 0x1000), usize::from(input.u8() % 64));
                put(&files, REGIONS[0].0 + at, input.take(len));
            }
            1 | 2 => descriptor(&mut |at, bytes| put(&files, at, bytes), &config, &mut input),
            3 | 4 => {
                if !config.packed {
                    index = index.wrapping_add(u16::from(input.u8() % 8));
                    put(&files, at.avail + 2, &index.to_le_bytes());
                }
                if !queue.is_truncated() {
                    serve(&mut queue, &mut model, &mut chain, &mut out);
                }
            }
            5 => end(&mut queue, &mut model, &mut out, input.u8()),
            6 => {
                let which = usize::from(input.u8() % 2);
                let len = u64::from(input.one_of(&[0_u16, 1, 0x1000, 0x1800, 0x2000, 0x4000, 0x8000]));
                files[which].set_len(len).expect("our own memory");
            }
            _ => {
                let which = usize::from(input.u8() % 2);
                files[which] = Region::anonymous(0, REGIONS[which].1).expect("memory").file;
                files.iter().zip(REGIONS).for_each(|(file, (_, len))| file.set_len(len).expect("our own memory"));
                memory = map(&files);
                // In flight is only what the old map has.
                while !out.is_empty() {
                    end(&mut queue, &mut model, &mut out, 0);
                }
                queue.publish_used();
                // A ring that the new map has not, or not whole, stays with the old one.
                let _ = queue.replace_memory(&memory);
            }
        }
        queue.publish_used();
    }
    while !out.is_empty() {
        end(&mut queue, &mut model, &mut out, 0);
    }
    assert_eq!(queue.in_flight(), 0, "every chain comes back");
}

fn map(files: &[File; 2]) -> Arc<GuestMemory> {
    let regions = files.iter().zip(REGIONS).map(|(file, (guest_addr, size))| {
        let file = file.try_clone().expect("a descriptor");
        Region { guest_addr, size, user_addr: guest_addr, file, offset: 0 }
    });
    Arc::new(regions.fold(GuestMemory::empty(), |memory, region| memory.with(region).expect("a map")))
}

/// Writes to the files, and not through a map, which the writer's own process would have to survive.
fn put(files: &[File; 2], at: u64, bytes: &[u8]) {
    for (file, (start, len)) in files.iter().zip(REGIONS) {
        if (start..start + len).contains(&at) {
            let room = (start + len - at).min(bytes.len() as u64) as usize;
            let known = file.metadata().expect("our own memory").len();
            // Writing behind the end would make the file whole again.
            if at - start + room as u64 <= known {
                file.write_all_at(&bytes[..room], at - start).expect("our own memory");
            }
        }
    }
}
