//! A table of what is in flight, whose places are used again.

#![forbid(unsafe_code)]

/// Values under small numbers. It grows to the most that was ever in it, and allocates no more after that.
pub struct Slab<T> {
    places: Vec<Place<T>>,
    /// The first free place; each free place names the next, the last one the end of the table.
    free: u32,
    len: usize,
}

enum Place<T> {
    Free { next: u32 },
    Used(T),
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl<T> Slab<T> {
    /// An empty one, which allocates nothing before it has more than `capacity`.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { places: Vec::with_capacity(capacity), free: 0, len: 0 }
    }

    /// How many values are in it.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a value somewhere and says where.
    pub fn insert(&mut self, value: T) -> u32 {
        let place = self.free;
        match self.places.get_mut(place as usize) {
            Some(slot) => {
                let Place::Free { next } = *slot else { unreachable!("the free list names free places") };
                self.free = next;
                *slot = Place::Used(value);
            }
            None => {
                self.places.push(Place::Used(value));
                self.free = self.places.len() as u32;
            }
        }
        self.len += 1;
        place
    }

    /// The value at `place`, if there is one.
    pub fn get(&self, place: u32) -> Option<&T> {
        match self.places.get(place as usize) {
            Some(Place::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// Likewise, to be changed.
    pub fn get_mut(&mut self, place: u32) -> Option<&mut T> {
        match self.places.get_mut(place as usize) {
            Some(Place::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// All values that are in it, and where each is.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        (0..).zip(&mut self.places).filter_map(|(at, place)| match place {
            Place::Used(value) => Some((at, value)),
            Place::Free { .. } => None,
        })
    }

    /// All values that are in it.
    pub fn into_values(self) -> impl Iterator<Item = T> {
        self.places.into_iter().filter_map(|place| match place {
            Place::Used(value) => Some(value),
            Place::Free { .. } => None,
        })
    }

    /// Takes the value out, if there is one.
    pub fn remove(&mut self, place: u32) -> Option<T> {
        let slot = self.places.get_mut(place as usize)?;
        if let Place::Free { .. } = slot {
            return None;
        }
        let Place::Used(value) = std::mem::replace(slot, Place::Free { next: self.free }) else { return None };
        self.free = place;
        self.len -= 1;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_before_the_table_grows() {
        let mut slab = Slab::default();
        assert!(slab.is_empty());
        let places: Vec<u32> = (0..4).map(|i| slab.insert(i)).collect();
        assert_eq!(places, [0, 1, 2, 3]);
        assert_eq!(slab.remove(1), Some(1));
        assert_eq!(slab.remove(3), Some(3));
        assert_eq!((slab.remove(3), slab.get_mut(1).copied(), slab.remove(77)), (None, None, None));
        assert_eq!((slab.insert(10), slab.insert(11), slab.insert(12)), (3, 1, 4));
        assert_eq!((slab.len(), slab.is_empty()), (5, false));
        assert_eq!((slab.get(3).copied(), slab.get_mut(3).copied()), (Some(10), Some(10)));
        assert_eq!((slab.remove(0), slab.get(0), slab.get(77)), (Some(0), None, None));
        assert_eq!(
            slab.iter_mut().map(|(at, value)| (at, *value)).collect::<Vec<_>>(),
            [(1, 11), (2, 2), (3, 10), (4, 12)]
        );
        assert_eq!(slab.into_values().collect::<Vec<_>>(), [11, 2, 10, 12]);
    }
}
