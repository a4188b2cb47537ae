//! Root file systems on the real kernel.

use super::overlay::mount_by_options;
use super::*;
use crate::world::linux::unpack::confined;
use std::os::fd::AsFd;

/// A directory of a test, and what is mounted in it: gone with it, also where the test fails.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Root {
        Root(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let Ok(table) = MountTable::read() else { return };
        for mount in table.ours(&[self.path().to_path_buf()]) {
            let _ = umount2(&mount.target, MntFlags::MNT_DETACH);
        }
    }
}

/// Unmounts, as soon as no program that another test has just forked holds a file in there (until its execve).
fn unmount_soon(target: &Path) {
    let start = std::time::Instant::now();
    while let Err(error) = unmount(target) {
        let busy = matches!(error, Error::Busy { .. });
        assert!(busy && start.elapsed().as_secs() < 10, "{error}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn layers(root: &Path, count: usize) -> Vec<PathBuf> {
    let layer = |i: usize| {
        let dir = root.join(format!("layer:{i},{}", "x".repeat(200)));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(format!("f{i}")), i.to_string()).unwrap();
        fs::write(dir.join("who"), i.to_string()).unwrap();
        dir
    };
    (0..count).map(layer).collect()
}

#[test]
fn many_layers_with_odd_and_long_names() {
    let root = Root::new();
    let lower = layers(root.path(), 130);
    let at = |name: &str| root.path().join(name);
    let target = at("target");
    assert_eq!(observe(&target).unwrap(), None);
    mount_rootfs(&lower, &at("upper"), &at("work"), &target, None).unwrap();
    let first = observe(&target).unwrap().unwrap();
    assert_eq!(first.kind, FsKind::Overlay);
    mount_rootfs(&lower, &at("upper"), &at("work"), &target, None).unwrap();
    assert_eq!(observe(&target).unwrap(), Some(first), "mounted once");
    assert_eq!(fs::read_to_string(target.join("who")).unwrap(), "0");
    assert_eq!(fs::read_to_string(target.join("f129")).unwrap(), "129");

    let table = MountTable::read().unwrap();
    let prefixes = [root.path().to_path_buf()];
    assert_eq!(table.ours(&prefixes).map(|m| m.id).collect::<Vec<_>>(), [first.id]);
    assert_eq!(table.get(&target).unwrap().fs_type, "overlay");

    let held = fs::File::open(target.join("who")).unwrap();
    match unmount(&target).unwrap_err() {
        Error::Busy { holder, .. } => assert_eq!(holder, Some(std::process::id() as i32)),
        other => panic!("{other}"),
    }
    drop(held);
    unmount_soon(&target);
    unmount_soon(&target);
    unmount_soon(&at("absent"));
    assert_eq!(observe(&target).unwrap(), None);
    assert_eq!(fs::read_dir(at("upper")).unwrap().count(), 0);
}

#[test]
fn the_way_of_older_kernels() {
    let root = Root::new();
    let lower = layers(root.path(), 130);
    let target = root.path().join("target");
    for dir in ["upper", "work", "target"] {
        fs::create_dir(root.path().join(dir)).unwrap();
    }
    let upper = (&*root.path().join("upper"), &*root.path().join("work"));
    let upper = Some(upper);
    let (lower, label) = (&lower, None);
    mount_by_options(&Overlay { lower, upper, label }, &target).unwrap();
    assert_eq!(fs::read_to_string(target.join("f129")).unwrap(), "129");
    unmount_soon(&target);
    let upper = None;
    let by_options = detached_by_options(&Overlay { lower, upper, label }).unwrap();
    for view in [by_options, detached(lower).unwrap()] {
        assert!(confined(view.as_fd(), b"f129", OFlag::O_RDONLY, false).is_ok());
        let refused = nix::sys::stat::mkdirat(&view, "new", Mode::S_IRWXU);
        assert_eq!(refused, Err(Errno::EROFS));
    }
    assert_eq!(
        MountTable::read().unwrap().ours(&[root.path().to_path_buf()]).count(),
        0
    );
}

#[test]
fn owners_are_mapped_for_a_user_namespace() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};
    let mut child = Command::new("unshare")
        .args(["-U", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    let proc = PathBuf::from(format!("/proc/{}", child.id()));
    for map in ["uid_map", "gid_map"] {
        fs::write(proc.join(map), "0 100000 65536").unwrap();
    }
    let userns = fs::File::open(proc.join("ns/user")).unwrap();
    let root = Root::new();
    let at = |name: &str| root.path().join(name);
    let lower = layers(root.path(), 2);
    std::os::unix::fs::chown(lower[1].join("f1"), Some(7), Some(8)).unwrap();
    let mapping = Mapping {
        userns: userns.as_fd(),
        root: (100_000, 100_000),
    };
    fs::create_dir_all(at("mapped/5")).unwrap(); // left by a crash
    for _ in 0..2 {
        assert!(mount_rootfs_mapped(&lower, &at("upper"), &at("work"), &at("target"), None, mapping).unwrap());
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    let owner = |name: &str| fs::metadata(at(name)).map(|m| (m.uid(), m.gid())).unwrap();
    assert_eq!(owner("target"), (100_000, 100_000));
    assert_eq!(owner("target/f0"), (100_000, 100_000));
    assert_eq!(owner("target/f1"), (100_007, 100_008));
    fs::write(at("target/f1"), "copied up").unwrap();
    assert_eq!(owner("target/f1"), (100_007, 100_008));
    assert_eq!(owner("upper/f1"), (100_007, 100_008));
    assert_eq!(fs::metadata(lower[1].join("f1")).unwrap().uid(), 7);
    assert_eq!(
        MountTable::read().unwrap().ours(&[root.path().to_path_buf()]).count(),
        1
    );
    assert!(!at("mapped").exists());
    unmount_soon(&at("target"));
}

#[test]
fn no_layers_at_all() {
    let root = Root::new();
    let at = |name: &str| root.path().join(name);
    mount_rootfs(&[], &at("upper"), &at("work"), &at("target"), None).unwrap();
    fs::write(at("target/file"), "x").unwrap();
    unmount_soon(&at("target"));
    assert_eq!(fs::read(at("upper/file")).unwrap(), b"x");
    let view = detached(&[]).unwrap();
    assert_eq!(
        confined(view.as_fd(), b"etc", OFlag::O_PATH, false).unwrap_err(),
        Errno::ENOENT
    );
}

#[test]
fn shared_memory() {
    let root = Root::new();
    let shm = root.path().join("shm");
    mount_shm(&shm, 64 << 20, None).unwrap();
    mount_shm(&shm, 64 << 20, None).unwrap();
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&shm).unwrap().permissions().mode() & 0o7777, 0o1777);
    let size = nix::sys::statvfs::statvfs(&shm).unwrap();
    assert_eq!(size.blocks() * size.fragment_size(), 64 << 20);
    unmount_soon(&shm);
    assert_eq!(observe(&shm).unwrap(), None);
}

#[test]
fn overlay_works_here() {
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    probe(root.path()).unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}
