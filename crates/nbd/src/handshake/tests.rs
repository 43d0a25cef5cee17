//! Servers that are a list of bytes. What is heard from each is written out, section by section of the specification.

use super::*;

/// A server that says what it was told to say, whatever it hears.
struct Script {
    says: io::Cursor<Vec<u8>>,
    hears: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.says.read(into)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hears.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// "Newstyle negotiation": the magic numbers, and the handshake flags.
const FIXED: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
/// "Fixed newstyle negotiation": the magic number of every answer.
const ANSWER: &[u8] = b"\x00\x03\xe8\x89\x04\x55\x65\xa9";
const ACK: u32 = 1;
const INFO: u32 = 3;
const UNSUPPORTED: u32 = 0x8000_0001;

fn answers(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    [ANSWER, &option.to_be_bytes(), &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn talk(says: &[&[u8]], name: &str) -> (Result<Export, HandshakeError>, Vec<u8>) {
    let mut script = Script { says: io::Cursor::new(says.concat()), hears: Vec::new() };
    let export = greet(&mut script).and_then(|greeting| choose(&mut script, greeting, name));
    if export.is_ok() {
        assert_eq!(script.says.position(), script.says.get_ref().len() as u64, "all that was said was heard");
    }
    (export, script.hears)
}

fn refusal(says: &[&[u8]]) -> String {
    talk(says, "a").0.unwrap_err().to_string()
}

#[test]
fn a_server_that_can_do_everything_is_asked_for_all_of_it() {
    let size = b"\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x01\x0d";
    let blocks = b"\x00\x03\x00\x00\x02\x00\x00\x00\x10\x00\x00\x20\x00\x00";
    let unknown = b"\x00\x63whatever";
    let (export, heard) = talk(
        &[
            FIXED,
            &answers(11, ACK, b""),
            &answers(7, INFO, blocks),
            &answers(7, INFO, unknown),
            &answers(7, INFO, size),
            &answers(7, ACK, b""),
        ],
        "disk",
    );
    let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 21 };
    let flags = export_flag::HAS_FLAGS | export_flag::SEND_FLUSH | export_flag::SEND_FUA | export_flag::CAN_MULTI_CONN;
    assert_eq!(export.unwrap(), Export { size: 1 << 20, flags, blocks, headers: Headers::Extended });
    let expected: [&[u8]; 3] = [
        // The client's flags.
        b"\x00\x00\x00\x03",
        b"IHAVEOPT\x00\x00\x00\x0b\x00\x00\x00\x00",
        // A name, and one wish: block sizes.
        b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x0c\x00\x00\x00\x04disk\x00\x01\x00\x03",
    ];
    assert_eq!(heard, expected.concat());
}

#[test]
fn a_server_that_knows_less_is_taken_as_it_is() {
    let size = b"\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x01";
    let no = |option| answers(option, UNSUPPORTED, b"no such option");
    let structured = talk(
        &[
            FIXED,
            &no(11),
            &answers(8, ACK, b""),
            &answers(7, INFO, &[size, &b"\x00"[..]].concat()[..12]),
            &answers(7, ACK, b""),
        ],
        "",
    );
    assert_eq!(structured.0.unwrap().headers, Headers::Structured);
    // No GO either: by name, without the zeroes.
    let (export, heard) = talk(&[FIXED, &no(11), &no(8), &no(7), b"\x00\x00\x00\x00\x00\x00\x02\x00\x00\x03"], "x");
    let flags = export_flag::HAS_FLAGS | export_flag::READ_ONLY;
    assert_eq!(export.unwrap(), Export { size: 512, flags, blocks: BlockSizes::default(), headers: Headers::Simple });
    assert!(heard.ends_with(b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x01x"));
    // Not even answers to options; there are zeroes.
    let (export, heard) =
        talk(&[b"NBDMAGICIHAVEOPT\x00\x00", b"\x00\x00\x00\x00\x00\x00\x02\x00\x00\x02", &[0; 124]], "x");
    assert_eq!(export.unwrap().flags, 0, "flags that the server does not say it has are none");
    assert_eq!(heard, b"\x00\x00\x00\x00IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x01x");
}

#[test]
fn each_refusal_says_in_a_line_what_would_be_right() {
    let no = |option| answers(option, UNSUPPORTED, b"");
    assert_eq!(refusal(&[]), "the server has ended the connection before it greeted");
    assert!(
        refusal(&[b"HTTP/1.1 400 Bad"]).starts_with("what listens there is no NBD server: it greets with 0x48545450")
    );
    assert!(refusal(&[b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53"]).contains("oldstyle"));
    let tls = answers(11, 0x8000_0005, b"FORCEDTLS\n\x1b");
    assert_eq!(refusal(&[FIXED, &tls]), "the server wants TLS ('FORCEDTLS\\n\\u{1b}'); name credentials by tls-creds");
    let unknown = answers(7, 0x8000_0006, b"");
    assert!(refusal(&[FIXED, &no(11), &no(8), &unknown]).starts_with("the server has no export 'a'; "));
    assert!(refusal(&[FIXED, &no(11), &no(8), &no(7)]).contains("which it does not have perhaps"));
    let policy = answers(7, 0x8000_0002, b"not you");
    assert_eq!(refusal(&[FIXED, &no(11), &no(8), &policy]), "the server refuses the export ('not you')");
}

#[test]
fn a_server_that_lies_is_told_apart_and_believed_in_nothing() {
    let go = |answers: &[u8]| refusal(&[FIXED, &self::answers(11, ACK, b""), answers]);
    let broken = "the server breaks the protocol: ";
    assert!(go(&answers(7, ACK, b"")).starts_with(broken), "no size");
    assert!(go(&answers(8, ACK, b"")).starts_with(broken), "the answer to another option");
    assert!(go(&answers(7, INFO, b"\x00\x00\x00")).starts_with(broken), "half an export");
    assert!(go(&answers(7, INFO, b"")).starts_with(broken), "nothing");
    assert!(go(&answers(7, INFO, b"\x00\x03\x00\x00")).starts_with(broken), "half of the block sizes");
    assert!(go(&answers(7, INFO, &[&[0, 3][..], &[0; 12]].concat())).contains("block sizes must be"));
    let huge = [ANSWER, b"\x00\x00\x00\x07", b"\x00\x00\x00\x03", b"\xff\xff\xff\xff"].concat();
    assert_eq!(go(&huge), format!("{broken}an answer has 4294967295 bytes"));
    let size = [b"\x00\x00".as_slice(), &u64::MAX.to_be_bytes(), b"\x00\x01"].concat();
    assert!(go(&[answers(7, INFO, &size), answers(7, ACK, b"")].concat()).contains("more than any disk"));
    let endless = answers(7, INFO, b"\x00\x09").repeat(1000);
    assert!(go(&endless).contains("more than 32 things"));
}

#[test]
fn tls_begins_where_the_server_takes_it_and_nowhere_else() {
    let begin = |says: &[&[u8]]| {
        let mut script = Script { says: io::Cursor::new(says.concat()), hears: Vec::new() };
        let begun = greet(&mut script).and_then(|greeting| start_tls(&mut script, greeting));
        begun.map(|()| script.hears)
    };
    let heard = begin(&[FIXED, &answers(5, ACK, b"")]).unwrap();
    assert_eq!(heard, b"\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x05\x00\x00\x00\x00");
    let refused = begin(&[FIXED, &answers(5, UNSUPPORTED, b"")]).unwrap_err().to_string();
    assert_eq!(refused, "the server has no TLS; leave out tls-creds, or use a server that has");
    assert!(begin(&[b"NBDMAGICIHAVEOPT\x00\x00"]).unwrap_err().to_string().starts_with("the server has no TLS"));
}
