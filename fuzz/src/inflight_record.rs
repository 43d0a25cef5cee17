//! A record of what is in flight, which its front end scribbles over while it is kept, and hands to the next device.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use egret_disk::Request;
use egret_virtio::blk::BlkQueue;
use egret_vring::memory::{Buffers, GuestMemory, Region};
use egret_vring::ring::{Chain, Inflight, InflightConfig, Queue, QueueConfig, Record};

use crate::blk_ring::{REGIONS, descriptor, device, end, memory, ring, serve};
use crate::input::Input;

/// A program: what is written to the ring and to the record, when the device looks, and when it is replaced by another
/// that knows the record alone.
///
/// # Panics
/// When a device does what it must not.
pub fn inflight_record(data: &[u8]) {
    let mut input = Input(data);
    let memory = memory();
    let config = ring(&mut input);
    // Sometimes for fewer descriptors than the ring has.
    let queue_size = input.one_of(&[config.size, config.size, 32, 1]);
    let place = InflightConfig { queues: 1, queue_size, packed: config.packed };
    let file = Region::anonymous(0, place.bytes()).expect("memory").file;
    let kind = input.u8();
    let at = config.queue(REGIONS[0].0);
    let mut device = Device::start(at, &memory, &file, place, kind);
    let mut index = config.base;
    while !input.is_over() {
        match input.u8() % 8 {
            0 => {
                let (at, len) = (REGIONS[0].0 + u64::from(input.u16() % 0x1000), input.u8() % 64);
                memory.write(at, input.take(len.into()));
            }
            1 | 2 => descriptor(&mut |at, bytes| _ = memory.write(at, bytes), &config, &mut input),
            3 => {
                if !config.packed {
                    index = index.wrapping_add(u16::from(input.u8() % 8));
                    memory.write(at.avail + 2, &index.to_le_bytes());
                }
                device.serve();
            }
            4 => device.end(input.u8()),
            5 | 6 => {
                let (at, len) = (u64::from(input.u16()) % place.bytes(), u64::from(input.u8() % 32));
                let bytes = input.take(len.min(place.bytes() - at) as usize);
                file.write_all_at(bytes, at).expect("our own memory");
            }
            _ => {
                // Sometimes it ends what is in flight, and sometimes it is killed.
                if input.u8().is_multiple_of(2) {
                    device.drain();
                }
                device = Device::start(at, &memory, &file, place, kind);
            }
        }
        device.publish();
    }
    device.drain();
}

/// A device, if the record let it start.
struct Device(Option<Running>);

struct Running {
    queue: Queue,
    model: BlkQueue,
    chain: Chain,
    out: Vec<Request<Buffers>>,
}

impl Device {
    fn start(at: QueueConfig, memory: &Arc<GuestMemory>, file: &File, place: InflightConfig, kind: u8) -> Self {
        let started = at.start_recorded(memory, record(file, place));
        let running = |queue: Queue| {
            assert!(queue.in_flight() <= queue.size(), "more in flight than there can be");
            let model = device(kind).queue(queue.size());
            Running { queue, model, chain: Chain::new(), out: Vec::new() }
        };
        Self(started.ok().map(running))
    }

    fn serve(&mut self) {
        if let Some(Running { queue, model, chain, out }) = &mut self.0 {
            serve(queue, model, chain, out);
        }
    }

    fn end(&mut self, which: u8) {
        if let Some(Running { queue, model, out, .. }) = &mut self.0 {
            end(queue, model, out, which);
        }
    }

    fn publish(&mut self) {
        if let Some(running) = &mut self.0 {
            running.queue.publish_used();
        }
    }

    fn drain(&mut self) {
        while self.0.as_ref().is_some_and(|running| !running.out.is_empty()) {
            self.end(0);
            self.publish();
        }
        if let Some(Running { queue, .. }) = &self.0 {
            assert_eq!(queue.in_flight(), 0, "every chain comes back");
        }
    }
}

fn record(file: &File, place: InflightConfig) -> Option<Record> {
    let file = file.try_clone().expect("a descriptor");
    Inflight::map(file, 0, place.bytes(), place).expect("it is as long as it must be").queue(0)
}
