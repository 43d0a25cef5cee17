//! What a host has once Egret is installed: the program with its manual, completions and units, a package of that, and what
//! the program says of the host.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::has_or_skips;
use support::scratch::Scratch;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// In the program's place, and smaller: what is packed and unpacked here.
fn program(scratch: &Scratch) -> PathBuf {
    let [text, path] = ["egret.sh", "egret"].map(|name| scratch.path(name));
    fs::write(&text, format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_egret"))).unwrap();
    // Who forks here meanwhile would have it open for writing, and nobody could execute it.
    let mut install = Command::new("install");
    install.args(["-m", "0755"]).args([&text, &path]);
    succeeds(install);
    path
}

fn run(mut command: Command) -> Output {
    // What this test's own make has set, and an operator's shell.
    for variable in ["MAKEFLAGS", "MAKELEVEL", "DESTDIR", "PREFIX", "ZSHDIR"] {
        command.env_remove(variable);
    }
    command.current_dir(ROOT).output().unwrap()
}

fn succeeds(command: Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Every file below a folder, from there.
fn files(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut left = vec![folder.to_owned()];
    while let Some(inner) = left.pop() {
        for entry in fs::read_dir(inner).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => left.push(entry.path()),
                false => drop(found.insert(entry.path().strip_prefix(folder).unwrap().display().to_string())),
            }
        }
    }
    found
}

/// The commands that help names.
fn commands() -> Vec<String> {
    let mut help = Command::new(env!("CARGO_BIN_EXE_egret"));
    help.arg("--help");
    let help = succeeds(help);
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
    let names: Vec<String> = names.filter(|name| *name != "help").map(str::to_owned).collect();
    assert!(names.len() > 8, "{help}");
    names
}

/// What there is to be under a prefix, besides a manual's pages, which may be packed.
const BESIDE_THE_MANUAL: [&str; 9] = [
    "bin/egret",
    "lib/systemd/system/egret.service",
    "lib/systemd/system/egret.socket",
    "lib/systemd/system/egret@.service",
    "lib/systemd/system/egret@.socket",
    "lib/sysusers.d/egret.conf",
    "share/bash-completion/completions/egret",
    "share/doc/egret/copyright",
    "share/fish/vendor_completions.d/egret.fish",
];

/// That all of it is among these files, which are under a prefix, with pages that are packed or not.
fn is_complete(found: &BTreeSet<String>, prefix: &str, pages: &str) {
    let missing: Vec<_> =
        BESIDE_THE_MANUAL.into_iter().filter(|file| !found.contains(&format!("{prefix}{file}"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
    for command in commands() {
        assert!(found.contains(&format!("{prefix}share/man/man1/egret-{command}{pages}")), "{command}: {found:?}");
    }
}

#[test]
fn what_is_installed_is_complete_and_its_units_start_the_program_where_it_is() {
    if !has_or_skips("make") {
        return;
    }
    let scratch = Scratch::new();
    let prefix = scratch.path("prefix");
    let mut make = Command::new("sh");
    make.args(["-c", "umask 077; exec make install \"$@\"", "sh"]);
    make.arg(format!("EGRET={}", program(&scratch).display())).arg(format!("PREFIX={}", prefix.display()));
    succeeds(make);
    for file in
        ["share/man/man1/egret.1", "share/fish/vendor_completions.d/egret.fish", "lib/systemd/system/egret.service"]
    {
        let mode = fs::metadata(prefix.join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "{file}");
    }
    let installed = files(&prefix);
    is_complete(&installed, "", ".1");
    assert!(installed.contains("share/zsh/site-functions/_egret"), "{installed:?}");
    for unit in ["egret.service", "egret@.service"] {
        let text = fs::read_to_string(prefix.join("lib/systemd/system").join(unit)).unwrap();
        let (_, start) = text.split_once("\nExecStart=").unwrap();
        assert_eq!(start.split(' ').next().map(Path::new), Some(&*prefix.join("bin/egret")), "{unit}");
    }
    let mut installed = Command::new(prefix.join("bin/egret"));
    installed.arg("--version");
    assert!(succeeds(installed).starts_with("egret "));
}

#[test]
fn a_package_has_all_that_is_installed_and_says_what_it_needs() {
    if !has_or_skips("make") || !has_or_skips("dpkg-deb") {
        return;
    }
    let scratch = Scratch::new();
    let mut make = Command::new("scripts/make-package");
    make.arg(scratch.path("")).env("EGRET", program(&scratch));
    let package = succeeds(make).trim().to_owned();
    let field = |name: &str| {
        let mut ask = Command::new("dpkg-deb");
        ask.args(["--field", &package, name]);
        succeeds(ask).trim().to_owned()
    };
    assert_eq!((field("Package"), field("Version")), ("egret".to_owned(), env!("CARGO_PKG_VERSION").to_owned()));
    assert!(field("Depends").contains("libc6") && field("Suggests") == "librbd1");
    let root = scratch.path("root");
    let mut unpack = Command::new("dpkg-deb");
    unpack.args(["--raw-extract", &package]).arg(&root);
    succeeds(unpack);
    let packed = files(&root);
    is_complete(&packed, "usr/", ".1.gz");
    assert!(packed.contains("usr/share/zsh/vendor-completions/_egret") && packed.contains("DEBIAN/postinst"));
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/egret.service")).unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/egret serve "), "{unit}");
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o755, "it becomes the host's /");
}

#[test]
fn what_is_to_be_installed_has_to_be_built_before() {
    if !has_or_skips("make") {
        return;
    }
    let mut make = Command::new("make");
    make.args(["install", "EGRET=/nonexistent/egret", "PREFIX=/nonexistent"]);
    let output = run(make);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("there is no /nonexistent/egret: make build makes it"), "{said}");
}

#[test]
fn the_manual_reads_without_complaint() {
    if !has_or_skips("groff") {
        return;
    }
    let scratch = Scratch::new();
    let pages = scratch.path("man");
    let mut write = Command::new(env!("CARGO_BIN_EXE_egret"));
    write.arg("man").arg(&pages);
    succeeds(write);
    for page in files(&pages) {
        let mut groff = Command::new("groff");
        // A line that is not as wide as others is no fault.
        groff.args(["-man", "-Tutf8", "-ww", "-Wbreak"]).arg(pages.join(&page));
        let output = run(groff);
        assert!(output.status.success() && output.stderr.is_empty(), "{page}: {output:?}");
        // It is told apart from others by its name, and is no page of nothing.
        assert!(String::from_utf8_lossy(&output.stdout).to_lowercase().contains(page.trim_end_matches(".1")), "{page}");
    }
}

#[test]
fn bash_completes_keys_and_their_words_and_everything_else_as_before() {
    if !has_or_skips("bash") {
        return;
    }
    let scratch = Scratch::new();
    let script = scratch.path("completions");
    let mut write = Command::new(env!("CARGO_BIN_EXE_egret"));
    write.args(["completions", "bash"]);
    fs::write(&script, succeeds(write)).unwrap();
    // As bash calls it, which has the words that it splits at blanks, = and : in an array.
    let ask = r#"
        source "$1"
        read -ra COMP_WORDS <<<"$(sed 's/\([=:]\)/ \1 /g' <<<"$3")"
        [[ $3 != *[[:space:]=:] ]] || COMP_WORDS+=('')
        COMP_LINE=$3 COMP_POINT=${#3} COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        compopt() { :; } # there is no line that is edited
        _egret_or_keys "$2" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let completed = |line: &str| -> Vec<String> {
        let mut bash = Command::new("bash");
        let egret = env!("CARGO_BIN_EXE_egret");
        bash.args(["-c", ask, "bash"]).arg(&script).arg(egret).arg(format!("{egret} {line}"));
        succeeds(bash).lines().map(str::to_owned).collect()
    };
    assert_eq!(completed("serve --blockdev null"), ["null-co,", "null-aio,"]);
    assert_eq!(completed("serve --blockdev file,node-name=a,file"), ["a,filename="]);
    assert_eq!(completed("serve --export=vhost-user-blk,id=e,writable="), ["on", "off"]);
    assert!(completed("serve --object iothread,poll-policy=lo").contains(&"low-regret".to_owned()));
    assert!(completed("ser").contains(&"serve".to_owned()));
    assert!(completed("serve --fd-monitor ").contains(&"epoll".to_owned()));
}

#[test]
fn the_doctor_says_what_is_used_here_and_that_a_daemon_serves() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    // A daemon has as many descriptors as it may, and few are enough for nobody.
    let mut doctor = Command::new("sh");
    doctor.args(["-c", "ulimit -S -n 8 && exec \"$0\" doctor \"$1\"", env!("CARGO_BIN_EXE_egret")]);
    doctor.arg(&image).env("TMPDIR", scratch.path(""));
    let page = succeeds(doctor);
    for what in [
        "kernel",
        "fd-monitor",
        "aio",
        "disk",
        "locked memory",
        "open files",
        "huge pages",
        "TLS",
        "sandbox",
        "a daemon",
    ] {
        assert!(page.lines().any(|line| line.starts_with(&format!("{what} "))), "{what}: {page}");
    }
    assert!(page.ends_with("  serves here\n"), "{page}");
    assert_eq!(scratch.left_behind(), [""; 0]);
}

#[test]
fn the_doctor_fails_where_no_daemon_could_serve_and_says_why() {
    let scratch = Scratch::new();
    let mut doctor = Command::new("sh");
    doctor.args(["-c", "ulimit -n 8 && exec \"$0\" doctor", env!("CARGO_BIN_EXE_egret")]);
    doctor.env("TMPDIR", scratch.path(""));
    let output = run(doctor);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("  cannot serve here\n"), "{output:?}");
    assert!(!output.status.success() && said.starts_with("egret: a daemon cannot serve here: "), "{said}");
    assert!(said.contains("open files") && said.lines().count() == 1, "{said}");
}
