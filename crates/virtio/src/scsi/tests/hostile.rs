//! Drivers that send anything.

use proptest::prelude::*;

use super::*;

proptest! {
    /// Whatever a driver sends is answered, or breaks its queue; and what the disk is asked for is in the driver's memory
    /// and on the disk.
    #[test]
    fn whatever_a_driver_sends_is_answered_within_its_buffers(
        lun in prop_oneof![Just(FIRST.to_bytes()), Just(FAR.to_bytes()), any::<[u8; 8]>()],
        opcode in any::<u8>(),
        rest in any::<[u8; 31]>(),
        small in any::<bool>(),
        queue in 0u16..4,
        lengths in (0u32..80, 0u32..5000, 0u32..130, 0u32..5000),
        fails in any::<bool>(),
    ) {
        let scsi = device();
        let mut line = Line::requests(&scsi);
        if queue != 2 {
            line = Line::new(&scsi, queue);
        }
        let mut cdb = [&[opcode][..], &rest].concat();
        if small {
            // So that commands get past the checks of their addresses.
            cdb[2..7].fill(0);
            cdb[9..13].fill(0);
        }
        line.header(lun, 3, &cdb);
        let (header, out, response, room) = lengths;
        let readable: Vec<_> =
            [piece(HEADER, header), piece(BUFFER, out)].into_iter().filter(|piece| piece.len > 0).collect();
        let writable: Vec<_> =
            [piece(RESPONSE, response), piece(BUFFER + 0x2000, room)].into_iter().filter(|piece| piece.len > 0).collect();
        prop_assume!(!readable.is_empty() || !writable.is_empty());
        let space: u32 = writable.iter().map(|piece| piece.len).sum();
        let mut next = match line.offer(&readable, &writable) {
            Ok(next) => next,
            Err(_) => return Ok(()),
        };
        for _ in 0..10_000 {
            match next {
                Next::Complete(ended) => {
                    prop_assert!(ended.written <= space);
                    prop_assert_eq!(line.guest.queue.in_flight(), 0);
                    return Ok(());
                }
                Next::Wait => prop_assert!(false, "there is nobody to wait for"),
                Next::Submit(_, request) => {
                    prop_assert!(request.offset + request.len <= BLOCKS * 512);
                    let sum: usize = request.buffers.iter().map(|piece| piece.len()).sum();
                    prop_assert!(request.buffers.is_empty() || sum as u64 == request.len);
                    let result = if fails { Err(Errno::IO) } else { Ok(()) };
                    next = line.end(request, result);
                    continue;
                }
            }
            break;
        }
        prop_assert!(false, "it never ends");
    }
}
