//! What an operator wants to know once disks are served: where, and how a virtual machine takes them.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use egret_daemon::attach::Attach;
use egret_vocabulary::Config;
use egret_vocabulary::disk::Bottom;
use egret_vocabulary::schema::{Addr, Descriptor, FdAddr, LONGEST_SOCKET_PATH, UnixAddr};

/// For every export its address, and the lines that attach it.
pub fn announcement(config: &Config) -> Result<String> {
    let directory = std::env::current_dir().context("the current directory")?;
    let mut text = String::new();
    for export in &config.exports {
        let access = if export.writable { "writable" } else { "read-only" };
        let _ = match export.addr() {
            None => writeln!(text, "{}: {access}, to clients of the NBD server", export.id),
            Some(Addr::Unix(UnixAddr { path })) => {
                writeln!(text, "{}: {access}, at {}", export.id, directory.join(path).display())
            }
            Some(Addr::Fd(FdAddr { str: Descriptor::Number(fd) })) => {
                writeln!(text, "{}: {access}, at the socket of descriptor {fd}", export.id)
            }
            Some(Addr::Fd(FdAddr { str: Descriptor::Name(name) })) => {
                writeln!(text, "{}: {access}, at the inherited socket '{name}'", export.id)
            }
        };
        for (_, node) in export.node_names() {
            let Some(disk) = config.disk(node) else { continue };
            let (Bottom::File(image) | Bottom::HostDevice(image)) = disk.bottom else { continue };
            let direct = if disk.settings.direct { "past" } else { "through" };
            let _ = writeln!(text, "  {}: aio={}, {direct} the host's page cache", image.filename, image.aio);
        }
        if let Some(Addr::Unix(UnixAddr { path })) = export.addr()
            && let length = directory.join(path).as_os_str().len()
            && length > LONGEST_SOCKET_PATH
        {
            // The daemon makes it by its short name.
            let _ = writeln!(
                text,
                "  No client finds a socket by a path of {length} bytes, {LONGEST_SOCKET_PATH} at most: have it elsewhere \
                 (--socket, addr.path), or start clients in its directory"
            );
            continue;
        }
        let Some(attach) = Attach::new(export, &directory) else { continue };
        for (monitor, lines) in [
            ("QEMU, before 9.2 with reconnect=1 for reconnect-ms=100", &attach.qemu),
            ("libvirt", &attach.libvirt),
            ("cloud-hypervisor", &attach.cloud_hypervisor),
            ("crosvm run", &attach.crosvm),
            ("Firecracker, in \"drives\" of its configuration", &attach.firecracker),
        ] {
            if lines.is_empty() {
                continue;
            }
            let _ = writeln!(text, "\n  {monitor}:");
            for line in lines.lines() {
                let _ = writeln!(text, "    {line}");
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use egret_vocabulary::config::ConfigFile;

    use super::*;
    use crate::serve::Serve;

    #[test]
    fn a_socket_whose_whole_path_no_client_can_have_is_announced_without_lines_that_would_name_it() {
        let name = "s".repeat(LONGEST_SOCKET_PATH);
        let arguments = Serve {
            blockdev: vec!["null-co,node-name=n".to_owned()],
            export: vec![format!("vhost-user-blk,id=a,node-name=n,addr.type=unix,addr.path={name}")],
            ..Serve::default()
        };
        let text = announcement(&crate::serve::config(&arguments, ConfigFile::default()).unwrap()).unwrap();
        assert!(text.contains("No client finds a socket by a path of ") && !text.contains("-chardev"), "{text}");
    }

    #[test]
    fn every_export_is_announced_with_its_address_and_its_lines() {
        let arguments = Serve {
            blockdev: vec!["null-co,node-name=n".to_owned()],
            export: vec![
                "vhost-user-blk,id=a,node-name=n,addr.type=unix,addr.path=/run/a.sock,writable=on".to_owned(),
                "vhost-user-blk,id=b,node-name=n,addr.type=fd,addr.str=3".to_owned(),
            ],
            ..Serve::default()
        };
        let text = announcement(&crate::serve::config(&arguments, ConfigFile::default()).unwrap()).unwrap();
        assert!(text.starts_with("a: writable, at /run/a.sock\n\n  QEMU, before 9.2 with"), "{text}");
        assert!(text.contains(":\n    -object memory-backend-memfd"), "{text}");
        assert!(text.contains("\n  libvirt:\n    <memoryBacking>\n      <source type='memfd'/>"), "{text}");
        assert!(text.contains("\n  cloud-hypervisor:\n    --memory size=4G,shared=on"), "{text}");
        assert!(text.contains("\n  crosvm run:\n    --vhost-user block,socket=/run/a.sock,"), "{text}");
        assert!(
            text.contains("\n  Firecracker, in \"drives\" of its configuration:\n    {\"drive_id\": \"a\""),
            "{text}"
        );
        assert!(text.ends_with("b: read-only, at the socket of descriptor 3\n"), "{text}");
    }
}
