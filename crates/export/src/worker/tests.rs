//! What a worker does before its turn is over.

use std::sync::Arc;

use egret_disk::EngineOptions;
use egret_virtio::Device;
use egret_virtio::blk::{Blk, BlkConfig};
use egret_vring::memory::Region;
use egret_vring::ring::{Driver, DriverConfig, Piece};

use super::*;

const HEADER: u64 = 0x1_0000;
const ANSWERS: u64 = 0x2_0000;
/// GET_ID, which needs no disk.
const GET_ID: u32 = 8;

#[test]
fn a_driver_has_the_first_of_many_chains_before_the_others_have_ended() {
    let blk = BlkConfig {
        capacity_bytes: 1 << 20,
        logical_block_size: 512,
        physical_block_size: 512,
        optimal_io_size: 0,
        num_queues: 1,
        queue_size: 64,
        read_only: false,
        serial: "worker".into(),
        writethrough: false,
        discard: None,
        write_zeroes: None,
    };
    for (packed, left) in [(false, 4), (false, 0), (true, 4), (true, 0)] {
        let memory = Arc::new(GuestMemory::empty().with(Region::anonymous(0, 0x10_0000).unwrap()).unwrap());
        let base = if packed { 0x8000 } else { 0 };
        let config = DriverConfig { size: 64, packed, event_idx: true, indirect: None, base };
        let mut driver = Driver::new(&memory, 0, config).unwrap();
        let queue = driver.queue().start(&memory).unwrap();
        let model = Blk::new(blk.clone()).unwrap().model(0, 64);
        let info = QueueInfo { log: Arc::new(PeerLog::new("e")), index: 0, kickless: Kickless::default() };
        let errors = ErrorHandling::new("e", Default::default());
        let disks = Disks::new(Vec::new());
        let mut worker = QueueWorker::new(info, queue, model, disks, VringFds::default(), errors, Arc::default());
        let mut engines = EngineSet::new(EngineOptions::default());

        assert!(memory.write(HEADER, &[&GET_ID.to_le_bytes()[..], &[0; 12]].concat()));
        let many = u64::from(PUBLISH_AFTER) + left;
        for slot in 0..many {
            let answer = Piece { addr: ANSWERS + 64 * slot, len: 21 };
            driver.add(&[Piece { addr: HEADER, len: 16 }], &[answer], slot).unwrap();
        }
        driver.publish();
        worker.take_in(&mut engines, Nanos::ZERO);
        let mut reap = || std::iter::from_fn(|| driver.reap().unwrap()).count() as u64;
        assert_eq!(reap(), u64::from(PUBLISH_AFTER), "packed: {packed}, left: {left}");
        worker.notify(&mut Signals::new().unwrap());
        assert_eq!(reap(), left, "packed: {packed}, left: {left}");
        // What was published on the way is signalled then, whether something is left or not.
        assert_eq!(worker.counters.calls.get(), 1, "packed: {packed}, left: {left}");
    }
}
