//! The lab's pages name every key and every word that a plan may hold, and every plan that is built in.

use std::collections::BTreeSet;
use std::fs;

use serde::de::DeserializeOwned;

use super::*;
use crate::runner;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn pages() -> String {
    ["lab.md", "lab-guests.md"].map(|page| fs::read_to_string(format!("{ROOT}/docs/{page}")).unwrap()).concat()
}

/// What serde says that it would have taken in the place of `?`.
fn known<T: DeserializeOwned>(text: &str) -> BTreeSet<String> {
    let error = toml::from_str::<T>(text).err().unwrap();
    let message = error.message();
    assert!(message.starts_with("unknown "), "{message}");
    message.split('`').skip(3).step_by(2).map(str::to_owned).collect()
}

fn keys<T: DeserializeOwned>() -> BTreeSet<String> {
    known::<T>("'?' = 1")
}

fn words<T: DeserializeOwned>() -> BTreeSet<String> {
    #[derive(Deserialize)]
    struct Of<T> {
        #[serde(rename = "word")]
        _word: T,
    }
    known::<Of<T>>("word = '?'")
}

#[test]
fn every_key_and_every_word_of_a_plan_is_in_the_pages() {
    let pages = pages();
    let mut known = BTreeSet::new();
    for keys in
        [keys::<Plan>(), keys::<DiskPlan>(), keys::<Subject>(), keys::<LoadKeys>(), keys::<Chart>(), keys::<Profile>()]
    {
        known.extend(keys);
    }
    known.extend(keys::<Columns>());
    for words in [
        words::<DiskKind>(),
        words::<Stack>(),
        words::<Server>(),
        words::<Asks>(),
        words::<DeviceModel>(),
        words::<Pages>(),
    ] {
        known.extend(words);
    }
    for words in [
        words::<Application>(),
        words::<RateProcess>(),
        words::<Metric>(),
        words::<Form>(),
        words::<Across>(),
        words::<Published>(),
    ] {
        known.extend(words);
    }
    assert!(known.len() > 80, "{known:?}");
    let is_named = |name: &String| {
        let spelled = ["`?`", "\"?\"", "[?]", "\n? = "].map(|around| around.replace('?', name));
        spelled.iter().any(|spelled| pages.contains(spelled))
    };
    let missing: Vec<&String> = known.iter().filter(|name| !is_named(name)).collect();
    assert!(missing.is_empty(), "docs/lab.md and docs/lab-guests.md do not name {missing:?}");
}

#[test]
fn every_plan_in_the_folder_is_built_in_and_in_the_table() {
    let files = fs::read_dir(format!("{ROOT}/plans")).unwrap().map(|file| file.unwrap().path());
    let names: BTreeSet<String> = files.map(|path| path.file_stem().unwrap().display().to_string()).collect();
    assert_eq!(names, BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).collect());
    let pages = pages();
    for (name, _) in BUILT_IN {
        let row = format!("\n| `{name}` | {} |\n", Plan::named(name).unwrap().title);
        assert!(pages.contains(&row), "docs/lab.md has no row{row}");
        let answers = Plan::named(name).unwrap().answers.to_lowercase();
        let answers = answers.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(answers.contains("compare"), "{name} does not say what of the published figures cannot be compared");
        let says = ["processor", "no word of the hardware", "no published figures"]
            .iter()
            .any(|words| answers.contains(words));
        assert!(says, "{name} does not say what the published figures were measured on");
    }
}

#[test]
fn every_published_experiment_has_a_chart_in_the_plans_that_the_page_names() {
    let pages = pages();
    let two = ('a'..='x').map(|letter| format!("2{letter}"));
    for experiment in two.chain(["S0", "S1", "S3", "S4"].map(str::to_owned)) {
        let row = pages.lines().find(|line| line.starts_with(&format!("| {experiment} |"))).expect(&experiment);
        let named: BTreeSet<&str> =
            row.rsplit(" | ").take(2).flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        let has_it = |plan: &Plan| plan.experiments.contains(&experiment);
        let with_it = BUILT_IN.iter().filter(|(name, _)| has_it(&Plan::named(name).unwrap()));
        assert_eq!(named, with_it.map(|(name, _)| *name).collect(), "plans with {experiment}");
        for plan in named.iter().map(|name| Plan::named(name).unwrap()) {
            let is_of_it = |chart: &Chart| chart.id.split([',', '-', ' ']).next() == Some(experiment.as_str());
            assert!(plan.charts.iter().any(is_of_it), "{} has no chart of {experiment}", plan.name);
            let is_weighted = |one: &Subject| one.iothread.contains_key("poll-weight");
            assert!(experiment != "S1" || plan.subjects.iter().any(is_weighted), "{} weighs nothing", plan.name);
        }
    }
}

#[test]
fn the_page_says_how_long_profiles_take_and_how_large_their_disks_are() {
    let pages = pages();
    let mut rows = 0;
    for plan in BUILT_IN.iter().map(|(name, _)| Plan::named(name).unwrap()) {
        for (name, profile) in &plan.profiles {
            let long = plan.clone().with_profile(name).unwrap();
            let (disks, size) = (long.loads.iter().map(|load| load.disks).max().unwrap(), profile.size.unwrap());
            let hours = runner::duration(&long, &runner::steps(&long, 0, None)).as_secs().div_ceil(3600);
            let (ramp, runtime) = (profile.ramp_time, profile.runtime);
            let row = format!(
                "\n| `{} --profile {name}` | {ramp}, {runtime} | {disks} of {size} | {hours} hours |\n",
                plan.name
            );
            assert!(pages.contains(&row), "docs/lab.md has no row{row}");
            rows += 1;
        }
    }
    let of_profiles = pages.lines().filter(|line| line.starts_with("| `") && line.contains(" --profile "));
    assert_eq!(of_profiles.count(), rows);
}

#[test]
fn the_list_of_all_metrics_has_every_one() {
    let all = Metric::ALL.map(|metric| serde_json::to_value(metric).unwrap().as_str().unwrap().to_owned());
    assert_eq!(BTreeSet::from(all), words::<Metric>());
}

#[test]
fn a_mode_in_the_main_loop_and_in_a_thread_of_its_own_is_one_program_s() {
    for (name, _) in BUILT_IN {
        let plan = Plan::named(name).unwrap();
        let mode = |subject: &Subject| subject.name.split_once(", main loop").map(|(mode, _)| mode.to_owned());
        for (subject, mode) in plan.subjects.iter().filter_map(|subject| Some((subject, mode(subject)?))) {
            let other = format!("{mode}, I/O thread");
            let other = plan.subjects.iter().find(|subject| subject.name == other).expect(&other);
            assert_eq!((subject.stack, subject.server), (other.stack, other.server), "{name}: {mode}");
            assert_eq!(subject.blockdev, other.blockdev, "{name}: {mode}");
            let has_main_loop = match subject.stack {
                Stack::QemuStorageDaemon => true,
                Stack::Guest => subject.server == Server::Qemu,
                Stack::Host | Stack::Egret | Stack::VhostUserBlk | Stack::Ssh => false,
            };
            assert!(has_main_loop && (subject.iothreads, other.iothreads) == (0, 1), "{name}: {mode}");
        }
    }
}
