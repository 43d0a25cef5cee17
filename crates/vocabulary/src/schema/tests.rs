use std::collections::BTreeSet;
use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::key::{Key, ValueType};
use super::*;
use crate::keyval;

/// Reads an object as the command line does.
fn read<T: Object>(text: &str) -> Result<T, ObjectError> {
    let (value, spelling) =
        keyval::read(text, T::SHAPE.variants.as_ref().map_or("id", |variants| variants.tag)).unwrap();
    T::from_value(value, spelling)
}

fn error<T: Object + Debug>(text: &str) -> String {
    read::<T>(text).unwrap_err().to_string()
}

fn iothread(text: &str) -> Result<IoThread, ObjectError> {
    read(text)
}

/// What `$kind` is in the reference, and an object of that kind that sets every key it can.
const FULL: [&str; 9] = [
    "rbd,node-name=d,pool=p,namespace=n,image=i,conf=/c,snapshot=s,user=u,key-secret=k,auth-client-required.0=cephx,\
server.0.host=h,server.0.port=3300,encrypt.format=luks2,encrypt.key-secret=e,locking=on,connect-timeout=7,\
images-per-cluster-handle=2,settings.rbd_cache=false",
    "file,node-name=d0,filename=/d,aio=native,aio-max-batch=4,locking=off,cache.direct=on,cache.no-flush=on,\
     read-only=on,auto-read-only=off,discard=unmap,detect-zeroes=unmap",
    "null-aio,node-name=n0,size=64K,latency-ns=10000,read-zeroes=on",
    "raw,node-name=r0,file=d0",
    "blkdebug,node-name=b0,image=d0,inject-error.0.event=write_aio,inject-error.0.state=2,inject-error.0.iotype=write-zeroes,\
     inject-error.0.errno=28,inject-error.0.sector=7,inject-error.0.once=on,inject-error.1.event=none,\
     set-state.0.event=flush_to_os,set-state.0.state=1,set-state.0.new_state=2",
    "nbd,node-name=n1,server.type=unix,server.path=/n,export=e,tls-creds=t,tls-hostname=h,reconnect-delay=30,open-timeout=5",
    "nbd,node-name=n2,server.type=inet,server.host=h,server.port=10809",
    "throttle,node-name=t0,throttle-group=g,file=d0",
    "raw,node-name=r0,file.driver=host_device,file.filename=/dev/x,file.cache.direct=on",
];

const FULL_EXPORT: [&str; 5] = [
    "vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path=/s,writable=on,writethrough=yes,\
     logical-block-size=4k,num-queues=3,queue-size=256,serial=abc,fixed-iothread=off,\
     memory-max=1.5G,memory-files=any,user-mode-linux=on,pin-memory=on,rerror=ignore,werror=stop,request-timeout=30,iothread-vq-mapping.0.iothread=a,iothread-vq-mapping.0.vqs.0=0,iothread-vq-mapping.0.vqs.1=2,\
     iothread-vq-mapping.1.iothread=b,iothread-vq-mapping.1.vqs.0=1",
    "vhost-user-blk,id=e0,node-name=d0,addr.type=fd,addr.str=3,iothread=a",
    "vhost-user-scsi,id=e0,addr.type=fd,addr.str=3,num-queues=2,luns.0.lun=0,luns.0.node-name=d0,luns.1.lun=16383,\
     luns.1.target=255,luns.1.node-name=d1,luns.1.serial=s,luns.1.wwn=0x5000c50015ea71ac,luns.1.removable=on,luns.1.pr-file=/pr",
    "vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path=/s,iothread.0=a,iothread.1=b,mode=0660,user=me,\
     group=kvm,allow-uid.0=107,allow-uid.1=me",
    "nbd,id=e0,node-name=d0,name=disk,description=for whom,max-connections=3,writable=on,iothread.0=a,iothread.1=b",
];

const FULL_IOTHREAD: [&str; 2] = [
    "id=io0,poll-max-ns=1,poll-grow=2,poll-shrink=0,poll-weight=4,poll-policy=weighted,poll-idle-ms=7,\
     fd-monitor=epoll,aio-max-batch=8,thread-pool-min=9,thread-pool-max=10,cpu-affinity=0-1,,3,\
     x-clock-per-request=on",
    "id=io0,poll-policy=low-regret,poll-price=6",
];

const FULL_THROTTLE_GROUP: [&str; 4] = [
    "id=g,limits.iops-total=1,limits.iops-total-max=2,limits.iops-total-max-length=3,limits.iops-size=4,\
     limits.bps-total=5,limits.bps-total-max=6,limits.bps-total-max-length=7",
    "id=g,limits.iops-read=1,limits.iops-read-max=2,limits.iops-read-max-length=3,limits.iops-write=4,\
     limits.iops-write-max=5,limits.iops-write-max-length=6,limits.bps-read=7,limits.bps-read-max=8,\
     limits.bps-read-max-length=9,limits.bps-write=10,limits.bps-write-max=11,limits.bps-write-max-length=12",
    "id=g,x-iops-total=1,x-iops-total-max=2,x-iops-total-max-length=3,x-iops-size=4,x-bps-total=5,x-bps-total-max=6,\
     x-bps-total-max-length=7",
    "id=g,x-iops-read=1,x-iops-read-max=2,x-iops-read-max-length=3,x-iops-write=4,x-iops-write-max=5,\
     x-iops-write-max-length=6,x-bps-read=7,x-bps-read-max=8,x-bps-read-max-length=9,x-bps-write=10,x-bps-write-max=11,\
     x-bps-write-max-length=12",
];

/// JSON, and back.
fn there_and_back<T: Object + Serialize + DeserializeOwned + PartialEq + Debug>(text: &str) -> Value {
    let object = read::<T>(text).unwrap();
    let json = serde_json::to_value(&object).unwrap();
    let back: T = serde_json::from_value(json.clone()).unwrap_or_else(|error| panic!("{json}: {error}"));
    assert_eq!(back, object, "{json}");
    json
}

#[test]
fn every_object_survives_the_way_through_json() {
    let iothread = there_and_back::<IoThread>(FULL_IOTHREAD[0]);
    there_and_back::<IoThread>(FULL_IOTHREAD[1]);
    assert_eq!(iothread["cpu-affinity"], "0-1,3");
    assert_eq!(iothread["poll-shrink"], 0);
    for text in FULL {
        there_and_back::<Blockdev>(text);
    }
    for text in FULL_THROTTLE_GROUP {
        there_and_back::<ThrottleGroup>(text);
    }
    for text in FULL_EXPORT {
        there_and_back::<Export>(text);
    }
    let nested = there_and_back::<Blockdev>(FULL[8]);
    assert_eq!(
        nested["file"],
        json!({"driver": "host_device", "filename": "/dev/x", "aio": "threads", "aio-max-batch": 0, "locking": "auto",
               "drop-cache": true, "cache": {"direct": true}})
    );
}

/// Every key of the table can be set, and ends up in a field: none is read and forgotten.
#[test]
fn the_tables_and_the_structs_have_the_same_keys() {
    fn collect(value: &Value, path: &str, into: &mut BTreeSet<String>) {
        match value {
            Value::Object(object) => {
                for (name, value) in object {
                    collect(value, &format!("{path}{name}."), into);
                }
            }
            Value::Array(list) if list.iter().any(Value::is_object) => {
                list.iter().for_each(|value| collect(value, &format!("{path}N."), into));
            }
            _ => drop(into.insert(path.trim_end_matches('.').to_owned())),
        }
    }
    fn expected(shape: &Shape, path: &str, into: &mut BTreeSet<String>) {
        into.extend(shape.variants.iter().map(|variants| format!("{path}{}", variants.tag)));
        for (Key { name, kind, .. }, _) in shape.all_keys() {
            match kind {
                ValueType::Object(nested) => expected(nested, &format!("{path}{name}."), into),
                ValueType::List(nested) => expected(nested, &format!("{path}{name}.N."), into),
                ValueType::Settings => drop(into.insert(format!("{path}{name}.rbd_cache"))),
                _ => drop(into.insert(format!("{path}{name}"))),
            }
        }
    }
    fn check<T: Object + Serialize>(texts: &[&str]) {
        let (mut have, mut want) = (BTreeSet::new(), BTreeSet::new());
        for text in texts {
            collect(&serde_json::to_value(read::<T>(text).unwrap()).unwrap(), "", &mut have);
        }
        expected(T::SHAPE, "", &mut want);
        assert_eq!(have, want);
    }
    check::<IoThread>(&FULL_IOTHREAD);
    check::<Blockdev>(&FULL[..8]);
    check::<ThrottleGroup>(&FULL_THROTTLE_GROUP);
    check::<Export>(&FULL_EXPORT);
}

/// An object with only what it needs has exactly the defaults that the reference promises.
#[test]
fn what_is_left_out_means_what_the_tables_say() {
    fn check<T: Object + Serialize>(least: &str, variant: Option<&str>, fill_in: fn(&mut T)) {
        let object = |text: &str| {
            let mut object = read::<T>(text).unwrap_or_else(|error| panic!("{error}"));
            fill_in(&mut object);
            serde_json::to_value(object).unwrap()
        };
        let (lean, mut checked) = (object(least), 0);
        for key in T::SHAPE.keys_of(variant).filter(|key| !least.contains(key.name)) {
            let Some(value) = lean.get(key.name) else { continue };
            assert_eq!(value, &object(&format!("{least},{}={}", key.name, key.unset))[key.name], "{}", key.name);
            checked += 1;
        }
        assert!(checked > 1, "{least} has too few defaults to be checked");
    }
    check::<IoThread>("id=io0", None, IoThread::fill_in);
    check::<Blockdev>("file,node-name=d0,filename=/d", Some("file"), |_| {});
    check::<Blockdev>("null-co,node-name=d0", Some("null-co"), |_| {});
    check::<Blockdev>("nbd,node-name=d0,server.type=unix,server.path=/s", Some("nbd"), |_| {});
    check::<Export>("vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=/s", Some("vhost-user-blk"), |_| {});
    let scsi = "vhost-user-scsi,id=e,luns.0.lun=0,luns.0.node-name=d,addr.type=unix,addr.path=/s";
    check::<Export>(scsi, Some("vhost-user-scsi"), |_| {});
    assert_eq!(
        error::<Export>("nbd,id=e,node-name=d,num-queues=1"),
        "export 'e': key 'num-queues' belongs to type vhost-user-blk or vhost-user-scsi, and this is nbd"
    );
    for (text, policy) in [("id=io0", PolicyKind::LowRegret), ("id=io0,poll-shrink=0", PolicyKind::Weighted)] {
        assert_eq!(read::<IoThread>(text).unwrap().policy(), policy, "{text}");
    }
    assert_eq!(read::<IoThread>("id=io0").unwrap(), IoThread::new("io0"));
    let addr = Addr::Unix(UnixAddr { path: "/s".to_owned() });
    assert_eq!(
        read::<Export>("vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=/s").unwrap(),
        Export::new("e", "d", addr)
    );
}

#[test]
fn a_value_out_of_range_names_the_object_the_key_the_range_and_what_was_given() {
    for (text, line) in [
        ("io0,poll-weight=64", "iothread 'io0': poll-weight must be 0..=63, got 64"),
        ("io0,poll-weight=-1", "iothread 'io0': poll-weight must be 0..=63, got -1"),
        ("io0,poll-max-ns=32k", "iothread 'io0': poll-max-ns must be 0..=9223372036854775807, got '32k'"),
        ("io0,fd-monitor=kqueue", "iothread 'io0': fd-monitor must be auto, io_uring, epoll or ppoll, got 'kqueue'"),
        ("io0,thread-pool-max=0", "iothread 'io0': thread-pool-max must be 1..=65536, got 0"),
        ("io0,thread-pool-min=65", "iothread 'io0': thread-pool-min must be at most thread-pool-max (64), got 65"),
        (
            "io0,cpu-affinity=x",
            "iothread 'io0': cpu-affinity must be processor numbers (0-3,8) or a list of them, got 'x'",
        ),
        ("io0,poll-grow.x=1", "iothread 'io0': poll-grow must be 0..=9223372036854775807, got an object"),
        ("poll-grow=2", "iothread without id: id is missing"),
        ("0,poll-grow=2", "iothread '0': id must be a name (a letter, then letters, digits, '-', '.', '_'), got 0"),
    ] {
        assert_eq!(error::<IoThread>(text), line);
    }
    let long = format!("null-co,node-name={}", "n".repeat(32));
    let line = format!(
        "blockdev '{0}': node-name must be a name of at most 31 bytes (a letter, then letters, digits, '-', '.', '_'), \
         got '{0}'",
        "n".repeat(32)
    );
    assert_eq!(error::<Blockdev>(&long), line);
}

#[test]
fn a_polling_property_belongs_to_the_policy_that_is_named_with_it() {
    assert_eq!(
        error::<IoThread>("io0,poll-policy=low-regret,poll-weight=4"),
        "iothread 'io0': poll-weight has no effect on poll-policy=low-regret; it belongs to weighted"
    );
    assert_eq!(
        error::<IoThread>("io0,poll-price=4,poll-policy=busy"),
        "iothread 'io0': poll-price has no effect on poll-policy=busy; it belongs to low-regret"
    );
    // A line that names none may have been written for another program.
    iothread("io0,poll-weight=4,poll-price=2,poll-grow=2").unwrap();
}

#[test]
fn a_batch_is_limited_of_the_engine_that_has_batches() {
    for (aio, named) in [("", "threads"), (",aio=io_uring", "io_uring")] {
        let line = format!("aio-max-batch has no effect on aio={named}; it belongs to native");
        let text = format!("file,node-name=d,filename=x{aio},aio-max-batch");
        assert_eq!(error::<Blockdev>(&format!("{text}=1")), format!("blockdev 'd': {line}"));
        read::<Blockdev>(&format!("{text}=0")).unwrap();
    }
}

#[test]
fn an_unknown_key_names_the_nearest_known_one() {
    for (text, line) in [
        ("file,node-name=d,filenam=x", "blockdev 'd': unknown key 'filenam'; did you mean 'filename'?"),
        ("file,node-name=d,direct=on", "blockdev 'd': unknown key 'direct'; did you mean 'cache.direct'?"),
        ("file,node-name=d,cache.dirct=on", "blockdev 'd': unknown key 'cache.dirct'; did you mean 'direct'?"),
        (
            "null-co,node-name=d,colour=red",
            "blockdev 'd': unknown key 'colour'; known are driver, node-name, cache.direct, cache.no-flush, read-only, \
             auto-read-only, discard, detect-zeroes, size, latency-ns, read-zeroes",
        ),
        (
            "nbd,node-name=d,path=/s",
            "blockdev 'd': unknown key 'path'; known are driver, node-name, cache.direct, cache.no-flush, read-only, \
             auto-read-only, discard, detect-zeroes, server, export, filename, tls-creds, tls-hostname, reconnect-delay, \
             open-timeout",
        ),
        (
            "file,node-name=d,latency-ns=1",
            "blockdev 'd': key 'latency-ns' belongs to driver null-co or null-aio, and this is file",
        ),
        ("file,node-name=d", "blockdev 'd': filename is missing"),
        ("node-name=d", "blockdev 'd': driver is missing"),
        (
            "flie,node-name=d",
            "blockdev 'd': driver must be file, host_device, null-co, null-aio, nbd, rbd, raw, throttle or blkdebug, got 'flie'",
        ),
        (
            "raw,node-name=d,file.driver=file,file.filname=x",
            "blockdev 'd': unknown key 'file.filname'; did you mean 'filename'?",
        ),
        ("raw,node-name=d,file.driver=file", "blockdev 'd': file.filename is missing"),
    ] {
        assert_eq!(error::<Blockdev>(text), line);
    }
}

#[test]
fn a_set_of_descriptors_goes_by_its_number() {
    let set = |text: &str| read::<Blockdev>(text).unwrap();
    assert_eq!(set("file,node-name=d,filename=/dev/fdset/12").fd_set(), Some(12));
    let inline = set("raw,node-name=d,file.driver=host_device,file.filename=/dev/fdset/0");
    assert_eq!(inline.inline_child().unwrap().fd_set(), Some(0));
    assert_eq!(set("file,node-name=d,filename=/dev/fdset").fd_set(), None);
    for neither in ["", "x", "-1", "+1", "1/", " 1", "9223372036854775808"] {
        let line = "filename must be /dev/fdset/ with a number in 0..=9223372036854775807";
        assert_eq!(
            error::<Blockdev>(&format!("file,node-name=d,filename=/dev/fdset/{neither}")),
            format!("blockdev 'd': {line}, got '/dev/fdset/{neither}'")
        );
    }
}

#[test]
fn what_qemu_has_and_we_have_not_is_said_to_be_so_unless_it_changes_nothing() {
    for (text, line) in [
        (
            "qcow2,node-name=d,file=x",
            "blockdev 'd': driver 'qcow2' is QEMU's and not done here: Egret serves raw disks",
        ),
        (
            "file,node-name=d,filename=x,pr-manager=p",
            "blockdev 'd': pr-manager=p is QEMU's and not done here: persistent reservations are not passed on; a \
             logical unit keeps its own, in its pr-file",
        ),
        (
            "blkdebug,node-name=d,image=x,config=rules",
            "blockdev 'd': config=rules is QEMU's and not done here: rules of blkdebug are written in its own keys",
        ),
    ] {
        assert_eq!(error::<Blockdev>(text), line);
    }
    for limit in ["align", "max-transfer", "opt-write-zero", "max-write-zero", "opt-discard", "max-discard"] {
        let of = |value: u32| format!("blkdebug,node-name=d,image=x,{limit}={value}");
        assert!(error::<Blockdev>(&of(4096)).contains(&format!("{limit}=4096 is QEMU's and not done here")));
        read::<Blockdev>(&of(0)).unwrap();
    }
    let injected = |more: &str| format!("blkdebug,node-name=d,image=x,inject-error.0.event=none,inject-error.0.{more}");
    assert_eq!(
        error::<Blockdev>(&injected("immediately=on")),
        "blockdev 'd': inject-error.0.immediately=on is QEMU's and not done here: an injected error never comes within the submission"
    );
    read::<Blockdev>(&injected("immediately=off")).unwrap();
    let parent = "rbd,node-name=d,pool=p,image=i,encrypt.format=luks,encrypt.key-secret=s,encrypt.parent.format=luks";
    assert!(error::<Blockdev>(parent).contains("encrypt.parent=") && error::<Blockdev>(parent).contains("is QEMU's"));
    for list in ["take-child-perms", "unshare-child-perms"] {
        let error = error::<Blockdev>(&format!("blkdebug,node-name=d,image=x,{list}.0=write"));
        assert!(error.contains(&format!("{list}=")) && error.contains("is QEMU's and not done here"), "{error}");
    }
    for bitmaps in ["bitmap=b", "bitmaps.0=b"] {
        let error = error::<Export>(&format!("nbd,id=e,node-name=d,{bitmaps}"));
        assert!(error.contains("is QEMU's and not done here: there are no dirty bitmaps"), "{error}");
    }
    read::<Export>("nbd,id=e,node-name=d,allocation-depth=on").unwrap();
    read::<Export>("nbd,id=e,node-name=d,allow-inactive=off").unwrap();
    assert_eq!(
        error::<Export>("nbd,id=e,node-name=d,allow-inactive=on"),
        "export 'e': allow-inactive=on is QEMU's and not done here: an image is locked for as long as an export of it over NBD \
         is there"
    );
    read::<Blockdev>("raw,node-name=d,file=x,offset=0").unwrap();
    for part in ["offset=512", "size=1M"] {
        assert_eq!(
            error::<Blockdev>(&format!("raw,node-name=d,file=x,{part}")),
            format!("blockdev 'd': {part} is QEMU's and not done here: a disk is a whole file or device")
        );
    }
    assert!(error::<Blockdev>("file,node-name=d,filename=x,force-share=on").contains("use locking=off"));
    read::<Blockdev>("file,node-name=d,filename=x,force-share=off,drop-cache=on,x-check-cache-dropped=off,active=on")
        .unwrap();
    assert_eq!(
        error::<Export>("fuse,id=e,node-name=d"),
        "export 'e': type 'fuse' is QEMU's and not done here: Egret exports vhost-user-blk, vhost-user-scsi and nbd"
    );
    assert!(error::<Export>("vhost-user-blk,id=e,node-name=d,addr.type=inet").contains("addr.type 'inet' is QEMU's"));
    read::<Export>("vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=s,addr.abstract=off,allow-inactive=no")
        .unwrap();
}

#[test]
fn the_logical_units_of_an_export_are_apart_and_within_what_scsi_addresses() {
    let base = "vhost-user-scsi,id=e,addr.type=unix,addr.path=s";
    let one = format!("{base},luns.0.lun=1,luns.0.node-name=d");
    for (text, line) in [
        (format!("{base},luns.0.lun=0"), "luns.0.node-name is missing"),
        (format!("{base},luns.0.lun=16384,luns.0.node-name=d"), "luns.0.lun must be 0..=16383, got 16384"),
        (format!("{one},luns.0.target=256"), "luns.0.target must be 0..=255, got 256"),
        (format!("{one},luns.1.lun=1,luns.1.node-name=e"), "luns has two of target=0,lun=1"),
        (format!("{one},luns.1.lun=2,luns.1.node-name=d"), "luns has blockdev 'd' twice"),
        (
            format!("{one},luns.0.wwn=0x1234"),
            "luns.0.wwn must be a number of 64 bits that begins with 2, 3 or 5, got 0x1234",
        ),
        (format!("{one},num-queues=255"), "num-queues must be 1..=254, got 255"),
        (
            format!("{one},logical-block-size=128k"),
            "logical-block-size must be a power of two in 512..=65536 bytes, got 131072",
        ),
        (
            format!("{one},node-name=d"),
            "key 'node-name' belongs to type vhost-user-blk or nbd, and this is vhost-user-scsi",
        ),
    ] {
        assert_eq!(error::<Export>(&text), format!("export 'e': {line}"));
    }
}

#[test]
fn an_export_has_queues_rings_blocks_and_a_socket_within_their_limits() {
    let base = "vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=s";
    for (text, line) in [
        ("num-queues=0", "num-queues must be 1..=256, got 0"),
        ("num-queues=257", "num-queues must be 1..=256, got 257"),
        ("queue-size=2", "queue-size must be a power of two in 4..=1024, got 2"),
        ("queue-size=100", "queue-size must be a power of two in 4..=1024, got 100"),
        ("queue-size=2048", "queue-size must be a power of two in 4..=1024, got 2048"),
        ("logical-block-size=1000", "logical-block-size must be a power of two in 512..=2097152 bytes, got 1000"),
        ("logical-block-size=4M", "logical-block-size must be a power of two in 512..=2097152 bytes, got '4M'"),
        ("serial=123456789012345678901", "serial must be text of at most 20 bytes, got 123456789012345678901"),
        ("writable=maybe", "writable must be on or off, got 'maybe'"),
        (
            "iothread=a,iothread-vq-mapping.0.iothread=a",
            "iothread and iothread-vq-mapping say the same thing twice: use one of them",
        ),
        ("iothread.0=a,iothread.1=b,fixed-iothread=on", "fixed-iothread=on needs a single iothread, got several"),
        ("iothread.0=a,iothread.1=a", "iothread names iothread 'a' twice"),
    ] {
        assert_eq!(error::<Export>(&format!("{base},{text}")), format!("export 'e': {line}"));
    }
    let path = "p".repeat(108);
    assert_eq!(
        error::<Export>(&format!("vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={path}")),
        format!("export 'e': addr.path must be text of 1..=107 bytes, got '{path}'")
    );
    assert_eq!(
        error::<Export>("vhost-user-blk,id=e,node-name=d,addr.type=fd,addr.str=3abc"),
        "export 'e': addr.str must be the number of an open file descriptor, or a name of $LISTEN_FDNAMES, got '3abc'"
    );
}

#[test]
fn who_may_connect_is_said_in_octal_and_by_names_or_numbers_and_only_of_a_socket_that_is_made_here() {
    let unix = "vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=s";
    let users = "allow-uid must be a user's name or number, or a list of them";
    let made = "whoever made that socket has said it; allow-uid does go with it";
    for (text, line) in [
        ("mode=07777", "mode must be octal permissions (0600), got 07777".to_owned()),
        ("mode=0668", "mode must be octal permissions (0600), got 0668".to_owned()),
        ("user=", "user must be text of 1..=255 bytes, got ''".to_owned()),
        ("allow-uid=", format!("{users}, got ''")),
        ("allow-uid.0.x=1", format!("{users}, got a list")),
    ] {
        assert_eq!(error::<Export>(&format!("{unix},{text}")), format!("export 'e': {line}"));
    }
    let fd = "vhost-user-blk,id=e,node-name=d,addr.type=fd,addr.str=3,allow-uid=7";
    assert_eq!(read::<Export>(fd).unwrap().vhost_user().unwrap().access.allow_uid, ["7"]);
    for key in ["mode=0660", "user=me", "group=kvm"] {
        let (name, _) = key.split_once('=').unwrap();
        let line = format!("export 'e': {name} does not go with addr.type=fd: {made}");
        assert_eq!(error::<Export>(&format!("{fd},{key}")), line);
    }
    let typed = |users: Value| {
        let addr = json!({"type": "unix", "path": "s"});
        let export = json!({"type": "vhost-user-blk", "id": "e", "node-name": "d", "addr": addr, "allow-uid": users});
        Export::from_value(export, Spelling::Typed)
            .map(|export| export.vhost_user().unwrap().access.allow_uid.clone())
            .map_err(|e| e.to_string())
    };
    assert_eq!(typed(json!(7)).unwrap(), ["7"]);
    assert_eq!(typed(json!([7, "me"])).unwrap(), ["7", "me"]);
    for users in [json!([]), json!([-1]), json!(4_294_967_296_u64), json!([1.5]), json!({})] {
        assert!(typed(users.clone()).unwrap_err().contains(" must be "), "{users}");
    }
}

#[test]
fn a_queue_mapping_gives_every_queue_to_one_iothread() {
    let base = "vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=s,num-queues=3";
    let map = |text: &str| {
        let keys: Vec<_> = text.split(' ').map(|key| format!("iothread-vq-mapping.{key}")).collect();
        read::<Export>(&format!("{base},{}", keys.join(",")))
    };
    let dealt = map("0.iothread=a 1.iothread=b").unwrap();
    assert_eq!([0, 1, 2].map(|queue| dealt.iothread_of(queue)), [Some("a"), Some("b"), Some("a")]);
    let owned = map("0.iothread=a 0.vqs.0=2 1.iothread=b 1.vqs.0=0 1.vqs.1=1").unwrap();
    assert_eq!([0, 1, 2].map(|queue| owned.iothread_of(queue)), [Some("b"), Some("b"), Some("a")]);
    let unset = read::<Export>(base).unwrap();
    assert_eq!(unset.iothread_of(1), None);
    let list = read::<Export>(&format!("{base},iothread.0=x,iothread.1=y")).unwrap();
    assert_eq!([0, 1, 2].map(|queue| list.iothread_of(queue)), [Some("x"), Some("y"), Some("x")]);

    for (text, line) in [
        ("0.iothread=a 0.vqs.0=0 1.iothread=b", "iothread-vq-mapping: iothread 'b' has no vqs, and others have"),
        ("0.iothread=a 0.vqs.0=3", "iothread-vq-mapping: vqs must be 0..=2 (num-queues=3), got 3"),
        ("0.iothread=a 0.vqs.0=1 0.vqs.1=1", "iothread-vq-mapping gives queue 1 to two iothreads"),
        ("0.iothread=a 0.vqs.0=0 0.vqs.1=2", "iothread-vq-mapping gives queue 1 to no iothread"),
        ("0.iothread=a 1.iothread=a", "iothread-vq-mapping names iothread 'a' twice"),
        ("0.vqs.0=0", "iothread-vq-mapping.0.iothread is missing"),
    ] {
        assert_eq!(map(text).unwrap_err().to_string(), format!("export 'e': {line}"));
    }
}

#[test]
fn typed_sources_have_typed_values() {
    let read = |value: Value| IoThread::from_value(value, Spelling::Typed).map_err(|error| error.to_string());
    assert_eq!(read(json!({"id": "a", "poll-weight": 5})).unwrap().poll_weight, Some(5));
    let cpus = read(json!({"id": "a", "cpu-affinity": [3, 1]})).unwrap().cpu_affinity.unwrap();
    assert_eq!(cpus.to_string(), "1,3");
    assert_eq!(read(json!({"id": "a", "cpu-affinity": 0})).unwrap().cpu_affinity.unwrap().to_string(), "0");
    assert_eq!(
        read(json!({"id": "a", "cpu-affinity": -1})).unwrap_err(),
        "iothread 'a': cpu-affinity must be processor numbers (0-3,8) or a list of them, got -1"
    );
    assert_eq!(
        read(json!({"id": 5})).unwrap_err(),
        "iothread without id: id must be a name (a letter, then letters, digits, '-', '.', '_'), in quotes, got 5"
    );
    let export = |mode: Value| {
        let addr = json!({"type": "unix", "path": "s"});
        let export = json!({"type": "vhost-user-blk", "id": "e", "node-name": "d", "addr": addr, "mode": mode});
        Export::from_value(export, Spelling::Typed).map_err(|error| error.to_string())
    };
    assert!(export(json!("0660")).is_ok());
    assert_eq!(
        export(json!(432)).unwrap_err(),
        "export 'e': mode must be octal permissions (0600), in quotes, got 432"
    );
    assert_eq!(export(json!("0o660")).unwrap_err(), "export 'e': mode must be octal permissions (0600), got '0o660'");
    assert_eq!(
        read(json!({"id": "a", "poll-weight": "5"})).unwrap_err(),
        "iothread 'a': poll-weight must be a number without quotes, 0..=63, got '5'"
    );
    assert_eq!(
        read(json!({"id": "a", "poll-weight": 1.5})).unwrap_err(),
        "iothread 'a': poll-weight must be 0..=63, got 1.5"
    );
    let direct = r#"{"driver": "file", "filename": "x", "node-name": "d", "cache": {"direct": true}}"#;
    assert_eq!(self::read::<Blockdev>(direct).unwrap().cache.direct, Some(true));
    assert_eq!(
        error::<Blockdev>(&direct.replace("true", "\"on\"")),
        "blockdev 'd': cache.direct must be true or false without quotes, got 'on'"
    );
    assert_eq!(
        IoThread::from_value(json!(5), Spelling::Typed).unwrap_err().to_string(),
        "iothread without id: it must be an object of keys, got 5"
    );
}

#[test]
fn plain_serde_goes_through_the_same_checks() {
    let error = serde_json::from_str::<IoThread>(r#"{"id": "a", "pol-grow": 1}"#).unwrap_err().to_string();
    assert_eq!(error, "iothread 'a': unknown key 'pol-grow'; did you mean 'poll-grow'?");
    assert!(iothread("a").is_ok());
}

/// The reference for people holds exactly what the tables say. `EGRET_BLESS=1` writes it anew.
#[test]
fn the_reference_is_in_step_with_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut blessed = text.clone();
    for (noun, table) in [
        (IoThread::NOUN, reference(IoThread::SHAPE)),
        (Secret::NOUN, reference(Secret::SHAPE)),
        (ThrottleGroup::NOUN, reference(ThrottleGroup::SHAPE)),
        (TlsCreds::NOUN, reference(TlsCreds::SHAPE)),
        (Blockdev::NOUN, reference(Blockdev::SHAPE)),
        (Export::NOUN, reference(Export::SHAPE)),
        ("nbd-server", reference(&NBD_SERVER)),
    ] {
        let (begin, end) = (format!("<!-- keys of {noun} -->\n"), format!("<!-- end of {noun} -->"));
        let from = blessed.find(&begin).unwrap_or_else(|| panic!("no '{begin}'")) + begin.len();
        let to = blessed.find(&end).unwrap_or_else(|| panic!("no '{end}'"));
        blessed.replace_range(from..to, &format!("\n{table}\n"));
    }
    if std::env::var_os("EGRET_BLESS").is_some() {
        std::fs::write(path, &blessed).unwrap();
        return;
    }
    assert!(
        text == blessed,
        "docs/options.md is out of step; EGRET_BLESS=1 cargo test -p egret-vocabulary writes it anew"
    );
}

#[test]
fn an_object_of_another_type_is_refused_by_name() {
    let read = |text| {
        let (value, spelling) = keyval::read(text, "qom-type").unwrap();
        IoThread::from_user_object(value, spelling).map_err(|error| error.to_string())
    };
    assert_eq!(read("iothread,id=a").unwrap(), IoThread::new("a"));
    assert_eq!(
        read("authz-simple,id=t").unwrap_err(),
        "object 't': qom-type 'authz-simple' is QEMU's and not done here: of QEMU's objects Egret has iothread, secret, throttle-group and tls-creds-x509"
    );
    assert_eq!(
        read("iothred,id=t").unwrap_err(),
        "object 't': qom-type must be iothread, secret, throttle-group or tls-creds-x509, got 'iothred'"
    );
    assert_eq!(read("id=t").unwrap_err(), "object 't': qom-type is missing");
    assert_eq!(read("iothread").unwrap_err(), "iothread without id: id is missing");
}

#[test]
fn a_dotted_key_in_json_is_told_to_be_nested() {
    let text = r#"{"driver": "file", "node-name": "d", "filename": "x", "cache.direct": true}"#;
    assert_eq!(
        error::<Blockdev>(text),
        "blockdev 'd': unknown key 'cache.direct'; dots are for key=value text, here it is {\"cache\": {\"direct\": ...}}"
    );
}

proptest::proptest! {
    #[test]
    fn no_argument_makes_an_object_panic(
        driver in "(file|raw|null-co|vhost-user-blk|a)",
        keys in proptest::collection::vec(
            "(id|node-name|size|file(\\.driver|\\.file)*|cache(\\.direct)?|addr(\\.type|\\.path|\\.str)?|iothread(\\.[01])?|\
             iothread-vq-mapping\\.0\\.(vqs\\.0|iothread)|num-queues|cpu-affinity|poll-grow)=[a-z0-9.,-]{0,6}",
            0..6,
        ),
    ) {
        let text = format!("{driver},{}", keys.join(","));
        let _ = keyval::read(&text, "driver").map(|(value, spelling)| Blockdev::from_value(value, spelling));
        let _ = keyval::read(&text, "type").map(|(value, spelling)| Export::from_value(value, spelling));
        let _ = keyval::read(&text, "id").map(|(value, spelling)| IoThread::from_value(value, spelling));
    }
}
