//! Writes the report of a run anew: `cargo run -p egret-lab --example report -- DIRECTORY`.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("which run's directory?");
        std::process::exit(2);
    };
    let run = egret_lab::runner::read(&directory)?;
    egret_lab::report::write(&run, &directory)
}
