//! Each command of Egret's that a page shows is run, and each configuration file used.
//!
//! Commands run one after the other in a directory of the page's own, where the test has made what they name: images,
//! directories, a daemon for those that need one. A path from the root is one from that directory, and three
//! dots stand for a disk or a monitor. What is not run says why, in [`NOT_RUN`].

mod support;

use std::fs::{self, File};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use support::server::{Reaped, binary};
use support::{await_some, await_that};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Commands that are not run as they are, and where they are run instead.
const NOT_RUN: [(&str, &str); 16] = [
    ("egret bench --resume egret-bench/modes-20260102-030405", "a run of its reader's: crates/egret/tests/bench.rs"),
    ("egret bench curve --output after --rates-of before", "likewise"),
    ("egret compare before/ after/", "two runs of its reader's: crates/egret/tests/bench.rs"),
    ("egret compare before-1/ before-2/ before-3/ -- after-1/ after-2/ after-3/", "likewise"),
    (
        "egret ctl qmp.sock blockdev-reopen \
         'options=[{\"driver\":\"host_device\",\"node-name\":\"disk0\",\"filename\":\"/dev/mapper/disk0\"}]'",
        "a device of its reader's: crates/egret/tests/stopped.rs",
    ),
    ("egret report DIRECTORY", "a run of its reader's: crates/egret/tests/bench.rs"),
    ("egret report --mail DIRECTORY", "likewise: crates/egret/tests/lab_guest.rs"),
    ("egret report --mail polling", "likewise: crates/egret/tests/lab_guest.rs"),
    ("egret report --output dashboard.html runs/*", "a run of its reader's: crates/egret/tests/bench.rs"),
    (
        "egret serve --object iothread,id=io0 \
         --blockdev nbd,node-name=d0,server.type=unix,server.path=/run/nbd.sock,export=disk,reconnect-delay=30 \
         --export vhost-user-blk,id=d0,node-name=d0,addr.type=unix,addr.path=disk.sock,writable=on,iothread=io0",
        "a server of its reader's: crates/egret/tests/nbd.rs",
    ),
    (
        "egret serve --object tls-creds-x509,id=tls0,dir=/etc/pki/egret,endpoint=client \
         --blockdev nbd,node-name=d0,filename=nbds://10.0.0.7/disk,tls-creds=tls0,tls-hostname=store.example,reconnect-delay=30 \
         --export vhost-user-blk,id=d0,node-name=d0,addr.type=unix,addr.path=disk.sock,writable=on",
        "a server and certificates of its reader's: crates/egret/tests/nbd_tls.rs",
    ),
    (
        "egret serve --object tls-creds-x509,id=tls0,dir=tls,endpoint=server \
         --blockdev file,node-name=disk0,filename=disk.img \
         --nbd-server addr.type=inet,addr.host=::,addr.port=10809,tls-creds=tls0 \
         --export nbd,id=backup,node-name=disk0,name=disk",
        "certificates of its reader's: crates/egret/tests/nbd_tls.rs",
    ),
    (
        "egret serve --object iothread,id=io0 --object secret,id=key,file=/etc/ceph/guest.key,format=base64 \
         --blockdev rbd,node-name=d0,pool=rbd,image=disk,user=guest,key-secret=key,cache.direct=on,discard=unmap \
         --export vhost-user-blk,id=d0,node-name=d0,addr.type=unix,addr.path=disk.sock,writable=on,iothread=io0",
        "a cluster of its reader's: crates/egret/tests/rbd.rs",
    ),
    (
        "egret serve --blockdev rbd,node-name=d0,pool=rbd,image=disk,conf=/dev/shm/egret-nodes/ceph.conf \
         --export vhost-user-blk,id=d0,node-name=d0,addr.type=unix,addr.path=disk.sock,writable=on",
        "containers of its reader's: crates/egret/tests/rbd.rs has such a cluster without",
    ),
    (
        "egret serve ... allow-inactive=on egret serve ... allow-inactive=on",
        "a picture of two hosts: crates/egret/tests/migration",
    ),
    ("egret serve --user egret --group disk ...", "a user of its reader's: crates/egret/tests/sandbox.rs"),
];

/// What a page's commands find: a daemon at `qmp.sock` with these options. Pages that start one themselves are not here.
const SERVED: [(&str, &str); 4] = [
    (
        "docs/errors.md",
        "--blockdev file,node-name=disk0,filename=disk.img \
         --export vhost-user-blk,id=e0,node-name=disk0,addr.type=unix,addr.path=e0.sock",
    ),
    (
        "docs/live.md",
        "--sandbox-dir . --object iothread,id=io0 --blockdev file,node-name=disk0,filename=disk.img \
         --export vhost-user-blk,id=e0,node-name=disk0,addr.type=unix,addr.path=e0.sock,num-queues=4,iothread=io0",
    ),
    (
        "docs/scsi.md",
        "--sandbox-dir . --blockdev file,node-name=d0,filename=a.img \
         --export vhost-user-scsi,id=scsi0,addr.type=unix,addr.path=scsi.sock,writable=on,luns.0.lun=0,luns.0.node-name=d0",
    ),
    ("docs/watching.md", "--blockdev file,node-name=d0,filename=a.img"),
];

/// How a page's configuration file is used.
const CONFIGURED: &str = "egret serve --config example.toml";

/// A command as a page has it, and what the page says that it prints; or a configuration file.
struct Example {
    command: String,
    shows: String,
}

impl Example {
    /// The command with one blank between words, wherever the page has them.
    fn words(&self) -> String {
        self.command.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// The commands of a page, in its order: behind `$` in blocks of a console, or in lines that are set off by four blanks. And
/// its configuration files, of those that are whole.
fn examples(page: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut block: Option<bool> = None;
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(kind) = line.strip_prefix("```") {
            block = block.is_none().then_some(kind == "console");
            if kind == "toml" {
                let shows =
                    lines.clone().take_while(|line| *line != "```").fold(String::new(), |all, line| all + line + "\n");
                if ["[[blockdev]]", "[[export]]"].iter().all(|part| shows.contains(part)) {
                    examples.push(Example { command: CONFIGURED.to_owned(), shows });
                }
            }
            continue;
        }
        let begins = match block {
            Some(true) => line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")),
            Some(false) => None,
            None => line.strip_prefix("    "),
        };
        let Some(begins) = begins.filter(|command| command.starts_with("egret ")) else {
            if let (Some(true), Some(last), false) = (block, examples.last_mut(), line.starts_with("$ ")) {
                last.shows += line;
                last.shows.push('\n');
            }
            continue;
        };
        let mut command = begins.to_owned();
        while command.ends_with('\\') {
            command.pop();
            command += lines.next().expect("a command goes on").trim_start();
        }
        let command = command.split("  #").next().unwrap_or_default().trim_end().to_owned();
        examples.push(Example { command, shows: String::new() });
    }
    examples
}

/// The pages with examples.
fn pages() -> Vec<(String, Vec<Example>)> {
    let mut pages: Vec<String> = vec!["README.md".to_owned(), "CONTRIBUTING.md".to_owned()];
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("the pages").map(|entry| entry.expect("a page"));
    pages.extend(docs.filter_map(|page| Some(format!("docs/{}", page.file_name().to_str()?))));
    pages.retain(|page| page.ends_with(".md"));
    pages.sort();
    let read = |page: String| {
        let text = fs::read_to_string(Path::new(ROOT).join(&page)).expect("a page");
        (page, examples(&text))
    };
    pages.into_iter().map(read).filter(|(_, examples)| !examples.is_empty()).collect()
}

/// A page's directory, and the daemons that its commands have started.
struct Reader {
    place: tempfile::TempDir,
    served: Vec<Reaped>,
}

impl Reader {
    fn new() -> Self {
        // Short: it has sockets in it.
        let place = tempfile::Builder::new().prefix("e").tempdir().expect("a directory");
        std::os::unix::fs::symlink(Path::new(ROOT).join("crates"), place.path().join("crates")).expect("a link");
        let waits = Path::new(ROOT).join("crates/polling/traces/loop-qd1.waits");
        fs::copy(waits, place.path().join("waits.txt")).expect("a recording");
        Self { place, served: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The command with what stands for something put in.
    fn in_place(&self, command: &str) -> String {
        let here = self.place.path().display().to_string();
        let one = "--blockdev file,node-name=any,filename=any.img \
                   --export vhost-user-blk,id=any,node-name=any,addr.type=unix,addr.path=any.sock";
        let text = command
            .replace("--blockdev ... --export ...", one)
            .replace("--chardev ...", "--chardev socket,id=any,path=any-qmp.sock,server=on,wait=off")
            .replace("--monitor ...", "--monitor chardev=any")
            .replace(" ...", &format!(" {one}"));
        // Nothing is touched outside.
        let begins = |text: String, before: &str| text.replace(&format!("{before}/"), &format!("{before}{here}/"));
        let text = ["'", "\"", "=", ":", ",", " "].into_iter().fold(text, begins);
        text.replace(&format!("path={here}/objects/"), "path=/objects/")
    }

    /// Makes what the command names: images, and the directories of sockets and files.
    fn make_what_it_names(&self, command: &str) {
        let is_end = |c: char| " ,'\"=:\n".contains(c);
        let mut before = "";
        for word in command.split(is_end).filter(|word| !word.is_empty()) {
            let path = self.path(word);
            if before == "--sandbox-dir" {
                fs::create_dir_all(&path).expect("a directory");
            } else if word.starts_with(self.place.path().to_str().expect("our own path")) {
                fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            }
            if (before == "filename" || word.ends_with(".img")) && !path.exists() {
                File::create(&path).and_then(|file| file.set_len(64 << 20)).expect("an image");
            }
            before = word;
        }
    }

    fn shell(&self, command: &str) -> Command {
        let mut shell = Command::new("sh");
        let path = format!("{}:{}", Path::new(&binary()).parent().expect("a directory").display(), env!("PATH"));
        shell.args(["-c", &format!("exec {command}")]).current_dir(&self.place).env("PATH", path);
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        shell
    }

    /// Runs a command to its end. Returns what it prints.
    fn run(&self, command: &str) -> String {
        // One that does not end fails by itself, and does not use up the time of all tests.
        let output = self.shell(&format!("timeout 300 {command}")).output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {}, {said}", output.status);
        String::from_utf8(output.stdout).expect("text")
    }

    /// Starts a daemon, and waits until it serves.
    fn serve(&mut self, command: &str) {
        // Two that follow one another on a page may have the same names.
        self.end();
        self.make_what_it_names(command);
        let ready = self.path("ready");
        let _ = fs::remove_file(&ready);
        let socket = UnixDatagram::bind(&ready).expect("a socket");
        socket.set_nonblocking(true).expect("our own socket");
        let mut shell = self.shell(command);
        shell.env("NOTIFY_SOCKET", &ready).stdout(Stdio::null()).stderr(Stdio::inherit());
        let mut child = Reaped(shell.spawn().expect("a shell"));
        await_that(&format!("{command} to serve"), || {
            let mut message = [0; 512];
            assert_eq!(child.0.try_wait().expect("our child"), None, "{command} has ended");
            let read = socket.recv(&mut message).unwrap_or(0);
            message[..read].windows(7).any(|word| word == b"READY=1")
        });
        self.served.push(child);
    }

    /// Ends the daemons that run, as a reader would.
    fn end(&mut self) {
        for mut daemon in self.served.drain(..) {
            end(&mut daemon.0);
        }
    }
}

fn end(child: &mut Child) {
    kill_process(Pid::from_child(child), Signal::TERM).expect("our child");
    let status = await_some("the daemon to end", || child.try_wait().expect("our child"));
    assert_eq!(status.code(), Some(0));
}

fn follow(page: &str, examples: &[Example]) -> usize {
    let mut reader = Reader::new();
    let mut run = 0;
    for example in examples {
        let Example { command, shows } = example;
        let short = example.words();
        let is_served = |reader: &Reader| !reader.served.is_empty() && reader.path("qmp.sock").exists();
        if NOT_RUN.iter().any(|(other, _)| *other == short) {
            continue;
        }
        run += 1;
        // Plans take minutes to hours: `make demo` runs one, and `lab.rs` and `lab_guest.rs` short ones.
        if short.starts_with("egret bench") && !["--list", "--dry-run"].iter().any(|ends| short.ends_with(ends)) {
            reader.run(&format!("{command} --dry-run"));
            continue;
        }
        let mut command = reader.in_place(command);
        if command == CONFIGURED {
            let text = reader.in_place(shows);
            reader.make_what_it_names(&text);
            fs::write(reader.path("example.toml"), text).expect("a file");
        }
        if short.starts_with("egret serve") {
            reader.serve(&command);
            continue;
        }
        if let (true, Some((_, options))) = (
            (short.starts_with("egret ctl") || short.starts_with("egret top")) && !is_served(&reader),
            SERVED.iter().find(|(other, _)| *other == page),
        ) {
            let qmp = "--chardev socket,id=q,path=qmp.sock,server=on,wait=off --monitor chardev=q";
            reader.serve(&format!("egret serve {options} {qmp}"));
        }
        if short.starts_with("egret top") {
            command = "egret top --once --interval 0.1 qmp.sock".to_owned();
        }
        reader.make_what_it_names(&command);
        if page == "docs/qmp.md" && run == 2 {
            // What the page has typed into another monitor's client.
            File::create(reader.path("disk.img")).and_then(|file| file.set_len(64 << 20)).expect("an image");
            reader.run("egret ctl qmp.sock blockdev-add driver=file node-name=disk0 filename=disk.img");
        }
        let printed = reader.run(&command);
        let [printed, shows] = [&printed, shows].map(|text| text.trim_end());
        assert!(shows.is_empty() || printed == shows, "{page}: {command} prints\n{printed}\nand not\n{shows}");
    }
    reader.end();
    run
}

#[test]
fn each_command_that_a_page_shows_is_run() {
    let pages = pages();
    for (other, why) in NOT_RUN {
        let mut shown = pages.iter().flat_map(|(_, examples)| examples);
        assert!(shown.any(|example| example.words() == other), "no page has '{other}', which is not run: {why}");
    }
    let run: usize = pages.iter().map(|(page, examples)| follow(page, examples)).sum();
    println!("{run} commands of {} pages", pages.len());
    assert!(run >= 25, "{run}");
}
