use egret_vocabulary::Config;
use serde_json::json;

use super::*;
use crate::Daemon;
use crate::process::Inherited;
use crate::qmp::frame::Framer;

/// What one client is answered, message by message.
fn answers(messages: &[&str]) -> Vec<Value> {
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    let (mut session, _) = Session::begin();
    let mut framer = Framer::default();
    let mut answers = Vec::new();
    for message in messages {
        let bytes = format!("{message}\n");
        let mut input = bytes.as_bytes();
        while let Some(frame) = framer.take(&mut input) {
            answers.push(match session.hear(frame) {
                Heard::Answer(answer) => answer,
                Heard::Order(order) => order.run(&mut daemon).0,
            });
        }
    }
    answers
}

/// The class and text of the error that answers `message`, once capabilities are agreed on.
fn error(message: &str) -> (String, String) {
    let answer = answers(&[r#"{"execute":"qmp_capabilities"}"#, message]).remove(1);
    let text = |key: &str| answer["error"][key].as_str().unwrap_or_else(|| panic!("{message}: {answer}")).to_owned();
    (text("class"), text("desc"))
}

#[test]
fn a_client_negotiates_once_and_before_all_else() {
    let begin = r#"{"execute":"qmp_capabilities"}"#;
    let answers = answers(&[r#"{"execute":"query-version","id":1}"#, begin, begin, r#"{"execute":"query-version"}"#]);
    assert_eq!(
        answers[0],
        json!({"id": 1, "error": {
            "class": "CommandNotFound", "desc": "Expecting capabilities negotiation with 'qmp_capabilities'"}})
    );
    assert_eq!(answers[1], json!({"return": {}}));
    assert_eq!(
        answers[2]["error"],
        json!({"class": "CommandNotFound",
               "desc": "Capabilities negotiation is already complete, command ignored"})
    );
    assert_eq!(answers[3]["return"]["qemu"]["major"], 10);
}

#[test]
fn a_client_that_wants_what_is_not_offered_has_not_begun() {
    for (arguments, text) in [
        (json!({"foo": 1}), "Parameter 'foo' is unexpected"),
        (json!({"enable": "oob"}), "Parameter 'enable' must be a list"),
        (json!({"enable": ["oob"]}), "Capability \"oob\" is not offered"),
        (json!({"enable": ["x"]}), "Parameter 'enable' must be a list"),
    ] {
        let begin = json!({"execute": "qmp_capabilities", "arguments": arguments}).to_string();
        let answers = answers(&[&begin, r#"{"execute":"query-version"}"#]);
        let got = answers[0]["error"]["desc"].as_str().unwrap_or_default();
        assert!(got.starts_with(text), "{begin}: {answers:?}");
        assert_eq!(answers[1]["error"]["class"], "CommandNotFound", "{begin}");
    }
}

#[test]
fn a_client_that_has_lost_its_place_begins_anew() {
    let [begin, next] = [r#"{"execute":"qmp_capabilities"}"#, r#"{"execute":"query-version"}"#];
    for text in ["{\"execute\": \"que\u{1}", "{\"execute\": \u{1}", "\u{1}", "}", "{\"execute\": \"que\n"] {
        let answers = answers(&[begin, &format!("{text}{next}")]);
        let text = answers[1]["error"]["desc"].as_str().unwrap_or_else(|| panic!("{text:?}: {answers:?}"));
        assert!(text.starts_with("JSON parse error, "), "{text}");
        assert_eq!((answers.len(), &answers[2]["return"]["qemu"]["major"]), (3, &json!(10)), "{text:?}");
    }
}

#[test]
fn an_id_comes_back_whatever_it_is_and_whatever_happens() {
    for id in [json!(7), json!("x"), json!({"a": [1]}), json!(null)] {
        for command in ["query-commands", "nope", "object-del"] {
            let message = json!({"execute": command, "id": id}).to_string();
            let answer = answers(&[r#"{"execute":"qmp_capabilities"}"#, &message]).remove(1);
            assert_eq!(answer["id"], id, "{answer}");
        }
    }
}

/// Each of these was sent to qemu-storage-daemon 10.0, which answers with this class and text, or one that begins so.
#[test]
fn what_makes_no_sense_is_answered_as_qemus_daemon_does() {
    let deep = "[".repeat(2000);
    for (message, class, text) in [
        (r#"{"execute":"nope"}"#, "CommandNotFound", "The command nope has not been found"),
        (r#"{"executed":"nope"}"#, "GenericError", "QMP input member 'executed' is unexpected"),
        (r#"{"execute":5}"#, "GenericError", "QMP input member 'execute' must be a string"),
        ("[1]", "GenericError", "QMP input must be a JSON object"),
        ("5", "GenericError", "QMP input must be a JSON object"),
        ("\"x\"", "GenericError", "QMP input must be a JSON object"),
        ("{}", "GenericError", "QMP input lacks member 'execute'"),
        (r#"{"execute":"query-version","foo":1}"#, "GenericError", "QMP input member 'foo' is unexpected"),
        (
            r#"{"execute":"query-version","arguments":5}"#,
            "GenericError",
            "QMP input member 'arguments' must be an object",
        ),
        (r#"{"execute":"query-version","arguments":{"x":1}}"#, "GenericError", "Parameter 'x' is unexpected"),
        (r#"{"execute": }"#, "GenericError", "JSON parse error, "),
        ("]", "GenericError", "JSON parse error, expecting value"),
        (r#"{"execute":"quit","execute":"query-version"}"#, "GenericError", "JSON parse error, duplicate key"),
        ("nonsense", "GenericError", "JSON parse error, "),
        (&deep, "GenericError", "JSON nesting depth limit exceeded"),
        (
            r#"{"execute":"object-add","arguments":{"qom-type":"iothread"}}"#,
            "GenericError",
            "Parameter 'id' is missing",
        ),
        (
            r#"{"execute":"object-add","arguments":{"qom-type":"iothread","id":"x","foo":1}}"#,
            "GenericError",
            "Parameter 'foo' is unexpected",
        ),
        (r#"{"execute":"object-del","arguments":{"id":"nope"}}"#, "GenericError", "object 'nope' not found"),
        (r#"{"execute":"qom-list","arguments":{"path":"/nope"}}"#, "DeviceNotFound", "Device '/nope' not found"),
        (
            r#"{"execute":"qom-get","arguments":{"path":"/objects/io9","property":"poll-max-ns"}}"#,
            "DeviceNotFound",
            "Device '/objects/io9' not found",
        ),
        (
            r#"{"execute":"blockdev-add","arguments":{"driver":"null-co"}}"#,
            "GenericError",
            "'node-name' must be specified for the root node",
        ),
        (
            r#"{"execute":"blockdev-add","arguments":{"node-name":"d2"}}"#,
            "GenericError",
            "Parameter 'driver' is missing",
        ),
        (
            r#"{"execute":"blockdev-add","arguments":{"driver":"raw","node-name":"r0","file":"nope"}}"#,
            "GenericError",
            "Cannot find device='nope' nor node-name='nope'",
        ),
        (
            r#"{"execute":"blockdev-del","arguments":{"node-name":"nope"}}"#,
            "GenericError",
            "Failed to find node with node-name='nope'",
        ),
        (r#"{"execute":"block-export-del","arguments":{}}"#, "GenericError", "Parameter 'id' is missing"),
        (r#"{"execute":"block-export-del","arguments":{"id":"nope"}}"#, "GenericError", "Export 'nope' is not found"),
        (
            r#"{"execute":"block_resize","arguments":{"node-name":"zz","size":512}}"#,
            "GenericError",
            "Cannot find device='' nor node-name='zz'",
        ),
    ] {
        let (got_class, got) = error(message);
        assert_eq!(got_class, class, "{message}");
        assert!(got.starts_with(text), "{message}: {got}");
    }
}

#[test]
fn a_property_of_a_thread_is_set_to_its_default_by_0_and_shown_as_it_is_in_force() {
    let get = r#"{"execute":"qom-get","arguments":{"path":"/objects/io0","property":"poll-grow"}}"#;
    let set = |property: &str, value: Value| {
        let arguments = json!({"path": "io0", "property": property, "value": value});
        json!({"execute": "qom-set", "arguments": arguments}).to_string()
    };
    let answers = answers(&[
        r#"{"execute":"qmp_capabilities"}"#,
        r#"{"execute":"object-add","arguments":{"qom-type":"iothread","id":"io0"}}"#,
        &set("poll-grow", json!(8)),
        get,
        &set("poll-grow", json!(0)),
        get,
        &set("poll-grow", json!("x")),
        &set("poll-policy", json!("low-regret")),
        &set("poll-grow", json!(3)),
        &set("colour", json!(3)),
        &set("fd-monitor", json!("epoll")),
        r#"{"execute":"query-iothreads"}"#,
    ]);
    assert_eq!(answers[3], json!({"return": 8}));
    assert_eq!(answers[5], json!({"return": 2}));
    let text = |at: usize| answers[at]["error"]["desc"].as_str().unwrap_or_else(|| panic!("{}", answers[at]));
    assert!(text(6).starts_with("iothread 'io0': poll-grow must be a number without quotes, 0..="));
    assert_eq!(answers[7], json!({"return": {}}));
    assert!(text(8).starts_with("iothread 'io0': poll-grow has no effect on poll-policy=low-regret"));
    assert_eq!(text(9), "Property 'iothread.colour' not found");
    assert!(text(10).contains("fd-monitor cannot be changed while the thread runs"));
    let thread = &answers[11]["return"][0];
    assert_eq!((&thread["id"], &thread["poll-policy"]), (&json!("io0"), &json!("low-regret")));
    assert_eq!((&thread["poll-max-ns"], &thread["poll-price"]), (&json!(8_388_607), &json!(1)));
    assert!(thread["thread-id"].as_i64().unwrap() > 0);
}

#[test]
fn every_command_says_what_it_misses_and_what_it_does_not_know() {
    for command in COMMANDS.iter() {
        let message = json!({"execute": command.name, "arguments": {"no-such-key": 1}}).to_string();
        error(&message);
    }
}

#[test]
fn a_command_that_only_looks_waits_for_no_change() {
    let looks = |command: &&Command| {
        ["query-", "egret-query-", "qom-get", "qom-list"].iter().any(|begin| command.name.starts_with(begin))
    };
    assert!(COMMANDS.iter().filter(looks).count() > 10);
    for command in COMMANDS.iter().filter(looks) {
        assert!(!matches!(command.run, command::Run::Mutate(_)), "{}", command.name);
    }
}

/// The arguments are those of the examples in QEMU's reference of QMP, which name objects that must be there first.
#[test]
fn the_examples_of_qemus_reference_work() {
    let place = tempfile::tempdir().unwrap();
    let image = place.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let addr = json!({"type": "unix", "path": place.path().join("socket")});
    let commands = [
        json!({"execute": "qmp_capabilities", "arguments": {"enable": []}}),
        json!({"execute": "query-version"}),
        json!({"execute": "query-commands"}),
        json!({"execute": "query-iothreads"}),
        json!({"execute": "query-blockstats"}),
        json!({"execute": "blockdev-add", "arguments": {"driver": "file", "node-name": "scratch", "filename": image}}),
        json!({"execute": "block-export-add", "arguments": {"type": "vhost-user-blk", "id": "e", "node-name": "scratch",
               "writable": true, "addr": addr}}),
        json!({"execute": "block_resize", "arguments": {"device": "scratch", "size": 1_073_741_824}}),
        json!({"execute": "blockdev-add", "arguments": {"driver": "null-co", "node-name": "ide0-1-0"}}),
        json!({"execute": "block_set_io_throttle", "arguments": {"id": "ide0-1-0", "bps": 1_000_000, "bps_rd": 0,
               "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0, "bps_max": 8_000_000, "bps_rd_max": 0,
               "bps_wr_max": 0, "iops_max": 0, "iops_rd_max": 0, "iops_wr_max": 0, "bps_max_length": 60,
               "iops_size": 0}}),
        json!({"execute": "block_set_io_throttle", "arguments": {"device": "ide0-1-0", "bps": 0, "bps_rd": 0,
               "bps_wr": 0, "iops": 512, "iops_rd": 0, "iops_wr": 0, "bps_max": 0, "bps_rd_max": 0, "bps_wr_max": 0,
               "iops_max": 0, "iops_rd_max": 0, "iops_wr_max": 0, "iops_size": 0}}),
        json!({"execute": "blockdev-del", "arguments": {"node-name": "ide0-1-0"}}),
        json!({"execute": "query-named-block-nodes"}),
        json!({"execute": "quit"}),
    ];
    let messages: Vec<String> = commands.iter().map(Value::to_string).collect();
    let messages: Vec<&str> = messages.iter().map(String::as_str).collect();
    let answers = answers(&messages);
    assert_eq!(answers.len(), commands.len());
    for (command, answer) in commands.iter().zip(&answers) {
        assert!(answer.get("return").is_some(), "{command}: {answer}");
    }
    let nodes = answers[12]["return"].as_array().unwrap();
    assert_eq!((nodes.len(), &nodes[0]["image"]["virtual-size"]), (1, &json!(1_073_741_824)));
}

#[test]
fn who_reads_by_qemus_schema_finds_what_it_needs() {
    let place = tempfile::tempdir().unwrap();
    let addr = |name: &str| json!({"type": "unix", "data": {"path": place.path().join(name), "abstract": false, "tight": true}});
    let inet = json!({"type": "inet", "data": {"host": "127.0.0.1", "port": "0", "numeric": true, "ipv4": true, "ipv6": false,
                      "keep-alive": true, "mptcp": false}});
    let commands = [
        json!({"execute": "qmp_capabilities"}),
        json!({"execute": "blockdev-add", "arguments": {"driver": "null-co", "node-name": "d"}}),
        json!({"execute": "query-blockstats", "arguments": {"query-nodes": true}}),
        json!({"execute": "nbd-server-start", "arguments": {"addr": inet}}),
        json!({"execute": "nbd-server-start", "arguments": {"addr": addr("nbd")}}),
        json!({"execute": "qom-list", "arguments": {"path": "/objects"}}),
    ];
    let messages: Vec<String> = commands.iter().map(Value::to_string).collect();
    let answers = answers(&messages.iter().map(String::as_str).collect::<Vec<_>>());
    let stats = &answers[2]["return"][0]["stats"];
    // Those of BlockDeviceStats that are not optional.
    for op in ["rd", "wr", "zone_append", "flush", "unmap"] {
        let mut members = vec![format!("{op}_operations"), format!("{op}_total_time_ns")];
        members.extend(["failed", "invalid"].map(|how| format!("{how}_{op}_operations")));
        if op != "flush" {
            members.extend(["bytes", "merged"].map(|what| format!("{op}_{what}")));
        }
        assert!(members.iter().all(|member| stats[member].is_u64()), "{stats}");
    }
    assert!(stats["wr_highest_offset"].is_u64() && stats["timed_stats"].is_array(), "{stats}");
    assert!(stats["account_invalid"].is_boolean() && stats["account_failed"].is_boolean(), "{stats}");
    let refused = answers[3]["error"]["desc"].as_str().unwrap();
    assert!(refused.contains("port"), "all else is known: {refused}");
    assert!(answers[4].get("return").is_some(), "{}", answers[4]);
}
