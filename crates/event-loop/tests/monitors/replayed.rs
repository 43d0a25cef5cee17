//! What a loop recorded, replayed: the same policy is told the same, and chooses the same windows.

use std::sync::mpsc::{Sender, channel};

use egret_event_loop::EventLoop;
use egret_polling::replay::windows;
use egret_polling::{BlockCost, Idleness, Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait, build};

use crate::bell::{Bell, PATIENCE, bell, hear_work, on_every_loop};

/// Passes on the windows that a policy chooses.
struct Overheard(Box<dyn Policy>, Sender<Nanos>);

impl Policy for Overheard {
    fn window(&mut self, before: &Standing) -> Nanos {
        let window = self.0.window(before);
        let _ = self.1.send(window);
        window
    }
    fn observe(&mut self, wait: &Wait<'_>) {
        self.0.observe(wait);
    }
    fn forget(&mut self, slot: Slot) {
        self.0.forget(slot);
    }
    fn window_now(&self) -> Nanos {
        self.0.window_now()
    }
    fn weighs_block_cost(&self) -> bool {
        self.0.weighs_block_cost()
    }
    fn observes_every_turn(&self) -> bool {
        self.0.observes_every_turn()
    }
}

#[test]
fn a_recording_replayed_has_the_windows_that_the_loop_had() {
    on_every_loop(|handle| {
        for kind in [PolicyKind::SharedWindow, PolicyKind::PerSourceWindow, PolicyKind::Weighted] {
            // Waits here are as long as scheduling makes them: some are above the maximum, and others are not.
            let max = Nanos::from_micros(200);
            let parameters = Parameters { max: Some(max), ..Parameters::default() };
            let (overheard, heard) = channel();
            let policy = Box::new(Overheard(build(kind, &parameters).unwrap(), overheard));
            let begin = move |target: &mut EventLoop<Bell>| {
                target.set_idle_after(Idleness::DEFAULT);
                target.set_policy(policy, max);
                target.record_waits(1 << 16);
            };
            handle.call(begin).unwrap();
            let (first, first_outside, hear_first) = bell();
            let (second, second_outside, hear_second) = bell();
            let bells = [first, second].map(|bell| handle.attach(bell).unwrap());
            let mut chosen = Vec::new();
            for round in 0..150 {
                // The loop waits, or has waited once more: whoever rings before it does has no wait recorded.
                chosen.push(heard.recv_timeout(PATIENCE).expect("the loop waits when it has nothing to do"));
                first_outside.ring();
                if round % 3 == 0 {
                    second_outside.ring();
                    hear_work(&hear_second, 1);
                }
                hear_work(&hear_first, 1);
            }
            let mut trace = handle.call(|target| target.take_recording(String::new())).unwrap().unwrap();
            bells.into_iter().for_each(|bell| drop(handle.detach(bell)));
            // What a block delays was part of what the policy saw.
            trace.block = BlockCost { cpu: Nanos::ZERO, latency: Nanos::ZERO };
            let replayed = windows(&trace, kind, &parameters).unwrap();
            assert!(replayed.len() >= chosen.len(), "{kind}: {} waits", replayed.len());
            chosen.extend(heard.iter().take(replayed.len() - chosen.len()));
            assert_eq!(replayed, chosen, "{kind}");
            let all_are_long = trace.waits.iter().all(|wait| wait.length >= max);
            assert!(all_are_long || chosen.iter().any(|&window| window > Nanos::ZERO), "{kind}: {chosen:?}");
        }
    });
}
