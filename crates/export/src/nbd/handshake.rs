//! What server and client say to each other until the client has chosen an export: bytes in, bytes out.
//!
//! A client may haggle as it likes, within a budget: so many options, of so many bytes each. Who reads slowly is not
//! answered any more before it has read ([`Handshake::wants`]), and there is a deadline, which is the server's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use egret_nbd::protocol::{
    ANSWER_MAGIC, BlockSizes, DEFAULT_PAYLOAD, GREETING_MAGIC, Headers, OPTION_MAGIC, answer, export_flag,
    handshake_flag, info, option,
};

use super::client::{ALLOCATION_DEPTH, BASE_ALLOCATION, Contexts};
use super::export::{NbdOptions, Offer};
use crate::queues::lock;

/// Bytes of a string at most: NBD has no longer ones.
const LONGEST_TEXT: usize = 4096;
/// Bytes of an option's data at most: it holds strings, of which contexts may be several.
const MOST_DATA: usize = 32 << 10;
/// Options that one client names. Who looks at every export of a server that has hundreds needs some for each.
const MOST_OPTIONS: u32 = 4096;
/// Answers that wait to be read before more options are looked at.
const MOST_OUTPUT: usize = 64 << 10;

/// What is offered, by its name.
pub(super) type Offers = BTreeMap<String, Arc<Offer>>;

/// The contexts that there are.
const CONTEXTS: [(u32, &str); 2] = [(BASE_ALLOCATION, "base:allocation"), (ALLOCATION_DEPTH, "qemu:allocation-depth")];

/// What a client has chosen.
pub(super) struct Chosen {
    pub(super) offer: Arc<Offer>,
    pub(super) headers: Headers,
    pub(super) contexts: Contexts,
    /// What it has sent beyond.
    pub(super) input: Vec<u8>,
    /// What it is told first.
    pub(super) output: Vec<u8>,
}

/// What a client's bytes have come to.
pub(super) enum Fed {
    /// It is to say more.
    Waits,
    /// What it says next is encrypted, once it was sent what there is to send.
    StartsTls,
    /// An export.
    Chose(Chosen),
}

/// Whether a client has to encrypt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encryption {
    /// It cannot.
    None,
    /// It has to, and says nothing else before.
    Due,
    /// It has.
    Begun,
}

/// How a handshake ends without a choice: for a reason, or because the client wants no more.
pub(super) type Ended = Option<String>;

/// A conversation with one client.
pub(super) struct Handshake {
    input: Vec<u8>,
    output: Vec<u8>,
    /// The client's flags; none yet.
    flags: Option<u32>,
    options: u32,
    encryption: Encryption,
    headers: Headers,
    /// The export that contexts were chosen for, and which.
    contexts: Option<(String, Contexts)>,
}

/// What is to be read off the front of an option's data.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    fn number<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.number().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.number().map(u32::from_be_bytes)
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        str::from_utf8(self.bytes(len)?).ok().filter(|_| len <= LONGEST_TEXT)
    }
}

impl Handshake {
    /// It begins with what the server says.
    pub(super) fn new(has_tls: bool) -> Self {
        let mut output = Vec::with_capacity(64);
        output.extend(GREETING_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        output.extend((handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
        let (headers, encryption) = (Headers::Simple, if has_tls { Encryption::Due } else { Encryption::None });
        Self { input: Vec::new(), output, flags: None, options: 0, encryption, headers, contexts: None }
    }

    /// What is to be sent.
    pub(super) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Whether there is any.
    pub(super) const fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Whether it takes more input, which it does not until what it has said is read.
    pub(super) fn wants(&self) -> bool {
        self.output.len() < MOST_OUTPUT
    }

    /// Takes what the client has sent.
    ///
    /// # Errors
    ///
    /// It is to be hung up on.
    pub(super) fn feed(&mut self, bytes: &[u8], offers: &Mutex<Offers>) -> Result<Fed, Ended> {
        self.input.extend_from_slice(bytes);
        loop {
            if self.flags.is_none() {
                let Some(flags) = Reader(&self.input).u32() else { return Ok(Fed::Waits) };
                let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
                if flags & !known != 0 {
                    return Err(Some(format!("its flags are {flags:#x}, of which {known:#x} were offered")));
                }
                self.flags = Some(flags);
                self.input.drain(..4);
            }
            if !self.wants() {
                return Ok(Fed::Waits);
            }
            let mut reader = Reader(&self.input);
            let Some(magic) = reader.number().map(u64::from_be_bytes) else { return Ok(Fed::Waits) };
            if magic != OPTION_MAGIC {
                return Err(Some(format!("an option begins with {magic:#x}")));
            }
            let (Some(option), Some(len)) = (reader.u32(), reader.u32()) else { return Ok(Fed::Waits) };
            if len as usize > MOST_DATA {
                return Err(Some(format!("option {option} has {len} bytes of data, and {MOST_DATA} are the most")));
            }
            let Some(data) = reader.bytes(len as usize) else { return Ok(Fed::Waits) };
            let (data, used) = (data.to_vec(), 16 + len as usize);
            self.input.drain(..used);
            self.options += 1;
            if self.options > MOST_OPTIONS {
                return Err(Some(format!("it has named {MOST_OPTIONS} options and has not chosen an export")));
            }
            if self.encryption == Encryption::Due {
                if self.begin_tls(option, &data)? {
                    return Ok(Fed::StartsTls);
                }
                continue;
            }
            if let Some(offer) = self.take(option, &data, &lock(offers))? {
                let contexts = self.contexts.take().filter(|(name, _)| *name == offer.options.name);
                let (headers, contexts) = (self.headers, contexts.map(|(_, contexts)| contexts).unwrap_or_default());
                let (input, output) = (std::mem::take(&mut self.input), std::mem::take(&mut self.output));
                return Ok(Fed::Chose(Chosen { offer, headers, contexts, input, output }));
            }
        }
    }

    /// Answers one option of a client that has to encrypt first; says whether it does now.
    fn begin_tls(&mut self, option: u32, data: &[u8]) -> Result<bool, Ended> {
        match option {
            option::STARTTLS if !data.is_empty() => self.refuse(option, answer::INVALID, "it takes no data"),
            // Who speaks before he has heard the answer is not alone perhaps: that would be taken for what he says inside.
            option::STARTTLS if !self.input.is_empty() => {
                return Err(Some("it has sent something between STARTTLS and TLS".to_owned()));
            }
            option::STARTTLS => {
                self.answer(option, answer::ACK, &[]);
                self.encryption = Encryption::Begun;
                return Ok(true);
            }
            option::ABORT => return Err(self.part()),
            // It knows no answers.
            option::EXPORT_NAME => return Err(Some("it does not begin TLS, which tls-creds ask for".to_owned())),
            _ => self.refuse(option, answer::TLS_REQUIRED, "this server wants TLS (NBD_OPT_STARTTLS)"),
        }
        Ok(false)
    }

    /// Answers one option; the export that it chooses, if it does.
    fn take(&mut self, option: u32, data: &[u8], offers: &Offers) -> Result<Option<Arc<Offer>>, Ended> {
        match option {
            option::EXPORT_NAME if data.len() > LONGEST_TEXT => {
                let len = data.len();
                return Err(Some(format!("it names an export by {len} bytes, and {LONGEST_TEXT} are the most")));
            }
            option::EXPORT_NAME => {
                let name = String::from_utf8_lossy(data);
                let offer = offers.get(&*name);
                let offer = offer.ok_or_else(|| Some(format!("there is no export of the name '{name}'")))?;
                if offer.is_full() {
                    return Err(Some(format!("export '{name}' has as many clients as its max-connections")));
                }
                self.output.extend(offer.disk().size().to_be_bytes());
                self.output.extend(self.export_flags(&offer.options).to_be_bytes());
                if self.flags.is_some_and(|flags| flags & u32::from(handshake_flag::NO_ZEROES) == 0) {
                    self.output.extend([0; 124]);
                }
                return Ok(Some(Arc::clone(offer)));
            }
            option::ABORT => return Err(self.part()),
            option::LIST if data.is_empty() => {
                for (name, offer) in offers {
                    let len = (name.len() as u32).to_be_bytes();
                    // What follows the name is for people; qemu-nbd puts its description there, too.
                    let description = offer.options.description.as_deref().unwrap_or_default();
                    self.answer(option, answer::SERVER, &[&len, name.as_bytes(), description.as_bytes()]);
                }
                self.answer(option, answer::ACK, &[]);
            }
            option::INFO | option::GO => return Ok(self.tell(option, data, offers)),
            option::STRUCTURED_REPLY if data.is_empty() => match self.headers {
                Headers::Extended => self.refuse(option, answer::EXTENDED_HEADERS_REQUIRED, "headers are extended"),
                Headers::Simple | Headers::Structured => {
                    self.headers = Headers::Structured;
                    self.answer(option, answer::ACK, &[]);
                }
            },
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.headers = Headers::Extended;
                self.answer(option, answer::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.tell_contexts(option, data, offers),
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                self.refuse(option, answer::INVALID, "it takes no data");
            }
            option::STARTTLS if self.encryption == Encryption::Begun => {
                self.refuse(option, answer::INVALID, "TLS has begun");
            }
            option::STARTTLS => self.refuse(option, answer::UNSUPPORTED, "this server has no TLS"),
            _ => self.refuse(option, answer::UNSUPPORTED, "it is not known here"),
        }
        Ok(None)
    }

    /// Tells what an export is like; returns it, if it is chosen with that.
    fn tell(&mut self, option: u32, data: &[u8], offers: &Offers) -> Option<Arc<Offer>> {
        let mut reader = Reader(data);
        let mut read = || {
            let name = reader.text()?;
            let count = reader.u16()?;
            let kinds = (0..count).map(|_| reader.u16()).collect::<Option<Vec<u16>>>()?;
            reader.0.is_empty().then_some((name, kinds))
        };
        let Some((name, kinds)) = read() else {
            self.refuse(
                option,
                answer::INVALID,
                "its data is not a name, of 4096 bytes at most, and kinds of information",
            );
            return None;
        };
        let Some(offer) = offers.get(name) else {
            self.refuse(option, answer::UNKNOWN, "there is no export of that name");
            return None;
        };
        if option == option::GO && offer.is_full() {
            self.refuse(option, answer::POLICY, "the export has as many clients as its max-connections");
            return None;
        }
        let disk = offer.disk();
        let (size, flags) = (disk.size().to_be_bytes(), self.export_flags(&offer.options).to_be_bytes());
        let minimum = 512;
        let preferred = disk.physical_block_size().next_power_of_two().clamp(4096, DEFAULT_PAYLOAD);
        let sizes = BlockSizes { minimum, preferred, maximum: DEFAULT_PAYLOAD }.to_bytes();
        self.answer(option, answer::INFO, &[&info::EXPORT.to_be_bytes(), &size, &flags]);
        self.answer(option, answer::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), &sizes]);
        if kinds.contains(&info::NAME) {
            self.answer(option, answer::INFO, &[&info::NAME.to_be_bytes(), name.as_bytes()]);
        }
        if let (true, Some(text)) = (kinds.contains(&info::DESCRIPTION), &offer.options.description) {
            self.answer(option, answer::INFO, &[&info::DESCRIPTION.to_be_bytes(), text.as_bytes()]);
        }
        self.answer(option, answer::ACK, &[]);
        (option == option::GO).then(|| Arc::clone(offer))
    }

    fn tell_contexts(&mut self, option: u32, data: &[u8], offers: &Offers) {
        let is_set = option == option::SET_META_CONTEXT;
        if is_set {
            self.contexts = None;
        }
        if self.headers == Headers::Simple {
            return self.refuse(option, answer::INVALID, "structured replies come first");
        }
        let mut reader = Reader(data);
        let mut read = || {
            let name = reader.text()?;
            let count = reader.u32()?;
            let mut queries = Vec::new();
            for _ in 0..count {
                queries.push(reader.text()?);
            }
            reader.0.is_empty().then_some((name, queries))
        };
        let Some((name, queries)) = read() else {
            return self.refuse(
                option,
                answer::INVALID,
                "its data is not a name and contexts, of 4096 bytes at most each",
            );
        };
        if !offers.contains_key(name) {
            return self.refuse(option, answer::UNKNOWN, "there is no export of that name");
        }
        let asks_all = !is_set && queries.is_empty();
        let mut contexts = Contexts::default();
        for (id, context) in CONTEXTS {
            // A name space and no name asks for all of it, where nothing is chosen.
            let asks =
                |query: &&str| *query == context || !is_set && query.ends_with(':') && context.starts_with(*query);
            if asks_all || queries.iter().any(asks) {
                let id = if is_set { id } else { 0 };
                self.answer(option, answer::META_CONTEXT, &[&id.to_be_bytes(), context.as_bytes()]);
                contexts.allocation |= context == CONTEXTS[0].1;
                contexts.depth |= context == CONTEXTS[1].1;
            }
        }
        if is_set {
            self.contexts = Some((name.to_owned(), contexts));
        }
        self.answer(option, answer::ACK, &[]);
    }

    fn export_flags(&self, options: &NbdOptions) -> u16 {
        use export_flag::{
            CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_CACHE, SEND_DF, SEND_FAST_ZERO, SEND_FLUSH, SEND_FUA, SEND_TRIM,
            SEND_WRITE_ZEROES,
        };
        let when = |condition: bool, flags: u16| if condition { flags } else { 0 };
        // A flush is of the disk, whoever has written. Whether zeroes are fast is said of each request: the disk may be opened
        // otherwise meanwhile.
        HAS_FLAGS
            | SEND_FLUSH
            | SEND_FUA
            | SEND_CACHE
            | CAN_MULTI_CONN
            | when(self.headers != Headers::Simple, SEND_DF)
            | when(!options.writable, READ_ONLY)
            | when(options.writable, SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO)
    }

    /// Answers who wants no more.
    fn part(&mut self) -> Ended {
        self.answer(option::ABORT, answer::ACK, &[]);
        None
    }

    fn refuse(&mut self, option: u32, why: u32, words: &str) {
        self.answer(option, why, &[words.as_bytes()]);
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[&[u8]]) {
        let len: usize = data.iter().map(|part| part.len()).sum();
        self.output.extend(ANSWER_MAGIC.to_be_bytes());
        for number in [option, kind, len as u32] {
            self.output.extend(number.to_be_bytes());
        }
        data.iter().for_each(|part| self.output.extend_from_slice(part));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use egret_disk::Disk;

    use super::*;

    /// An option's bytes.
    pub(in crate::nbd) fn said(option: u32, data: &[u8]) -> Vec<u8> {
        [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    }

    /// The answers in a server's output: what kind each has, and its data.
    fn answers(mut output: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut answers = Vec::new();
        while let Some((header, rest)) = output.split_first_chunk::<20>() {
            assert_eq!(header[..8], ANSWER_MAGIC.to_be_bytes());
            let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let (data, rest) = rest.split_at(word(16) as usize);
            answers.push((word(12), data.to_vec()));
            output = rest;
        }
        assert!(output.is_empty());
        answers
    }

    pub(in crate::nbd) fn kinds(output: &[u8]) -> Vec<u32> {
        answers(output).into_iter().map(|(kind, _)| kind).collect()
    }

    /// A disk of zeroes of a MiB, by this name.
    fn offer(name: &str, options: NbdOptions) -> (String, Arc<Offer>) {
        let null =
            egret_disk::Driver::Null { size: 1 << 20, latency: egret_event_loop::Nanos::ZERO, read_zeroes: true };
        let disk = Arc::new(Disk::open(&egret_disk::Options::new("null", null)).unwrap());
        (name.to_owned(), Arc::new(Offer::without_lanes(NbdOptions { name: name.to_owned(), ..options }, &disk)))
    }

    fn options() -> NbdOptions {
        NbdOptions { name: String::new(), description: None, writable: true, writethrough: false, max_connections: 0 }
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
    }

    /// Who has greeted with these flags and read the greeting.
    fn greeted(flags: u32) -> Handshake {
        let mut handshake = Handshake::new(false);
        let greeting = std::mem::take(handshake.output());
        assert_eq!(greeting, b"NBDMAGICIHAVEOPT\0\x03");
        assert!(matches!(handshake.feed(&flags.to_be_bytes(), &Mutex::default()), Ok(Fed::Waits)));
        handshake
    }

    /// What an option is answered.
    fn told(handshake: &mut Handshake, offers: &Mutex<Offers>, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        assert!(matches!(handshake.feed(&said(option, data), offers), Ok(Fed::Waits)));
        answers(&std::mem::take(handshake.output()))
    }

    #[test]
    fn an_export_is_told_of_as_it_is_and_in_as_many_words_as_are_asked_for() {
        let described = NbdOptions { description: Some("a disk".into()), ..options() };
        let read_only = NbdOptions { writable: false, ..options() };
        let offers = Mutex::new([offer("other", read_only), offer("disk", described)].into());
        // Of flags, flush, FUA, several connections and cache; of trim, zeroes and fast ones; of DF.
        let (all, writes, df) = (1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 10, 1 << 5 | 1 << 6 | 1 << 11, 1 << 7);
        let size = (1u64 << 20).to_be_bytes();
        for agreed in [None, Some(option::STRUCTURED_REPLY), Some(option::EXTENDED_HEADERS)] {
            let mut handshake = greeted(3);
            if let Some(agreed) = agreed {
                assert_eq!(told(&mut handshake, &offers, agreed, b""), [(answer::ACK, vec![])]);
                assert_eq!(told(&mut handshake, &offers, agreed, b"x")[0].0, answer::INVALID);
            }
            let all = if agreed.is_some() { all | df } else { all };
            for (name, flags) in [("disk", all | writes), ("other", all | 1 << 1)] {
                let export = [&info::EXPORT.to_be_bytes()[..], &size, &(flags as u16).to_be_bytes()].concat();
                let sizes = [512u32, 4096, 1 << 25].map(u32::to_be_bytes).concat();
                let sizes = [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat();
                let mut expected = vec![(answer::INFO, export), (answer::INFO, sizes), (answer::ACK, vec![])];
                let ask = [&string(name)[..], &[0, 0]].concat();
                assert_eq!(told(&mut handshake, &offers, option::INFO, &ask), expected, "{agreed:?} {name}");
                let ask = [&string(name)[..], &[0, 2], &info::NAME.to_be_bytes(), &info::DESCRIPTION.to_be_bytes()];
                let name_is = [&info::NAME.to_be_bytes()[..], name.as_bytes()].concat();
                expected.insert(2, (answer::INFO, name_is));
                if name == "disk" {
                    let text = [&info::DESCRIPTION.to_be_bytes()[..], b"a disk"].concat();
                    expected.insert(3, (answer::INFO, text));
                }
                assert_eq!(told(&mut handshake, &offers, option::INFO, &ask.concat()), expected, "{agreed:?} {name}");
            }
            let listed =
                [[&string("disk")[..], b"a disk"].concat(), string("other")].map(|name| (answer::SERVER, name));
            let expected: Vec<_> = listed.into_iter().chain([(answer::ACK, vec![])]).collect();
            assert_eq!(told(&mut handshake, &offers, option::LIST, b""), expected);
            // Numbers of kinds that are too few or too many.
            for wrong in [&[0, 1][..], &[0, 0, 0, 0], &[0, 1, 0, 0, 0], &[0]] {
                let ask = [&string("disk")[..], wrong].concat();
                assert_eq!(told(&mut handshake, &offers, option::INFO, &ask)[0].0, answer::INVALID, "{wrong:?}");
            }
        }
        for (flags, zeroes) in [(1, 124), (3, 0)] {
            let mut handshake = greeted(flags);
            let bytes = [said(option::EXPORT_NAME, b"disk"), vec![7; 28]].concat();
            let Ok(Fed::Chose(chosen)) = handshake.feed(&bytes, &offers) else { panic!("it has not chosen") };
            assert_eq!(
                (chosen.headers, chosen.contexts, chosen.input),
                (Headers::Simple, Contexts::default(), vec![7; 28])
            );
            let flags = ((all | writes) as u16).to_be_bytes();
            assert_eq!(chosen.output, [&size[..], &flags, &vec![0; zeroes]].concat());
        }
        // One that is full is told of, and not to be had.
        let (name, full) = offer("full", NbdOptions { max_connections: 2, ..options() });
        let offers = Mutex::new([(name, Arc::clone(&full))].into());
        let ask = [&string("full")[..], &[0, 0]].concat();
        for clients in 0..4 {
            full.clients.store(clients, std::sync::atomic::Ordering::Relaxed);
            let is_full = clients >= 2;
            assert_eq!(told(&mut greeted(3), &offers, option::INFO, &ask).last().unwrap().0, answer::ACK);
            match greeted(3).feed(&said(option::GO, &ask), &offers) {
                Ok(Fed::Chose(chosen)) => assert!(!is_full && kinds(&chosen.output).ends_with(&[answer::ACK])),
                fed => assert!(is_full && matches!(fed, Ok(Fed::Waits))),
            }
            assert_eq!(greeted(3).feed(&said(option::EXPORT_NAME, b"full"), &offers).is_err(), is_full, "{clients}");
        }
    }

    #[test]
    fn contexts_are_listed_by_what_they_begin_with_and_chosen_by_their_whole_names_for_one_export() {
        const NAMES: [&str; 2] = ["base:allocation", "qemu:allocation-depth"];
        let offers = Mutex::new([offer("other", options()), offer("disk", options())].into());
        let ask = |name: &str, queries: &[&str]| {
            let each: Vec<u8> = queries.iter().flat_map(|query| string(query)).collect();
            [&string(name)[..], &(queries.len() as u32).to_be_bytes(), &each].concat()
        };
        for (queries, listed, set) in [
            (&[][..], &[0, 1][..], &[][..]),
            (&NAMES[..], &[0, 1], &[0, 1]),
            (&NAMES[..1], &[0], &[0]),
            (&NAMES[1..], &[1], &[1]),
            (&["base:"], &[0], &[]),
            (&["qemu:"], &[1], &[]),
            (&["base:", NAMES[1]], &[0, 1], &[1]),
            (&["base"], &[], &[]),
            (&["x:"], &[], &[]),
            (&["base:alloc"], &[], &[]),
        ] {
            let mut handshake = greeted(3);
            told(&mut handshake, &offers, option::STRUCTURED_REPLY, b"");
            let expected = |found: &[usize], numbered: bool| -> Vec<_> {
                let of = |at: &usize| {
                    let number = if numbered { *at as u32 + 1 } else { 0 };
                    (answer::META_CONTEXT, [&number.to_be_bytes()[..], NAMES[*at].as_bytes()].concat())
                };
                found.iter().map(of).chain([(answer::ACK, vec![])]).collect()
            };
            let list = told(&mut handshake, &offers, option::LIST_META_CONTEXT, &ask("disk", queries));
            assert_eq!(list, expected(listed, false), "{queries:?}");
            let chosen = told(&mut handshake, &offers, option::SET_META_CONTEXT, &ask("disk", queries));
            assert_eq!(chosen, expected(set, true), "{queries:?}");
            // To list them changes nothing of what was chosen.
            told(&mut handshake, &offers, option::LIST_META_CONTEXT, &ask("disk", &[]));
            let go = said(option::GO, &[&string("disk")[..], &[0, 0]].concat());
            let Ok(Fed::Chose(chosen)) = handshake.feed(&go, &offers) else { panic!("it has not chosen") };
            let contexts = Contexts { allocation: set.contains(&0), depth: set.contains(&1) };
            assert_eq!((chosen.headers, chosen.contexts), (Headers::Structured, contexts), "{queries:?}");
        }
        // What was chosen of another export, or before something that is refused, is chosen no more.
        for (second, data, name) in [
            (option::LIST, vec![], "other"),
            (option::SET_META_CONTEXT, ask("nobody", &NAMES), "disk"),
            (option::SET_META_CONTEXT, ask("disk", &NAMES)[..9].to_vec(), "disk"),
            (option::SET_META_CONTEXT, [ask("disk", &NAMES), vec![0]].concat(), "disk"),
        ] {
            let mut handshake = greeted(3);
            told(&mut handshake, &offers, option::EXTENDED_HEADERS, b"");
            told(&mut handshake, &offers, option::SET_META_CONTEXT, &ask("disk", &NAMES));
            told(&mut handshake, &offers, second, &data);
            let go = said(option::GO, &[&string(name)[..], &[0, 0]].concat());
            let Ok(Fed::Chose(chosen)) = handshake.feed(&go, &offers) else { panic!("it has not chosen") };
            assert_eq!(
                (chosen.headers, chosen.contexts),
                (Headers::Extended, Contexts::default()),
                "{second} {data:?}"
            );
        }
    }

    #[test]
    fn options_are_answered_however_their_bytes_come() {
        let offers = Mutex::default();
        let name = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
        let context = [&4u32.to_be_bytes()[..], b"disk", &[0; 4]].concat();
        let said = [
            3u32.to_be_bytes().to_vec(),
            said(option::LIST, b""),
            said(option::LIST, b"x"),
            said(4711, b"data"),
            said(option::STARTTLS, b""),
            said(option::SET_META_CONTEXT, &context),
            said(option::STRUCTURED_REPLY, b""),
            said(option::SET_META_CONTEXT, &context),
            said(option::SET_META_CONTEXT, b"short"),
            said(option::INFO, &name),
            said(option::GO, &name[..9]),
            said(option::EXTENDED_HEADERS, b""),
            said(option::STRUCTURED_REPLY, b""),
        ]
        .concat();
        let expected = [
            answer::ACK,
            answer::INVALID,
            answer::UNSUPPORTED,
            answer::UNSUPPORTED,
            answer::INVALID,
            answer::ACK,
            answer::UNKNOWN,
            answer::INVALID,
            answer::UNKNOWN,
            answer::INVALID,
            answer::ACK,
            answer::EXTENDED_HEADERS_REQUIRED,
        ];
        for piece in [1, 3, 16, said.len()] {
            let mut handshake = Handshake::new(false);
            handshake.output().clear();
            for bytes in said.chunks(piece) {
                assert!(handshake.feed(bytes, &offers).is_ok_and(|fed| matches!(fed, Fed::Waits)));
            }
            assert_eq!(kinds(handshake.output()), expected);
            assert!(handshake.input.is_empty());
        }
        let told = told(&mut greeted(3), &offers, option::STARTTLS, b"");
        assert_eq!(told, [(answer::UNSUPPORTED, b"this server has no TLS".to_vec())]);
    }

    #[test]
    fn who_reads_nothing_is_answered_until_so_much_waits_for_him() {
        let mut handshake = greeted(1);
        for (waiting, wants) in [(MOST_OUTPUT - 1, true), (MOST_OUTPUT, false)] {
            *handshake.output() = vec![0; waiting];
            assert_eq!(handshake.wants(), wants);
        }
    }

    #[test]
    fn who_does_not_keep_to_it_is_hung_up_on() {
        let after_flags = |bytes: Vec<u8>| [3u32.to_be_bytes().to_vec(), bytes].concat();
        let (offers, no_name) = (Mutex::default(), after_flags(said(option::EXPORT_NAME, b"disk")));
        for (bytes, why) in [
            (4u32.to_be_bytes().to_vec(), Some("its flags are 0x4")),
            (after_flags(vec![0; 16]), Some("an option begins with 0x0")),
            (
                after_flags([&b"IHAVEOPT"[..], &[0, 0, 0, 7], &[0xff; 4]].concat()),
                Some("option 7 has 4294967295 bytes"),
            ),
            (no_name, Some("there is no export of the name 'disk'")),
            (after_flags(said(option::EXPORT_NAME, &[b'x'; 4096])), Some("there is no export of the name 'xxx")),
            (after_flags(said(option::EXPORT_NAME, &[b'x'; 4097])), Some("it names an export by 4097 bytes")),
            (after_flags(said(option::LIST, b"").repeat(5000)), Some("it has named 4096 options")),
            (after_flags(said(option::LIST, b"").repeat(4097)), Some("it has named 4096 options")),
            (after_flags(said(option::LIST, &[0; 32769])), Some("option 3 has 32769 bytes")),
            (after_flags(said(option::ABORT, b"")), None),
        ] {
            let mut handshake = Handshake::new(false);
            let mut ended = None;
            // Who reads all that it is told.
            for bytes in bytes.chunks(64) {
                handshake.output().clear();
                ended = ended.or(handshake.feed(bytes, &offers).err());
            }
            let line = ended.expect("it is hung up on");
            assert!(line.as_deref().map(|line| line.starts_with(why.unwrap_or("-"))) == why.map(|_| true), "{line:?}");
            if why.is_none() {
                assert_eq!(kinds(handshake.output()), [answer::ACK], "who says so is answered");
            }
        }
        // Where there is an answer to it, that is given.
        for (len, why) in [(4096, answer::UNKNOWN), (4097, answer::INVALID)] {
            let name = [&(len as u32).to_be_bytes()[..], &vec![b'x'; len], &[0, 0]].concat();
            let mut handshake = Handshake::new(false);
            handshake.output().clear();
            assert!(handshake.feed(&after_flags(said(option::GO, &name)), &offers).is_ok());
            assert_eq!(kinds(handshake.output()), [why]);
        }
        // As much as there may be is not too much.
        for bytes in [said(option::LIST, b"").repeat(4096), said(option::LIST, &[0; 32768])] {
            let mut handshake = greeted(3);
            for bytes in bytes.chunks(64) {
                handshake.output().clear();
                assert!(handshake.feed(bytes, &offers).is_ok());
            }
            assert!(handshake.has_output());
        }
        // Who reads nothing is not listened to for ever.
        let mut handshake = Handshake::new(false);
        let _ = handshake.feed(&after_flags(said(option::LIST, b"").repeat(4000)), &offers);
        assert!(!handshake.wants() && handshake.output.len() < MOST_OUTPUT + 100);
    }

    #[test]
    fn where_tls_is_due_nothing_is_answered_before_it_and_nothing_taken_over_into_it() {
        let offers = Mutex::default();
        let after_flags = |said: &[u8]| [&3u32.to_be_bytes()[..], said].concat();
        let name = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
        let early = [
            said(option::LIST, b""),
            said(option::GO, &name),
            said(option::STRUCTURED_REPLY, b""),
            said(option::STARTTLS, b"x"),
            said(option::STARTTLS, b""),
        ];
        let early = after_flags(&early.concat());
        for piece in [1, early.len()] {
            let mut handshake = Handshake::new(true);
            handshake.output().clear();
            let fed: Vec<_> = early.chunks(piece).map(|bytes| handshake.feed(bytes, &offers).ok()).collect();
            assert!(matches!(fed.last(), Some(Some(Fed::StartsTls))));
            let refused = [answer::TLS_REQUIRED; 3].into_iter().chain([answer::INVALID, answer::ACK]);
            assert_eq!(kinds(handshake.output()), refused.collect::<Vec<_>>());
            assert_eq!(handshake.headers, Headers::Simple, "what was refused has no effect");
            // Inside.
            handshake.output().clear();
            let inside = [said(option::STARTTLS, b""), said(option::STRUCTURED_REPLY, b"")].concat();
            assert!(matches!(handshake.feed(&inside, &offers), Ok(Fed::Waits)));
            assert_eq!(kinds(handshake.output()), [answer::INVALID, answer::ACK]);
        }
        let mut leaves = Handshake::new(true);
        leaves.output().clear();
        let aborted = leaves.feed(&after_flags(&said(option::ABORT, b"")), &offers);
        assert!(matches!(aborted, Err(None)), "it may leave at any time");
        assert_eq!(kinds(leaves.output()), [answer::ACK]);
        for (said, why) in [
            ([said(option::STARTTLS, b""), said(option::LIST, b"")].concat(), "between STARTTLS and TLS"),
            ([said(option::STARTTLS, b""), vec![0x16]].concat(), "between STARTTLS and TLS"),
            (said(option::EXPORT_NAME, b"disk"), "does not begin TLS"),
        ] {
            let ended = Handshake::new(true).feed(&after_flags(&said), &offers).err().flatten();
            assert!(ended.as_ref().is_some_and(|line| line.contains(why)), "{ended:?}");
        }
    }
}
