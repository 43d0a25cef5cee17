use serde_json::json;

use super::*;
use crate::disk::Bottom;
use crate::keyval;
use crate::schema::Spelling;

fn objects<T: Object>(texts: &[&str], implied: &str) -> Vec<T> {
    let object = |text: &&str| {
        let (value, spelling) = keyval::read(text, implied).unwrap();
        T::from_value(value, spelling).unwrap()
    };
    texts.iter().map(object).collect()
}

fn config(iothreads: &[&str], blockdevs: &[&str], exports: &[&str]) -> Result<Config, String> {
    let exports: Vec<String> = exports.iter().map(|export| format!("vhost-user-blk,{export}")).collect();
    let exports: Vec<&str> = exports.iter().map(String::as_str).collect();
    Config::new(objects(iothreads, "id"), objects(blockdevs, "driver"), objects(&exports, "type"))
        .map_err(|error| error.to_string())
}

fn error(iothreads: &[&str], blockdevs: &[&str], exports: &[&str]) -> String {
    config(iothreads, blockdevs, exports).unwrap_err()
}

const NULL: &str = "null-co,node-name=d0";
const EXPORT: &str = "id=e0,node-name=d0,addr.type=unix,addr.path=/a";

#[test]
fn objects_that_fit_together_are_a_config() {
    let config = config(&["io0", "io1"], &[NULL], &[&format!("{EXPORT},iothread=io1")]).unwrap();
    assert_eq!(config.iothreads.len(), 2);
    assert_eq!(config.exports[0].iothread_of(0), Some("io1"));
    assert_eq!(config.warnings(), Vec::<String>::new());
    assert!(matches!(config.disk("d0").unwrap().bottom, Bottom::Null(null) if null.size == 1 << 30));
    assert_eq!(config.disk("d1"), None);
}

#[test]
fn a_name_belongs_to_one_object() {
    assert_eq!(error(&["a", "a"], &[], &[]), "iothread 'a': there is another iothread of this name");
    assert_eq!(error(&[], &[NULL, NULL], &[]), "blockdev 'd0': there is another blockdev of this name");
    let inline = "raw,node-name=r,file.driver=null-co,file.node-name=d0";
    assert_eq!(error(&[], &[NULL, inline], &[]), "blockdev 'd0': there is another blockdev of this name");
    let other = EXPORT.replace("/a", "/b");
    assert_eq!(error(&[], &[NULL], &[EXPORT, &other]), "export 'e0': there is another export of this name");
    // Blockdevs, exports and what --object makes do not share names.
    config(&["x"], &["null-co,node-name=x"], &["id=x,node-name=x,addr.type=unix,addr.path=/a"]).unwrap();
}

#[test]
fn what_object_makes_shares_one_set_of_names() {
    let checked = |secrets: &[&str], tls_creds: &[&str], iothreads: &[&str]| {
        let (secrets, tls_creds) = (objects(secrets, "id"), objects(tls_creds, "id"));
        let throttle_groups = objects(&["g"], "id");
        let config =
            Config { secrets, tls_creds, throttle_groups, iothreads: objects(iothreads, "id"), ..Config::empty() };
        config.checked().map(drop).map_err(|error| error.to_string())
    };
    let (secret, tls_creds) = ("x,data=1", "x,dir=/");
    for (found, line) in [
        (checked(&[secret, secret], &[], &[]), "secret 'x': there is another secret of this name"),
        (checked(&[secret], &[tls_creds], &[]), "tls-creds-x509 'x': there is another secret of this name"),
        (checked(&[secret], &[], &["x"]), "iothread 'x': there is another secret of this name"),
        (
            checked(&[], &[tls_creds, tls_creds], &[]),
            "tls-creds-x509 'x': there is another tls-creds-x509 of this name",
        ),
        (checked(&[], &[tls_creds], &["x"]), "iothread 'x': there is another tls-creds-x509 of this name"),
        (checked(&[], &[], &["x", "x"]), "iothread 'x': there is another iothread of this name"),
        (checked(&[], &[], &["g"]), "iothread 'g': there is another throttle-group of this name"),
    ] {
        assert_eq!(found.unwrap_err(), line);
    }
    checked(&[secret], &["y,dir=/"], &["z"]).unwrap();
}

#[test]
fn a_reference_leads_to_an_object_or_names_the_nearest() {
    assert_eq!(
        error(&[], &["null-co,node-name=disk"], &[&EXPORT.replace("d0", "dsik")]),
        "export 'e0': node-name: there is no blockdev 'dsik'; did you mean 'disk'?"
    );
    assert_eq!(error(&[], &[], &[EXPORT]), "export 'e0': node-name: there is no blockdev 'd0'; there are none");
    assert_eq!(
        error(&["main", "other"], &[NULL], &[&format!("{EXPORT},iothread=fast")]),
        "export 'e0': iothread: there is no iothread 'fast'; known are main, other"
    );
    assert_eq!(
        error(&["io0"], &[NULL], &[&format!("{EXPORT},iothread-vq-mapping.0.iothread=io1")]),
        "export 'e0': iothread-vq-mapping: there is no iothread 'io1'; did you mean 'io0'?"
    );
    assert_eq!(
        error(&[], &[NULL, "raw,node-name=r,file=d9"], &[]),
        "blockdev 'r': file: there is no blockdev 'd9'; did you mean 'd0'?"
    );
}

#[test]
fn a_stack_of_blockdevs_ends_somewhere() {
    assert_eq!(
        error(&[], &["raw,node-name=a,file=b", "raw,node-name=b,file=a"], &[]),
        "blockdev 'a': file leads back to itself"
    );
    assert_eq!(error(&[], &["raw,node-name=a,file=a"], &[]), "blockdev 'a': file leads back to itself");
}

#[test]
fn a_disk_is_in_one_throttle_group_that_is_there() {
    let checked = |blockdevs: &[&str]| {
        let (throttle_groups, blockdevs) = (objects(&["limits0", "limits1"], "id"), objects(blockdevs, "driver"));
        let config = Config { throttle_groups, blockdevs, ..Config::empty() };
        config.checked().map_err(|error| error.to_string())
    };
    let inline = "throttle,node-name=t,throttle-group=limits0,file.driver=null-co,file.node-name=d0";
    let above = "raw,node-name=r,file=t";
    let config = checked(&[inline, above, "throttle,node-name=u,throttle-group=limits1,file=d0"]).unwrap();
    for (node, groups) in [("t", vec!["limits0"]), ("r", vec!["limits0"]), ("u", vec!["limits1"]), ("d0", vec![])] {
        assert_eq!(config.disk(node).unwrap().throttle_groups, groups, "{node}");
        assert_eq!(config.throttled().get(node).copied(), groups.first().copied(), "{node}");
    }
    assert_eq!(
        checked(&[&inline.replace("limits0", "limit1")]).unwrap_err(),
        "blockdev 't': throttle-group: there is no throttle-group 'limit1'; did you mean 'limits1'?"
    );
    let second = "file leads to a second blockdev with driver=throttle: a disk is in one throttle-group";
    for over in ["file=r", "file.driver=throttle,file.throttle-group=limits0,file.file=d0"] {
        let over = format!("throttle,node-name=o,throttle-group=limits1,{over}");
        assert_eq!(checked(&[inline, above, &over]).unwrap_err(), format!("blockdev 'o': {second}"));
    }
}

#[test]
fn a_blockdev_of_its_own_needs_a_name() {
    assert_eq!(error(&[], &["file,filename=x.img"], &[]), "blockdev (file, x.img): node-name is missing");
    assert_eq!(error(&[], &["null-co"], &[]), "blockdev (null-co): node-name is missing");
}

#[test]
fn native_aio_needs_direct_io() {
    let line = "aio=native needs cache.direct=on (or use aio=io_uring)";
    assert_eq!(error(&[], &["file,node-name=d,filename=x,aio=native"], &[]), format!("blockdev 'd': {line}"));
    let inline = "raw,node-name=r,file.driver=file,file.filename=x,file.aio=native";
    assert_eq!(error(&[], &[inline], &[]), format!("blockdev (file, x): {line}"));
    config(&[], &[&format!("{inline},cache.direct=on")], &[]).unwrap();
    config(&[], &[&format!("{inline},file.cache.direct=on")], &[]).unwrap();
}

#[test]
fn zeroes_unmap_only_where_discards_do() {
    assert_eq!(
        error(&[], &["file,node-name=d,filename=x,detect-zeroes=unmap"], &[]),
        "blockdev 'd': detect-zeroes=unmap needs discard=unmap"
    );
    config(&[], &["file,node-name=d,filename=x,detect-zeroes=unmap,discard=unmap"], &[]).unwrap();
}

#[test]
fn a_read_only_disk_has_no_writable_export() {
    for disk in [
        "null-co,node-name=d0,read-only=on",
        "raw,node-name=d0,read-only=on,file.driver=null-co",
        "raw,node-name=d0,file.driver=null-co,file.read-only=on",
    ] {
        assert_eq!(
            error(&[], &[disk], &[&format!("{EXPORT},writable=on")]),
            "export 'e0': writable=on, and blockdev 'd0' has read-only=on"
        );
        config(&[], &[disk], &[EXPORT]).unwrap();
    }
}

#[test]
fn two_exports_do_not_share_an_address() {
    let e1 = "id=e1,node-name=d0,addr.type=unix,addr.path=/./a";
    assert_eq!(error(&[], &[NULL], &[EXPORT, e1]), "export 'e1': addr.path /./a is taken by export 'e0'");
}

#[test]
fn whatever_listens_has_a_socket_of_its_own() {
    let mut config = config(&[], &[NULL], &[EXPORT]).unwrap();
    let metrics = crate::metrics::address("unix:/m").unwrap();
    let at = |whose: &str| (whose.to_owned(), &metrics);
    config.check_sockets([at("metrics")]).unwrap();
    let error = config.check_sockets([at("metrics"), at("chardev 'c'")]).unwrap_err().to_string();
    assert_eq!(error, "chardev 'c': path /m is taken by metrics");
    let server = json!({"addr": {"type": "unix", "path": "/m"}});
    config.nbd_server = Some(NbdServer::from_value(server, Spelling::Typed).unwrap());
    let error = config.check_sockets([at("metrics")]).unwrap_err().to_string();
    assert_eq!(error, "metrics: path /m is taken by nbd-server");
    let server = json!({"addr": {"type": "unix", "path": "/a"}});
    config.nbd_server = Some(NbdServer::from_value(server, Spelling::Typed).unwrap());
    let error = config.checked().unwrap_err().to_string();
    assert_eq!(error, "export 'e0': addr.path /a is taken by nbd-server");
}

#[test]
fn two_writers_of_one_disk_are_allowed_with_a_warning() {
    let e1 = "id=e1,node-name=d0,addr.type=unix,addr.path=/b";
    let e0 = format!("{EXPORT},writable=on");
    let config = config(&[], &[NULL], &[&e0, &format!("{e1},writable=on")]).unwrap();
    assert_eq!(
        config.warnings(),
        ["export 'e1': export 'e0' writes to blockdev 'd0' too; its guests must know of each other"]
    );
}

#[test]
fn exports_of_one_disk_agree_on_when_it_is_locked() {
    let e1 = "id=e1,node-name=d0,addr.type=unix,addr.path=/b";
    let [e0, both] = [EXPORT, e1].map(|export| format!("{export},allow-inactive=on"));
    assert_eq!(
        error(&[], &[NULL], &[&e0, e1]),
        "export 'e0': allow-inactive=on, and export 'e1' of blockdev 'd0' has off: all exports of one blockdev have the \
         same"
    );
    assert_eq!(config(&[], &[NULL], &[&e0, &both]).unwrap().warnings(), Vec::<String>::new());
}

#[test]
fn a_disk_that_two_hosts_may_have_is_warned_of_if_it_is_cached() {
    let export = format!("{EXPORT},allow-inactive=on");
    let warnings = |disk: &str| config(&[], &[disk], &[&export]).unwrap().warnings();
    let cached = "raw,node-name=d0,file.driver=file,file.filename=/x";
    assert_eq!(
        warnings(cached),
        [
            "export 'e0': allow-inactive=on, and blockdev 'd0' has cache.direct=off: two hosts agree on what is in the image \
          for certain only with cache.direct=on"
        ]
    );
    assert_eq!(warnings(&format!("{cached},cache.direct=on")), Vec::<String>::new());
    assert_eq!(config(&[], &[cached], &[EXPORT]).unwrap().warnings(), Vec::<String>::new());
}

#[test]
fn an_inline_child_takes_what_it_leaves_unset_and_a_named_one_does_not() {
    let outer = "cache.direct=on,cache.no-flush=on,discard=unmap,auto-read-only=off";
    let inline = format!("raw,node-name=i,{outer},file.driver=file,file.filename=x,file.node-name=below");
    let named = format!("raw,node-name=n,{outer},file=f");
    let config = config(&[], &[&inline, &named, "file,node-name=f,filename=y"], &[]).unwrap();

    let disk = config.disk("i").unwrap();
    assert!(disk.settings.direct && disk.settings.no_flush && !disk.settings.auto_read_only);
    assert_eq!(disk.settings.discard, Discard::Unmap);
    assert!(matches!(disk.bottom, Bottom::File(image) if image.filename == "x"));
    // What lies below is the same disk when it is exported by its own name.
    assert_eq!(config.disk("below").unwrap(), disk);

    let disk = config.disk("n").unwrap();
    assert!(!disk.settings.direct && !disk.settings.no_flush && disk.settings.auto_read_only);
    assert_eq!(disk.settings.discard, Discard::Ignore, "the file itself lets none through");
    assert!(matches!(disk.bottom, Bottom::File(image) if image.filename == "y"));
}

#[test]
fn a_config_is_shown_with_its_defaults_filled_in() {
    let config = config(&["io0"], &[NULL], &[EXPORT]).unwrap();
    let json = serde_json::to_value(&config).unwrap();
    assert_eq!(json["iothreads"][0]["poll-idle-ms"], 7_000);
    assert_eq!(json["blockdevs"][0]["size"], 1 << 30);
    assert_eq!(json["exports"][0]["queue-size"], 128);
}
