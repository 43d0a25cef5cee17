//! The lines that attach an export to a virtual machine.
//!
//! `docs/attach.md` explains them. The guest's memory has to be shared, because the daemon reads and writes it: QEMU's
//! `share=on`, libvirt's `<access mode='shared'/>`, cloud-hypervisor's `shared=on`. crosvm and Firecracker share it by
//! themselves.

use std::fmt::Write as _;
use std::path::Path;

use egret_vocabulary::schema::{Addr, Device, Export, UnixAddr, VhostUser};

/// The ring size that QEMU, and libvirt with it, sets up when told nothing.
const QEMU_QUEUE_SIZE: u16 = 128;

/// How often, in milliseconds, QEMU tries to connect again to a daemon that went away: a new one is there in less, and a
/// guest waits no longer than that.
const RECONNECT_MS: u32 = 100;

/// How to attach one export, ready to be pasted; empty for who cannot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attach {
    /// Arguments of `qemu-system-*` 9.2 or later, which has `reconnect-ms`; before it was `reconnect`, in seconds. The
    /// guest's memory (`-m`, here 4 GiB) and the lines that share it are needed once however many disks there are.
    pub qemu: String,
    /// Elements of a libvirt domain.
    pub libvirt: String,
    /// Arguments of `cloud-hypervisor`.
    pub cloud_hypervisor: String,
    /// Arguments of `crosvm run`.
    pub crosvm: String,
    /// A drive of Firecracker's: one of `drives` in its configuration, or what is sent to `PUT /drives/ID`.
    pub firecracker: String,
}

impl Attach {
    /// The lines for `export`, whose socket path, if relative, starts at `directory`.
    ///
    /// `None` for an export on an inherited descriptor: where its socket is, only the one who made it knows.
    pub fn new(export: &Export, directory: &Path) -> Option<Self> {
        let vhost_user = export.vhost_user()?;
        let Addr::Unix(UnixAddr { path }) = &vhost_user.addr else { return None };
        let path = directory.join(path).to_string_lossy().into_owned();
        // QEMU alone knows vhost-user-scsi, as far as has been tried.
        if let Device::VhostUserScsi(_) = export.device {
            return Some(Self { qemu: qemu(export, vhost_user, &path), ..Self::default() });
        }
        Some(Self {
            qemu: qemu(export, vhost_user, &path),
            libvirt: libvirt(vhost_user, &path),
            cloud_hypervisor: cloud_hypervisor(vhost_user, &path),
            crosvm: crosvm(vhost_user, &path),
            firecracker: firecracker(&export.id, &path),
        })
    }
}

fn qemu(Export { id, device, .. }: &Export, vhost_user: &VhostUser, path: &str) -> String {
    let VhostUser { num_queues, queue_size, .. } = vhost_user;
    let device = if let Device::VhostUserScsi(_) = device {
        format!("vhost-user-scsi-pci,num_queues={num_queues},virtqueue_size={queue_size}")
    } else {
        format!("vhost-user-blk-pci,num-queues={num_queues},queue-size={queue_size}")
    };
    let chardev =
        shell_word(&format!("socket,id=chr-{id},path={},reconnect-ms={RECONNECT_MS}", path.replace(',', ",,")));
    format!(
        "-object memory-backend-memfd,id=mem,size=4G,share=on -machine memory-backend=mem -m 4G \\\n\
         -chardev {chardev} \\\n\
         -device {device},id={id},chardev=chr-{id}"
    )
}

fn libvirt(VhostUser { num_queues, queue_size, .. }: &VhostUser, path: &str) -> String {
    let mut driver = format!("<driver name='qemu' type='raw' queues='{num_queues}'");
    if *queue_size != QEMU_QUEUE_SIZE {
        let _ = write!(driver, " queue_size='{queue_size}'");
    }
    format!(
        "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
         <disk type='vhostuser' device='disk'>\n  {driver}/>\n  <source type='unix' path='{}'>\n    \
         <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
         <target dev='vda' bus='virtio'/>\n</disk>",
        xml_text(path)
    )
}

fn cloud_hypervisor(VhostUser { num_queues, queue_size, .. }: &VhostUser, path: &str) -> String {
    let disk = format!("vhost_user=true,socket={},num_queues={num_queues},queue_size={queue_size}", quoted(path));
    format!("--memory size=4G,shared=on \\\n--disk {}", shell_word(&disk))
}

/// It takes as many queues as the export has, and lets rings be longer than any that Egret serves.
fn crosvm(VhostUser { queue_size, .. }: &VhostUser, path: &str) -> String {
    let disk = format!("block,socket={},max-queue-size={queue_size}", quoted(path));
    format!("--vhost-user {}", shell_word(&disk))
}

/// With its other `cache_type`, which it takes if none is named, it has guests know nothing of flushes.
fn firecracker(id: &str, path: &str) -> String {
    // A name there is of letters, digits and underscores.
    let id = id.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let [id, path] = [id.as_str(), path].map(serde_json::Value::from);
    format!(r#"{{"drive_id": {id}, "socket": {path}, "is_root_device": false, "cache_type": "Writeback"}}"#)
}

/// A path among options that are split at commas, for who knows double quotes.
fn quoted(path: &str) -> String {
    if path.contains([',', '[', ']']) { format!("\"{path}\"") } else { path.to_owned() }
}

/// `text` as one word of a POSIX shell.
fn shell_word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+=,:@%".contains(&byte);
    if text.bytes().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// `text` inside an XML attribute in single quotes.
fn xml_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use egret_vocabulary::schema::{Object as _, Spelling};
    use serde_json::{Value, json};

    use super::*;

    fn export(path: &str) -> Export {
        with(json!({ "type": "vhost-user-blk", "node-name": "disk0", "addr": { "type": "unix", "path": path } }))
    }

    /// One with these keys, too.
    fn with(mut keys: Value) -> Export {
        (keys["id"], keys["num-queues"]) = ("disk0".into(), 4.into());
        Export::from_value(keys, Spelling::Typed).unwrap()
    }

    #[test]
    fn an_export_tells_how_it_is_attached() {
        let attach = Attach::new(&export("disk.sock"), Path::new("/run/vm")).unwrap();
        assert_eq!(
            attach.qemu,
            "-object memory-backend-memfd,id=mem,size=4G,share=on -machine memory-backend=mem -m 4G \\\n\
             -chardev socket,id=chr-disk0,path=/run/vm/disk.sock,reconnect-ms=100 \\\n\
             -device vhost-user-blk-pci,num-queues=4,queue-size=128,id=disk0,chardev=chr-disk0"
        );
        assert_eq!(
            attach.libvirt,
            "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
             <disk type='vhostuser' device='disk'>\n  <driver name='qemu' type='raw' queues='4'/>\n  \
             <source type='unix' path='/run/vm/disk.sock'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
             <target dev='vda' bus='virtio'/>\n</disk>"
        );
        assert_eq!(
            attach.cloud_hypervisor,
            "--memory size=4G,shared=on \\\n\
             --disk vhost_user=true,socket=/run/vm/disk.sock,num_queues=4,queue_size=128"
        );
        assert_eq!(attach.crosvm, "--vhost-user block,socket=/run/vm/disk.sock,max-queue-size=128");
        let drive = r#"{"drive_id": "disk0", "socket": "/run/vm/disk.sock", "is_root_device": false, "cache_type": "Writeback"}"#;
        assert_eq!(attach.firecracker, drive);
    }

    #[test]
    fn a_virtio_scsi_export_has_a_line_for_qemu_alone() {
        let attach = Attach::new(
            &with(json!({ "type": "vhost-user-scsi", "addr": { "type": "unix", "path": "s" } })),
            Path::new("/"),
        )
        .unwrap();
        let device = "-device vhost-user-scsi-pci,num_queues=4,virtqueue_size=128,id=disk0,chardev=chr-disk0";
        assert!(attach.qemu.ends_with(device), "{attach:?}");
        assert_eq!(attach, Attach { qemu: attach.qemu.clone(), ..Attach::default() });
    }

    #[test]
    fn odd_paths_are_quoted_as_each_reader_needs_it() {
        let attach = Attach::new(&export("/a,b & 'c'.sock"), Path::new("/")).unwrap();
        assert!(
            attach.qemu.contains(r"-chardev 'socket,id=chr-disk0,path=/a,,b & '\''c'\''.sock,reconnect-ms=100' "),
            "{attach:?}"
        );
        assert!(attach.libvirt.contains("path='/a,b &amp; &apos;c&apos;.sock'"), "{attach:?}");
        assert!(attach.cloud_hypervisor.contains(r#"socket="/a,b & '\''c'\''.sock",num"#), "{attach:?}");
        assert!(attach.crosvm.contains(r#"socket="/a,b & '\''c'\''.sock",max"#), "{attach:?}");
        let read: Value = serde_json::from_str(&attach.firecracker).unwrap();
        assert_eq!(read["socket"], "/a,b & 'c'.sock");
        assert_eq!(firecracker("disk-0.a", "s").split('"').nth(3), Some("disk_0_a"));
    }

    #[test]
    fn another_ring_size_is_handed_to_libvirt() {
        let addr = json!({ "type": "unix", "path": "s" });
        let export = with(json!({ "type": "vhost-user-blk", "node-name": "d", "addr": addr, "queue-size": 256 }));
        let attach = Attach::new(&export, Path::new("/")).unwrap();
        assert!(attach.libvirt.contains("queues='4' queue_size='256'/>"), "{attach:?}");
    }

    #[test]
    fn an_inherited_socket_has_no_lines() {
        let addr = json!({ "type": "fd", "str": "3" });
        let export = with(json!({ "type": "vhost-user-blk", "node-name": "d", "addr": addr }));
        assert_eq!(Attach::new(&export, Path::new("/")), None);
    }
}
