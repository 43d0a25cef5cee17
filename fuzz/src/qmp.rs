//! What a monitor's client sends.

use egret_daemon::qmp::frame::Framer;
use egret_daemon::qmp::session::{Heard, Session};

/// Bytes on a monitor's socket. Commands are taken in and their arguments checked; none runs.
///
/// # Panics
/// When an answer is neither success nor failure, or the messages of a stream depend on how it was cut.
pub fn qmp(data: &[u8]) {
    let whole = messages(data, data.len());
    let cut = 1 + data.first().map_or(0, |byte| usize::from(*byte));
    assert_eq!(whole, messages(data, cut), "cut into {cut} bytes each, the messages are others");
    let (mut session, greeting) = Session::begin();
    assert!(greeting["QMP"].is_object());
    for message in whole {
        let Heard::Answer(answer) = session.hear(message) else { continue };
        let kinds = ["return", "error"].map(|kind| answer.get(kind).is_some());
        assert!(kinds[0] != kinds[1], "{answer}");
        if kinds[1] {
            assert!(answer["error"]["desc"].as_str().is_some_and(|text| !text.is_empty()), "{answer}");
        }
    }
}

/// The messages of bytes that arrive `step` at a time.
fn messages(data: &[u8], step: usize) -> Vec<Result<Vec<u8>, egret_daemon::qmp::frame::FrameError>> {
    let mut framer = Framer::default();
    let mut messages = Vec::new();
    for mut part in data.chunks(step.max(1)) {
        while let Some(message) = framer.take(&mut part) {
            messages.push(message);
        }
    }
    messages
}
