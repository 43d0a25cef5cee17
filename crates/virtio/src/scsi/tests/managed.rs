//! Task management.

use super::*;

/// What a function comes to, of which the first bytes of the response are looked at.
fn tmf(control: &mut Line, function: u32, at: LunAddress, tag: u64) -> Next {
    let mut request = [0; 24];
    request[4..8].copy_from_slice(&function.to_le_bytes());
    request[8..16].copy_from_slice(&at.to_bytes());
    request[16..].copy_from_slice(&tag.to_le_bytes());
    control.guest.write(HEADER, &request);
    control.offer(&[piece(HEADER, 24)], &[piece(RESPONSE, 1)]).unwrap()
}

#[track_caller]
fn done(control: &mut Line, function: u32, at: LunAddress, tag: u64) -> u8 {
    match tmf(control, function, at, tag) {
        Next::Done(ended) => {
            assert_eq!(ended.written, 1);
            control.guest.read::<1>(RESPONSE)[0]
        }
        other => panic!("not done: {other:?}"),
    }
}

const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_ACA: u32 = 2;
const CLEAR_TASK_SET: u32 = 3;
const NEXUS_RESET: u32 = 4;
const UNIT_RESET: u32 = 5;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

#[test]
fn a_function_ends_when_the_commands_that_it_ends_have_left() {
    for (function, response) in [
        (ABORT_TASK, ABORTED),
        (ABORT_TASK_SET, ABORTED),
        (CLEAR_TASK_SET, ABORTED),
        (UNIT_RESET, RESET),
        (NEXUS_RESET, RESET),
    ] {
        let scsi = device();
        let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
        let (_, request) = line.submitted(FIRST, 77, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
        assert_eq!(done(&mut control, QUERY_TASK, FIRST, 77), SUCCEEDED);
        assert_eq!(done(&mut control, QUERY_TASK, FIRST, 78), OK);
        assert_eq!(done(&mut control, QUERY_TASK_SET, FIRST, 0), SUCCEEDED);
        assert_eq!(done(&mut control, QUERY_TASK_SET, FAR, 0), OK);

        assert!(matches!(tmf(&mut control, function, FIRST, 77), Next::Wait));
        let token = crate::token_of(BASE, control.chain.head());
        assert!(matches!(control.model.retry(&control.guest.memory, token), Next::Wait));
        let told = line.ended(request, Ok(()));
        assert_eq!((told.response, told.residual), (response, 512));
        let Next::Done(ended) = control.model.retry(&control.guest.memory, token) else { panic!("it is over") };
        control.use_up(ended);
        assert_eq!((control.guest.read::<1>(RESPONSE)[0], control.model.in_flight()), (OK, 0));

        // What was reset says so, once.
        let told = line.done(FIRST, &[0], &[], &[]);
        let news = match function {
            UNIT_RESET => Some((6, 0x29, 3)),
            NEXUS_RESET => Some((6, 0x29, 7)),
            _ => None,
        };
        assert_eq!(told.sense, news);
        assert_eq!(line.done(FAR, &[0], &[], &[]).sense, None, "nobody else was meant");
    }
}

#[test]
fn a_function_is_not_complete_before_the_driver_has_been_shown_what_it_ended() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FIRST, 77, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    line.shows = false;
    line.ended(request, Ok(()));
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 77), Next::Wait));
    let token = crate::token_of(BASE, control.chain.head());
    assert!(matches!(control.model.retry(&control.guest.memory, token), Next::Wait));
    line.model.progress().unwrap().show();
    assert!(matches!(control.model.retry(&control.guest.memory, token), Next::Done(_)));
}

#[test]
fn a_command_that_waits_is_aborted_without_having_done_anything() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    line.guest.write(BUFFER, &[0; 1024]);
    let (_, read) = line.submitted(FIRST, 1, &compare_and_write, &[piece(BUFFER, 1024)], &[]);
    assert!(matches!(line.command(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
    let waiting = crate::token_of(BASE, line.chain.head());
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 2), Next::Wait));
    let Next::Done(ended) = line.model.retry(&line.guest.memory, waiting) else { panic!("it is aborted") };
    line.use_up(ended);
    assert_eq!(line.told(ended).response, ABORTED);
    let Next::Submit(_, write) = line.end(read, Ok(())) else { panic!("the other goes on") };
    assert_eq!(line.ended(write, Ok(())).status, GOOD);
}

#[test]
fn a_task_that_has_ended_is_no_task_and_what_is_not_there_is_said_not_to_be() {
    let scsi = device();
    let mut control = Line::new(&scsi, 0);
    assert_eq!(done(&mut control, ABORT_TASK, FIRST, 5), OK);
    assert_eq!(done(&mut control, CLEAR_ACA, FIRST, 0), REJECTED);
    assert_eq!(done(&mut control, 99, FIRST, 0), REJECTED);
    assert_eq!(done(&mut control, ABORT_TASK, LunAddress { target: 0, lun: 5 }, 5), INCORRECT_LUN);
    assert_eq!(done(&mut control, ABORT_TASK, LunAddress { target: 5, lun: 0 }, 5), BAD_TARGET);
}

#[test]
fn there_is_nothing_to_subscribe_to() {
    let scsi = device();
    let mut control = Line::new(&scsi, 0);
    for kind in [1u32, 2] {
        control.guest.write(HEADER, &[&kind.to_le_bytes()[..], &FIRST.to_bytes(), &[0xff; 4]].concat());
        control.guest.write(RESPONSE, &[0xee; 5]);
        let next = control.offer(&[piece(HEADER, 16)], &[piece(RESPONSE, 5)]);
        assert!(matches!(next, Ok(Next::Done(Ended { written: 5, .. }))));
        assert_eq!(control.guest.read::<5>(RESPONSE), [0, 0, 0, 0, OK]);
    }
}
