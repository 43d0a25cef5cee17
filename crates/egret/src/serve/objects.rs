//! `egret serve --object ... --blockdev ... --export ...`: everything said, in qemu-storage-daemon's words.

use anyhow::{Result, anyhow};
use egret_vocabulary::config::{Config, ConfigFile};
use egret_vocabulary::keyval;
use egret_vocabulary::schema::{
    self, Blockdev, Export, IoThread, NbdServer, Object, ObjectError, Secret, Spelling, ThrottleGroup, TlsCreds,
};
use serde_json::Value;

use super::Serve;

/// The configuration that the file and the options spell out; their order does not matter.
pub fn config(arguments: &Serve, file: ConfigFile) -> Result<Config> {
    let mut objects = file;
    let of = |noun| move |text: &String| is_of(text, noun);
    let (secrets, others): (Vec<_>, Vec<_>) = arguments.object.iter().cloned().partition(of(Secret::NOUN));
    let (tls_creds, others): (Vec<_>, Vec<_>) = others.into_iter().partition(of(TlsCreds::NOUN));
    let (groups, others): (Vec<_>, Vec<_>) = others.into_iter().partition(of(ThrottleGroup::NOUN));
    objects.secrets.extend(read_all(&secrets, "object", "qom-type", schema::untagged::<Secret>)?);
    objects.tls_creds.extend(read_all(&tls_creds, "object", "qom-type", schema::untagged::<TlsCreds>)?);
    objects.throttle_groups.extend(read_all(&groups, "object", "qom-type", schema::untagged::<ThrottleGroup>)?);
    objects.iothreads.extend(read_all(&others, "object", "qom-type", IoThread::from_user_object)?);
    objects.blockdevs.extend(read_all(&arguments.blockdev, "blockdev", "driver", Blockdev::from_value)?);
    objects.exports.extend(read_all(&arguments.export, "export", "type", Export::from_value)?);
    if let Some(text) = &arguments.nbd_server {
        let (value, spelling) = keyval::read(text, "").map_err(|error| anyhow!("--nbd-server {text}: {error}"))?;
        let server = NbdServer::from_value(value, spelling);
        objects.nbd_server = Some(server.map_err(|problem| anyhow!("--nbd-server {text}: {problem}"))?);
    }
    Ok(objects.config()?)
}

fn is_of(text: &str, noun: &str) -> bool {
    let read = keyval::read(text, "qom-type");
    read.is_ok_and(|(value, _)| value.get("qom-type").and_then(Value::as_str) == Some(noun))
}

fn read_all<T: Object>(
    texts: &[String],
    option: &str,
    implied: &str,
    read: impl Fn(Value, Spelling) -> Result<T, ObjectError>,
) -> Result<Vec<T>> {
    let object = |text: &String| {
        let read_text = keyval::read(text, implied).map_err(|error| match said(text) {
            said if said == text => anyhow!("--{option} {text}: {error}"),
            // An error's own words are of the text.
            said => anyhow!("--{option} {said}: not KEY=VALUE,... (with two commas for one of a value) and not JSON"),
        });
        let (value, spelling) = read_text?;
        // An object without a name is identified by its option.
        let is_named = value.get(T::NAME).is_some();
        read(value, spelling)
            .map_err(|error| if is_named { error.into() } else { anyhow!("--{option} {}: {error}", said(text)) })
    };
    texts.iter().map(object).collect()
}

/// What errors say of an option's argument: nothing that may be secret.
fn said(text: &str) -> &str {
    if text.contains("secret") { "secret,..." } else { text }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};
    use egret_vocabulary::schema::Shape;

    use super::*;
    use crate::cli::{Cli, Command, arguments};

    /// The configuration that a command line asks for.
    fn line(line: &str) -> Result<Config, String> {
        let words = line.split_whitespace().map(Into::into);
        let Command::Serve(arguments) = Cli::try_parse_from(arguments(words)).unwrap().command else {
            panic!("{line}")
        };
        crate::serve::config(&arguments, ConfigFile::default()).map_err(|error| format!("{error:#}"))
    }

    /// Each was given to qemu-storage-daemon 10.0, which served it (with files and descriptors of these names).
    const TAKEN_BY_QEMU: [&str; 13] = [
        "--blockdev driver=file,node-name=f,filename=d.img \
         --export type=vhost-user-blk,id=e,addr.type=unix,addr.path=s,node-name=f",
        "--blockdev file,node-name=f,filename=d.img,cache.direct=on,aio=native,discard=unmap,detect-zeroes=unmap \
         --export vhost-user-blk,id=e,addr.type=unix,addr.path=s,node-name=f,writable=on,num-queues=4",
        "--blockdev file,filename=d.img,node-name=f --blockdev raw,file=f,node-name=r \
         --export vhost-user-blk,id=e,node-name=r,addr.type=unix,addr.path=s",
        "--blockdev raw,node-name=r,cache.direct=yes,file.driver=file,file.filename=d.img,file.aio=io_uring \
         --export vhost-user-blk,id=e,node-name=r,addr.type=unix,addr.path=s,logical-block-size=4k",
        "--object iothread,id=io0,poll-max-ns=0x8000,poll-grow=2,poll-shrink=0,aio-max-batch=0 \
         --blockdev null-co,node-name=n,size=1073741824,read-zeroes=on \
         --export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s,iothread=io0,fixed-iothread=on",
        "--object {\"qom-type\":\"iothread\",\"id\":\"io0\",\"thread-pool-max\":8} \
         --blockdev {\"driver\":\"null-aio\",\"node-name\":\"n\",\"size\":1048576,\"cache\":{\"direct\":true}} \
         --export {\"type\":\"vhost-user-blk\",\"id\":\"e\",\"node-name\":\"n\",\"iothread\":\"io0\",\
\"addr\":{\"type\":\"unix\",\"path\":\"s\"},\"writable\":true}",
        "--blockdev=null-co,node-name=n --export=vhost-user-blk,id=e,node-name=n,addr.type=fd,addr.str=5",
        "--blockd null-co,node-name=n --exp vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s",
        "-T enable=blk*,file=t -T vhost* --daemonize --pidfile p --blockdev null-co,node-name=n \
         --export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s",
        "--blockdev file,node-name=f,filename=d.img,read-only=on,auto-read-only=on,locking=off,force-share=off,\
drop-cache=on --export vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=s,allow-inactive=off,",
        "--blockdev null-co,node-name=n --nbd-server addr.type=unix,addr.path=s,max-connections=4 \
         --export nbd,id=e,node-name=n,name=x,description=y,writable=on,writethrough=on",
        "--object throttle-group,id=g,x-iops-total=500,x-iops-total-max=5000,x-iops-total-max-length=30 \
         --blockdev null-co,node-name=n --blockdev driver=throttle,node-name=t,throttle-group=g,file=n \
         --export vhost-user-blk,id=e,node-name=t,addr.type=unix,addr.path=s",
        "--object throttle-group,id=g,limits.iops-read=500,limits.bps-write=1000000,limits.iops-size=4096 \
         --blockdev throttle,node-name=t,throttle-group=g,file.driver=file,file.filename=d.img \
         --export vhost-user-blk,id=e,node-name=t,addr.type=unix,addr.path=s",
    ];

    #[test]
    fn a_size_of_all_guest_memory_is_spelled_like_any_other() {
        let with = |size: &str| line(&format!("egret serve {} --memory-max {size}", TAKEN_BY_QEMU[0]));
        assert_eq!(with("1.5T").unwrap().memory_max, 3 << 39);
        assert_eq!(with("1").unwrap_err(), "--memory-max must be 1048576..=140737488355328 bytes, got 1");
        assert_eq!(with("much").unwrap_err(), "--memory-max must be 1048576..=140737488355328 bytes, got 'much'");
    }

    #[test]
    fn lines_that_qemus_daemon_takes_are_taken_unchanged() {
        for taken in TAKEN_BY_QEMU {
            for program in ["egret serve", "qemu-storage-daemon"] {
                let config = line(&format!("{program} {taken}")).unwrap_or_else(|error| panic!("{taken}: {error}"));
                assert_eq!(config.exports[0].id, "e");
            }
        }
    }

    #[test]
    fn the_order_of_options_does_not_matter() {
        let (first, second) = ("--blockdev null-co,node-name=n", "--object iothread,id=i");
        let third = "--export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s,iothread=i";
        let forward = line(&format!("egret serve {first} {second} {third}")).unwrap();
        assert_eq!(forward, line(&format!("egret serve {third} {second} {first}")).unwrap());
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        for (options, error) in [
            ("", "nothing to serve: name a disk (egret serve DISK), or give an --export or a --monitor"),
            (
                "--nbd-server addr.type=inet,addr.host=::1,addr.port=http",
                "--nbd-server addr.type=inet,addr.host=::1,addr.port=http: addr.port must be 1..=65535, got 'http'",
            ),
            (
                "--blockdev null-co,node-name=n --export nbd,id=e,node-name=n",
                "export 'e': type=nbd needs --nbd-server, which says where clients connect",
            ),
            ("--blockdev null-co,node-name", "--blockdev null-co,node-name: expected '=' after 'node-name'"),
            ("--blockdev null-co", "blockdev (null-co): node-name is missing"),
            ("--object iothread", "--object iothread: iothread without id: id is missing"),
            ("--object iothread,id=io0,poll-weight=64", "iothread 'io0': poll-weight must be 0..=63, got 64"),
            (
                "--export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s",
                "export 'e': node-name: there is no blockdev 'n'; there are none",
            ),
        ] {
            assert_eq!(line(&format!("egret serve {options}")).unwrap_err(), error);
        }
    }

    #[test]
    fn no_error_shows_what_is_secret() {
        let syntax = "--object secret,...: not KEY=VALUE,... (with two commas for one of a value) and not JSON";
        for (option, error) in [
            ("secret,data=hunter2", "--object secret,...: secret without id: id is missing"),
            ("qom-type=secret,data=hunter2", "--object secret,...: secret without id: id is missing"),
            ("{\"qom-type\":\"secret\",\"data\":\"hunter2\"}", "--object secret,...: secret without id: id is missing"),
            ("secret,id=s,data=correct,hunter2", syntax),
        ] {
            assert_eq!(line(&format!("egret serve --object {option}")).unwrap_err(), error);
        }
    }

    #[test]
    fn the_help_of_serve_names_every_type_of_object() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        let types = |shape: &'static Shape| shape.variants.iter().flat_map(|types| types.of).map(|(name, _)| *name);
        for (option, types) in [
            ("object", vec![IoThread::NOUN, Secret::NOUN, ThrottleGroup::NOUN, TlsCreds::NOUN]),
            ("blockdev", types(Blockdev::SHAPE).collect()),
            ("export", types(Export::SHAPE).collect()),
        ] {
            let option = serve.get_arguments().find(|argument| argument.get_long() == Some(option)).unwrap();
            let help = option.get_help().unwrap().to_string();
            assert!(help.contains(&types.join("|")), "{help}");
        }
    }
}
