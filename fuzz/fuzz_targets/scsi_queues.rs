#![no_main]
#![allow(missing_docs)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| egret_fuzz::scsi_queues(data));
