//! What was written is what is read.

use super::*;

#[test]
fn what_was_written_is_read_back() {
    everywhere(1 << 20, |rig| {
        let data = pattern(65536, 1);
        rig.write(4096, &data).unwrap();
        assert_eq!(rig.read(4096, 65536), data);
        assert_eq!(rig.read(0, 4096), vec![0; 4096]);
        rig.run(Op::Flush, 0, 0).unwrap();
    });
}

#[test]
fn many_requests_at_once_each_find_their_own_data() {
    everywhere(4 << 20, |rig| {
        for i in 0..256u64 {
            rig.push_write(i * 16384, Memory::pieces(&[4096, 8192, 4096], 0).filled(&pattern(16384, i)));
        }
        rig.settle();
        assert!(rig.done.drain().all(|(_, result)| result.is_ok()));
        rig.memory.clear();
        let reads: Vec<u64> = (0..256u64).map(|i| rig.push_read(i * 16384, Memory::new(16384, 0))).collect();
        for (i, token) in reads.into_iter().enumerate() {
            let (result, memory) = rig.finish(token);
            assert_eq!(result, Ok(()));
            assert!(memory.unwrap().data() == pattern(16384, i as u64), "request {i}");
        }
    });
}
