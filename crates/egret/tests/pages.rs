//! What the pages name is there: files, anchors, commands of make and cargo, tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// What a reader has, and what the lab, the fuzzer and the compiler write.
const NOT_OURS: [&str; 10] = [
    "cells.csv",
    "cells.jsonl",
    "egret-report.html",
    "egret.toml",
    "fuzz/artifacts",
    "mine.toml",
    "report.html",
    "report.md",
    "result.json",
    "target/",
];

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(Path::new(ROOT).join(path)).unwrap()
}

/// Every file and folder of the repository, from its root.
fn tree(folder: &Path, into: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        if ["target", ".git", ".cache", "egret-bench"].iter().any(|skipped| name == *skipped) {
            continue;
        }
        into.insert(entry.path().strip_prefix(ROOT).unwrap().to_owned());
        if entry.file_type().unwrap().is_dir() {
            tree(&entry.path(), into);
        }
    }
}

fn files() -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    tree(Path::new(ROOT), &mut files);
    files
}

/// Pages that people read, with their text.
fn pages() -> Vec<(PathBuf, String)> {
    let is_page = |path: &PathBuf| {
        let parent = path.parent().unwrap();
        path.extension().is_some_and(|extension| extension == "md")
            && (parent == Path::new("") || parent == Path::new("docs"))
    };
    let pages: Vec<_> = files().into_iter().filter(is_page).map(|path| (path.clone(), read(path))).collect();
    assert!(pages.len() > 15, "{pages:?}");
    pages
}

/// What stands in backticks, as words.
fn code_words(page: &str) -> impl Iterator<Item = &str> {
    page.split('`').skip(1).step_by(2).flat_map(str::split_whitespace)
}

fn is_file_name(word: &str) -> bool {
    let is_plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    let extension = Path::new(word).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let first = word.split('/').next().unwrap_or_default();
    let is_ours =
        ["crates", "docs", "plans", "scripts", "contrib", "fuzz", ".ci"].contains(&first) && word.contains('/');
    let is_program = ["rs", "toml", "md", "sh", "js", "html"].contains(&extension);
    is_plain && !word.starts_with('/') && !word.ends_with("/TARGET") && (is_ours || is_program)
}

#[test]
fn every_file_that_a_page_names_is_there() {
    let files = files();
    let mut missing = Vec::new();
    for (page, text) in pages() {
        for word in code_words(&text).map(|word| word.trim_matches(|c| "(),:;".contains(c)).trim_end_matches('/')) {
            let is_known =
                || files.iter().any(|file| file.ends_with(word)) || NOT_OURS.iter().any(|own| word.starts_with(own));
            if is_file_name(word) && !is_known() {
                missing.push((page.clone(), word.to_owned()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let plain = heading.trim_start_matches('#').trim().to_lowercase();
    plain
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn every_link_of_a_page_leads_somewhere() {
    let mut broken = Vec::new();
    for (page, text) in pages() {
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") || target.contains(char::is_whitespace) {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            let there = Path::new(ROOT).join(&path).exists();
            let has_heading = || read(&path).lines().any(|line| line.starts_with('#') && anchor(line) == heading);
            if !there || (!heading.is_empty() && !has_heading()) {
                broken.push((page.clone(), target.to_owned()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_target_of_make_and_of_cargo_that_a_page_names_is_there() {
    let (makefile, files) = (read("Makefile"), files());
    let has = |ends: [String; 2]| files.iter().any(|file| ends.iter().any(|end| file.ends_with(end)));
    let mut missing = Vec::new();
    for (page, text) in pages() {
        let commands = text.split('`').skip(1).step_by(2).chain(text.lines().filter(|line| line.starts_with("    ")));
        for command in commands {
            let words: Vec<&str> = command.split_whitespace().collect();
            for pair in words.windows(2) {
                let (option, name) = (pair[0], pair[1]);
                let is_there = match option {
                    "make" if words[0] == "make" => makefile.contains(&format!("\n{name}:")),
                    "-p" if words[0] == "cargo" => name
                        .strip_prefix("egret-")
                        .is_none_or(|room| has([format!("crates/{room}/Cargo.toml"), format!("{room}/Cargo.toml")])),
                    "--test" => has([format!("tests/{name}.rs"), format!("tests/{name}/main.rs")]),
                    "--bench" => has([format!("benches/{name}.rs"), format!("benches/{name}/main.rs")]),
                    "--example" => has([format!("examples/{name}.rs"), format!("examples/{name}/main.rs")]),
                    _ => true,
                };
                if !is_there {
                    missing.push((page.clone(), command.to_owned()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_test_that_a_page_names_is_there() {
    let rust = files().into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let code: String = rust.map(read).collect();
    let mut named = 0;
    // Metrics, and functions of SPDK's, are as long.
    let is_other =
        |name: &str| ["egret_", "spdk_", "bdev_scsi_", "_scsi_"].iter().any(|theirs| name.starts_with(theirs));
    for (page, text) in pages() {
        let is_sentence = |name: &&str| {
            let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            is_name && name.matches('_').count() >= 4 && !is_other(name)
        };
        for name in code_words(&text).filter(is_sentence) {
            named += 1;
            assert!(code.contains(&format!("fn {name}(")), "{}: there is no test {name}", page.display());
        }
    }
    assert!(named > 300, "{named}");
}

#[test]
fn every_crate_but_that_of_guest_memory_has_its_modules_ask_for_unsafe_code() {
    let roots = files().into_iter().filter(|path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs"));
    let asks = |path: &PathBuf| {
        ["forbid", "deny"].iter().any(|lint| read(path).contains(&format!("\n#![{lint}(unsafe_code)]\n")))
    };
    let others: Vec<_> = roots.filter(|path| !asks(path)).collect();
    assert_eq!(others, [Path::new("crates/vring/src/lib.rs")]);
}

#[test]
fn the_guest_tests_are_those_that_the_readme_and_the_page_of_tests_list() {
    let is_test = |line: &&str| line.starts_with("fn ") && line.contains("() {");
    let mut tests = Vec::new();
    for (file, module) in [("main", ""), ("conformance", "conformance::"), ("failing", "failing::")] {
        let code = read(format!("crates/egret/tests/guest/{file}.rs"));
        let found = code.split("#[test]\n").skip(1).filter_map(|rest| rest.lines().find(is_test));
        let names = found.filter_map(|line| line.strip_prefix("fn ")?.split('(').next());
        tests.extend(names.map(|name| (module, name.to_owned())));
    }
    let (readme, page) = (read("README.md"), read("docs/testing.md"));
    for (module, test) in &tests {
        assert!(readme.contains(&format!("\ntest {module}{test} ... ok\n")), "README.md lists no {test}");
        assert!(page.contains(&format!("\n| `{test}` |")), "docs/testing.md lists no {test}");
    }
    assert!(readme.contains(&format!("\nrunning {} tests\n", tests.len())), "{tests:#?}");
}

#[test]
fn every_crate_is_in_the_picture_of_the_rooms_and_in_their_table() {
    let page = read("docs/architecture.md");
    let picture = page.split("```").nth(1).unwrap();
    let crates: Vec<_> = fs::read_dir(Path::new(ROOT).join("crates")).unwrap().map(|entry| entry.unwrap()).collect();
    assert!(crates.len() > 10);
    for name in crates.iter().map(|entry| entry.file_name().into_string().unwrap()) {
        assert!(picture.split_whitespace().any(|word| word == name), "the picture has no {name}");
        // The command may know everything.
        assert!(name == "egret" || page.contains(&format!("\n| `{name}` | ")), "the table has no {name}");
    }
}
