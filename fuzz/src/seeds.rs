//! What targets share: devices, and commands that mean something.

use egret_scsi::{DiscardConfig, LunConfig};

use crate::input::Input;

/// The size of every disk, in bytes.
pub const CAPACITY: u64 = 96 * 4096;

/// A unit, by the bits of `kind`.
pub fn unit(kind: u8, serial: &str) -> LunConfig {
    let has = |bit: u8| kind & 1 << bit != 0;
    LunConfig {
        capacity_bytes: CAPACITY,
        logical_block_bytes: if has(0) { 4096 } else { 512 },
        physical_block_bytes: 4096,
        read_only: has(1) && has(2),
        removable: has(3),
        write_cache: !has(4),
        discard: has(5).then_some(DiscardConfig {
            max_bytes: 8 * 4096,
            granularity_bytes: 4096,
            alignment_bytes: 0,
            max_descriptors: 4,
            reads_zeroes: false,
        }),
        max_write_zeroes_bytes: 16 * 4096,
        max_transfer_bytes: if has(6) { 8 * 4096 } else { 0 },
        max_compare_and_write_blocks: if has(7) { 0 } else { 4 },
        serial: serial.to_owned(),
        ..LunConfig::default()
    }
}

/// Every operation code that is known, with the service actions of those that have some.
const KNOWN: &[(u8, &[u8])] = &[
    (0x00, &[]),
    (0x03, &[]),
    (0x08, &[]),
    (0x0a, &[]),
    (0x12, &[]),
    (0x15, &[]),
    (0x16, &[]),
    (0x17, &[]),
    (0x1a, &[]),
    (0x1b, &[]),
    (0x1e, &[]),
    (0x25, &[]),
    (0x28, &[]),
    (0x2a, &[]),
    (0x2e, &[]),
    (0x2f, &[]),
    (0x35, &[]),
    (0x41, &[]),
    (0x42, &[]),
    (0x4d, &[]),
    (0x55, &[]),
    (0x56, &[]),
    (0x57, &[]),
    (0x5a, &[]),
    (0x5e, &[0, 1, 2, 3]),
    (0x5f, &[0, 1, 2, 3, 4, 5, 6, 7]),
    (0x88, &[]),
    (0x89, &[]),
    (0x8a, &[]),
    (0x8e, &[]),
    (0x8f, &[]),
    (0x91, &[]),
    (0x93, &[]),
    (0x9e, &[0x10]),
    (0xa0, &[]),
    (0xa3, &[0x0c, 0x0d]),
    (0xa8, &[]),
    (0xaa, &[]),
    (0xae, &[]),
    (0xaf, &[]),
];

/// A CDB: anything; or one that is known, at an address that the disk has more often than not.
pub fn cdb(input: &mut Input<'_>) -> [u8; 32] {
    let how = input.u8();
    if how.is_multiple_of(8) {
        return input.array();
    }
    let (opcode, actions) = input.one_of(KNOWN);
    let mut cdb = [0; 32];
    cdb[0] = opcode;
    cdb[1..16].copy_from_slice(&input.array::<15>());
    if !actions.is_empty() {
        cdb[1] = input.one_of(actions) | if how & 0x10 != 0 { cdb[1] & 0xe0 } else { 0 };
    }
    if how & 0x20 == 0 {
        // Where addresses and lengths have their high bytes.
        match opcode >> 5 {
            1 | 2 => [2, 3, 4, 7].into_iter().for_each(|at| cdb[at] = 0),
            4 => [2, 3, 4, 5, 6, 7, 8, 10, 11, 12].into_iter().for_each(|at| cdb[at] = 0),
            5 => [2, 3, 4, 6, 7, 8].into_iter().for_each(|at| cdb[at] = 0),
            _ => {}
        }
    }
    cdb
}
