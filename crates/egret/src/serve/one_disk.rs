//! `egret serve DISK`: one disk, and the best that the machine offers for it.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use egret_daemon::probe;
use egret_vocabulary::Config;
use egret_vocabulary::schema::{Blockdev, Export, IoThread, Object as _, Spelling};
use serde_json::{Map, Value, json};

use super::Serve;

/// What the disk and its export are called.
const NAME: &str = "disk0";
/// The default number of queues: enough for each processor of a small guest to have its own.
const QUEUES: u16 = 4;

/// The configuration for one disk.
///
/// It is written as `--object`, `--blockdev` and `--export` would have it, so that it meets the same checks.
pub fn config(disk: &Path, arguments: &Serve) -> Result<Config> {
    let driver = driver(disk)?;
    let filename = disk.to_str().with_context(|| format!("disk '{}': its name is not UTF-8", disk.display()))?;
    let direct = !arguments.buffered && probe::takes_direct_io(disk);
    let aio = arguments.aio.clone().unwrap_or_else(|| probe::best_engine(direct).to_string());

    let names: Vec<String> = (0..arguments.iothreads).map(|number| format!("io{number}")).collect();
    let iothread = |id: &String| {
        let mut object = Map::from_iter([("id".to_owned(), Value::from(id.as_str()))]);
        set(&mut object, "poll-policy", arguments.poll_policy.as_ref());
        set(&mut object, "poll-max-ns", arguments.poll_max_ns.as_ref());
        set(&mut object, "fd-monitor", arguments.fd_monitor.as_ref());
        IoThread::from_value(object.into(), Spelling::Text)
    };
    let iothreads = names.iter().map(iothread).collect::<Result<_, _>>()?;

    let blockdev = json!({
        "driver": driver,
        "node-name": NAME,
        "filename": filename,
        "aio": aio,
        "cache": { "direct": switch(direct) },
        "read-only": switch(arguments.read_only),
        "discard": "unmap",
    });
    let num_queues = arguments.num_queues.clone().unwrap_or_else(|| QUEUES.max(arguments.iothreads).to_string());
    let export = json!({
        "type": "vhost-user-blk",
        "id": NAME,
        "node-name": NAME,
        "addr": { "type": "unix", "path": arguments.socket.clone().unwrap_or_else(|| socket_of(filename)) },
        "writable": switch(!arguments.read_only),
        "num-queues": num_queues,
        "iothread": names,
    });
    let blockdevs = vec![Blockdev::from_value(blockdev, Spelling::Text)?];
    let exports = vec![Export::from_value(export, Spelling::Text)?];
    Ok(Config::new(iothreads, blockdevs, exports)?)
}

/// What kind of disk is at `path`.
pub fn driver(path: &Path) -> Result<&'static str> {
    let shown = path.display();
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if probe::is_place_of_devices(path) {
                bail!("disk '{shown}': no such device; is its name right, and is it activated?")
            }
            bail!("disk '{shown}': no such file; make an empty one with: truncate -s 10G '{shown}'")
        }
        Err(error) => bail!("disk '{shown}': {error}"),
    };
    if kind.is_file() {
        Ok("file")
    } else if kind.is_block_device() {
        Ok("host_device")
    } else if kind.is_dir() {
        bail!("disk '{shown}' is a directory; name a raw image or a block device")
    } else {
        bail!("disk '{shown}' is neither a file nor a block device")
    }
}

/// What there is to say of a disk that begins as an image in a format does. It is served all the same: its guest may have
/// written that, and is not to keep its own daemon from starting.
pub fn warning(disk: &Path) -> Option<String> {
    let format = probe::image_format(disk)?;
    Some(format!(
        "disk '{}' begins as a {format} image does, and is served as a raw disk: to write to it destroys such an image; if it is \
         one, and no guest has written that, convert it first: qemu-img convert -O raw",
        disk.display()
    ))
}

/// `disk.sock` for `/images/disk.img`.
fn socket_of(filename: &str) -> String {
    let stem = Path::new(filename).file_stem().unwrap_or_default().to_string_lossy();
    format!("{stem}.sock")
}

fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn set(object: &mut Map<String, Value>, key: &str, value: Option<&String>) {
    object.extend(value.map(|value| (key.to_owned(), Value::from(value.as_str()))));
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use egret_vocabulary::config::ConfigFile;

    use super::*;

    fn serve(directory: &Path) -> (std::path::PathBuf, Serve) {
        let disk = directory.join("disk.img");
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let socket = Some(directory.join("d.sock").to_str().unwrap().to_owned());
        let arguments = Serve { disk: Some(disk.clone()), socket, iothreads: 1, ..Serve::default() };
        (disk, arguments)
    }

    #[test]
    fn a_disk_by_its_path_is_the_same_config_as_the_objects_that_spell_it_out() {
        let place = tempfile::tempdir().unwrap();
        let (disk, arguments) = serve(place.path());
        let arguments = Serve {
            iothreads: 2,
            poll_policy: Some("busy".to_owned()),
            aio: Some("threads".to_owned()),
            buffered: true,
            ..arguments
        };
        let (disk_text, socket) = (disk.to_str().unwrap(), arguments.socket.clone().unwrap());
        let spelled = Serve {
            object: vec!["iothread,id=io0,poll-policy=busy".into(), "iothread,id=io1,poll-policy=busy".into()],
            blockdev: vec![format!(
                "file,node-name=disk0,filename={disk_text},aio=threads,cache.direct=off,read-only=off,discard=unmap"
            )],
            export: vec![format!(
                "vhost-user-blk,id=disk0,node-name=disk0,addr.type=unix,addr.path={socket},writable=on,num-queues=4,\
                 iothread.0=io0,iothread.1=io1"
            )],
            ..Serve::default()
        };
        assert_eq!(config(&disk, &arguments).unwrap(), crate::serve::config(&spelled, ConfigFile::default()).unwrap());
    }

    #[test]
    fn what_adjusts_one_disk_is_refused_beside_objects_that_say_for_themselves_what_they_are() {
        let ours = [
            "--socket=s",
            "--read-only",
            "--aio=native",
            "--buffered",
            "--num-queues=2",
            "--iothreads=2",
            "--poll-policy=off",
            "--poll-max-ns=0",
            "--fd-monitor=epoll",
        ];
        let objects = ["--blockdev=b", "--object=o", "--export=e", "--config=c", "--add-fd=fd=3", "--nbd-server=s"];
        let serve = |options: &[&str]| {
            let command = <Serve as clap::Args>::augment_args(clap::Command::new("serve"));
            command.try_get_matches_from([&["serve"], options].concat()).map_err(|e| e.to_string())
        };
        for of_objects in objects {
            assert!(serve(&[of_objects]).is_ok(), "{of_objects}");
            let name = of_objects.split('=').next().unwrap();
            for option in ours.iter().chain(&["disk.img"]) {
                let refused = serve(&[option, of_objects]).unwrap_err();
                assert!(refused.contains("cannot be used with") && refused.contains(name), "{option}: {refused}");
            }
        }
        for option in ours {
            assert!(serve(&["disk.img", option]).is_ok(), "{option}");
            assert!(serve(&[option]).unwrap_err().contains("<DISK>"), "{option}");
        }
    }

    #[test]
    fn help_says_by_which_policy_an_io_thread_polls_that_is_told_nothing() {
        let command = <Serve as clap::Args>::augment_args(clap::Command::new("serve"));
        let policy = command.get_arguments().find(|argument| argument.get_id() == "poll_policy").unwrap();
        let help = policy.get_help().unwrap().to_string();
        let default = IoThread::new("io0").policy();
        assert!(help.ends_with(&format!("[default: {default}]")), "{help}");
    }

    #[test]
    fn a_disk_gets_the_best_engine_that_there_is() {
        let place = tempfile::tempdir().unwrap();
        let (disk, arguments) = serve(place.path());
        let config = config(&disk, &arguments).unwrap();
        let direct = probe::takes_direct_io(&disk);
        let blockdev = serde_json::to_value(&config.blockdevs[0]).unwrap();
        assert_eq!(blockdev["cache"]["direct"], direct);
        assert_eq!(blockdev["aio"], probe::best_engine(direct).as_str());
    }

    #[test]
    fn a_read_only_disk_is_exported_without_writes() {
        let place = tempfile::tempdir().unwrap();
        let (disk, arguments) = serve(place.path());
        let config = config(&disk, &Serve { read_only: true, ..arguments }).unwrap();
        assert_eq!(config.blockdevs[0].read_only, Some(true));
        assert!(!config.exports[0].writable);
    }

    #[test]
    fn a_disk_that_begins_as_an_image_in_a_format_is_served_as_a_raw_one_with_a_warning() {
        let place = tempfile::tempdir().unwrap();
        let (disk, arguments) = serve(place.path());
        assert_eq!(warning(&disk), None);
        std::fs::write(&disk, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 504]].concat()).unwrap();
        assert!(config(&disk, &arguments).is_ok());
        let line = format!("disk '{}' begins as a qcow2 image does, and is served as a raw disk: ", disk.display());
        assert!(warning(&disk).unwrap().starts_with(&line));
    }

    #[test]
    fn a_path_that_is_no_disk_is_refused_with_what_to_do() {
        let place = tempfile::tempdir().unwrap();
        let (disk, arguments) = serve(place.path());
        let error = |path: &Path, arguments: &Serve| config(path, arguments).unwrap_err().to_string();
        let missing = place.path().join("no.img");
        let line =
            format!("disk '{0}': no such file; make an empty one with: truncate -s 10G '{0}'", missing.display());
        assert_eq!(error(&missing, &arguments), line);
        let line = "disk '/dev/no-vg/lv': no such device; is its name right, and is it activated?";
        assert_eq!(error(Path::new("/dev/no-vg/lv"), &arguments), line);
        let line = format!("disk '{}' is a directory; name a raw image or a block device", place.path().display());
        assert_eq!(error(place.path(), &arguments), line);
        assert_eq!(error(Path::new("/dev/null"), &arguments), "disk '/dev/null' is neither a file nor a block device");
        let queues = Serve { num_queues: Some("0".to_owned()), ..arguments.clone() };
        assert_eq!(error(&disk, &queues), "export 'disk0': num-queues must be 1..=256, got 0");
        let native = Serve { aio: Some("native".to_owned()), buffered: true, ..arguments };
        assert!(error(&disk, &native).starts_with("blockdev 'disk0': aio=native needs cache.direct=on"));
    }

    #[test]
    fn a_socket_is_named_after_its_disk() {
        assert_eq!(socket_of("/images/disk.img"), "disk.sock");
        assert_eq!(socket_of("/dev/nvme0n1"), "nvme0n1.sock");
    }
}
