//! How a loop waits: spinning first, if the policy says so, then blocked in the monitor.

use std::io;

use egret_polling::{Active, EventKind, Nanos};

use crate::entry::{BACKEND, slot};
use crate::monitor::Key;
use crate::polling::WaitEnd;
use crate::{Backend, EventLoop, Source, SourceId, clock};

/// How long a loop that always finds work may leave the monitor unasked, where only the monitor sees idle sources.
const MONITOR_AT_LEAST_EVERY: Nanos = Nanos::from_micros(50);
/// How many looks at a source go by between two readings of the clock while spinning: those cost about as much. With more
/// sources there are fewer looks at all of them, for the window is to end when it is over.
const LOOKS_PER_CLOCK_READ: usize = 8;
/// A spin that goes on for longer is counted while it lasts, or who never blocks would be taken for busy while nothing comes.
const COUNT_AFTER: Nanos = Nanos::from_millis(10);

impl<S: Source> EventLoop<S> {
    /// Looks at everything that can be seen without a system call.
    fn look(&mut self) -> bool {
        let found = self.sources.poll();
        if found > 0 {
            self.polling.counters.kicks_spared.add(found);
        }
        self.completed = self.backend.has_completions();
        self.has_work() || self.monitor.has_reports()
    }

    /// Whether there is something to do, as far as was looked and the monitor has told.
    fn has_work(&self) -> bool {
        self.completed || !self.sources.ready.is_empty() || self.mailbox.bell.rang()
    }

    fn deadline(&self) -> Option<Nanos> {
        match (self.timers.next(), self.backend.deadline()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn is_due(&self, now: Nanos) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }

    /// Ends when there is something to do.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        let start = clock::now();
        self.now = start;
        if self.look() || self.is_due(start) {
            self.flush()?;
            self.ask_monitor()?;
            if self.polling.observes_every_turn() {
                self.observe(start, Nanos::ZERO, None);
            }
            return Ok(());
        }
        let in_flight = self.backend.in_flight();
        let window = self.polling.window(start, in_flight);
        let found = window > Nanos::ZERO && self.spin(start, window)?;
        let spun = self.now - start;
        let end = if found {
            WaitEnd::Found
        } else if self.block()? {
            WaitEnd::Asleep
        } else {
            WaitEnd::Awake
        };
        self.observe(start, spun, Some(end));
        Ok(())
    }

    /// Spins until there is something to do, or the window is over; says which.
    fn spin(&mut self, start: Nanos, window: Nanos) -> io::Result<bool> {
        self.flush()?;
        self.sources.suppress();
        let end = start + window;
        let mut uncounted_since = start;
        let looks = (LOOKS_PER_CLOCK_READ / self.sources.active.len().max(1)).max(1);
        loop {
            for _ in 0..looks {
                if self.look() {
                    self.now = clock::now();
                    self.ask_monitor()?;
                    // What the monitor had a report of may have been nothing.
                    if self.has_work() {
                        return Ok(true);
                    }
                }
                std::hint::spin_loop();
            }
            self.now = clock::now();
            let uncounted = self.now - uncounted_since;
            if uncounted >= COUNT_AFTER {
                self.polling.count_vain(uncounted);
                uncounted_since = self.now;
            }
            self.ask_monitor()?;
            if self.is_due(self.now) || !self.sources.ready.is_empty() {
                return Ok(true);
            }
            if self.now >= end {
                return Ok(false);
            }
        }
    }

    /// Arms everything, looks once more, and sleeps; says whether it came to that.
    fn block(&mut self) -> io::Result<bool> {
        self.sources.arm();
        let clear = self.backend.arm() & self.mailbox.bell.arm() & self.sources.ready.is_empty();
        let timeout = if clear { self.deadline().map(|deadline| deadline - self.now) } else { Some(Nanos::ZERO) };
        let waited = self.monitor.wait(timeout, &mut self.reports);
        self.backend.suppress();
        self.mailbox.bell.disarm();
        let before = self.now;
        self.now = clock::now();
        self.monitor_asked = self.now;
        if clear {
            self.polling.counters.blocks.add(1);
            self.polling.counters.asleep.add_time(self.now - before);
        }
        self.take_reports();
        self.completed = self.backend.has_completions();
        waited.map(|()| clear)
    }

    /// Sends what engines pushed to the shared ring, where no wait is going to do it.
    fn flush(&self) -> io::Result<()> {
        self.ring.as_ref().map_or(Ok(()), |ring| ring.borrow_mut().flush())
    }

    /// Asks the monitor without sleeping: when it has reports, and now and then where only it can tell, so that a busy
    /// source does not starve the idle ones.
    fn ask_monitor(&mut self) -> io::Result<()> {
        let blind = self.ring.is_none() && self.now - self.monitor_asked >= MONITOR_AT_LEAST_EVERY;
        if blind || self.monitor.has_reports() {
            self.monitor_asked = self.now;
            self.monitor.wait(Some(Nanos::ZERO), &mut self.reports)?;
            self.take_reports();
            self.completed = self.backend.has_completions();
        }
        Ok(())
    }

    fn take_reports(&mut self) {
        while let Some(Key(report)) = self.reports.pop() {
            let (index, generation) = (report as u32, (report >> 32) as u32);
            if index == BACKEND {
                self.backend.announced(generation.cast_signed());
            } else if self.sources.get(SourceId { index, generation }).is_some() {
                self.polling.counters.kicks.add(1);
                self.sources.mark_reported(index);
            }
        }
    }

    /// Tells of the active list, and how the wait ended, if there was anything to wait for.
    fn observe(&mut self, start: Nanos, spun: Nanos, end: Option<WaitEnd>) {
        let Self { polling, sources, completed, now, .. } = self;
        let queues = sources.active().map(|(index, ready)| Active { slot: slot(index), kind: EventKind::Queue, ready });
        let engines = Active { slot: slot(BACKEND), kind: EventKind::Completion, ready: *completed };
        let active = queues.chain([engines]);
        match end {
            None => polling.observe_no_wait(active),
            Some(end) => polling.note(start, *now, spun, end, active),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MonitorChoice;
    use crate::bell::{Echo, bell, options};

    #[test]
    fn who_has_slept_and_is_awake_is_not_woken_for_a_letter() {
        let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
        let (mut bell, ..) = bell();
        bell.act = Some(Box::new(|turn| turn.set_timer(turn.now() + Nanos::from_millis(1))));
        target.attach(bell).map_err(|(_, e)| e).unwrap();
        while target.counters().blocks.get() == 0 {
            target.turn().unwrap();
        }
        assert!(!target.mailbox.bell.ring());
    }
}
