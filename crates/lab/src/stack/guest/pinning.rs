//! Which processor each thread of a virtual machine keeps to.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::qemu::Threads;
use crate::machine;
use crate::plan::Subject;

/// A processor for each thread; none at all where the scheduler places them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// For each I/O thread.
    pub iothreads: Vec<usize>,
    /// For each of the guest's processors.
    pub vcpus: Vec<usize>,
}

impl Pinning {
    /// For a subject on this machine.
    pub fn of(subject: &Subject) -> Self {
        Self::on(&machine::cores(), subject)
    }

    /// On `groups` of processors that share a core. I/O threads go where the subject says. Everybody else gets a core of
    /// its own as far as there are any, then a processor beside another of the guest's, and last one beside an I/O thread.
    /// Where there are fewer processors than threads nothing is pinned that the subject does not pin: threads that take
    /// turns on one processor are better off with the scheduler.
    fn on(groups: &[Vec<usize>], subject: &Subject) -> Self {
        let named = &subject.cpus;
        let (taken, free): (Vec<_>, Vec<_>) =
            groups.iter().partition(|group| group.iter().any(|cpu| named.contains(cpu)));
        let place = |group: &&Vec<usize>, at: usize| group.get(at).copied();
        let widest = groups.iter().map(Vec::len).max().unwrap_or(0);
        let beside = |groups: &[&Vec<usize>]| -> Vec<usize> {
            (0..widest).flat_map(|at| groups.iter().filter_map(move |group| place(group, at))).collect()
        };
        let mut pool = [beside(&free), beside(&taken)].concat();
        pool.retain(|cpu| !named.contains(cpu));

        let (iothreads, vcpus) = (subject.iothreads as usize, subject.vcpus as usize);
        let wanted = vcpus + if named.is_empty() { iothreads } else { 0 };
        if pool.len() < wanted {
            pool.clear();
        }
        let (for_vcpus, rest) = pool.split_at(vcpus.min(pool.len()));
        let for_iothreads = if named.is_empty() { rest } else { named };
        Self { iothreads: for_iothreads.iter().copied().cycle().take(iothreads).collect(), vcpus: for_vcpus.to_vec() }
    }

    /// Moves the threads to their places. One that this process may not use is left alone.
    pub fn apply(&self, threads: &Threads) {
        let pairs = threads.vcpus.iter().zip(&self.vcpus).chain(threads.iothreads.iter().zip(&self.iothreads));
        for (thread, cpu) in pairs {
            let mut only = CpuSet::new();
            only.set(*cpu);
            if let Some(thread) = Pid::from_raw(*thread as i32) {
                let _ = sched_setaffinity(Some(thread), &only);
            }
        }
    }

    /// The first two threads that are pinned to one core, in a line; an I/O thread before others.
    fn shared_core(&self, groups: &[Vec<usize>]) -> Option<String> {
        let iothreads = self.iothreads.iter().map(|cpu| format!("an I/O thread on CPU {cpu}")).zip(&self.iothreads);
        let vcpus = self.vcpus.iter().map(|cpu| format!("a processor of the guest on CPU {cpu}")).zip(&self.vcpus);
        let threads: Vec<(String, &usize)> = iothreads.chain(vcpus).collect();
        let core = |cpu: &usize| groups.iter().position(|group| group.contains(cpu));
        threads.iter().enumerate().find_map(|(place, (one, cpu))| {
            let (other, _) = threads[place + 1..].iter().find(|(_, other)| core(other) == core(cpu))?;
            Some(format!("{one} and {other}"))
        })
    }
}

/// The first two of a guest's threads that are pinned to one of `groups` of processors, in a line.
pub fn shared_core(groups: &[Vec<usize>], subject: &Subject) -> Option<String> {
    Pinning::on(groups, subject).shared_core(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinning(groups: &[Vec<usize>], keys: &str) -> Pinning {
        let subject: Subject = toml::from_str(&format!("name = 'guest'\nstack = 'guest'\n{keys}")).unwrap();
        Pinning::on(groups, &subject)
    }

    /// Processor N shares a core with processor N + 8, as on the machine of the published figures.
    fn eight_cores() -> Vec<Vec<usize>> {
        (0..8).map(|core| vec![core, core + 8]).collect()
    }

    #[test]
    fn everybody_gets_a_core_where_there_are_enough() {
        let pinning = pinning(&eight_cores(), "vcpus = 4\niothreads = 2");
        assert_eq!(pinning, Pinning { iothreads: vec![4, 5], vcpus: vec![0, 1, 2, 3] });
        assert_eq!(pinning.shared_core(&eight_cores()), None);
    }

    #[test]
    fn a_processor_of_the_guest_keeps_off_the_core_of_an_io_thread_as_long_as_it_can() {
        let pinning = |vcpus: u32| pinning(&eight_cores(), &format!("vcpus = {vcpus}\ncpus = [14]"));
        assert_eq!(pinning(7), Pinning { iothreads: vec![14], vcpus: vec![0, 1, 2, 3, 4, 5, 7] });
        assert_eq!(pinning(7).shared_core(&eight_cores()), None);
        // Where the published figures have it on CPU 6, beside the I/O thread.
        assert_eq!(pinning(8).vcpus, [0, 1, 2, 3, 4, 5, 7, 8]);
        assert_eq!(
            pinning(8).shared_core(&eight_cores()).unwrap(),
            "a processor of the guest on CPU 0 and a processor of the guest on CPU 8"
        );
    }

    #[test]
    fn an_io_thread_that_shares_a_core_is_warned_of_before_all_else() {
        let pinning = pinning(&eight_cores(), "vcpus = 15\ncpus = [14]");
        assert_eq!(pinning.vcpus.last(), Some(&6));
        assert_eq!(
            pinning.shared_core(&eight_cores()).unwrap(),
            "an I/O thread on CPU 14 and a processor of the guest on CPU 6"
        );
    }

    #[test]
    fn nothing_is_pinned_where_threads_would_take_turns() {
        let two = [vec![0], vec![1]];
        assert_eq!(pinning(&two, "vcpus = 2\niothreads = 1"), Pinning::default());
        assert_eq!(pinning(&two, "vcpus = 2\niothreads = 0").vcpus, [0, 1]);
        let named = pinning(&two, "vcpus = 2\niothreads = 2\ncpus = [1]");
        assert_eq!(named, Pinning { iothreads: vec![1, 1], vcpus: vec![] });
        assert!(named.shared_core(&two).is_some());
    }
}
