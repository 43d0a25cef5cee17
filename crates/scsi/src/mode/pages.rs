//! The mode pages there are, and what can be changed in them.
//!
//! Most of them say that there is nothing to say: the host's disk recovers from errors as it sees fit, nothing is ever
//! disconnected, no timer puts anything to sleep. They are here for initiators that ask.

use crate::sense::{Code, Sense};

/// What MODE SELECT can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Modes {
    /// Writes may stay in a cache until a flush.
    pub(crate) write_cache: bool,
    /// Every write is refused.
    pub(crate) protect: bool,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    WriteCache,
    Protect,
}

impl Mode {
    /// Its byte and bit in its page: WCE (SBC-4, caching mode page), SWP (SPC-5, control mode page).
    fn place(self) -> (usize, u8) {
        match self {
            Self::WriteCache => (2, 0x04),
            Self::Protect => (4, 0x08),
        }
    }
}

impl Modes {
    fn of(&mut self, mode: Mode) -> &mut bool {
        match mode {
            Mode::WriteCache => &mut self.write_cache,
            Mode::Protect => &mut self.protect,
        }
    }
}

/// A mode page.
#[derive(Debug)]
pub(super) struct Page {
    code: u8,
    subpage: u8,
    /// As it is when what can be changed is off; header included.
    off: &'static [u8],
    mode: Option<Mode>,
}

/// Every page, or subpage, as often as there are (SPC-5, mode page and subpage codes).
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// SPF, in the first byte: it is a subpage, and has a longer header.
const SUBPAGE_FORMAT: u8 = 0x40;

/// A page of `N` bytes, with zeroes after its header.
const fn zeroes<const N: usize>(code: u8) -> [u8; N] {
    let mut bytes = [0; N];
    (bytes[0], bytes[1]) = (code, N as u8 - 2);
    bytes
}

/// The same, with something at one place.
const fn with<const N: usize>(mut bytes: [u8; N], at: usize, value: u8) -> [u8; N] {
    bytes[at] = value;
    bytes
}

const fn page(code: u8, off: &'static [u8]) -> Page {
    Page { code, subpage: 0, off, mode: None }
}

/// In the order in which they are returned.
static PAGES: [Page; 8] = [
    // SBC-4, read-write error recovery: nothing is retried or reallocated here, and recovered errors are not told.
    page(0x01, &const { zeroes::<12>(0x01) }),
    // SPC-5, disconnect-reconnect: no limits.
    page(0x02, &const { zeroes::<16>(0x02) }),
    // SBC-4, verify error recovery.
    page(0x07, &const { zeroes::<12>(0x07) }),
    // SBC-4, caching.
    Page { mode: Some(Mode::WriteCache), ..page(0x08, &const { zeroes::<20>(0x08) }) },
    // SPC-5, control: a task set for each nexus; fixed format sense; reordering without restrictions; no limit to being busy.
    Page { mode: Some(Mode::Protect), ..page(0x0a, &[0x0a, 10, 0x20, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0]) },
    // SPC-5, control extension.
    Page { subpage: 1, ..page(0x0a, &const { with(with(with([0; 32], 0, SUBPAGE_FORMAT | 0x0a), 1, 1), 3, 28) }) },
    // SPC-5, power condition: no timer runs, and nobody is told of a condition that has ended (CCF).
    page(0x1a, &const { with(zeroes::<40>(0x1a), 39, 0x54) }),
    // SBC-4, informational exceptions control: none are reported (DEXCPT).
    page(0x1c, &const { with(zeroes::<12>(0x1c), 2, 0x08) }),
];

impl Page {
    /// The pages that MODE SENSE asks for.
    ///
    /// # Errors
    ///
    /// There is no such page or subpage.
    pub(super) fn asked(code: u8, subpage: u8) -> Result<impl Iterator<Item = &'static Self>, Sense> {
        let of_code = move |page: &&Self| code == ALL_PAGES || code == page.code;
        let wanted = move |page: &&Self| of_code(page) && (subpage == ALL_SUBPAGES || subpage == page.subpage);
        if !PAGES.iter().any(|page| of_code(&page)) {
            return Err(Sense::cdb(2).bit(5));
        }
        // All pages are asked for with all of their subpages or with none.
        let some_subpages = code == ALL_PAGES && !matches!(subpage, 0 | ALL_SUBPAGES);
        if some_subpages || !PAGES.iter().any(|page| wanted(&page)) {
            return Err(Sense::cdb(3));
        }
        Ok(PAGES.iter().filter(wanted))
    }

    /// Takes the modes from the page that begins at `at` in MODE SELECT's list, and returns where it ends. Pages are `taken`
    /// once: a list is no work beyond what it can say.
    ///
    /// # Errors
    ///
    /// There is no such page, it was there before, it is not all there, or it would change what cannot be changed.
    pub(super) fn take(
        list: &[u8],
        at: usize,
        modes: &mut Modes,
        taken: &mut [bool; PAGES.len()],
    ) -> Result<usize, Sense> {
        let too_short = Sense::illegal(Code::PARAMETER_LIST_LENGTH);
        // PS is reserved here.
        let (code, is_subpage) = (list[at] & 0x3f, list[at] & SUBPAGE_FORMAT != 0);
        let of_code = |page: &&Self| page.code == code && page.is_subpage() == is_subpage;
        if !PAGES.iter().any(|page| of_code(&page)) {
            return Err(Sense::list(at).bit(5));
        }
        let subpage = if is_subpage { *list.get(at + 1).ok_or(too_short)? } else { 0 };
        let found = PAGES.iter().position(|page| of_code(&page) && page.subpage == subpage);
        let found = found.ok_or(Sense::list(at + 1))?;
        if std::mem::replace(&mut taken[found], true) {
            return Err(Sense::list(at).bit(5));
        }
        let page = &PAGES[found];
        let (current, changeable) = (page.bytes(*modes), page.changeable());
        let header = page.header();
        let (length, end) = (if is_subpage { 2 } else { 1 }, at + current.len());
        if list.len() < at + header {
            return Err(too_short);
        }
        if list[at + length..at + header] != current[length..header] {
            return Err(Sense::list(at + length));
        }
        let given = list.get(at..end).ok_or(too_short)?;
        let fixed = |i: usize| (given[i] ^ current[i]) & !changeable[i] != 0;
        if let Some(wrong) = (header..given.len()).find(|i| fixed(*i)) {
            return Err(Sense::list(at + wrong));
        }
        if let Some(mode) = page.mode {
            let (byte, mask) = mode.place();
            *modes.of(mode) = given[byte] & mask != 0;
        }
        Ok(end)
    }

    /// The page as it is with these modes, header included.
    pub(super) fn bytes(&self, mut modes: Modes) -> Vec<u8> {
        let mut bytes = self.off.to_vec();
        if let Some(mode) = self.mode.filter(|mode| *modes.of(*mode)) {
            let (byte, mask) = mode.place();
            bytes[byte] |= mask;
        }
        bytes
    }

    /// The bits that can be changed, header included.
    pub(super) fn changeable(&self) -> Vec<u8> {
        let mut bytes = self.off.to_vec();
        bytes[self.header()..].fill(0);
        if let Some(mode) = self.mode {
            let (byte, mask) = mode.place();
            bytes[byte] = mask;
        }
        bytes
    }

    fn is_subpage(&self) -> bool {
        self.off[0] & SUBPAGE_FORMAT != 0
    }

    /// The length of its header, in bytes.
    fn header(&self) -> usize {
        if self.is_subpage() { 4 } else { 2 }
    }
}
