//! What holds for every policy, whatever the waits and the properties.
#![allow(missing_docs)]

use egret_polling::{
    Active, BlockCost, Contention, Done, EventKind, LastWait, Nanos, Parameters, Policy, PolicyKind, Slot, Standing,
    Wait, build,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// One thing that happens to a policy.
#[derive(Clone, Debug)]
enum Event {
    Wait { length: u64, wakeup: u64, in_flight: u32, active: Vec<Active>, kind: EventKind },
    Forget(u32),
    BlockCost(BlockCost),
    Contention(Contention),
}

/// Mostly waits as they are, sometimes waits as they never should be.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..200_000_u64, 1 => 0..10_000_000_000_u64, 1 => any::<u64>(), 1 => Just(u64::MAX)]
}

fn kind() -> impl Strategy<Value = EventKind> {
    prop_oneof![Just(EventKind::Queue), Just(EventKind::Completion), Just(EventKind::Other)]
}

fn active() -> impl Strategy<Value = Vec<Active>> {
    vec((0..8_u32, kind(), any::<bool>()), 0..4)
        .prop_map(|list| list.into_iter().map(|(slot, kind, ready)| Active { slot: Slot(slot), kind, ready }).collect())
}

fn event() -> impl Strategy<Value = Event> {
    let wait = (length(), length(), 0..12_u32, active(), kind())
        .prop_map(|(length, wakeup, in_flight, active, kind)| Event::Wait { length, wakeup, in_flight, active, kind });
    let cost = (length(), length())
        .prop_map(|(cpu, latency)| Event::BlockCost(BlockCost { cpu: Nanos(cpu), latency: Nanos(latency) }));
    let contention = (length(), length(), any::<u64>()).prop_map(|(ran, delayed, preempted)| {
        Event::Contention(Contention { ran: Nanos(ran), delayed: Nanos(delayed), preempted })
    });
    prop_oneof![40 => wait, 1 => (0..8_u32).prop_map(Event::Forget), 1 => cost, 1 => contention]
}

fn parameters() -> impl Strategy<Value = Parameters> {
    let large = || prop_oneof![Just(0), 1..4_u64, 0..=Parameters::LARGEST, Just(Parameters::LARGEST)];
    let max = prop_oneof![Just(0), Just(32_768), 0..100_000_u64, large()];
    let weight = prop::option::of(0..=Parameters::LARGEST_WEIGHT);
    let price = prop::option::of(0..=Parameters::LARGEST_PRICE);
    (max, prop::option::of(large()), prop::option::of(large()), weight, price).prop_map(
        |(max, grow, shrink, weight, price)| Parameters { max: Some(Nanos(max)), grow, shrink, weight, price },
    )
}

/// Plays `events`; returns the window before each wait.
fn play(policy: &mut dyn Policy, events: &[Event]) -> Vec<Nanos> {
    let mut last = LastWait::default();
    let mut windows = Vec::new();
    for event in events {
        match event {
            Event::Wait { length, wakeup, in_flight, active, kind } => {
                let done = Done { requests: *in_flight, took: Nanos(*wakeup) };
                let cpu = policy.wants_cpu_time().then_some(Nanos(length.rotate_left(7)));
                let window = policy.window(&Standing { in_flight: *in_flight, done, cpu, last });
                windows.push(window);
                let (blocked, spun) = (*length > window.0, window.min(Nanos(*length)));
                let length = if blocked { Nanos(*length) + Nanos(*wakeup) } else { Nanos(*length) };
                policy.observe(&Wait { length, spun, blocked, active });
                last = LastWait { kind: *kind, length };
            }
            Event::Forget(slot) => policy.forget(Slot(*slot)),
            Event::BlockCost(cost) => policy.set_block_cost(*cost),
            Event::Contention(evidence) => policy.contend(*evidence),
        }
    }
    windows
}

fn windows(kind: PolicyKind, parameters: &Parameters, events: &[Event]) -> Vec<Nanos> {
    play(build(kind, parameters).unwrap().as_mut(), events)
}

proptest! {
    #[test]
    fn no_window_is_ever_longer_than_the_maximum(parameters in parameters(), events in vec(event(), 0..200)) {
        // One never blocks, whatever the maximum.
        for &kind in PolicyKind::ALL.iter().filter(|&&kind| kind != PolicyKind::Busy) {
            for window in windows(kind, &parameters, &events) {
                prop_assert!(Some(window) <= parameters.max, "{kind}: {window}");
            }
        }
    }

    #[test]
    fn a_maximum_of_zero_means_that_no_policy_spins(parameters in parameters(), events in vec(event(), 0..50)) {
        let parameters = Parameters { max: Some(Nanos::ZERO), ..parameters };
        for &kind in PolicyKind::ALL {
            prop_assert!(windows(kind, &parameters, &events).iter().all(|&window| window == Nanos::ZERO));
        }
    }

    #[test]
    fn zero_for_grow_shrink_or_weight_is_as_good_as_unset(max in 0..100_000_u64, events in vec(event(), 0..100)) {
        let zero = Parameters { max: Some(Nanos(max)), grow: Some(0), shrink: Some(0), weight: Some(0), price: None };
        let default = Parameters { max: Some(Nanos(max)), ..Parameters::default() };
        for &kind in PolicyKind::ALL {
            prop_assert_eq!(windows(kind, &zero, &events), windows(kind, &default, &events));
        }
    }

    #[test]
    fn a_policy_built_anew_remembers_nothing(
        parameters in parameters(),
        before in vec(event(), 0..100),
        after in vec(event(), 0..50),
    ) {
        for &kind in PolicyKind::ALL {
            let mut used = build(kind, &parameters).unwrap();
            play(used.as_mut(), &before);
            used = build(kind, &parameters).unwrap();
            prop_assert_eq!(play(used.as_mut(), &after), windows(kind, &parameters, &after));
        }
    }

    #[test]
    fn a_policy_that_weighs_no_blocks_decides_the_same_whatever_they_cost(events in vec(event(), 0..100)) {
        let costless: Vec<_> = events.iter().filter(|event| !matches!(event, Event::BlockCost(_))).cloned().collect();
        let parameters = Parameters::default();
        for &kind in PolicyKind::ALL {
            if !build(kind, &parameters).unwrap().weighs_block_cost() {
                prop_assert_eq!(windows(kind, &parameters, &events), windows(kind, &parameters, &costless), "{}", kind);
            }
        }
    }

    #[test]
    fn off_never_spins_and_busy_never_blocks(events in vec(event(), 0..50)) {
        let parameters = Parameters::default();
        prop_assert!(windows(PolicyKind::Off, &parameters, &events).iter().all(|&window| window == Nanos::ZERO));
        prop_assert!(windows(PolicyKind::Busy, &parameters, &events).iter().all(|&window| window == Nanos::MAX));
    }
}
