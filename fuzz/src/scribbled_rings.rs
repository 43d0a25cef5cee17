//! A ring that a second thread scribbles over while it is served.

use std::sync::atomic::{AtomicBool, Ordering};

use egret_vring::memory::GuestMemory;
use egret_vring::ring::{Chain, DriverConfig};

use crate::blk_ring::{REGIONS, descriptor, device, end, memory, ring, serve};
use crate::input::Input;

/// How often the device looks.
const LOOKS: u8 = 32;

/// A program for the thread that scribbles: where, and what. It runs again and again, while the device serves the ring.
/// What becomes of it depends on the moment, and no moment must be a bad one.
///
/// # Panics
/// When the device does what it must not.
pub fn scribbled_rings(data: &[u8]) {
    let mut input = Input(data);
    let memory = memory();
    let config = ring(&mut input);
    let at = config.queue(REGIONS[0].0);
    let mut queue = at.start(&memory).expect("a queue");
    let mut model = device(input.u8()).queue(config.size);
    let (mut chain, mut out) = (Chain::new(), Vec::new());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Over too when the device panics, or nobody would hear of it.
        let ends = Ends(&is_over);
        let scribbler = scope.spawn(|| {
            let mut index = config.base;
            while !is_over.load(Ordering::Relaxed) {
                let mut program = Input(input.0);
                while !program.is_over() && !is_over.load(Ordering::Relaxed) {
                    scribble(&memory, &config, at.avail, &mut index, &mut program);
                }
                if input.is_over() {
                    return;
                }
            }
        });
        for look in 0..LOOKS {
            serve(&mut queue, &mut model, &mut chain, &mut out);
            for _ in 0..out.len().min(usize::from(look % 4)) {
                end(&mut queue, &mut model, &mut out, look);
            }
            queue.publish_used();
            queue.arm_kicks();
        }
        drop(ends);
        // Its scope alone would not wait for all of it: a thread that is still on its way out looks like a leak.
        scribbler.join().expect("it only writes");
    });
    while !out.is_empty() {
        end(&mut queue, &mut model, &mut out, 0);
    }
    assert_eq!(queue.in_flight(), 0, "every chain comes back");
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn scribble(memory: &GuestMemory, config: &DriverConfig, available: u64, index: &mut u16, program: &mut Input<'_>) {
    match program.u8() % 4 {
        0 => {
            let (at, len) = (REGIONS[0].0 + u64::from(program.u16() % 0x1000), program.u8() % 64);
            memory.write(at, program.take(len.into()));
        }
        1 | 2 => descriptor(&mut |at, bytes| _ = memory.write(at, bytes), config, program),
        _ => {
            *index = index.wrapping_add(u16::from(program.u8() % 4));
            memory.write(available + 2, &index.to_le_bytes());
        }
    }
}
