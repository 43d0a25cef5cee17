//! The changed crate's test programs, without the changes that do not compile.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::change::Change;
use crate::rewrite::{Id, Left, Marks, helper, rewrite};

/// The compiler's error where a constant needs a function that is not `const`.
const CALL_IN_CONSTANT: &str = "E0015";

/// A package's folder, and a program of its tests.
pub(crate) type Program = (PathBuf, PathBuf);

pub(crate) struct Built {
    pub(crate) programs: Vec<Program>,
    /// The changes that the programs can make.
    pub(crate) made: BTreeSet<Id>,
    pub(crate) do_not_compile: BTreeSet<Id>,
    /// What was rewritten, as it was.
    sources: HashMap<PathBuf, String>,
}

impl Built {
    /// Builds the tests anew, with one change and no other, and says whether that compiles.
    ///
    /// # Errors
    /// Where it cannot be tried.
    pub(crate) fn alone(&self, workspace: &Path, folders: &[PathBuf], change: &Change) -> anyhow::Result<bool> {
        let changed = workspace.join(&change.file);
        for (file, source) in &self.sources {
            let text = if *file == changed { change.applied(source) } else { source.clone() };
            // What is as it was is not built again.
            if fs::read_to_string(file)? != text {
                fs::write(file, text)?;
            }
        }
        Ok(compile(folders)?.1.is_empty())
    }
}

/// Rewrites the sources of the package in the first of some folders of a workspace, and builds the tests of all, with ever fewer
/// changes until they compile.
///
/// # Errors
/// Where they do not compile for another reason.
pub(crate) fn build(workspace: &Path, folders: &[PathBuf], changes: &[Change]) -> anyhow::Result<Built> {
    let roots = roots(&folders[0]);
    let mut sources = HashMap::new();
    for file in roots.iter().cloned().chain(changes.iter().map(|change| workspace.join(&change.file))) {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        sources.insert(file, text);
    }
    let (mut do_not_compile, mut left_out, mut constant) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    loop {
        let mut marks = HashMap::new();
        for (file, source) in &sources {
            let is_left = |id| !do_not_compile.contains(&id) && !left_out.contains(&id);
            let numbered =
                (1..).zip(changes).filter(|(id, change)| workspace.join(&change.file) == *file && is_left(*id));
            let mut rewritten = rewrite(source, numbered, &constant).with_context(|| file.display().to_string())?;
            if roots.contains(file) {
                rewritten.text += &helper(changes.len());
            }
            fs::write(file, &rewritten.text)?;
            marks.insert(file.clone(), rewritten.marks);
        }
        let (programs, errors) = compile(folders)?;
        if errors.is_empty() {
            let all = marks.into_values().flatten();
            let places = all.filter_map(|(_, left)| if let Left::Place(ids) = left { Some(ids) } else { None });
            let made = places.flatten().collect();
            return Ok(Built { programs, made, do_not_compile, sources });
        }
        let dropped = do_not_compile.len() + left_out.len() + constant.len();
        for error in &errors {
            match culprit(error, workspace, &marks) {
                Some(Left::Change(id)) => {
                    do_not_compile.insert(id);
                }
                Some(Left::Place(ids)) => left_out.extend(ids),
                None => {
                    let says = error["message"].as_str().filter(|_| error["code"]["code"] == CALL_IN_CONSTANT);
                    let called = says.and_then(|text| text.split('`').nth(1)?.rsplit("::").next());
                    let Some(called) = called else { bail!("{}", error["rendered"].as_str().unwrap_or_default()) };
                    constant.insert(called.to_owned());
                }
            }
        }
        ensure!(do_not_compile.len() + left_out.len() + constant.len() > dropped, "it does not compile");
        eprintln!("{} changes do not compile, and more may not", do_not_compile.len() + left_out.len());
    }
}

/// The first files of a crate and of its tests: modules say `crate` to what is in them.
fn roots(folder: &Path) -> Vec<PathBuf> {
    let tests = fs::read_dir(folder.join("tests")).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let tests = tests.map(|path| if path.is_dir() { path.join("main.rs") } else { path });
    let all = tests.chain(["src/lib.rs", "src/main.rs"].map(|file| folder.join(file)));
    all.filter(|path| path.is_file() && path.extension().is_some_and(|it| it == "rs")).collect()
}

/// The test programs of the packages in some folders, and the compiler's errors about the first that has any.
fn compile(folders: &[PathBuf]) -> anyhow::Result<(Vec<Program>, Vec<Value>)> {
    let mut programs = Vec::new();
    for folder in folders {
        let (of_it, errors) = compile_one(folder)?;
        if !errors.is_empty() {
            return Ok((Vec::new(), errors));
        }
        programs.extend(of_it.into_iter().map(|program| (folder.clone(), program)));
    }
    Ok((programs, Vec::new()))
}

fn compile_one(folder: &Path) -> anyhow::Result<(Vec<PathBuf>, Vec<Value>)> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "-q", "--no-run", "--tests", "--message-format=json"]).current_dir(folder);
    let output = command.env_remove("CARGO_TARGET_DIR").stderr(Stdio::inherit()).output()?;
    let (mut programs, mut errors, mut has_finished) = (Vec::new(), Vec::new(), false);
    for value in serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>() {
        let mut value = value.context("cargo's output")?;
        if let (true, Some(program)) = (value["profile"]["test"] == true, value["executable"].as_str()) {
            programs.push(program.into());
        }
        let message = &value["message"];
        // One without a place says how many there were.
        if message["level"] == "error" && message["spans"].as_array().is_some_and(|spans| !spans.is_empty()) {
            errors.push(value["message"].take());
        }
        has_finished |= value["success"] == true;
    }
    ensure!(has_finished || !errors.is_empty(), "cargo has built nothing");
    Ok((programs, errors))
}

/// What is to be left out for an error: the smallest part of the text that it is in.
fn culprit(error: &Value, workspace: &Path, files: &HashMap<PathBuf, Marks>) -> Option<Left> {
    let mut places = Vec::new();
    collect(error, &mut places);
    // Those that it is about come first.
    places.sort_by_key(|(is_primary, ..)| !is_primary);
    places.into_iter().find_map(|(_, file, at)| {
        let around = files
            .get(&workspace.join(file))?
            .iter()
            .filter(|(range, _)| range.start <= at.start && at.end <= range.end);
        around.min_by_key(|(range, _)| range.len()).map(|(_, left)| left.clone())
    })
}

/// All places that a message names, through macros as well.
fn collect(message: &Value, places: &mut Vec<(bool, String, Range<usize>)>) {
    let each = |name: &str| message[name].as_array().into_iter().flatten();
    for mut span in each("spans") {
        let is_primary = span["is_primary"] == true;
        while let (Some(file), Some(start), Some(end)) =
            (span["file_name"].as_str(), span["byte_start"].as_u64(), span["byte_end"].as_u64())
        {
            places.push((is_primary, file.to_owned(), start as usize..end as usize));
            span = &span["expansion"]["span"];
        }
    }
    each("children").for_each(|child| collect(child, places));
}
