//! A well-behaved, independent client: libblkio.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::Path;
use std::slice;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};

use super::PATIENCE;

/// The length of a request in [`DiskQueue::write_pattern`], and of one slot of a queue's buffer, in bytes.
pub const BLOCK: usize = 64 << 10;
/// How many requests those keep in flight.
pub const DEPTH: usize = 16;

/// What memory holds before a read: data of an earlier request must not pass for what was read.
const SPOILT: u8 = 0xEE;

/// How to connect.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Queues whose completions are waited for.
    pub queues: usize,
    /// Queues whose completions are polled for; they come after the others.
    pub poll_queues: usize,
    /// Whether to promise not to write; a read-only export demands it.
    pub read_only: bool,
    /// Bytes of buffer per queue.
    pub buffer: usize,
}

impl Default for Client {
    fn default() -> Self {
        Self { queues: 1, poll_queues: 0, read_only: false, buffer: DEPTH * BLOCK }
    }
}

/// A connection to a vhost-user-blk export, or for comparison an image without any daemon.
pub struct Disk {
    /// The queues, each of which another thread may use.
    pub queues: Vec<DiskQueue>,
    blkio: Blkio,
}

/// One queue with its own buffer in memory that the daemon sees.
pub struct DiskQueue {
    queue: Blkioq,
    buffer: MemoryRegion,
}

impl Disk {
    /// Connects with one queue.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        Self::connect_as(socket, Client::default())
    }

    /// Connects, starts the queues and shares a buffer for each.
    pub fn connect_as(socket: &Path, client: Client) -> io::Result<Self> {
        let mut blkio = Blkio::new("virtio-blk-vhost-user").map_err(failed)?;
        blkio.set_str("path", socket.to_str().expect("our own path")).map_err(failed)?;
        blkio.set_bool("read-only", client.read_only).map_err(failed)?;
        Self::start(blkio, client)
    }

    /// Opens an image, or a block device of the host, by itself: with io_uring, and past the page cache if `direct`.
    pub fn open(image: &Path, direct: bool) -> io::Result<Self> {
        let mut blkio = Blkio::new("io_uring").map_err(failed)?;
        blkio.set_str("path", image.to_str().expect("our own path")).map_err(failed)?;
        blkio.set_bool("direct", direct).map_err(failed)?;
        Self::start(blkio, Client::default())
    }

    fn start(mut blkio: Blkio, client: Client) -> io::Result<Self> {
        blkio.connect().map_err(failed)?;
        blkio.set_i32("num-queues", client.queues as i32).map_err(failed)?;
        blkio.set_i32("num-poll-queues", client.poll_queues as i32).map_err(failed)?;
        let started = blkio.start().map_err(failed)?;
        let mut queues = Vec::new();
        for queue in started.queues.into_iter().chain(started.poll_queues) {
            let buffer = blkio.alloc_mem_region(client.buffer).map_err(failed)?;
            blkio.map_mem_region(&buffer).map_err(failed)?;
            queues.push(DiskQueue { queue, buffer });
        }
        Ok(Self { queues, blkio })
    }

    /// The disk's size in bytes, asked of the daemon now.
    pub fn capacity(&self) -> io::Result<u64> {
        self.blkio.get_u64("capacity").map_err(failed)
    }

    /// How many queues the daemon offers.
    pub fn max_queues(&self) -> io::Result<usize> {
        self.blkio.get_i32("max-queues").map(|queues| queues as usize).map_err(failed)
    }

    /// The size in bytes that requests must be a multiple of.
    pub fn request_alignment(&self) -> io::Result<usize> {
        self.blkio.get_i32("request-alignment").map(|bytes| bytes as usize).map_err(failed)
    }

    /// The first queue.
    pub fn first(&mut self) -> &mut DiskQueue {
        &mut self.queues[0]
    }
}

impl DiskQueue {
    /// The queue and the start of its buffer, for a load that is more than these methods.
    pub fn parts(&mut self) -> (&mut Blkioq, *mut u8) {
        (&mut self.queue, self.buffer.addr as *mut u8)
    }

    /// Reads up to the buffer's length at byte `at`.
    pub fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let slot = self.slot(0, len);
        slot.fill(SPOILT);
        let slot = slot.as_mut_ptr();
        self.queue.read(at, slot, len, 0, ReqFlags::empty());
        self.finish()?;
        Ok(self.slot(0, len).to_vec())
    }

    /// Writes `data` at byte `at`.
    pub fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.write_with(at, data, ReqFlags::empty())
    }

    /// [`write`](Self::write) with flags, such as FUA.
    pub fn write_with(&mut self, at: u64, data: &[u8], flags: ReqFlags) -> io::Result<()> {
        let slot = self.slot(0, data.len());
        slot.copy_from_slice(data);
        let slot = slot.as_ptr();
        self.queue.write(at, slot, data.len(), 0, flags);
        self.finish()
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.queue.flush(0, ReqFlags::empty());
        self.finish()
    }

    /// Gives up `range`.
    pub fn discard(&mut self, range: Range<u64>) -> io::Result<()> {
        self.queue.discard(range.start, range.end - range.start, 0, ReqFlags::empty());
        self.finish()
    }

    /// Makes `range` read as zeroes; `flags` may forbid giving its space up.
    pub fn write_zeroes(&mut self, range: Range<u64>, flags: ReqFlags) -> io::Result<()> {
        self.queue.write_zeroes(range.start, range.end - range.start, 0, flags);
        self.finish()
    }

    /// Fills `range` with what `seed` and each word's own address make, [`DEPTH`] blocks in flight.
    pub fn write_pattern(&mut self, range: Range<u64>, seed: u64) -> io::Result<()> {
        self.stream(
            range,
            |queue, block, at, slot| {
                block.copy_from_slice(&pattern(seed, at, block.len()));
                queue.write(at, block.as_ptr(), block.len(), slot, ReqFlags::empty());
            },
            |_, _| (),
        )
    }

    /// Reads `range` and checks that [`write_pattern`](Self::write_pattern) with `seed` wrote it.
    ///
    /// # Panics
    /// At the first byte that differs.
    pub fn verify_pattern(&mut self, range: Range<u64>, seed: u64) -> io::Result<()> {
        self.stream(
            range,
            |queue, block, at, slot| {
                block.fill(SPOILT);
                queue.read(at, block.as_mut_ptr(), block.len(), slot, ReqFlags::empty());
            },
            |block, at| {
                let expected = pattern(seed, at, block.len());
                let wrong = block.iter().zip(&expected).position(|(read, written)| read != written);
                assert_eq!(wrong, None, "the block at {at} differs from what was written, at this byte of it");
            },
        )
    }

    fn stream(
        &mut self,
        range: Range<u64>,
        mut submit: impl FnMut(&mut Blkioq, &mut [u8], u64, usize),
        mut complete: impl FnMut(&[u8], u64),
    ) -> io::Result<()> {
        let mut free: Vec<usize> = (0..self.buffer.len / BLOCK).collect();
        let mut held = vec![0..0; free.len()];
        let mut next = range.start;
        let mut in_flight = 0;
        while next < range.end || in_flight > 0 {
            while next < range.end
                && let Some(slot) = free.pop()
            {
                let end = range.end.min(next + BLOCK as u64);
                held[slot] = next..end;
                let block: *mut [u8] = self.slot(slot, (end - next) as usize);
                // SAFETY: the block lies in the buffer, beside `queue`, and no other request in flight holds its slot.
                submit(&mut self.queue, unsafe { &mut *block }, next, slot);
                (next, in_flight) = (end, in_flight + 1);
            }
            let mut completions = [const { MaybeUninit::uninit() }; DEPTH];
            for slot in self.reap(&mut completions)? {
                let block = held[slot].clone();
                complete(self.slot(slot, (block.end - block.start) as usize), block.start);
                free.push(slot);
                in_flight -= 1;
            }
        }
        Ok(())
    }

    /// Waits for the one request in flight.
    pub fn finish(&mut self) -> io::Result<()> {
        self.reap(&mut [MaybeUninit::uninit()]).map(drop)
    }

    /// Waits for at least one completion; their tokens, or the first error among them.
    fn reap(&mut self, completions: &mut [MaybeUninit<Completion>]) -> io::Result<Vec<usize>> {
        let count = self.queue.do_io(completions, 1, Some(&mut PATIENCE.clone()), None).map_err(failed)?;
        completions[..count]
            .iter()
            .map(|completion| {
                // SAFETY: `do_io` has filled the first `count`.
                let completion = unsafe { completion.assume_init_ref() };
                match completion.ret {
                    0 => Ok(completion.user_data),
                    error => Err(io::Error::from_raw_os_error(-error)),
                }
            })
            .collect()
    }

    fn slot(&mut self, slot: usize, len: usize) -> &mut [u8] {
        let start = slot * BLOCK;
        assert!(start + len <= self.buffer.len, "the request is longer than the buffer");
        // SAFETY: the bytes lie in the region, which lives as long as the queue; the daemon writes into them only while
        // a request holds them, and nobody here looks at them meanwhile.
        unsafe { slice::from_raw_parts_mut((self.buffer.addr as *mut u8).add(start), len) }
    }
}

/// What [`DiskQueue::write_pattern`] writes at byte `at`.
pub fn pattern(seed: u64, at: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| (seed ^ (at + index * 8)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    (0..len.div_ceil(8) as u64).flat_map(|index| word(index).to_le_bytes()).take(len).collect()
}

fn failed(error: blkio::Error) -> io::Error {
    let kind = io::Error::from_raw_os_error(error.errno().raw_os_error()).kind();
    io::Error::new(kind, error.message().to_owned())
}
