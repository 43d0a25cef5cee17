//! What tells an image in a format from that of a raw disk, and a place where devices are from one of files.
//!
//! No disk is refused for its content: a guest may write what it likes. It is for who names a disk and says nothing of what is
//! in it, to be warned.

use std::fs::File;
use std::io::Read as _;
use std::path::{self, Path};

/// What images begin with. LUKS, which QEMU has as a format, is none of them: guests encrypt whole disks by it.
const MAGIC: [(&[u8], &str); 6] = [
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "VHD"),
];

/// The format of the image at `path`, which is a file or a block device; `None` of a raw disk's, and of one that cannot be
/// read.
pub fn of(path: &Path) -> Option<&'static str> {
    let mut begin = Vec::new();
    File::open(path).ok()?.take(32).read_to_end(&mut begin).ok()?;
    MAGIC.iter().find(|(magic, _)| begin.starts_with(magic)).map(|(_, format)| *format)
}

/// Whether what is missing at `path` would be a device: a file that is made there is in the host's memory.
pub fn is_place_of_devices(path: &Path) -> bool {
    path::absolute(path).is_ok_and(|path| path.starts_with("/dev") && !path.starts_with("/dev/shm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_told_by_what_they_begin_with() {
        let image = tempfile::NamedTempFile::new().unwrap();
        for (begin, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Some("qcow2")),
            (b"QED\0", Some("qed")),
            (b"KDMV\x01\0\0\0", Some("vmdk")),
            (b"# Disk DescriptorFile\nversion=1", Some("vmdk")),
            (b"vhdxfileM\0", Some("vhdx")),
            (b"LUKS\xba\xbe\0\x01aes", None),
            (b"conectix\0\0\0\x02", Some("VHD")),
            (b"\xeb\x63\x90 a boot sector", None),
            (b"", None),
        ] {
            std::fs::write(image.path(), begin).unwrap();
            assert_eq!(of(image.path()), format, "{begin:?}");
        }
        assert_eq!(of(Path::new("/nowhere/disk.img")), None);
    }

    #[test]
    fn where_devices_are_no_file_is_to_be_made() {
        for (path, is) in [("/dev/sdz", true), ("/dev/mapper/x", true), ("/dev/shm/x", false), ("dev/x", false)] {
            assert_eq!(is_place_of_devices(Path::new(path)), is, "{path}");
        }
    }
}
