//! Task management.

use super::*;
use crate::scsi::control::FUNCTIONS;
use crate::scsi::queue::FUNCTIONS_A_TURN;

/// What a function comes to, of which the first bytes of the response are looked at.
fn tmf(control: &mut Line, function: u32, at: LunAddress, tag: u64) -> Next {
    let mut request = [0; 24];
    request[4..8].copy_from_slice(&function.to_le_bytes());
    request[8..16].copy_from_slice(&at.to_bytes());
    request[16..].copy_from_slice(&tag.to_le_bytes());
    control.guest.write(HEADER, &request);
    control.guest.write(RESPONSE, &[0xee]);
    control.offer(&[piece(HEADER, 24)], &[piece(RESPONSE, 1)]).unwrap()
}

/// What a function is answered that is asked while these queues run.
#[track_caller]
fn done(control: &mut Line, lines: &mut [&mut Line], function: u32, at: LunAddress, tag: u64) -> u8 {
    let mut next = tmf(control, function, at, tag);
    if matches!(next, Next::Wait) {
        lines.iter_mut().for_each(|line| assert!(line.resume().is_empty()));
        next = control.resumed();
    }
    match next {
        Next::Complete(ended) => {
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
        assert_eq!(done(&mut control, &mut [&mut line], QUERY_TASK, FIRST, 77), SUCCEEDED);
        assert_eq!(done(&mut control, &mut [&mut line], QUERY_TASK, FIRST, 78), OK);
        assert_eq!(done(&mut control, &mut [&mut line], QUERY_TASK_SET, FIRST, 0), SUCCEEDED);
        assert_eq!(done(&mut control, &mut [&mut line], QUERY_TASK_SET, FAR, 0), OK);

        assert!(matches!(tmf(&mut control, function, FIRST, 77), Next::Wait));
        assert!(line.resume().is_empty() && control.resume().is_empty());
        let told = line.ended(request, Ok(()));
        assert_eq!((told.response, told.residual), (response, 512));
        assert!(matches!(control.resumed(), Next::Complete(_)));
        assert_eq!((control.guest.read::<1>(RESPONSE)[0], control.guest.queue.in_flight()), (OK, 0));

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
    // One that ends after the function has come, and one that had ended before, of which the driver does not know.
    for ends_first in [false, true] {
        let (_, request) = line.submitted(FIRST, 77, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
        line.shows = false;
        if ends_first {
            line.ended(request, Ok(()));
            assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 77), Next::Wait));
            assert!(line.resume().is_empty());
        } else {
            line.shows = true;
            assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 77), Next::Wait));
            assert!(line.resume().is_empty());
            line.shows = false;
            assert_eq!(line.ended(request, Ok(())).response, ABORTED);
        }
        assert!(control.resume().is_empty());
        line.shows = true;
        line.show();
        assert!(matches!(control.resumed(), Next::Complete(_)));
    }
}

#[test]
fn a_command_that_waits_is_aborted_without_having_done_anything() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    line.guest.write(BUFFER, &[0; 1024]);
    let (_, read) = line.submitted(FIRST, 1, &compare_and_write, &[piece(BUFFER, 1024)], &[]);
    assert!(matches!(line.command(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
    let head = line.chain.head();
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 2), Next::Wait));
    assert!(!line.model.is_aborted(head) && line.model.waiting() == 1);
    assert!(line.resume().is_empty() && control.resume().is_empty(), "it is found at the end of the turn");
    assert!(line.model.is_aborted(head));
    let Next::Complete(ended) = line.resumed() else { panic!("it is aborted") };
    assert_eq!(line.told(ended).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
    let Next::Submit(_, write) = line.end(read, Ok(())) else { panic!("the other goes on") };
    assert_eq!(line.ended(write, Ok(())).status, GOOD);
    assert!(line.resume().is_empty());
}

#[test]
fn a_command_that_was_put_off_and_waits_to_go_on_does_so_in_its_turn_or_is_aborted() {
    let scsi = device();
    let (mut line, mut other) = (Line::requests(&scsi), Line::new(&scsi, 3));
    let mut control = Line::new(&scsi, 0);
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    line.guest.write(BUFFER, &[0; 1024]);
    other.guest.write(BUFFER, &[0; 1024]);
    for aborts in [false, true] {
        let (key, mut write) = line.submitted(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
        line.model.suspend(&mut write);
        let (_, read) = other.submitted(FIRST, 1, &compare_and_write, &[piece(BUFFER, 1024)], &[]);
        let readmitted = line.model.readmit(&line.guest.memory, key, write);
        assert!(matches!(readmitted, Next::Wait), "{readmitted:?}");
        assert_eq!(line.model.waiting(), 1);
        if aborts {
            assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 2), Next::Wait));
            assert!(other.resume().is_empty(), "it has none of it");
            assert!(line.resume().is_empty() && control.resume().is_empty(), "it is found at the end of the turn");
            let Next::Complete(ended) = line.resumed() else { panic!("it is aborted") };
            assert_eq!(line.told(ended).response, ABORTED);
            assert!(matches!(control.resumed(), Next::Complete(_)));
        }
        assert_eq!(line.model.waiting(), usize::from(!aborts));
        let Next::Submit(_, last) = other.end(read, Ok(())) else { panic!("it has compared") };
        assert_eq!(other.ended(last, Ok(())).status, GOOD);
        if !aborts {
            let Next::Submit(_, write) = line.resumed() else { panic!("its turn has come") };
            assert_eq!((write.len, line.ended(write, Ok(())).status), (512, GOOD));
        }
        assert_eq!(line.model.waiting(), 0);
    }
}

#[test]
fn a_queue_that_lets_go_of_its_commands_keeps_nobody_waiting() {
    let scsi = device();
    let (mut line, mut other) = (Line::requests(&scsi), Line::new(&scsi, 3));
    let mut control = Line::new(&scsi, 0);
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    line.guest.write(BUFFER, &[0; 1024]);
    let (_, read) = line.submitted(FIRST, 1, &compare_and_write, &[piece(BUFFER, 1024)], &[]);
    for line in [&mut line, &mut other] {
        assert!(matches!(line.command(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]), Ok(Next::Wait)));
        assert_eq!(line.model.waiting(), 1);
    }
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
    assert!(line.resume().is_empty());
    // The disk has not got it.
    drop(read);
    line.model.set_waker(None);
    line.model.let_go();
    assert_eq!(line.model.waiting(), 0);
    let Next::Submit(_, write) = other.resumed() else { panic!("its turn has come") };
    assert!(control.resume().is_empty() && control.model.left() == 1);
    assert_eq!(other.ended(write, Ok(())).status, GOOD);
}

#[test]
fn a_function_that_was_to_end_a_command_that_is_left_behind_is_not_done_and_one_that_asks_for_it_is_answered() {
    type Leave = fn(Line);
    let leave: [Leave; 2] = [
        |mut line| {
            line.model.set_waker(None);
            line.model.let_go();
        },
        // Nobody took it back from its loop, or it could not go on anywhere.
        drop,
    ];
    for leave in leave {
        let scsi = device();
        let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
        let (_, mut write) = line.submitted(FIRST, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
        line.model.suspend(&mut write);
        drop(write);
        assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
        assert!(line.resume().is_empty());
        // The queue has looked at the first, and at none of those.
        for (function, tag) in [(UNIT_RESET, 0), (ABORT_TASK, 2), (QUERY_TASK, 1)] {
            assert!(matches!(tmf(&mut control, function, FIRST, tag), Next::Wait));
        }
        assert!(control.resume().is_empty());
        leave(line);
        assert!(matches!(control.resumed(), Next::Complete(_)));
        assert_eq!((control.guest.read::<1>(RESPONSE)[0], control.model.left()), (SUCCEEDED, 3));
        let mut ended = Vec::new();
        control.model.end_left(&control.guest.memory, &mut ended);
        assert_eq!((ended.len(), control.model.left(), control.guest.read::<1>(RESPONSE)[0]), (3, 0, OK));
    }
}

#[test]
fn a_command_that_is_taken_in_after_the_function_in_the_same_turn_was_there_before_it() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
    line.shows = false;
    assert!(line.resume().is_empty());
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    line.shows = true;
    line.show();
    assert!(control.resume().is_empty());
    assert_eq!(line.ended(request, Ok(())).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
}

#[test]
fn a_task_that_has_ended_is_no_task_and_what_is_not_there_is_said_not_to_be() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FIRST, 5, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    line.ended(request, Ok(()));
    let lines = &mut [&mut line];
    assert_eq!(done(&mut control, lines, QUERY_TASK, FIRST, 5), OK);
    assert_eq!(done(&mut control, lines, ABORT_TASK, FIRST, 5), OK);
    assert_eq!(done(&mut control, lines, CLEAR_ACA, FIRST, 0), REJECTED);
    assert_eq!(done(&mut control, lines, 99, FIRST, 0), REJECTED);
    assert_eq!(done(&mut control, lines, ABORT_TASK, LunAddress { target: 0, lun: 5 }, 5), INCORRECT_LUN);
    assert_eq!(done(&mut control, lines, ABORT_TASK, LunAddress { target: 5, lun: 0 }, 5), BAD_TARGET);
}

#[test]
fn a_function_waits_for_its_own_commands_on_every_queue_and_for_no_others() {
    let scsi = device();
    let (mut one, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let mut two = Line::new(&scsi, 3);
    let room = [piece(BUFFER, 512)];
    let (_, mine) = one.submitted(FIRST, 1, &read10(0, 1), &[], &room);
    let (_, beside) = one.submitted(FAR, 1, &read10(0, 1), &[], &room);
    let (_, theirs) = two.submitted(FIRST, 1, &read10(1, 1), &[], &room);
    assert!(matches!(tmf(&mut control, ABORT_TASK_SET, FIRST, 0), Next::Wait));
    assert!(one.resume().is_empty() && two.resume().is_empty());
    // One that comes later with the same tag is another.
    let (_, late) = two.submitted(FIRST, 1, &read10(2, 1), &[], &room);
    assert_eq!(one.ended(mine, Ok(())).response, ABORTED);
    assert!(control.resume().is_empty());
    assert_eq!(two.ended(theirs, Ok(())).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
    for (line, request) in [(&mut one, beside), (&mut two, late)] {
        assert_eq!(line.ended(request, Ok(())).response, OK);
    }
}

#[test]
fn several_functions_may_wait_for_one_command_and_the_last_says_how_it_ends() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    for function in [ABORT_TASK, UNIT_RESET, ABORT_TASK_SET, NEXUS_RESET] {
        assert!(matches!(tmf(&mut control, function, FIRST, 1), Next::Wait));
        assert!(line.resume().is_empty() && control.resume().is_empty());
    }
    assert_eq!(line.ended(request, Ok(())).response, RESET);
    assert_eq!(control.resume().len(), 4);
    assert_eq!(control.guest.queue.in_flight(), 0);
}

#[test]
fn a_queue_that_does_not_run_keeps_no_function_waiting_and_one_that_leaves_lets_go_of_it() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let leave: [fn(&mut Line, Line); 2] = [
        |line, _| {
            line.model.set_waker(None);
            line.model.let_go();
        },
        |line, other| *line = other,
    ];
    for leave in leave {
        assert!(matches!(tmf(&mut control, QUERY_TASK_SET, FIRST, 0), Next::Wait));
        assert!(control.resume().is_empty(), "the queue has not looked yet");
        let mut other = Line::new(&scsi, 3);
        other.model.let_go();
        leave(&mut line, other);
        assert!(control.resume().is_empty() && control.model.left() == 1, "its commands may be in the ring");
        control.model.end_left(&control.guest.memory, &mut Vec::new());
        assert_eq!(done(&mut control, &mut [], ABORT_TASK_SET, FIRST, 0), OK);
        line = Line::new(&scsi, 2);
    }
    // That there is no such unit is known without them.
    let mut line = Line::requests(&scsi);
    assert!(matches!(tmf(&mut control, ABORT_TASK_SET, LunAddress { target: 0, lun: 5 }, 0), Next::Wait));
    line.model.leave_functions();
    line.model.let_go();
    assert!(control.resume().is_empty() && control.model.left() == 1);
    control.model.end_left(&control.guest.memory, &mut Vec::new());
    assert_eq!(control.guest.read::<1>(RESPONSE)[0], INCORRECT_LUN);
}

#[test]
fn functions_wait_for_a_queue_that_is_on_its_way_to_another_loop_and_find_what_lies_in_its_ring() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    assert!(matches!(tmf(&mut control, QUERY_TASK, FIRST, 1), Next::Wait));
    line.model.set_waker(None);
    // One is not looked at yet, and the other comes in between.
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
    assert!(control.resume().is_empty());
    line.model.set_waker(Some(Arc::clone(&line.woken).into()));
    assert!(line.is_woken());
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    assert!(line.resume().is_empty());
    assert!(matches!(control.resumed(), Next::Complete(_)));
    assert_eq!(control.guest.read::<1>(RESPONSE)[0], SUCCEEDED);
    assert_eq!(line.ended(request, Ok(())).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
}

#[test]
fn a_function_waits_for_the_commands_of_a_queue_that_is_on_its_way_to_another_loop() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    line.model.set_waker(None);
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
    assert!(control.resume().is_empty());
    line.model.set_waker(Some(Arc::clone(&line.woken).into()));
    assert!(line.resume().is_empty());
    assert_eq!(line.ended(request, Ok(())).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
}

#[test]
fn a_unit_that_is_taken_away_meanwhile_keeps_no_function_from_its_end() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FAR, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    assert!(matches!(tmf(&mut control, UNIT_RESET, FAR, 0), Next::Wait));
    scsi.remove(FAR).unwrap();
    assert!(line.resume().is_empty());
    assert_eq!(line.done(FIRST, &[0], &[], &[]).response, OK);
    assert_eq!(line.ended(request, Ok(())).response, RESET);
    assert!(matches!(control.resumed(), Next::Complete(_)));
}

/// The driver may reuse their memory when it has been answered.
#[test]
fn a_function_for_a_unit_that_was_taken_away_ends_when_the_commands_that_the_unit_still_had_have_left() {
    for function in [ABORT_TASK, ABORT_TASK_SET, CLEAR_TASK_SET, UNIT_RESET, NEXUS_RESET] {
        let beside = LunAddress { lun: 5, ..FAR };
        for (added, gone) in [(None, BAD_TARGET), (Some(beside), INCORRECT_LUN)] {
            let scsi = device();
            added.into_iter().for_each(|beside| scsi.add(scsi.prepare(beside, unit()).unwrap()).unwrap());
            let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
            let (_, request) = line.submitted(FAR, 77, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
            scsi.remove(FAR).unwrap();
            assert!(matches!(tmf(&mut control, function, FAR, 77), Next::Wait), "{function}");
            assert!(line.resume().is_empty() && control.resume().is_empty(), "{function}");
            line.ended(request, Ok(()));
            assert!(matches!(control.resumed(), Next::Complete(_)));
            assert_eq!(control.guest.read::<1>(RESPONSE)[0], OK, "{function}: it has ended them");
            let is_there = function == NEXUS_RESET && added.is_some();
            let told = done(&mut control, &mut [&mut line], function, FAR, 77);
            assert_eq!(told, if is_there { OK } else { gone }, "{function}");
            assert_eq!(done(&mut control, &mut [&mut line], QUERY_TASK, FAR, 77), gone);
        }
    }
}

#[test]
fn a_function_for_a_unit_that_was_taken_away_is_complete_that_has_ended_commands_though_others_may_be_left_in_a_ring() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FAR, 77, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    scsi.remove(FAR).unwrap();
    assert!(matches!(tmf(&mut control, UNIT_RESET, FAR, 0), Next::Wait));
    // Its queue stops for good.
    line.shows = false;
    assert!(line.resume().is_empty());
    line.model.leave_functions();
    assert!(control.resume().is_empty() && control.model.left() == 0);
    assert_eq!(line.ended(request, Ok(())).response, RESET);
    line.model.leave_functions();
    assert!(control.resume().is_empty() && control.model.left() == 1);
    control.model.end_left(&control.guest.memory, &mut Vec::new());
    assert_eq!(control.guest.read::<1>(RESPONSE)[0], OK);
}

#[test]
fn a_driver_has_so_many_functions_under_way_and_others_stay_in_the_ring() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let (_, request) = line.submitted(FIRST, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    for _ in 0..FUNCTIONS {
        assert!(control.model.takes_chains());
        assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 1), Next::Wait));
    }
    assert!(!control.model.takes_chains());
    // The queue looks at some of them in a turn, and is woken for the others.
    let mut turns = 0;
    while line.is_woken() {
        turns += 1;
        assert!(line.resume().is_empty() && control.resume().is_empty());
    }
    assert!(turns >= FUNCTIONS / FUNCTIONS_A_TURN, "in {turns} turns");
    line.ended(request, Ok(()));
    assert_eq!(control.resume().len(), FUNCTIONS);
    assert_eq!((control.model.takes_chains(), control.guest.queue.in_flight()), (true, 0));
}

#[test]
fn there_is_nothing_to_subscribe_to() {
    let scsi = device();
    let mut control = Line::new(&scsi, 0);
    let absent = LunAddress { lun: 5, ..FIRST };
    let nowhere = LunAddress { target: 5, lun: 0 };
    let report_luns = [0xc1, 1, 0, 0, 0, 0, 0, 0];
    for kind in [1u32, 2] {
        for (lun, response) in [
            (FIRST.to_bytes(), OK),
            (absent.to_bytes(), INCORRECT_LUN),
            (nowhere.to_bytes(), BAD_TARGET),
            (report_luns, BAD_TARGET),
        ] {
            control.guest.write(HEADER, &[&kind.to_le_bytes()[..], &lun, &[0xff; 4]].concat());
            control.guest.write(RESPONSE, &[0xee; 5]);
            let next = control.offer(&[piece(HEADER, 16)], &[piece(RESPONSE, 5)]);
            assert!(matches!(next, Ok(Next::Complete(Completed { written: 5, .. }))));
            assert_eq!(control.guest.read::<5>(RESPONSE), [0, 0, 0, 0, response]);
        }
    }
}

#[test]
fn a_request_that_is_cut_short_or_has_no_room_for_its_response_breaks_the_queue_and_an_unknown_one_is_unsupported() {
    let scsi = device();
    let mut control = Line::new(&scsi, 0);
    control.guest.write(HEADER, &[0; 24]);
    for (kind, header, response) in [(0u32, 24, 1), (1, 16, 5), (2, 16, 5)] {
        control.guest.write(HEADER, &kind.to_le_bytes());
        let short = control.offer(&[piece(HEADER, header - 1)], &[piece(RESPONSE, response)]);
        assert_eq!(short.unwrap_err(), Malformed::ShortHeader { len: header - 1, needed: header }, "type {kind}");
        let room = [piece(RESPONSE, response - 1)];
        let cramped = control.offer(&[piece(HEADER, header)], &room[..usize::from(response > 1)]);
        assert_eq!(cramped.unwrap_err(), Malformed::NoStatus, "type {kind}");
    }
    control.guest.write(HEADER, &3u32.to_le_bytes());
    let short = control.offer(&[piece(HEADER, 3)], &[piece(RESPONSE, 5)]);
    assert_eq!(short.unwrap_err(), Malformed::ShortHeader { len: 3, needed: 4 });
    let Ok(Next::Complete(ended)) = control.offer(&[piece(HEADER, 4)], &[]) else { panic!("not done") };
    assert_eq!((ended.status, ended.written), (crate::Status::Unsupported, 0));
}

#[test]
fn a_write_that_was_put_off_is_stable_if_the_write_cache_was_turned_off_meanwhile() {
    let scsi = device();
    let (mut line, mut other) = (Line::requests(&scsi), Line::new(&scsi, 3));
    let (key, mut write) = line.submitted(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
    assert_eq!(write.op, Op::Write { fua: false });
    line.model.suspend(&mut write);
    other.guest.write(BUFFER, &[0, 0, 0, 0, 8, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let (_, flush) = other.submitted(FIRST, 1, &[0x15, 0x10, 0, 0, 24, 0], &[piece(BUFFER, 24)], &[]);
    assert_eq!((flush.op, other.ended(flush, Ok(())).status), (Op::Flush, GOOD));
    let Next::Submit(_, write) = line.model.readmit(&line.guest.memory, key, write) else { panic!("it goes on") };
    assert_eq!((write.op, write.len), (Op::Write { fua: true }, 512));
    assert_eq!(line.ended(write, Ok(())).status, GOOD);
}

#[test]
fn what_a_command_has_done_counts_once_though_its_parts_are_put_off_and_asked_for_anew() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let put_off = |line: &mut Line, key, mut request: Request<Buffers>| {
        line.model.suspend(&mut request);
        match line.model.readmit(&line.guest.memory, key, request) {
            Next::Submit(_, request) => request,
            other => panic!("it goes on: {other:?}"),
        }
    };
    // WRITE AND VERIFY of a block, by its bytes: its read alone is put off, which counts as nothing.
    let mut cdb = write10(0, 1);
    (cdb[0], cdb[1]) = (0x2e, 0x02);
    let (key, write) = line.submitted(FIRST, 1, &cdb, &[piece(BUFFER, 512)], &[]);
    let Next::Submit(_, mut read) = line.end(write, Ok(())) else { panic!("it is verified") };
    for _ in 0..2 {
        read = put_off(&mut line, key, read);
    }
    let told = line.ended(read, Ok(()));
    assert_eq!((told.status, told.ended.request_type, told.ended.bytes), (GOOD, crate::RequestType::Write, 512));
    // COMPARE AND WRITE begins again, and finds something else then.
    let (key, read) = line.submitted(FIRST, 1, &compare_and_write(0), &[piece(BUFFER, 1024)], &[]);
    let Next::Submit(_, write) = line.end(read, Ok(())) else { panic!("the write follows") };
    let read = put_off(&mut line, key, write);
    line.guest.write(BUFFER, &[1; 512]);
    let told = line.ended(read, Ok(()));
    assert_eq!(
        (told.status, told.ended.request_type, told.ended.bytes),
        (CHECK_CONDITION, crate::RequestType::Read, 512)
    );
}

#[test]
fn a_command_that_was_put_off_and_is_aborted_ends_as_that_and_so_does_its_function_though_it_would_be_refused() {
    let scsi = device();
    let (mut line, mut other) = (Line::requests(&scsi), Line::new(&scsi, 3));
    let mut control = Line::new(&scsi, 0);
    let (key, mut write) = line.submitted(FIRST, 2, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
    line.model.suspend(&mut write);
    // All writes are refused from here on.
    other.guest.write(BUFFER, &[0, 0, 0, 0, 10, 10, 0x20, 0x10, 0x08, 0, 0, 0, 0xff, 0xff, 0, 0]);
    let (_, flush) = other.submitted(FIRST, 1, &[0x15, 0x10, 0, 0, 16, 0], &[piece(BUFFER, 16)], &[]);
    assert_eq!(other.ended(flush, Ok(())).status, GOOD);
    assert!(matches!(tmf(&mut control, ABORT_TASK, FIRST, 2), Next::Wait));
    assert!(other.resume().is_empty() && line.resume().is_empty(), "it is found at the end of the turn");
    let Next::Complete(ended) = line.model.readmit(&line.guest.memory, key, write) else { panic!("it is aborted") };
    line.use_up(ended);
    assert_eq!(line.told(ended).response, ABORTED);
    assert!(matches!(control.resumed(), Next::Complete(_)));
    assert!(line.resume().is_empty());
}
