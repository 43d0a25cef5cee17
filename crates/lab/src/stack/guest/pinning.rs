//! Which processor each thread of a virtual machine keeps to.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::monitor::Threads;
use crate::machine;
use crate::plan::Subject;
use crate::results::Warning;

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

    /// On `groups` of processors that share a core. I/O threads go where the subject says. What is left over gets a core
    /// of its own each, or else a processor of its own, or else nothing is pinned that the subject does not pin: two
    /// threads that take turns on one processor are better off with the scheduler.
    fn on(groups: &[Vec<usize>], subject: &Subject) -> Self {
        let named = &subject.cpus;
        let taken = |group: &&Vec<usize>| !group.iter().any(|cpu| named.contains(cpu));
        let whole: Vec<usize> = groups.iter().filter(taken).filter_map(|group| group.first().copied()).collect();
        let single: Vec<usize> = groups.concat().into_iter().filter(|cpu| !named.contains(cpu)).collect();
        let (iothreads, vcpus) = (subject.iothreads as usize, subject.vcpus as usize);
        let wanted = vcpus + if named.is_empty() { iothreads } else { 0 };
        let pool = [whole, single].into_iter().find(|pool| pool.len() >= wanted).unwrap_or_default();
        let (for_vcpus, rest) = pool.split_at(vcpus.min(pool.len()));
        let for_iothreads = if named.is_empty() { rest } else { named.as_slice() };
        Self {
            iothreads: for_iothreads.iter().copied().cycle().take(if for_iothreads.is_empty() { 0 } else { iothreads }).collect(),
            vcpus: for_vcpus.to_vec(),
        }
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

    /// I/O threads and processors of the guest that share a core, in a line.
    fn shared_cores(&self, groups: &[Vec<usize>]) -> Option<String> {
        let both = |group: &&Vec<usize>| {
            let io = group.iter().find(|cpu| self.iothreads.contains(cpu))?;
            let vcpu = group.iter().find(|cpu| self.vcpus.contains(cpu))?;
            Some(format!("an I/O thread on CPU {io} and a processor of the guest on CPU {vcpu}"))
        };
        groups.iter().find_map(|group| both(&group))
    }
}

/// What a reader should mind about where a guest's threads run.
pub fn warnings(subject: &Subject) -> Vec<Warning> {
    let groups = machine::cores();
    let shared = Pinning::on(&groups, subject).shared_cores(&groups);
    let text = shared.map(|shared| format!("{}: {shared} share a core, so that each slows the other down", subject.name));
    text.into_iter().map(|text| Warning { about: "smt-sibling".into(), text }).collect()
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
        assert_eq!(pinning.shared_cores(&eight_cores()), None);
    }

    #[test]
    fn an_io_thread_that_is_put_on_a_sibling_is_warned_of() {
        // Eight processors and no core left: theirs.
        let pinning = pinning(&eight_cores(), "vcpus = 8\niothreads = 1\ncpus = [14]");
        assert_eq!(pinning.iothreads, [14]);
        assert_eq!(
            pinning.shared_cores(&eight_cores()).unwrap(),
            "an I/O thread on CPU 14 and a processor of the guest on CPU 6"
        );
    }

    #[test]
    fn a_processor_of_the_guest_keeps_off_the_core_of_an_io_thread_that_was_placed() {
        let pinning = pinning(&eight_cores(), "vcpus = 7\niothreads = 1\ncpus = [14]");
        assert_eq!(pinning.vcpus, [0, 1, 2, 3, 4, 5, 7]);
        assert_eq!(pinning.shared_cores(&eight_cores()), None);
    }

    #[test]
    fn nothing_is_pinned_where_threads_would_take_turns() {
        assert_eq!(pinning(&[vec![0], vec![1]], "vcpus = 2\niothreads = 1"), Pinning::default());
        let placed = pinning(&[vec![0], vec![1]], "vcpus = 2\niothreads = 2\ncpus = [1]");
        assert_eq!(placed, Pinning { iothreads: vec![1, 1], vcpus: vec![] });
        assert_eq!(pinning(&[vec![0], vec![1]], "vcpus = 2\niothreads = 0").vcpus, [0, 1]);
    }
}
