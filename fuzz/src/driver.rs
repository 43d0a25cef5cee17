//! Runs a target for as long as one likes, without libFuzzer: it looks at no coverage, and needs nothing.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use crate::corpus::{corpus, mutants};

/// Runs `target` on the files that the command line names; or for the number of minutes that it names, or one, on the
/// corpus and then on inputs that are made of it, from another seed each time.
///
/// The input under way lies in `fuzz/artifacts/TARGET`, and stays there if it is the last one.
pub fn drive(name: &str, target: fn(&[u8])) -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let minutes = match arguments.as_slice() {
        [] => 1.0,
        [minutes] if minutes.parse::<f64>().is_ok() => minutes.parse().unwrap_or(1.0),
        files => {
            files.iter().for_each(|file| target(&fs::read(file).expect("a file")));
            return ExitCode::SUCCESS;
        }
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(name);
    fs::create_dir_all(&folder).expect("a folder for findings");
    let path = folder.join(format!("input-{}", std::process::id()));
    let now = File::create(&path).expect("a file for the input");
    let seed = SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
    let inputs: Vec<_> = corpus(name).into_iter().map(|(_, bytes)| bytes).collect();
    let (begin, limit) = (Instant::now(), Duration::from_secs_f64(60.0 * minutes));
    let mut count = 0_u64;
    for input in inputs.clone().into_iter().chain(mutants(inputs, seed)) {
        if begin.elapsed() >= limit {
            break;
        }
        // A process that a signal ends says nothing more.
        now.write_all_at(&input, 0).and_then(|()| now.set_len(input.len() as u64)).expect("a file for the input");
        if catch_unwind(|| target(&input)).is_err() {
            eprintln!("{name}: after {count} executions, by {}", path.display());
            return ExitCode::FAILURE;
        }
        count += 1;
    }
    drop(fs::remove_file(path));
    println!("{name}: {count} executions in {:.0} s", begin.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}
