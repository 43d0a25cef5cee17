//! What a queue does whose view of the units is older than what there is.

use egret_scsi::{Code, LogicalUnit, LunConfig};
use egret_vring::memory::Region;

use super::header::CDB;
use super::*;
use crate::scsi::{LunAddress, ScsiConfig};

const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };
const BESIDE: LunAddress = LunAddress { target: 0, lun: 1 };
/// LUN 7 of target 0, and that of REPORT LUNS: there is no unit.
const NOWHERE: [[u8; 8]; 2] = [[1, 0, 0x40, 7, 0, 0, 0, 0], [0xc1, 1, 0, 0, 0, 0, 0, 0]];

fn add(scsi: &Arc<Scsi>, at: LunAddress) {
    let config = LunConfig { capacity_bytes: 1 << 20, serial: "s".into(), ..LunConfig::default() };
    scsi.add(scsi.prepare(at, Arc::new(LogicalUnit::new(config).unwrap())).unwrap()).unwrap();
}

/// What the first unit has to tell.
fn news(scsi: &Scsi) -> Option<Code> {
    let lun = scsi.lun(FIRST).unwrap();
    let waker = Waker::noop();
    let task = Task { cdb: &[0; 6], nexus: &lun.nexus, luns: &[], data_in: 0, data_out: 0, lane: 0, waker };
    match lun.unit.begin(&mut Command::new(), &task, &&[][..]) {
        Step::Done(done) => done.sense.map(|sense| sense.code),
        step => panic!("{step:?}"),
    }
}

#[test]
fn who_is_given_a_list_of_units_that_has_changed_meanwhile_is_told_so() {
    let memory = GuestMemory::empty().with(Region::anonymous(0, 4096).unwrap()).unwrap();
    for (lun, changes) in
        [None, Some(NOWHERE[0]), Some(NOWHERE[1])].into_iter().flat_map(|lun| [(lun, false), (lun, true)])
    {
        let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, "guest").unwrap();
        add(&scsi, FIRST);
        add(&scsi, BESIDE);
        while news(&scsi).is_some() {}
        let mut queue = scsi.request_queue(0, 64);
        queue.slots[0].data_in = 255;
        // After the queue has looked, and before it answers.
        if changes {
            scsi.remove(BESIDE).unwrap();
        }
        let mut cdb = [0; CDB];
        (cdb[0], cdb[9]) = (REPORT_LUNS, 255);
        let header = Header { lun: lun.unwrap_or(FIRST.to_bytes()), tag: 0, cdb };
        match lun {
            Some(_) => drop(queue.begin_nowhere(&memory, 0, &header)),
            None => drop(queue.begin_other(&memory, RequestToken::new(0, 0), 0, &header)),
        }
        assert_eq!(news(&scsi), changes.then_some(Code::LUNS_CHANGED), "{lun:?}");
    }
}
