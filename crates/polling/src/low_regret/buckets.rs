//! The scale on which waits are counted: four buckets an octave, from 256 ns to 16 ms.

/// How many buckets there are. The first takes all that is shorter, the last all that is longer.
pub(super) const BUCKETS: usize = 64;

/// The octave in which the first bucket begins: 2^8 ns.
const FIRST_OCTAVE: u32 = 8;
const PER_OCTAVE: u32 = 4;

/// The longest wait that is told from a longer one, in nanoseconds.
pub(super) const LONGEST: u64 = edge(BUCKETS) - 1;

/// The bucket of a wait of `length` nanoseconds.
pub(super) fn bucket(length: u64) -> usize {
    let octave = (length | 1).ilog2();
    if octave < FIRST_OCTAVE {
        return 0;
    }
    // The two bits after the leading one are the quarter of the octave.
    let quarter = (length >> (octave - 2)) as u32 & (PER_OCTAVE - 1);
    (((octave - FIRST_OCTAVE) * PER_OCTAVE + quarter) as usize).min(BUCKETS - 1)
}

/// Where bucket `index` begins, and the one before it ends.
pub(super) const fn edge(index: usize) -> u64 {
    let octave = FIRST_OCTAVE + index as u32 / PER_OCTAVE;
    let quarter = index as u64 % PER_OCTAVE as u64;
    (PER_OCTAVE as u64 + quarter) << (octave - 2)
}

/// What a wait in bucket `index` is taken to be.
pub(super) const MIDDLE: [u64; BUCKETS] = {
    let mut middle = [edge(0) / 2; BUCKETS];
    let mut index = 1;
    while index < BUCKETS {
        middle[index] = edge(index).midpoint(edge(index + 1));
        index += 1;
    }
    middle
};

/// Where each bucket ends; a window of this length finds all of it.
pub(super) const END: [u64; BUCKETS] = {
    let mut end = [0; BUCKETS];
    let mut index = 0;
    while index < BUCKETS {
        end[index] = edge(index + 1) - 1;
        index += 1;
    }
    end
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_lies_between_its_edges() {
        for index in 1..BUCKETS {
            assert_eq!(bucket(edge(index)), index);
            assert_eq!(bucket(edge(index) - 1), index - 1);
            assert!(edge(index) < MIDDLE[index] && MIDDLE[index] <= END[index]);
        }
        assert_eq!([0, 1, 255, u64::MAX].map(bucket), [0, 0, 0, BUCKETS - 1]);
    }

    #[test]
    fn the_scale_reaches_beyond_10_ms() {
        assert_eq!(edge(0), 256);
        assert_eq!(LONGEST, (1 << 24) - 1);
    }
}
