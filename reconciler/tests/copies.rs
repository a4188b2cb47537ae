//! Copies of layers on file systems that share blocks. Needs root, loop devices, and the programs that make disks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use reconciler::world::linux::copy;

/// A disk in a file, mounted; unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    /// `None` if this machine cannot: no program, or no such file system in the kernel.
    fn new(dir: &Path, make: &[&str], kind: &str) -> Option<Disk> {
        let (file, target) = (dir.join("disk"), dir.join("mounted"));
        fs::File::create(&file).unwrap().set_len(512 << 20).unwrap();
        fs::create_dir(&target).unwrap();
        let mut mkfs = Command::new(make[0]);
        let made = mkfs
            .args(&make[1..])
            .arg(&file)
            .output()
            .is_ok_and(|out| out.status.success());
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", "loop"]).arg(&file).arg(&target);
        (made && mount.status().is_ok_and(|status| status.success())).then_some(Disk(target))
    }

    fn free(&self) -> u64 {
        nix::unistd::syncfs(fs::File::open(&self.0).unwrap()).unwrap();
        let stat = nix::sys::statvfs::statvfs(&self.0).unwrap();
        stat.blocks_free() * stat.fragment_size()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Bytes that a copy of 64 MiB takes.
fn cost(disk: &Disk) -> u64 {
    let (layer, copied) = (disk.0.join("layer"), disk.0.join("copied"));
    fs::create_dir(&layer).unwrap();
    let bytes: Vec<u8> = (0..16u32 << 20)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    fs::write(layer.join("file"), &bytes).unwrap();
    let before = disk.free();
    copy::merge(&[layer], &copied, None).unwrap();
    let cost = before.saturating_sub(disk.free());
    assert!(fs::read(copied.join("file")).unwrap() == bytes);
    cost
}

#[test]
fn blocks_are_shared_where_the_file_system_can() {
    for (make, kind) in [(&["mkfs.xfs", "-q"][..], "xfs"), (&["mkfs.btrfs", "-q"], "btrfs")] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        match Disk::new(dir.path(), make, kind) {
            Some(disk) => assert!(cost(&disk) < 8 << 20, "{kind}"),
            None => eprintln!("SKIPPED: no {kind} here"),
        }
    }
}

#[test]
fn elsewhere_bytes_are_copied() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = Disk::new(dir.path(), &["mkfs.ext4", "-q", "-F"], "ext4").expect("ext4 on a loop device");
    assert!(cost(&disk) >= 64 << 20);
}
