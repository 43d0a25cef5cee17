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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_used_again_when_what_was_there_is_gone_and_nothing_else_moves() {
        let mut slab = Slab::default();
        assert!(slab.is_empty());
        assert_eq!(['a', 'b', 'c'].map(|value| slab.insert(value)), [0, 1, 2]);
        assert_eq!((slab.len(), slab.is_empty()), (3, false));
        assert_eq!([1, 1, 7].map(|at| slab.remove(at)), [Some('b'), None, None]);
        assert_eq!([0, 1, 2, 3].map(|at| slab.get_mut(at).copied()), [Some('a'), None, Some('c'), None]);
        assert_eq!((slab.len(), slab.insert('d'), slab.insert('e'), slab.len()), (2, 1, 3, 4));
        assert_eq!([0, 1, 2, 3].map(|at| slab.remove(at)), ['a', 'd', 'c', 'e'].map(Some));
        assert!(slab.is_empty());
    }
}
