//! Things by small numbers, which are used again.

/// A table whose places are given out and back, and that never moves what is in it.
pub(super) struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(super) const fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(at) => {
                self.places[at as usize] = Some(value);
                at
            }
            None => {
                self.places.push(Some(value));
                (self.places.len() - 1) as u32
            }
        }
    }

    pub(super) fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.places.get_mut(at as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, at: u32) -> Option<T> {
        let value = self.places.get_mut(at as usize)?.take()?;
        self.free.push(at);
        Some(value)
    }
}
