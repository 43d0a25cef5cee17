//! The machine's cores, and the placement of load and server on them.

use std::fs;

use egret_loadgen::machine::allowed;

/// The processors of the load and of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The load's cores, dealt out to its jobs; empty leaves them to the scheduler.
    pub load: Vec<usize>,
    /// The server's, or the virtual machine's; empty leaves it to the scheduler.
    pub server: Vec<usize>,
}

impl Placement {
    /// Deals `groups` of processors that share a core out: the load gets a core for each of its `jobs`, but at most half of
    /// all, and one processor of each; the server gets the rest. Where there is only one core they share it, unpinned
    /// unless it has several processors.
    pub fn of(groups: &[Vec<usize>], jobs: usize) -> Self {
        match groups {
            [] => Self::default(),
            [only] => match only.split_first() {
                Some((first, rest)) if !rest.is_empty() => Self { load: vec![*first], server: rest.to_vec() },
                _ => Self::default(),
            },
            groups => {
                let (load, server) = groups.split_at(jobs.clamp(1, groups.len() / 2));
                Self { load: load.iter().map(|group| group[0]).collect(), server: server.concat() }
            }
        }
    }
}

/// Processors that this process may use, in groups of those that share a core.
pub fn cores() -> Vec<Vec<usize>> {
    by_core(allowed())
}

/// All of the machine's processors, in such groups: others may run where this process may not.
pub fn all_cores() -> Vec<Vec<usize>> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    by_core(parse_list(online.trim()))
}

fn by_core(processors: impl IntoIterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for cpu in processors {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(path).map(|list| parse_list(list.trim())).unwrap_or_default();
        match groups.iter_mut().find(|group| group.iter().any(|member| siblings.contains(member))) {
            Some(group) => group.push(cpu),
            None => groups.push(vec![cpu]),
        }
    }
    groups
}

/// Numbers as the kernel lists them: `0-3,8`.
pub fn parse_list(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_has_a_core_for_each_job_and_half_of_all_at_most() {
        let place = |groups: &[&[usize]], jobs| {
            let groups: Vec<Vec<usize>> = groups.iter().map(|group| group.to_vec()).collect();
            let Placement { load, server } = Placement::of(&groups, jobs);
            (load, server)
        };
        assert_eq!(place(&[&[0], &[1]], 4), (vec![0], vec![1]));
        assert_eq!(place(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]], 1), (vec![0], vec![1, 5, 2, 6, 3, 7]));
        assert_eq!(place(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]], 9), (vec![0, 1], vec![2, 6, 3, 7]));
        assert_eq!(place(&[&[0, 1]], 2), (vec![0], vec![1]));
        assert_eq!(place(&[&[0]], 1), (vec![], vec![]));
    }

    #[test]
    fn this_machines_processors_are_each_in_one_core() {
        let mut all = cores().concat();
        all.sort_unstable();
        assert_eq!(all, allowed().collect::<Vec<_>>());
    }
}
