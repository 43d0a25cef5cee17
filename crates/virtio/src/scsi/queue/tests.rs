//! What a queue does whose view of the units is older than what there is.

use std::sync::atomic::AtomicBool;
use std::task::Wake;

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

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_full_queue_looks_for_so_many_functions_a_turn_through_its_commands_and_for_each_again_when_one_was_popped() {
    const FUNCTIONS: usize = 4 * FUNCTIONS_A_TURN;
    let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, "guest").unwrap();
    add(&scsi, FIRST);
    let (mut queue, woken) = (scsi.request_queue(0, 64), Arc::new(Woken::default()));
    queue.set_waker(Some(Arc::clone(&woken).into()));
    let ended = Arc::default();
    for _ in 0..FUNCTIONS {
        queue.inbox.post(&Function::new(0, About::Unit(FIRST), Some(Abort::Task), &ended));
    }
    for popped in 0..3 {
        queue.enter(popped, 0, 0);
        let mut found = 0;
        while woken.0.swap(false, Ordering::Relaxed) || found == 0 {
            queue.resume(&GuestMemory::empty(), &mut Vec::new());
            queue.is_full(popped);
            let before = mem::replace(&mut found, queue.slots[usize::from(popped)].functions.len());
            assert!(found - before <= FUNCTIONS_A_TURN, "{before} {found}");
        }
        assert_eq!(found, FUNCTIONS);
    }
}
