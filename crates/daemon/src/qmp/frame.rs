//! Where one JSON value ends and the next begins.
//!
//! QMP has no frames: values follow one another, with white space between them or without. Strings may have single quotes,
//! as qmp-spec allows clients, and come out with double ones, as JSON has them. An object or a list ends
//! with its last bracket, and anything else at white space. A byte that no JSON has ends it as well, by which a client
//! that has lost its place begins anew (qmp-spec, "Forcing the JSON parser into known-good state"). How large a value may
//! be, and how deep, is bounded: what is beyond is an error, and reading goes on after the next line break.

/// The most bytes that one value may have.
pub const LARGEST: usize = 1 << 20;
/// The most brackets that may be open at a time; less than what serde_json takes.
pub const DEEPEST: usize = 100;

/// Why bytes are no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// More than [`LARGEST`] bytes.
    #[error("JSON message is larger than {LARGEST} bytes")]
    TooLarge,
    /// More than [`DEEPEST`] brackets.
    #[error("JSON nesting depth limit exceeded")]
    TooDeep,
    /// A bracket that closes nothing.
    #[error("JSON parse error, expecting value")]
    Unopened,
    /// A control character, or a byte that UTF-8 does not have.
    #[error("JSON parse error, stray byte 0x{0:02x}")]
    Stray(u8),
}

/// Cuts a stream of bytes into JSON values; it holds no more than one value at a time.
#[derive(Debug, Default)]
pub struct Framer {
    value: Vec<u8>,
    depth: usize,
    /// The quote that its string ends with, inside one.
    quoted: Option<u8>,
    escaped: bool,
    /// Everything up to the next line break is thrown away.
    skipping: bool,
}

impl Framer {
    /// Takes bytes from the front of `input`, up to the end of the first value that they complete; returns it, or why
    /// there is none, or nothing if the value goes on.
    pub fn take(&mut self, input: &mut &[u8]) -> Option<Result<Vec<u8>, FrameError>> {
        while let Some((&byte, rest)) = input.split_first() {
            *input = rest;
            if self.skipping && !is_stray(byte) {
                self.skipping = byte != b'\n';
                continue;
            }
            match self.step(byte) {
                Ok(true) => return Some(Ok(std::mem::take(self).value)),
                Ok(false) => {}
                Err(error) => {
                    let skips = matches!(error, FrameError::TooLarge | FrameError::TooDeep);
                    *self = Self { skipping: skips && byte != b'\n', ..Self::default() };
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// Whether `byte` ends the value.
    fn step(&mut self, byte: u8) -> Result<bool, FrameError> {
        if is_stray(byte) || (self.quoted.is_some() && byte < b' ') {
            return Err(FrameError::Stray(byte));
        }
        if self.value.is_empty() && byte.is_ascii_whitespace() {
            return Ok(false);
        }
        if self.value.len() >= LARGEST {
            return Err(FrameError::TooLarge);
        }
        if let Some(quote) = self.quoted {
            match byte {
                b'\'' if self.escaped => {
                    self.value.pop();
                    self.value.push(byte);
                }
                _ if self.escaped => self.value.push(byte),
                _ if byte == quote => {
                    self.quoted = None;
                    self.value.push(b'"');
                }
                b'"' => self.value.extend(b"\\\""),
                _ => self.value.push(byte),
            }
            self.escaped = !self.escaped && byte == b'\\';
            return Ok(false);
        }
        match byte {
            b'{' | b'[' => {
                if self.depth == DEEPEST {
                    return Err(FrameError::TooDeep);
                }
                self.depth += 1;
            }
            b'}' | b']' => self.depth = self.depth.checked_sub(1).ok_or(FrameError::Unopened)?,
            b'"' | b'\'' => {
                self.quoted = Some(byte);
                self.value.push(b'"');
                return Ok(false);
            }
            _ => {}
        }
        // Outside of brackets a word ends at white space, and a bracket ends what it closes.
        let ends = self.depth == 0 && (byte.is_ascii_whitespace() || matches!(byte, b'}' | b']'));
        self.value.push(byte);
        Ok(ends)
    }
}

/// Whether JSON has no such byte, in strings or beside them.
const fn is_stray(byte: u8) -> bool {
    matches!(byte, 0..b' ' | 0xfe..) && !matches!(byte, b'\t' | b'\r' | b'\n')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames(text: &[u8]) -> Vec<Result<String, FrameError>> {
        let (mut framer, mut input, mut found) = (Framer::default(), text, Vec::new());
        while let Some(frame) = framer.take(&mut input) {
            found.push(frame.map(|value| String::from_utf8_lossy(&value).trim().to_owned()));
        }
        found
    }

    #[test]
    fn values_end_with_their_brackets_or_at_white_space() {
        let text = br#" {"a":"}\"{"}{"b":[1,{}]}
            [1] 17 "x y"  {"open":"#;
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(frames(text), [ok(r#"{"a":"}\"{"}"#), ok(r#"{"b":[1,{}]}"#), ok("[1]"), ok("17"), ok("\"x y\"")]);
    }

    #[test]
    fn single_quotes_are_as_good_as_double_ones() {
        for (text, json) in [
            (r#"{'a':'b'}"#, r#"{"a":"b"}"#),
            (r#"['a"}', "b'}"]"#, r#"["a\"}", "b'}"]"#),
            (r#"['\'}', "\'}", '\"}', '\\']"#, r#"["'}", "'}", "\"}", "\\"]"#),
        ] {
            assert_eq!(frames(text.as_bytes()), [Ok(json.to_owned())]);
        }
    }

    #[test]
    fn what_is_too_much_is_skipped_to_the_end_of_its_line() {
        let deep = format!("{}\n{{}}", "[".repeat(DEEPEST + 1));
        assert_eq!(frames(deep.as_bytes()), [Err(FrameError::TooDeep), Ok("{}".to_owned())]);
        let large = format!("{{\"{}\"}}}}}}\n{{}}", "x".repeat(LARGEST));
        assert_eq!(frames(large.as_bytes()), [Err(FrameError::TooLarge), Ok("{}".to_owned())]);
    }

    #[test]
    fn what_makes_no_sense_is_over_where_that_shows() {
        let next = Ok("{}".to_owned());
        for (text, error) in [
            (&b"]{}"[..], FrameError::Unopened),
            (b"{\"a\": \"b\x01{}", FrameError::Stray(1)),
            (b"{\"a\": \"b\xff{}", FrameError::Stray(0xff)),
            (b"{\"a\": \"b\n{}", FrameError::Stray(b'\n')),
            (b"{\"a\": \x0c{}", FrameError::Stray(0x0c)),
            (b"\x01{}", FrameError::Stray(1)),
        ] {
            assert_eq!(frames(text), [Err(error), next.clone()], "{text:?}");
        }
        let deep = format!("{}\x01{{}}", "[".repeat(DEEPEST + 1));
        assert_eq!(frames(deep.as_bytes()), [Err(FrameError::TooDeep), Err(FrameError::Stray(1)), next]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_hold_more_than_one_value(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let (mut framer, mut input) = (Framer::default(), bytes.as_slice());
            while framer.take(&mut input).is_some() {}
            prop_assert!(framer.value.len() <= LARGEST && framer.depth <= DEEPEST);
        }

        #[test]
        fn values_come_out_the_same_however_they_arrive(cut in 0_usize..40) {
            let text: &[u8] = br#"{"execute":"a","id":"\\"}{"execute":"b"}"#;
            let (first, second) = text.split_at(cut.min(text.len()));
            let (mut framer, mut found) = (Framer::default(), Vec::new());
            for mut part in [first, second] {
                while let Some(frame) = framer.take(&mut part) {
                    found.push(frame.unwrap());
                }
            }
            prop_assert_eq!(found, [br#"{"execute":"a","id":"\\"}"#.to_vec(), br#"{"execute":"b"}"#.to_vec()]);
        }
    }
}
