//! One busy disk beside 0, 1, 10 and 100 idle ones: is the line flat?

use std::time::Duration;

use egret_loadgen::machine::Cores;
use egret_loadgen::random::Shuffle;

use crate::cells::{Cell, Demand, Placement, Under};
use crate::deployment::{Contender, Outcome, Plan, Times, take_turns, try_deploy};
use egret_loadgen::load::Waiting;

/// How many idle disks, of 32 queues each.
const COMPANY: [usize; 4] = [0, 1, 10, 100];
/// How long a daemon is watched doing nothing.
const WATCH: Duration = Duration::from_secs(1);

/// One measurement.
pub struct Rung {
    pub monitor: &'static str,
    pub policy: String,
    pub company: usize,
    pub repetition: usize,
    pub outcome: Outcome,
}

/// The cost of an idle daemon with all these disks.
pub struct Idle {
    pub monitor: &'static str,
    pub policy: String,
    pub cores: f64,
}

/// Measures the busy disk on every rung; those of one monitor and policy take turns.
pub fn measure(policies: [&str; 2], repetitions: usize, times: Times, shuffle: &mut Shuffle) -> (Vec<Rung>, Vec<Idle>) {
    let cores = Cores::of_this_machine();
    let cell = Cell {
        under: Under::Null(10),
        waiting: Waiting::Blocking,
        demand: Demand::Depth(1),
        disks: 1,
        placement: Placement::Apart,
    };
    let (mut rungs, mut idle) = (Vec::new(), Vec::new());
    for monitor in ["ppoll", "epoll", "io_uring"] {
        for policy in policies {
            let contender = Contender::of_policy(&format!("{policy},fd-monitor={monitor}"));
            let mut deployments = Vec::new();
            for company in COMPANY {
                // None of these spins for good, and to stop and continue a daemon of many threads is work for it.
                let plan = Plan {
                    contender: &contender,
                    cores: &cores,
                    spec: cell.spec(&cores),
                    disks: 1,
                    company,
                    park: false,
                };
                match try_deploy(&plan, |options| cell.blockdevs(options, None)) {
                    Ok(deployment) => deployments.push((company, deployment)),
                    Err(error) => println!("failed: {monitor} {policy} beside {company}: {error}"),
                }
            }
            for (company, deployment) in &deployments {
                if *company == COMPANY[COMPANY.len() - 1] {
                    let cores = deployment.idle_cores(WATCH);
                    idle.push(Idle { monitor, policy: policy.to_owned(), cores });
                }
            }
            for repetition in 0..repetitions {
                deployments = take_turns(deployments, times, shuffle, |company, error| {
                    println!("failed: {monitor} {policy} beside {company}: {error}");
                });
                for (company, deployment) in &mut deployments {
                    let (policy, company) = (policy.to_owned(), *company);
                    rungs.push(Rung { monitor, policy, company, repetition, outcome: deployment.outcome() });
                }
            }
            eprintln!("ladder: {monitor}, {policy}: done");
        }
    }
    (rungs, idle)
}
