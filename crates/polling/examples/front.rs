//! Replays every generated trace under every policy and prints what it cost.
//!
//! ```text
//! cargo run --release -p egret-polling --example front           # the tables
//! cargo run --release -p egret-polling --example front -- svg mixture 30   # a picture: trace, K in us
//! ```

use std::error::Error;

use egret_polling::builtin::Builtin;
use egret_polling::replay::{Contender, Setting, fixed_windows, front_svg, replay};
use egret_polling::{BlockCost, Nanos, Parameters, PolicyKind};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<_> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tables(),
        ["svg", trace, k] => picture(trace.parse()?, k.parse()?),
        _ => Err("usage: front [svg TRACE K_US]".into()),
    }
}

fn setting(k_us: u64, max: Option<Nanos>) -> Setting {
    let parameters = Parameters { max, ..Parameters::default() };
    Setting { block: BlockCost::from_total(Nanos::from_micros(k_us)), parameters }
}

/// Every policy but `fixed`, of which `best-fixed` is the best.
fn compared() -> Vec<PolicyKind> {
    PolicyKind::ALL.iter().copied().filter(|&kind| kind != PolicyKind::Fixed).collect()
}

/// Costs relative to the offline optimum's, and `low-regret`'s relative to the best fixed window's.
fn tables() -> Result<(), Box<dyn Error>> {
    for (k_us, max) in [5, 30].into_iter().flat_map(|k| [(k, None), (k, Some(Parameters::QEMU_MAX))]) {
        let named = max.map_or_else(|| "unset".to_owned(), |max| max.0.to_string());
        println!("\nK = {k_us} us, poll-max-ns {named}: cost over the offline optimum's\n");
        for (index, trace) in Builtin::ALL.into_iter().enumerate() {
            let rows = replay(trace.name(), &trace.generate(), &setting(k_us, max), &compared())?;
            // The offline optimum's own row would be all ones.
            let rows = &rows[1..];
            if index == 0 {
                let names: Vec<_> = rows.iter().map(|row| row.contender.to_string()).collect();
                println!("| trace | {} | low-regret against best-fixed |", names.join(" | "));
                println!("|---{}|", "|---".repeat(rows.len() + 1));
            }
            let costs: Vec<_> = rows.iter().map(|row| format!("{:.2}", row.competitive_ratio)).collect();
            let ours = rows.iter().find(|row| row.contender == Contender::Policy(PolicyKind::LowRegret));
            let reach = ours.map_or(1.0, |row| row.against_best_fixed);
            println!("| {} | {} | {reach:.3} |", trace.name(), costs.join(" | "));
        }
    }
    Ok(())
}

fn picture(trace: Builtin, k_us: u64) -> Result<(), Box<dyn Error>> {
    let waits = trace.generate();
    let setting = setting(k_us, None);
    let rows = replay(trace.name(), &waits, &setting, &compared())?;
    print!("{}", front_svg(&rows, &fixed_windows(trace.name(), &waits, &setting)));
    Ok(())
}
