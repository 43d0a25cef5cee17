//! The device as its session sees it: queues, cache mode, size, and what goes on in another's place.

use super::*;

#[test]
fn a_driver_that_has_taken_nothing_or_not_config_wce_chooses_no_cache_mode_by_writeback() {
    let blk = Blk::new(config()).unwrap();
    assert!(blk.is_write_through(), "nobody would flush");
    blk.set_features(F_FLUSH).unwrap();
    blk.write_config(32, &[0]).unwrap();
    assert!(!blk.is_write_through(), "it flushes, whatever it has written");
}

#[test]
fn the_cache_mode_goes_on_in_another_device_s_place() {
    let devices = || {
        [(); 2].map(|()| {
            let blk = Blk::new(config()).unwrap();
            blk.set_features(F_FLUSH | F_CONFIG_WCE).unwrap();
            blk
        })
    };
    for writeback in [0, 1] {
        let [from, to] = devices();
        from.write_config(32, &[writeback]).unwrap();
        assert_eq!((from.choices(), from.is_write_through()), (writeback, writeback == 0));
        to.choose(1 - writeback);
        let state = from.save();
        assert_eq!(state[16..], [writeback]);
        to.load(&state, Origin::Elsewhere).unwrap();
        assert_eq!((to.choices(), to.is_write_through()), (writeback, writeback == 0));
        let [_, reconnected] = devices();
        reconnected.choose(from.choices());
        assert_eq!(reconnected.is_write_through(), writeback == 0);
        for wrong in [&[2][..], &[0, 0], &[]] {
            let refused = to.load(&pack(DeviceId::Blk, wrong), Origin::Elsewhere);
            assert_eq!(refused, Err(StateError::invalid("a cache mode that there is not")));
            assert_eq!(to.choices(), writeback);
        }
        assert_eq!(
            to.load(&pack(DeviceId::Scsi, &[0]), Origin::Elsewhere),
            Err(StateError::Device { found: 8, expected: 2 })
        );
    }
}

#[test]
fn a_cache_mode_from_another_device_outlasts_the_features_that_are_said_after_it() {
    let taken = F_FLUSH | F_CONFIG_WCE;
    let from = Blk::new(config()).unwrap();
    from.set_features(taken).unwrap();
    from.write_config(32, &[0]).unwrap();
    let (state, choices) = (from.save(), from.choices());
    let ways: [&dyn Fn(&Blk); 2] = [&|to| to.load(&state, Origin::Elsewhere).unwrap(), &|to| to.choose(choices)];
    for go_on in ways {
        let to = Blk::new(config()).unwrap();
        go_on(&to);
        // A front-end may begin with the features of its own, of which a device sees none.
        for said in [0, taken, taken] {
            to.set_features(said).unwrap();
            assert_eq!((to.choices(), to.is_write_through()), (0, true), "after {said:#x}");
        }
    }
}

#[test]
fn what_is_noted_and_saved_is_what_drivers_are_told_and_not_what_becomes_of_it_by_their_features() {
    let blk = Blk::new(config()).unwrap();
    blk.set_features(F_CONFIG_WCE).unwrap();
    assert_eq!((blk.is_write_through(), blk.choices(), blk.save()[16..].to_vec()), (true, 1, vec![1]));
}

#[test]
fn a_device_has_as_many_queues_as_it_was_made_with_and_all_of_them_need_its_disk() {
    let blk = Blk::new(config()).unwrap();
    assert_eq!((blk.num_queues(), blk.diskless_queues()), (4, 0));
    let mut model = Arc::clone(&blk).model(3, 64);
    assert!(matches!(model, Model::Request(_)) && model.takes_chains());
    // No request waits for another one, and none is ever aborted.
    model.let_go();
    assert_eq!((model.waiting(), model.is_aborted(0)), (0, false));
}

#[test]
fn a_disk_of_another_size_has_so_many_whole_blocks_and_the_driver_is_told_of_it_once() {
    let capacity_bytes = SECTORS * SECTOR + 512;
    let blk = Blk::new(BlkConfig { logical_block_size: 4096, capacity_bytes, ..config() }).unwrap();
    for (bytes, sectors, changed) in [
        (SECTORS * SECTOR, SECTORS, false),
        (8 * SECTORS * SECTOR, 8 * SECTORS, true),
        (8 * SECTORS * SECTOR, 8 * SECTORS, false),
        (8 * SECTORS * SECTOR + 4095, 8 * SECTORS, false),
        (8 * SECTORS * SECTOR + 4096, 8 * SECTORS + 8, true),
        (4095, 0, true),
    ] {
        assert_eq!((blk.resize(DiskKey(0), bytes), blk.sectors()), (changed, sectors), "{bytes} bytes");
    }
}
