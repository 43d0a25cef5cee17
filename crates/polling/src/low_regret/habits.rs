//! Which habit serves requests at the least cost, found by what they come to.
//!
//! What a block does to the waits after it shows in no single one of them. With several requests in flight they gather
//! meanwhile, and a later look finds more of them ended; a client that is left to sleep once sleeps more deeply from there
//! on; and who serves the disk may want the core. So what is compared here is the price of a request, CPU and time
//! together, under one habit and under another, in turns.

use super::price::Price;
use super::slice::{Cost, Difference, Sample, Slice, Tally};
use crate::{BlockCost, Contention, EventKind, HABITS as NAMES, HabitTimes, LastWait, Nanos, Standing, Wait};

/// How to wait; to try another is one more line here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    /// As single waits would have it: the experts decide.
    Learned,
    /// Every wait is spun for so long; not at all, and it is slept through.
    Window(u64),
    /// Every wait is spun for to its end, within reason, while requests come one soon after another.
    Endless,
}

const HABITS: [Habit; NAMES.len()] =
    [Habit::Learned, Habit::Window(0), Habit::Window(4_000), Habit::Window(16_000), Habit::Endless];
/// The first is in force at first.
const LEARNED: usize = 0;

/// What a slice has at least, in a trial: requests, and nanoseconds. Somebody else has the core for a millisecond or more
/// at a time, and a trial must not miss that.
const TRIAL: (u32, u64) = (8, 1_000_000);
/// The same between trials, and how long it is at most with fewer requests than that.
const RESTING: (u32, u64) = (32, 1_000_000);
const AT_MOST: u64 = 10_000_000;
/// The least, where somebody else wants the core: longer than they have it at a time, or a trial would see that once or never.
const CONTENDED: u64 = 4_000_000;
/// So many waits in a row that a request has ended soon, and the next one's end is in sight.
const IN_SIGHT: u32 = 4;
/// To wait for so long for what is no request is as good as not to see an end.
const SHORT: u64 = 100_000;
/// Waits with hardly any requests between them come to nothing.
const MOST_WAITS: u32 = 256;

/// Slices of a trial, and those before it that do not count: clients and disks adapt.
const SLICES: u32 = 8;
const SETTLING: u32 = 2;
/// So many slices of the habit in force a trial is compared with on either side, before it and after it: a machine that
/// changed meanwhile shows in their difference, and is not taken for the habit's doing.
const BESIDE: usize = 4;
const ENOUGH: f64 = 4.0;

/// After so many trials it is no accident any more what the machine did during them.
const OFTEN: u32 = 4;
/// So many in a row that were certain gains by themselves outweigh all before them: some changes of the machine are felt by none
/// but who is tried.
const ROW: u32 = 2;

/// What a trial cost is at most this part of all costs until the next of its kind.
const PATIENCE: f64 = 256.0;
/// The same where the load has changed, and what is known may not hold any more: at first. Twice as much each time that
/// nothing comes of it, and half as much again after each second without.
const IMPATIENCE: f64 = 8.0;
const CALM: u64 = 1_000_000_000;
/// Nanoseconds between two trials of a kind: at first, at most where more of them may tell, and at most.
const SOONEST: u64 = 25_000_000;
const UNCLEAR: u64 = 200_000_000;
const LATEST: u64 = 1_000_000_000;
/// A trial that cost too much to be paid for by then is made nevertheless, after so many nanoseconds and so many times as long
/// as it was: a stall of the machine may have been all that it was dear for.
const LONGEST_GAP: u64 = 4_000_000_000;
const SPARING: u64 = 64;

/// A load has changed where so many slices in a row are strange.
const ODD: u32 = 3;
/// So much spinning in vain ends a trial of spinning to the end.
const IN_VAIN: u32 = 2;

/// A habit that is not in force, and when it is tried again.
#[derive(Clone, Copy, Debug, Default)]
struct Rival {
    /// What the last trial cost beyond what the habit in force would have.
    excess: Cost,
    /// All costs since.
    spent: Cost,
    /// Nanoseconds since, and how many there are to be.
    rested: u64,
    gap: u64,
    /// How long the last trial was.
    lasted: u64,
    /// The load has changed since.
    stale: bool,
    /// What it came to in its trials, and what the habit in force did beside them.
    own: Tally,
    base: Tally,
    /// How many trials these are of, and how many of the latest were certain gains by themselves.
    trials: u32,
    row: u32,
}

impl Rival {
    fn is_due(&self, impatience: f64) -> bool {
        let patience = if self.stale { impatience } else { PATIENCE };
        let may_be_paid =
            self.spent.covers(self.excess * patience) || self.rested >= LONGEST_GAP.max(self.lasted * SPARING);
        may_be_paid && (self.stale || self.rested >= self.gap)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Trial {
    rival: usize,
    /// Slices so far, and how long they were.
    slices: u32,
    lasted: u64,
    /// What they cost, those to settle too, and their requests.
    spent: Cost,
    requests: f64,
    /// What those that count came to, and slices of the habit in force before it and after it.
    own: Tally,
    sides: [Tally; 2],
    /// It is over, and so many slices of the habit in force have come since.
    after: Option<usize>,
}

impl Trial {
    /// What it cost more than the habit in force would have.
    fn excess(&self) -> Cost {
        let [mut before, after] = self.sides.map(|side| side.cost());
        before += after;
        self.spent - before * (self.requests / 2.0)
    }

    /// Whether it was cheaper than what was before it, and than what was after it: the machine may have changed meanwhile.
    fn is_cheaper(&self, verdict: fn(&Difference) -> bool) -> bool {
        self.sides.iter().all(|side| verdict(&side.against(&self.own)))
    }
}

/// The habit in force, and the trials of the others.
pub(super) struct Habits {
    price: Price,
    /// In [`HABITS`].
    in_force: usize,
    /// How long each was in use, in trials too.
    in_use: HabitTimes,
    slice: Slice,
    /// The slice is long enough: it ends with the coming wait, for which the thread's CPU time is asked.
    is_full: bool,
    /// Waits in a row that a request has ended soon.
    soon: u32,
    /// Somebody has taken the core away of late.
    is_contended: bool,
    /// The thread's CPU time when the slice began.
    cpu: Option<u64>,
    /// Slices at the very first that do not count, either: a disk that was never read is no disk to judge by.
    settling: u32,
    trial: Option<Trial>,
    rivals: [Rival; HABITS.len()],
    /// What the habit in force came to, between trials; and the latest slices of it.
    own: Tally,
    latest: [Sample; BESIDE],
    /// How many of these are of the habit that is in force.
    beside: usize,
    /// How many slices in a row were far from that, and what they came to.
    odd: u32,
    strange: Tally,
    /// Of the last trial: what it leaves behind is part of what it cost.
    tried: Option<usize>,
    impatience: f64,
    /// Nanoseconds since the load last changed.
    calm: u64,
}

impl Habits {
    pub(super) fn new(price: Price) -> Self {
        Self {
            price,
            in_force: LEARNED,
            in_use: HabitTimes::default(),
            slice: Slice::default(),
            is_full: false,
            soon: 0,
            is_contended: false,
            cpu: None,
            settling: SETTLING,
            trial: None,
            rivals: Default::default(),
            own: Tally::default(),
            latest: Default::default(),
            beside: 0,
            odd: 0,
            strange: Tally::default(),
            tried: None,
            impatience: IMPATIENCE,
            calm: 0,
        }
    }

    fn now(&self) -> usize {
        self.trial.filter(|trial| trial.after.is_none()).map_or(self.in_force, |trial| trial.rival)
    }

    fn window_of(&self, habit: usize) -> Option<u64> {
        match HABITS[habit] {
            Habit::Learned => None,
            Habit::Window(window) => Some(window.min(self.price.longest())),
            // Whose load has gone does not burn, and whose load comes back knows what to do.
            Habit::Endless => (self.soon >= IN_SIGHT).then(|| self.price.endless()),
        }
    }

    /// The window of the coming wait, if it is not for the experts to say.
    pub(super) fn window(&self) -> Option<u64> {
        self.window_of(self.now())
    }

    /// Whether the coming wait is part of a trial: it is none of those that single waits should be judged by.
    pub(super) fn is_trial(&self) -> bool {
        self.now() != self.in_force
    }

    /// The window that is trusted, whatever is tried at the moment.
    pub(super) fn trusted(&self) -> Option<u64> {
        self.window_of(self.in_force)
    }

    /// How long each was in use, up to the last slice.
    pub(super) fn in_use(&self) -> HabitTimes {
        self.in_use
    }

    /// Whether the coming [`resume`](Self::resume) is to be told the thread's CPU time.
    pub(super) fn wants_cpu_time(&self) -> bool {
        self.is_full
    }

    /// Takes in what was done since the last wait.
    pub(super) fn resume(&mut self, before: &Standing) {
        self.slice.add_done(before);
        let LastWait { kind, length } = before.last;
        self.soon = match kind {
            // A timer, or a message: who spins for those never sleeps where they come often.
            EventKind::Other if length.0 <= SHORT => self.soon,
            EventKind::Queue | EventKind::Completion if length.0 <= self.price.endless() => self.soon.saturating_add(1),
            _ => 0,
        };
        if self.is_full {
            self.close(before.cpu.map(|cpu| cpu.0));
        }
    }

    /// Takes in a wait.
    pub(super) fn observe(&mut self, wait: &Wait<'_>) {
        let slice = &mut self.slice;
        slice.add_wait(wait, Nanos(self.price.in_sight()));
        let spins = self.trial.is_some_and(|trial| trial.after.is_none() && HABITS[trial.rival] == Habit::Endless);
        slice.vain += u32::from(spins && wait.blocked && wait.spun.0 >= self.price.endless());
        let (requests, nanoseconds) = if self.trial.is_some() { TRIAL } else { RESTING };
        let nanoseconds = if self.is_contended { CONTENDED } else { nanoseconds };
        let elapsed = slice.elapsed();
        self.is_full = slice.requests >= requests && elapsed >= nanoseconds
            || slice.requests >= TRIAL.0 && elapsed >= AT_MOST
            || slice.waits >= MOST_WAITS && slice.requests < TRIAL.0
            || slice.vain >= IN_VAIN;
    }

    /// Learns whether somebody else wants the core.
    pub(super) fn contend(&mut self, evidence: Contention) {
        self.is_contended = evidence.preempted > 0;
    }

    fn begin_slice(&mut self, cpu: Option<u64>) {
        self.slice = self.slice.next();
        self.cpu = cpu;
        self.is_full = false;
    }

    fn close(&mut self, cpu: Option<u64>) {
        let slice = self.slice;
        self.in_use[self.now()] += Nanos(slice.elapsed());
        let spent = cpu.zip(self.cpu).map(|(now, before)| now.saturating_sub(before));
        self.begin_slice(cpu);
        match self.trial {
            Some(trial) if slice.vain >= IN_VAIN => self.give_up(trial, &slice),
            _ if slice.requests == 0 => {}
            Some(Trial { after: None, .. }) => self.go_on(&slice, slice.per_request(spent, &self.price)),
            Some(_) => self.look_back(slice.per_request(spent, &self.price)),
            None => self.rest(&slice, slice.per_request(spent, &self.price)),
        }
    }

    /// Between trials: keeps the books, sees whether the load has changed, and begins the next one when it is due.
    fn rest(&mut self, slice: &Slice, sample: Sample) {
        if self.settling > 0 {
            self.settling -= 1;
            return;
        }
        if self.own.slices() >= ENOUGH && self.own.is_strange(sample) {
            self.odd += 1;
            self.strange.add(sample);
            if let Some(tried) = self.tried {
                self.rivals[tried].excess += (sample.cost - self.own.cost()).at_least_none() * sample.requests;
            }
        } else {
            (self.odd, self.tried, self.strange) = (0, None, Tally::default());
        }
        self.keep(sample);
        self.calm += slice.elapsed();
        if self.calm >= CALM {
            self.calm = 0;
            self.impatience = (self.impatience / 2.0).max(IMPATIENCE);
        }
        if self.odd == ODD {
            self.odd = 0;
            self.own = std::mem::take(&mut self.strange);
            self.look_again();
            self.impatience = (self.impatience * 2.0).min(PATIENCE);
        }
        for rival in &mut self.rivals {
            rival.spent += sample.cost * sample.requests;
            rival.rested += slice.elapsed();
        }
        if self.beside < BESIDE || self.odd > 0 {
            return;
        }
        let due = |&habit: &usize| habit != self.in_force && self.rivals[habit].is_due(self.impatience);
        let longest_ago = (0..HABITS.len()).filter(due).max_by_key(|&habit| self.rivals[habit].rested);
        self.trial = longest_ago.map(|rival| {
            let known = &mut self.rivals[rival];
            if known.stale {
                (known.own, known.base, known.trials, known.row) = Default::default();
            }
            let mut trial = Trial { rival, ..Trial::default() };
            for sample in self.latest {
                trial.sides[0].add(sample);
                known.base.add(sample);
            }
            trial
        });
    }

    /// Takes in a slice of the habit in force.
    fn keep(&mut self, sample: Sample) {
        self.own.add(sample);
        self.latest.rotate_left(1);
        self.latest[BESIDE - 1] = sample;
        self.beside = (self.beside + 1).min(BESIDE);
    }

    /// What was found may not hold any more.
    fn look_again(&mut self) {
        self.rivals.iter_mut().for_each(|rival| rival.stale = true);
        (self.calm, self.tried) = (0, None);
    }

    /// The waits have no end in sight, and there is no more to try.
    fn give_up(&mut self, trial: Trial, slice: &Slice) {
        self.trial = None;
        let rival = &mut self.rivals[trial.rival];
        let gap = (rival.gap * 2).clamp(SOONEST, LATEST);
        let lost = slice.lasted() as f64;
        *rival = Rival { excess: Cost { served: lost, added: lost }, gap, lasted: slice.lasted(), ..Rival::default() };
    }

    /// A slice of a trial.
    fn go_on(&mut self, slice: &Slice, sample: Sample) {
        let Some(trial) = &mut self.trial else { return };
        trial.lasted += slice.lasted();
        trial.spent += sample.cost * sample.requests;
        trial.requests += sample.requests;
        trial.slices += 1;
        if trial.slices > SETTLING {
            let rival = &mut self.rivals[trial.rival];
            rival.own.add(sample);
            trial.own.add(sample);
            // What came of it before may be of another machine: that ends no trial whose own slices are cheaper.
            let is_hopeless =
                rival.base.against(&rival.own).is_hopeless() && !trial.sides[0].against(&trial.own).saves();
            if trial.slices == SETTLING + SLICES || is_hopeless {
                trial.after = Some(0);
            }
        }
    }

    /// A slice of the habit in force after a trial: with these it is compared, too.
    fn look_back(&mut self, sample: Sample) {
        let Some(Trial { rival, sides: [_, side], after: Some(after), .. }) = &mut self.trial else { return };
        *after += 1;
        if *after <= SETTLING as usize {
            return;
        }
        side.add(sample);
        self.rivals[*rival].base.add(sample);
        let is_over = *after == SETTLING as usize + BESIDE;
        self.keep(sample);
        if is_over {
            self.decide();
        }
    }

    fn decide(&mut self) {
        let Some(trial) = self.trial.take() else { return };
        let rival = &mut self.rivals[trial.rival];
        let difference = rival.base.against(&rival.own);
        // Many slices tell a small difference sooner, but some of them are of before the machine changed.
        let long = self.own.against(&rival.own);
        rival.trials += 1;
        rival.row = if trial.is_cheaper(Difference::is_gain) { rival.row + 1 } else { 0 };
        rival.excess = trial.excess();
        rival.lasted = trial.lasted;
        self.tried = difference.is_loss().then_some(trial.rival);
        let latest = if difference.is_clear() { LATEST } else { UNCLEAR };
        rival.gap = if rival.stale { SOONEST } else { (rival.gap * 2).clamp(SOONEST, latest) };
        (rival.spent, rival.rested, rival.stale) = (Cost::default(), 0, false);
        let is_cheaper = trial.is_cheaper(Difference::saves) && (difference.is_gain() || long.is_gain());
        let is_often = difference.is_gain() && rival.trials >= OFTEN;
        if is_cheaper || is_often || rival.row == ROW {
            if rival.row == ROW {
                rival.own = trial.own;
            }
            rival.row = 0;
            self.own = rival.own;
            self.in_force = trial.rival;
            self.beside = 0;
            // What the others were compared with is in force no more; and it was worth it to look.
            self.look_again();
            self.impatience = IMPATIENCE;
        }
    }

    /// Learns what a block costs.
    pub(super) fn set_block(&mut self, cost: BlockCost) {
        self.price.set_block(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::super::buckets::LONGEST;
    use super::*;
    use crate::Done;

    #[test]
    fn a_slice_outlasts_a_turn_of_whoever_shares_the_core() {
        for (preempted, milliseconds) in [(0, 1), (1, 4)] {
            let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
            habits.contend(Contention { preempted, ..Contention::default() });
            let mut waits = 0;
            while !habits.wants_cpu_time() {
                let done = Done { requests: 8, took: Nanos::ZERO };
                habits.resume(&Standing { done, ..Standing::default() });
                let length = Nanos(100_000);
                habits.observe(&Wait { length, spun: length, blocked: false, active: &[] });
                waits += 1;
            }
            assert_eq!(waits, 10 * milliseconds, "{preempted}");
        }
    }
    /// A slice of requests, eight at a time, each time after a wait of so long; the next call ends it.
    fn serve(habits: &mut Habits, length: Nanos) {
        loop {
            habits.resume(&Standing { done: Done { requests: 8, took: Nanos::ZERO }, ..Standing::default() });
            habits.observe(&Wait { length, spun: length, blocked: false, active: &[] });
            if habits.wants_cpu_time() {
                return;
            }
        }
    }

    const USUAL: Nanos = Nanos(100_000);
    const UNUSUAL: Nanos = Nanos(900_000);

    #[test]
    fn what_a_request_costs_at_the_very_first_does_not_count() {
        let cost = |first| {
            let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
            (0..SETTLING).for_each(|_| serve(&mut habits, first));
            (0..3).for_each(|_| serve(&mut habits, USUAL));
            assert_eq!(habits.own.slices(), 2.0, "the last one has not ended");
            habits.own.cost()
        };
        assert_eq!(cost(UNUSUAL), cost(USUAL));
    }

    #[test]
    fn habits_are_told_of_by_what_they_do() {
        let said = HABITS.map(|habit| match habit {
            Habit::Learned => "learned".to_owned(),
            Habit::Window(nanoseconds) => nanoseconds.to_string(),
            Habit::Endless => "endless".to_owned(),
        });
        assert_eq!(said, NAMES);
    }

    #[test]
    fn a_habit_is_in_use_while_it_is_tried_and_while_it_is_in_force() {
        let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
        let mut slices = [0; HABITS.len()];
        while slices.iter().filter(|&&slices| slices > 0).count() < 3 {
            serve(&mut habits, USUAL);
            slices[habits.now()] += 1;
            // It has not ended before the next wait.
            let told: u64 = habits.in_use().iter().map(|time| time.0).sum();
            let ended: u64 = slices.iter().sum::<u64>() - 1;
            assert_eq!(told, ended * 10 * USUAL.0);
        }
        assert_eq!(habits.in_force, LEARNED, "nothing was dearer or cheaper than anything");
        serve(&mut habits, USUAL);
        assert_eq!(habits.in_use().map(|time| time.0), slices.map(|slices| slices * 10 * USUAL.0));
    }

    #[test]
    fn what_a_request_costs_at_first_in_a_trial_does_not_count() {
        let cost = |first| {
            let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
            while habits.trial.is_none() {
                serve(&mut habits, USUAL);
            }
            // It began with the slice that has just gone on.
            (1..SETTLING).for_each(|_| serve(&mut habits, first));
            (0..3).for_each(|_| serve(&mut habits, USUAL));
            let trial = habits.trial.expect("it has not ended");
            let own = &habits.rivals[trial.rival].own;
            assert_eq!((trial.slices, own.slices()), (SETTLING + 2, 2.0));
            own.cost()
        };
        assert_eq!(cost(UNUSUAL), cost(USUAL));
    }

    #[test]
    fn a_habit_is_not_thanked_for_what_the_machine_did_during_its_trial() {
        for (afterwards, is_gain) in [(UNUSUAL, true), (USUAL, false)] {
            let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
            while habits.trial.is_none() {
                serve(&mut habits, UNUSUAL);
            }
            let rival = habits.now();
            while habits.now() == rival {
                serve(&mut habits, USUAL);
            }
            while habits.trial.is_some() {
                serve(&mut habits, afterwards);
            }
            assert_eq!(habits.in_force == rival, is_gain, "{afterwards:?}");
        }
    }

    #[test]
    fn a_habit_that_is_cheaper_on_the_whole_comes_into_force_though_no_two_sides_of_a_trial_are_alike() {
        let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
        let comes_into_force = (0..5_000).any(|_| {
            let length = if habits.trial.is_none() { UNUSUAL } else { USUAL };
            serve(&mut habits, length);
            habits.in_force != LEARNED
        });
        assert!(comes_into_force);
    }

    #[test]
    fn a_habit_is_tried_again_within_four_seconds_however_dear_its_last_trial_was() {
        let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
        let mut rested = [0; HABITS.len()];
        let mut rest = 0;
        for slice in 0..20_000 {
            let before = habits.trial.map(|trial| trial.rival);
            // The first trials are as dear as if somebody had had the core for all of each slice.
            let is_dear = habits.now() != habits.in_force && slice < 200;
            serve(&mut habits, if is_dear { Nanos(4_000_000) } else { USUAL });
            let elapsed = if is_dear { 4_000_000 } else { 1_000_000 };
            for (habit, rested) in rested.iter_mut().enumerate().filter(|(habit, _)| *habit != habits.in_force) {
                *rested += elapsed;
                if before == Some(habit) {
                    *rested = 0;
                }
                rest = rest.max(*rested);
            }
        }
        // Four seconds of rest, and the trials of others meanwhile.
        assert!(rest <= LONGEST_GAP * 3 / 2, "{rest}");
        assert!(rest >= LONGEST_GAP / 2, "or nothing was dear: {rest}");
    }

    #[test]
    fn two_trials_in_a_row_that_are_certain_gains_outweigh_all_that_came_before() {
        for (sides, wins) in [
            (&[12.0, 12.0][..], true),
            (&[12.0][..], false),
            (&[12.0, 10.0, 12.0][..], false),
            (&[12.0, 10.0, 12.0, 12.0][..], true),
        ] {
            let mut habits = Habits { own: tally(9.0, &[12.0; 4]), ..habits() };
            habits.rivals[2] =
                Rival { own: tally(9.0, &[20.0; 200]), base: tally(9.0, &[12.0; 200]), trials: 25, ..Rival::default() };
            for &side in sides {
                assert_eq!(habits.in_force, LEARNED);
                let sides = [tally(9.0, &[12.0; 4]), tally(9.0, &[side; 4])];
                habits.trial = Some(Trial { rival: 2, own: tally(9.0, &[10.0; 8]), sides, ..Trial::default() });
                habits.decide();
            }
            assert_eq!(habits.in_force == 2, wins, "{sides:?}");
            let own = if wins { 10.0 } else { 12.0 };
            assert_eq!((habits.own.cost().added, habits.own.slices()), (own, if wins { 8.0 } else { 4.0 }));
        }
    }

    #[test]
    fn a_bad_past_ends_no_trial_at_once_that_is_cheaper_than_what_was_before_it() {
        for (cost, is_over) in [(10.0, false), (12.0, true), (20.0, true)] {
            let mut habits = habits();
            habits.rivals[2] =
                Rival { own: tally(9.0, &[20.0; 200]), base: tally(9.0, &[12.0; 200]), ..Rival::default() };
            let sides = [tally(9.0, &[12.0; 4]), Tally::default()];
            habits.trial = Some(Trial { rival: 2, slices: SETTLING, sides, ..Trial::default() });
            habits.go_on(&slice(), sample(9.0, cost));
            assert_eq!(habits.trial.and_then(|trial| trial.after).is_some(), is_over, "{cost}");
        }
    }

    #[test]
    fn a_gain_that_few_slices_beside_a_trial_cannot_tell_is_told_soon_by_the_many_before() {
        let mut habits = Habits::new(Price::new(Nanos(1_000_000), 1));
        // What a request costs goes up and down by twice the gain. By the sides of trials alone it takes 887 slices.
        let comes_into_force = (0..200).any(|slice| {
            let usual = if slice % 2 == 0 { 80_000 } else { 120_000 };
            let length = if habits.now() == habits.in_force { usual } else { 90_000 };
            serve(&mut habits, Nanos(length));
            habits.in_force != LEARNED
        });
        assert!(comes_into_force);
    }

    fn habits() -> Habits {
        Habits { settling: 0, ..Habits::new(Price::new(Nanos(1_000_000), 1)) }
    }

    /// So many requests in so many nanoseconds.
    fn standing(requests: u32, took: u64) -> Standing {
        Standing { done: Done { requests, took: Nanos(took) }, ..Standing::default() }
    }

    #[test]
    fn a_slice_has_requests_enough_and_time_enough_or_comes_to_nothing() {
        for (is_trial, is_contended, requests, took, waits, is_full) in [
            (false, false, 32, 1_000_000, 1, true),
            (false, false, 31, 1_000_000, 1, false),
            (false, false, 32, 999_999, 1, false),
            (false, false, 8, 10_000_000, 1, true),
            (false, false, 7, 10_000_000, 1, false),
            (false, false, 8, 9_999_999, 1, false),
            (true, false, 8, 1_000_000, 1, true),
            (true, false, 7, 1_000_000, 1, false),
            (true, false, 8, 999_999, 1, false),
            (false, true, 32, 4_000_000, 1, true),
            (false, true, 32, 3_999_999, 1, false),
            (false, false, 7, 0, 256, true),
            (false, false, 7, 0, 255, false),
            (false, false, 8, 0, 256, false),
        ] {
            let mut habits = habits();
            habits.trial = is_trial.then(Trial::default);
            habits.is_contended = is_contended;
            habits.slice.add_done(&standing(requests, took));
            habits.slice.waits = waits - 1;
            habits.observe(&Wait { length: Nanos::ZERO, spun: Nanos::ZERO, blocked: false, active: &[] });
            assert_eq!(habits.wants_cpu_time(), is_full, "{is_trial} {is_contended} {requests} {took} {waits}");
        }
    }

    #[test]
    fn waits_without_a_request_are_no_slice_to_judge_by() {
        let mut habits = Habits { is_full: true, ..habits() };
        habits.resume(&standing(0, 1_000_000));
        assert_eq!((habits.own.slices(), habits.is_full), (0.0, false));
        habits.is_full = true;
        habits.resume(&standing(1, 1_000_000));
        assert_eq!(habits.own.slices(), 1.0);
    }

    #[test]
    fn a_trial_of_spinning_to_the_end_is_given_up_after_two_spins_in_vain() {
        for (rival, after, spun, blocked, vain) in [
            (4, None, 1_000_000, true, 1),
            (4, None, 999_999, true, 0),
            (4, None, 1_000_000, false, 0),
            (3, None, 1_000_000, true, 0),
            (4, Some(0), 1_000_000, true, 0),
        ] {
            let mut habits = habits();
            habits.trial = Some(Trial { rival, after, ..Trial::default() });
            habits.rivals[rival].gap = 600_000_000;
            let wait = Wait { length: Nanos(1_000_000), spun: Nanos(spun), blocked, active: &[] };
            habits.observe(&wait);
            assert_eq!((habits.slice.vain, habits.is_full), (vain, false));
            habits.observe(&wait);
            assert_eq!(habits.is_full, vain > 0);
            if vain > 0 {
                // A load that leaves nothing to wait for begins then, and lasts a minute.
                let done = Done { requests: 1_000_000, took: Nanos(60_000_000_000) };
                habits.resume(&Standing { done, ..Standing::default() });
                let Rival { excess, gap, lasted, .. } = habits.rivals[rival];
                assert!(habits.trial.is_none());
                let expected = LONGEST + 2_000_000;
                let lost = Cost { served: expected as f64, added: expected as f64 };
                assert_eq!((excess, gap, lasted), (lost, LATEST, expected));
            }
        }
    }

    #[test]
    fn who_spins_to_the_end_does_so_while_requests_come_one_soon_after_another() {
        let endless = Nanos(1_000_000);
        for (kind, length, soon) in [
            (EventKind::Queue, endless, 4),
            (EventKind::Completion, endless, 4),
            (EventKind::Queue, endless + Nanos(1), 0),
            (EventKind::Other, Nanos(SHORT), 3),
            (EventKind::Other, Nanos(SHORT + 1), 0),
        ] {
            let mut habits = Habits { soon: 3, in_force: 4, ..habits() };
            habits.resume(&Standing { last: LastWait { kind, length }, ..Standing::default() });
            assert_eq!(habits.soon, soon, "{kind:?} {length}");
            let window = (soon == 4).then_some(1_000_000);
            assert_eq!((habits.window(), habits.trusted(), habits.is_trial()), (window, window, false));
        }
        let mut dear = Habits { soon: 4, in_force: 4, ..Habits::new(Price::new(Nanos::MAX, 1)) };
        dear.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(100_000) });
        assert_eq!(dear.window(), Some(1_760_000));
        let mut tried = Habits { in_force: 3, trial: Some(Trial { rival: 1, ..Trial::default() }), ..habits() };
        assert_eq!((tried.window(), tried.trusted(), tried.is_trial()), (Some(0), Some(16_000), true));
        tried.trial = Some(Trial { rival: 1, after: Some(0), ..Trial::default() });
        assert_eq!((tried.window(), tried.trusted(), tried.is_trial()), (Some(16_000), Some(16_000), false));
    }

    #[test]
    fn a_trial_is_due_when_the_last_one_has_been_paid_for_or_was_long_ago() {
        let both = |each: f64| Cost { served: each, added: each };
        let rival = Rival { excess: both(1.0), gap: 100, ..Rival::default() };
        for (spent, rested, lasted, stale, is_due) in [
            (256.0, 100, 0, false, true),
            (256.0, 99, 0, false, false),
            (255.0, 100, 0, false, false),
            (8.0, 0, 0, true, true),
            (7.0, 0, 0, true, false),
            (0.0, 4_000_000_000, 0, false, true),
            (0.0, 3_999_999_999, 0, false, false),
            (0.0, 6_400_000_000, 100_000_000, false, true),
            (0.0, 6_399_999_999, 100_000_000, false, false),
        ] {
            let rival = Rival { spent: both(spent), rested, lasted, stale, ..rival };
            assert_eq!(rival.is_due(8.0), is_due, "{spent} {rested} {lasted} {stale}");
        }
    }

    /// Two requests, so far apart, at such a cost.
    fn sample(time: f64, each: f64) -> Sample {
        Sample { requests: 2.0, time, cost: Cost { served: each, added: each } }
    }

    fn tally(time: f64, costs: &[f64]) -> Tally {
        let mut tally = Tally::default();
        costs.iter().for_each(|&each| tally.add(sample(time, each)));
        tally
    }

    /// A slice of a millisecond.
    fn slice() -> Slice {
        let mut slice = Slice::default();
        slice.add_done(&standing(2, 1_000_000));
        slice
    }

    #[test]
    fn three_strange_slices_in_a_row_are_another_load() {
        let none_due = [Rival { gap: u64::MAX, ..Rival::default() }; HABITS.len()];
        let rest = |usual, costs: &[f64], impatience| {
            let mut habits = Habits { rivals: none_due, impatience, ..habits() };
            (0..usual).for_each(|_| habits.rest(&slice(), sample(100.0, 10.0)));
            habits.tried = Some(2);
            costs.iter().for_each(|&each| habits.rest(&slice(), sample(100.0, each)));
            habits
        };
        assert_eq!(rest(3, &[20.0], 8.0).odd, 0, "three slices are too few to judge by");
        assert_eq!(rest(4, &[20.0], 8.0).odd, 1);
        // While one is in the making nothing is tried.
        let mut habits = rest(16, &[20.0], 8.0);
        habits.rivals = Default::default();
        habits.rest(&slice(), sample(100.0, 20.0));
        assert!(habits.trial.is_none());

        let habits = rest(16, &[20.0; 2], 8.0);
        assert_eq!((habits.odd, habits.rivals[2].stale, habits.trial.is_none()), (2, false, true));
        // What it leaves behind is part of what the last trial cost: 2 x 10, and then, for 180 / 17 is usual by now, less.
        let excess = 20.0 + 2.0 * (20.0 - 180.0 / 17.0);
        assert!((habits.rivals[2].excess.added - excess).abs() < 1e-9, "{:?}", habits.rivals[2].excess);
        assert_eq!(habits.rivals[1].excess, Cost::default());

        let habits = rest(16, &[20.0, 20.0, 11.0], 8.0);
        assert_eq!((habits.odd, habits.tried, habits.strange.slices()), (0, None, 0.0));

        for (impatience, after) in [(8.0, 16.0), (200.0, 256.0)] {
            let habits = rest(16, &[20.0; 3], impatience);
            assert!(habits.rivals.iter().all(|rival| rival.stale) && habits.tried.is_none());
            assert_eq!((habits.odd, habits.own.slices(), habits.impatience), (0, 3.0, after));
            assert_eq!(habits.own.cost(), Cost { served: 20.0, added: 20.0 });
        }
    }

    #[test]
    fn between_trials_the_books_are_kept_and_the_one_that_rested_longest_comes_first() {
        let mut habits = Habits { impatience: 64.0, calm: CALM - 1_000_001, ..habits() };
        for (rival, rested) in [(0, 9), (1, 1), (2, 5), (3, 3), (4, 4)] {
            habits.rivals[rival].rested = rested;
        }
        (0..3).for_each(|_| habits.rest(&slice(), sample(100.0, 10.0)));
        assert!(habits.trial.is_none(), "it takes four to compare with");
        // A second without a change halves impatience, once.
        assert_eq!((habits.impatience, habits.calm), (32.0, 1_000_000));
        habits.rest(&slice(), sample(100.0, 10.0));
        let trial = habits.trial.unwrap();
        assert_eq!((trial.rival, trial.sides[0].slices(), habits.rivals[2].base.slices()), (2, 4.0, 4.0));
        let Rival { spent, rested, .. } = habits.rivals[1];
        assert_eq!((spent, rested), (Cost { served: 80.0, added: 80.0 }, 4_000_001));
        let mut habits = Habits { calm: CALM - 1_000_000, ..self::habits() };
        habits.rest(&slice(), sample(100.0, 10.0));
        assert_eq!((habits.impatience, habits.calm), (IMPATIENCE, 0));
    }

    #[test]
    fn a_trial_has_eight_slices_after_two_to_settle_unless_it_is_hopeless() {
        for (each, slices) in [(10.0, 10), (20.0, 3)] {
            let mut habits = habits();
            habits.trial = Some(Trial { rival: 2, ..Trial::default() });
            habits.rivals[2].base = tally(100.0, &[10.0; 4]);
            while habits.trial.unwrap().after.is_none() {
                habits.go_on(&slice(), sample(100.0, each));
            }
            let Trial { slices: had, lasted, spent, requests, own, .. } = habits.trial.unwrap();
            assert_eq!((had, lasted, requests), (slices, u64::from(slices) * 1_000_000, f64::from(slices) * 2.0));
            assert_eq!(
                (own.slices(), habits.rivals[2].own.slices()),
                (f64::from(slices) - 2.0, f64::from(slices) - 2.0)
            );
            assert_eq!(spent.added, f64::from(slices) * 2.0 * each);
            // Two slices that do not count come after it, and four that do.
            for after in 1..=6 {
                assert_eq!(habits.trial.unwrap().sides[1].slices(), f64::from(after).max(3.0) - 3.0);
                habits.look_back(sample(100.0, 10.0));
            }
            assert!(habits.trial.is_none());
            assert_eq!((habits.rivals[2].base.slices(), habits.own.slices()), (8.0, 4.0));
        }
    }

    #[test]
    fn a_trial_cost_what_it_took_beyond_its_neighbours() {
        let sides = [tally(1.0, &[10.0]), tally(1.0, &[14.0])];
        let spent = Cost { served: 100.0, added: 90.0 };
        let trial = Trial { spent, requests: 6.0, sides, ..Trial::default() };
        assert_eq!(trial.excess(), Cost { served: 28.0, added: 18.0 });
    }

    #[test]
    fn a_habit_comes_into_force_where_its_trial_was_cheaper_and_is_tried_again_later_where_it_was_not() {
        /// What the habit in force came to before the trial and after it, the rival in it, and in all of its trials what it was
        /// compared with; how many there were before; whether it comes into force.
        type Tried = (f64, f64, f64, [f64; 2], u32, bool);
        let tried: [Tried; 6] = [
            (12.0, 12.0, 10.0, [12.0, 12.0], 0, true),
            (12.0, 10.0, 10.0, [12.0, 12.0], 0, false),
            (10.0, 12.0, 10.0, [12.0, 12.0], 2, false),
            (10.0, 12.0, 10.0, [12.0, 12.0], 3, true),
            // Too uneven to tell, but what came long before tells.
            (12.0, 12.0, 10.0, [4.0, 20.0], 0, true),
            (10.0, 10.0, 10.0, [4.0, 20.0], 3, false),
        ];
        for (before, after, own, base, trials, wins) in tried {
            let mut habits =
                Habits { beside: BESIDE, impatience: 64.0, calm: 5, own: tally(9.0, &[12.0; 4]), ..habits() };
            let sides = [tally(9.0, &[before; 4]), tally(9.0, &[after; 4])];
            habits.trial = Some(Trial { rival: 2, own: tally(9.0, &[own; 4]), sides, ..Trial::default() });
            habits.rivals[2] =
                Rival { own: tally(9.0, &[own; 4]), base: tally(9.0, &base), trials, ..Rival::default() };
            habits.decide();
            let expected = if wins { (2, 0, IMPATIENCE, 0, true) } else { (0, BESIDE, 64.0, 5, false) };
            let Habits { in_force, beside, impatience, calm, rivals, .. } = habits;
            assert_eq!((in_force, beside, impatience, calm, rivals[1].stale), expected, "{before} {after} {base:?}");
            assert_eq!(rivals[2].trials, trials + 1);
            assert_eq!(habits.own.cost().added, if wins { own } else { 12.0 });
        }

        // In nanoseconds: how long until the next trial, by the last time, and whether its end is remembered as a loss.
        for (own, base, stale, gap, then, is_loss) in [
            (20.0, [10.0, 10.0], false, 0, SOONEST, true),
            (20.0, [10.0, 10.0], false, 50_000_000, 100_000_000, true),
            (20.0, [10.0, 10.0], false, 600_000_000, LATEST, true),
            (20.0, [10.0, 10.0], true, 600_000_000, SOONEST, true),
            (10.0, [10.0, 10.0], false, 600_000_000, LATEST, false),
            (10.0, [4.0, 16.0], false, 150_000_000, UNCLEAR, false),
        ] {
            let mut habits = Habits { own: tally(9.0, &[10.0; 4]), ..habits() };
            let sides = [tally(9.0, &[10.0; 4]), tally(9.0, &[10.0; 4])];
            let trial = Trial { rival: 2, own: tally(9.0, &[own; 4]), sides, lasted: 7, ..Trial::default() };
            habits.trial = Some(trial);
            let spent = Cost { served: 1.0, added: 1.0 };
            let (own, base) = (tally(9.0, &[own; 4]), tally(9.0, &base));
            habits.rivals[2] = Rival { own, base, stale, gap, spent, rested: 5, ..Rival::default() };
            habits.decide();
            let Rival { gap, lasted, spent, rested, stale, .. } = habits.rivals[2];
            assert_eq!((gap, lasted, spent, rested, stale), (then, 7, Cost::default(), 0, false));
            assert_eq!((habits.tried, habits.in_force), (is_loss.then_some(2), LEARNED));
        }
    }
}
