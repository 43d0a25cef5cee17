//! Commands that need memory of the device's own.

use egret_scsi::MAX_SCRATCH;

use super::*;

/// Blocks of the longest operation.
const LONG: u16 = (MAX_SCRATCH / 512) as u16;

/// A device with one request queue, which has room for four long operations, and one unit of many blocks.
fn device() -> Arc<Scsi> {
    let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, "guest").unwrap();
    let config = LunConfig { capacity_bytes: 1 << 30, serial: "s".into(), ..LunConfig::default() };
    scsi.add(scsi.prepare(FIRST, Arc::new(LogicalUnit::new(config).unwrap())).unwrap()).unwrap();
    scsi
}

/// VERIFY, of nothing but that it can be read.
fn verify10(lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = read10(lba, blocks);
    cdb[0] = 0x2f;
    cdb
}

/// Has commands begin, and returns the operations that the disk is asked for.
fn begin(line: &mut Line, cdbs: impl IntoIterator<Item = [u8; 10]>) -> Vec<Request<Buffers>> {
    let mut tag = 100;
    let nexts = cdbs.into_iter().map(|cdb| {
        tag += 1;
        line.command(FIRST, tag, &cdb, &[], &[]).unwrap()
    });
    { nexts }.filter_map(|next| if let Next::Submit(_, request) = next { Some(request) } else { None }).collect()
}

/// How much of memory that is not the driver's is out.
fn out(line: &Line, requests: &[Request<Buffers>]) -> u64 {
    let own =
        requests.iter().flat_map(|request| request.buffers.iter()).filter(|piece| !line.guest.memory.holds(piece));
    own.map(|piece| piece.len() as u64).sum()
}

#[test]
fn however_many_commands_want_memory_a_queue_has_its_part_out_and_all_have_their_turn_in_order() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let lbas = (0..16u32).map(|i| i * 10_000);
    // Three operations each.
    let mut requests = begin(&mut line, lbas.clone().map(|lba| verify10(lba, 3 * LONG)));
    assert_eq!((requests.len(), out(&line, &requests)), (4, 4 * MAX_SCRATCH));
    let mut offsets: Vec<u64> = requests.iter().map(|request| request.offset).collect();
    let mut done = 0;
    while !requests.is_empty() {
        match line.end(requests.remove(0), Ok(())) {
            Next::Complete(ended) => {
                assert_eq!(line.told(ended).status, GOOD);
                done += 1;
            }
            Next::Submit(_, request) => requests.push(request),
            Next::Wait => {}
        }
        for next in line.resume() {
            let Next::Submit(_, request) = next else { panic!("not an operation: {next:?}") };
            requests.push(request);
        }
        assert!(out(&line, &requests) <= 4 * MAX_SCRATCH);
        offsets.extend(requests.last().filter(|last| offsets.last() != Some(&last.offset)).map(|last| last.offset));
    }
    assert_eq!((done, line.guest.queue.in_flight()), (16, 0));
    // Each has had one operation before any has two.
    let rounds = (0..3).flat_map(|round| lbas.clone().map(move |lba| u64::from(lba) * 512 + round * MAX_SCRATCH));
    assert_eq!(offsets, rounds.collect::<Vec<_>>());
}

#[test]
fn commands_that_need_little_memory_take_little_and_who_needs_much_is_not_overtaken() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let mut small = begin(&mut line, (0..20).map(|lba| verify10(lba, 1)));
    assert_eq!((small.len(), out(&line, &small)), (20, 20 * 512));
    let mut long = begin(&mut line, (0..4).map(|i| verify10(i * 1000, LONG)));
    assert_eq!(long.len(), 3, "there is room for no four of them beside the small ones");
    assert!(begin(&mut line, [verify10(0, 1)]).is_empty(), "it would be there before one that came first");
    line.ended(small.remove(0), Ok(()));
    assert!(line.resume().is_empty(), "not enough yet");
    line.ended(long.remove(0), Ok(()));
    assert!(begin(&mut line, [verify10(0, 1)]).is_empty(), "those that wait have been woken, and come first");
    let resumed: Vec<u64> = line
        .resume()
        .into_iter()
        .map(|next| if let Next::Submit(_, request) = next { request.len } else { panic!("{next:?}") })
        .collect();
    assert_eq!(resumed, [MAX_SCRATCH, 512, 512]);
}

#[test]
fn one_that_waits_for_memory_can_be_aborted_and_keeps_nobody_waiting() {
    let scsi = device();
    let (mut line, mut control) = (Line::requests(&scsi), Line::new(&scsi, 0));
    let mut requests = begin(&mut line, (0..6).map(|i| verify10(i * 1000, LONG)));
    assert_eq!((requests.len(), line.model.waiting()), (4, 2));
    // One that needs none does not wait.
    let flush = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let (_, request) = line.submitted(FIRST, 1, &flush, &[], &[]);
    assert_eq!(line.ended(request, Ok(())).status, GOOD);
    assert!(!line.is_woken(), "it has given nothing back");
    let aborts = |control: &mut Line, tag: u64| {
        let request = [&[0; 8][..], &FIRST.to_bytes(), &tag.to_le_bytes()].concat();
        control.guest.write(HEADER, &request);
        assert!(matches!(control.offer(&[piece(HEADER, 24)], &[piece(RESPONSE, 1)]), Ok(Next::Wait)));
    };
    // The fifth waits; the first has its memory.
    aborts(&mut control, 105);
    aborts(&mut control, 101);
    assert!(line.resume().is_empty());
    let Next::Complete(ended) = line.resumed() else { panic!("it is aborted") };
    assert_eq!(line.told(ended).response, ABORTED);
    assert_eq!(line.ended(requests.remove(0), Ok(())).response, ABORTED);
    let Next::Submit(_, sixth) = line.resumed() else { panic!("there is memory for it") };
    assert_eq!(sixth.offset, 5000 * 512);
    assert_eq!(control.resume().len(), 2);
    requests.push(sixth);
    requests.into_iter().for_each(|request| assert_eq!(line.ended(request, Ok(())).status, GOOD));
    assert_eq!(line.guest.queue.in_flight(), 0);
}

#[test]
fn what_the_disk_puts_into_memory_of_the_device_is_what_the_command_looks_at() {
    for (disk, status) in [(7, GOOD), (8, CHECK_CONDITION)] {
        let mut line = Line::requests(&device());
        line.guest.write(BUFFER, &[7; 512]);
        // VERIFY, of the medium against the data.
        let mut cdb = verify10(0, 1);
        cdb[1] = 0x02;
        let (_, mut request) = line.submitted(FIRST, 1, &cdb, &[piece(BUFFER, 512)], &[]);
        let (list, own) = request.buffers.into_parts();
        request.buffers = Buffers::own(own.unwrap().into_iter().map(|_| disk).collect(), list);
        assert_eq!(line.ended(request, Ok(())).status, status);
        assert!(!line.is_woken(), "nobody waits for what it has given back");
    }
}

#[test]
fn an_operation_that_fails_gives_its_memory_to_the_next() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let mut requests = begin(&mut line, (0..5).map(|i| verify10(i * 1000, 2 * LONG)));
    assert_eq!(line.ended(requests.remove(0), Err(Errno::IO)).status, CHECK_CONDITION);
    assert!(matches!(line.resumed(), Next::Submit(..)));
}

#[test]
fn the_more_queues_a_device_has_the_less_memory_has_each_but_never_none() {
    for (num_queues, at_once) in [(1, 4), (4, 4), (8, 2), (16, 1), (64, 1)] {
        let scsi = Scsi::new(ScsiConfig { num_queues, queue_size: 64 }, "guest").unwrap();
        scsi.add(scsi.prepare(FIRST, unit()).unwrap()).unwrap();
        let mut line = Line::requests(&scsi);
        assert_eq!(begin(&mut line, (0..5).map(|lba| verify10(lba, LONG))).len(), at_once, "{num_queues} queues");
    }
}

/// A unit whose whole medium is what the driver gives, compared in steps of which each is bounded.
#[test]
fn a_long_compare_is_many_short_ones() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let len = 8 * MAX_SCRATCH as u32;
    let pattern: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    line.guest.write(BUFFER, &pattern);
    let mut cdb = verify10(0, 8 * LONG);
    cdb[1] = 0x02;
    let mut next = line.command(FIRST, 1, &cdb, &[piece(BUFFER, len)], &[]).unwrap();
    let mut done = 0;
    while let Next::Submit(_, request) = next {
        assert_eq!((request.offset, request.len), (done, MAX_SCRATCH));
        // What the disk has is all zeroes, and the driver's data is the same as far as this.
        let part = &vec![0; request.len as usize][..];
        line.guest.write(BUFFER + done, part);
        done += request.len;
        if done == 5 * MAX_SCRATCH {
            line.guest.write(BUFFER + done - 1, &[1]);
        }
        next = line.end(request, Ok(()));
    }
    let Next::Complete(ended) = next else { panic!("{next:?}") };
    assert_eq!((done, line.told(ended).sense), (5 * MAX_SCRATCH, Some((0xe, 0x1d, 0))));
    assert_eq!(ended.status, crate::Status::Ok, "that they differ is what was asked");
}
