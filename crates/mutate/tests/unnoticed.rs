//! What tests of a little crate do not notice is told, and what they notice is not.

use std::fs;
use std::process::Command;

const CODE: &str = r#"pub fn larger(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

pub fn sum(numbers: &[u32]) -> u32 {
    let mut sum = 0;
    for number in numbers {
        sum += number;
    }
    sum
}

pub fn named(number: u32) -> &'static str {
    match number {
        0 => "none",
        1 if number < 9 => "one",
        _ if number > 100 => "many",
        _ => "some",
    }
}

pub fn is_odd(number: u32) -> bool {
    !number.is_multiple_of(2)
}

pub const fn double(number: u32) -> u32 {
    number * 2
}

pub const fn triple(number: u32) -> u32 {
    number * 3
}

const SIX: u32 = triple(2);

const FOUR: u32 = 2 * 2;

#[test]
fn the_larger_one_of_two_is_told() {
    assert_eq!((larger(1, 2), larger(2, 1)), (2, 2));
}

#[test]
fn numbers_are_summed() {
    assert_eq!(sum(&[1, 2, 3]), 6);
}

#[test]
fn numbers_have_names() {
    assert_eq!((named(0), named(101), named(2), double(1), SIX + FOUR), ("none", "many", "some", 2, 10));
}
"#;

/// What cargo-mutants would say of a line that has `what`.
fn change(genre: &str, line: &str, what: &str, replacement: &str) -> serde_json::Value {
    let number = CODE.lines().position(|it| it.contains(line)).unwrap();
    let column = CODE.lines().nth(number).unwrap().find(what).unwrap();
    serde_json::json!({
        "name": format!("src/lib.rs:{}:{}: {genre} {replacement}", number + 1, column + 1),
        "package": "little",
        "file": "src/lib.rs",
        "function": null,
        "span": {
            "start": { "line": number + 1, "column": column + 1 },
            "end": { "line": number + 1, "column": column + 1 + what.len() },
        },
        "replacement": replacement,
        "genre": genre,
    })
}

const USER: &str = r#"#[test]
fn three_is_odd_and_one_has_a_name() {
    assert_eq!((little::is_odd(3), little::named(1)), (true, "one"));
}
"#;

/// What is said of the little crate, held against its own tests and those of crates that use it, and the status.
fn told(users: &[&str]) -> (Vec<String>, Option<i32>) {
    let workspace = tempfile::tempdir().unwrap();
    let path = |name| workspace.path().join(name);
    fs::create_dir_all(path("user/src")).unwrap();
    fs::create_dir(path("src")).unwrap();
    let package = |name| format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n");
    fs::write(path("Cargo.toml"), package("little") + "[workspace]\nmembers = [\"user\"]\n").unwrap();
    fs::write(path("src/lib.rs"), CODE).unwrap();
    fs::write(path("user/Cargo.toml"), package("user") + "[dependencies]\nlittle = { path = \"..\" }\n").unwrap();
    fs::write(path("user/src/lib.rs"), USER).unwrap();
    let changes = [
        change("FnValue", "if a > b", "if a > b { a } else { b }", "0"),
        change("FnValue", "if a > b", "if a > b { a } else { b }", "String::new()"),
        change("BinaryOperator", "if a > b", ">", "<"),
        change("BinaryOperator", "if a > b", ">", ">="),
        change("BinaryOperator", "sum += number", "+=", "-="),
        change("MatchArm", "0 => ", "0 => \"none\",", ""),
        change("MatchArm", "1 if number", "1 if number < 9 => \"one\",", ""),
        change("MatchArmGuard", "_ if number", "number > 100", "true"),
        change("MatchArmGuard", "_ if number", "number > 100", "false"),
        change("BinaryOperator", "_ if number", ">", ">="),
        change("UnaryOperator", "!number", "!", ""),
        change("BinaryOperator", "number * 2", "*", "+"),
        change("BinaryOperator", "number * 3", "*", "+"),
        change("BinaryOperator", "2 * 2", "*", "+"),
        change("BinaryOperator", "2 * 2", "*", "/"),
        change("BinaryOperator", "2 * 2", "*", "&&"),
    ];
    fs::write(path("changes.json"), serde_json::to_string(&changes).unwrap()).unwrap();

    let mut command = Command::new(env!("CARGO_BIN_EXE_egret-mutate"));
    command.arg(workspace.path()).arg(".").arg(path("changes.json")).args(users);
    let output = command.env_remove("EGRET_MUTANTS_MINUTES").output().unwrap();
    eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<_> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    lines.sort_unstable();
    (lines, output.status.code())
}

/// What the little crate's tests do not notice, and nobody else's either.
const MISSED: [&str; 3] = [
    "missed: src/lib.rs:17:21: BinaryOperator >=",
    "missed: src/lib.rs:2:10: BinaryOperator >=",
    "missed: src/lib.rs:36:21: BinaryOperator +",
];

#[test]
fn changes_that_no_test_notices_are_told_and_no_others() {
    let (lines, status) = told(&[]);
    let sum = "changes: 16, by a build each: 4, do not compile: 2, noticed: 9, of these by time: 0, missed: 3, \
               not reached by any test: 2, not tried: 0";
    let not_reached = ["not reached: src/lib.rs:16:9: MatchArm ", "not reached: src/lib.rs:23:5: UnaryOperator "];
    assert_eq!(lines, [&[sum], &MISSED[..], &not_reached].concat());
    assert_eq!(status, Some(2));
}

#[test]
fn tests_of_crates_that_use_it_notice_as_well() {
    let (lines, status) = told(&["user"]);
    let sum = "changes: 16, by a build each: 4, do not compile: 2, noticed: 11, of these by time: 0, missed: 3, \
               not reached by any test: 0, not tried: 0";
    assert_eq!(lines, [&[sum], &MISSED[..]].concat());
    assert_eq!(status, Some(2));
}
