//! Bytes as a program.

/// What is left of an input. Past its end it reads as zeroes.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    /// Some bytes, up to `most`.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let len = usize::from(self.u8());
        self.take(len.min(most))
    }

    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// One of `things`.
    pub fn one_of<T: Copy>(&mut self, things: &[T]) -> T {
        things[usize::from(self.u8()) % things.len()]
    }
}
