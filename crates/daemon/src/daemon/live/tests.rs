use egret_vocabulary::keyval;
use egret_vocabulary::schema::Image;

use super::super::Deletion;
use super::super::tests::{daemon, export, image};
use super::*;

fn blockdev(text: &str) -> Blockdev {
    let (value, spelling) = keyval::read(text, "driver").unwrap();
    Blockdev::from_value(value, spelling).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn an_image_of_a_cluster_stays_in_that_cluster_and_is_decrypted_as_it_was() {
    let fixed = [
        ("conf", "conf=/c", "conf=/d"),
        ("user", "user=u", "user=v"),
        ("key-secret", "key-secret=k", "key-secret=l"),
        ("auth-client-required", "auth-client-required.0=cephx", "auth-client-required.0=none"),
        ("server", "server.0.host=h,server.0.port=1", "server.0.host=h,server.0.port=2"),
        ("encrypt", "encrypt.format=luks2,encrypt.key-secret=k", "encrypt.format=luks2,encrypt.key-secret=l"),
        ("settings", "settings.mon_host=h", "settings.mon_host=g"),
    ];
    let image = |parts: &[&str]| blockdev(&format!("rbd,node-name=d0,pool=p,image=i,{}", parts.join(",")));
    let as_it_is = fixed.map(|(_, part, _)| part);
    let reopened = |parts: &[&str]| {
        let mut node = image(&as_it_is);
        replace(&mut node, image(parts)).map(|()| node).map_err(|e| e.to_string())
    };
    for (at, (option, _, other)) in fixed.into_iter().enumerate() {
        let (mut without, mut otherwise) = (as_it_is.to_vec(), as_it_is);
        without.remove(at);
        otherwise[at] = other;
        for parts in [&without[..], &otherwise] {
            let error = reopened(parts).unwrap_err();
            assert!(error.starts_with(&format!("Cannot change the option '{option}'")), "{parts:?}: {error}");
        }
    }
    for free in ["discard=unmap", "read-only=on", "locking=off", "connect-timeout=7", "images-per-cluster-handle=7"] {
        let parts = [&as_it_is[..], &[free]].concat();
        assert_eq!(reopened(&parts), Ok(image(&parts)));
    }
}

#[test]
fn to_reopen_a_node_is_about_no_other_however_that_is_open() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    image(at, "d0");
    // One descriptor, so that the image is not to be had a second time.
    let only = std::fs::File::options().read(true).write(true).open(at.join("d0.img")).unwrap();
    daemon.add_fd(Some(0), only.into(), None).unwrap();
    daemon.add_blockdev(Blockdev::new("d0", Driver::File(Image::new("/dev/fdset/0")))).unwrap();
    daemon.add_blockdev(image(at, "d1")).unwrap();
    daemon.add_export(schema::Export { writable: true, ..export(at, "writes", "d0") }).unwrap();
    daemon.add_export(export(at, "reads", "d0")).unwrap();
    daemon.remove_export("writes", Deletion::Safe).unwrap();
    daemon.take_torn_down();
    assert!(!daemon.disks["d0"].read_only(), "who reads goes on with what was opened for another that wrote");
    let before = Arc::clone(&daemon.disks["d0"]);
    let otherwise = Blockdev { detect_zeroes: Some(schema::DetectZeroes::On), ..image(at, "d1") };
    daemon.reopen(vec![otherwise]).unwrap();
    assert!(Arc::ptr_eq(&daemon.disks["d0"], &before));
    // Who names it wants it as it should be.
    let refused = daemon.reopen(vec![daemon.config.blockdevs[0].clone()]).unwrap_err().to_string();
    assert!(refused.starts_with("blockdev 'd0': fdset 0 has descriptors for this"), "{refused}");
}
