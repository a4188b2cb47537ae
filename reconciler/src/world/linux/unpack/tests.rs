//! Real trees on a real file system, with GNU tar, umoci and the kernel's overlay as judges. Needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;

use nix::sys::stat::{Mode, UtimensatFlags, makedev, utimensat};
use sha2::{Digest as _, Sha256};

use super::super::content::digest_of;
use super::super::mounts::mount_rootfs;
use super::super::xattr;
use super::*;

/// A layer being written: members in order, odd ones too.
#[derive(Default)]
pub(crate) struct Layer(Vec<u8>);

impl Layer {
    pub(crate) fn raw(mut self, name: &str, kind: ::tar::EntryType, link: &str, mode: u32, data: &[u8]) -> Layer {
        let mut header = ::tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000);
        header.set_size(data.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        if kind.is_character_special() || kind.is_block_special() {
            header.set_device_major(1).unwrap();
            header.set_device_minor(3).unwrap();
        }
        header.set_cksum();
        self.0.extend(header.as_bytes());
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn dir(self, name: &str, mode: u32) -> Layer {
        self.raw(name, ::tar::EntryType::Directory, "", mode, b"")
    }

    pub(crate) fn file(self, name: &str, data: &str) -> Layer {
        self.raw(name, ::tar::EntryType::Regular, "", 0o644, data.as_bytes())
    }

    pub(crate) fn symlink(self, name: &str, to: &str) -> Layer {
        self.raw(name, ::tar::EntryType::Symlink, to, 0o777, b"")
    }

    pub(crate) fn link(self, name: &str, to: &str) -> Layer {
        self.raw(name, ::tar::EntryType::Link, to, 0o644, b"")
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Layer {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            data.extend(format!("{length} {key}=").bytes());
            data.extend(*value);
            data.push(b'\n');
        }
        self.raw("pax", ::tar::EntryType::XHeader, "", 0o644, &data)
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}

pub(crate) fn diff_id(tar: &[u8]) -> Digest {
    digest_of(Sha256::new_with_prefix(tar))
}

/// Unpacks layers, bottom first, into `<root>/l0`, `l1`, …; answers the trees, top first.
pub(crate) fn unpack_all(root: &Path, layers: Vec<Vec<u8>>) -> Result<Vec<PathBuf>> {
    let mut lower: Vec<PathBuf> = Vec::new();
    for (i, tar) in layers.into_iter().enumerate() {
        let dir = root.join(format!("l{i}/fs"));
        fs::create_dir_all(&dir).unwrap();
        unpack(&tar[..], &diff_id(&tar), &dir, &lower, &Limits::default())?;
        lower.insert(0, dir);
    }
    Ok(lower)
}

/// What can be said of each path below `root`, as text.
pub(crate) fn census(root: &Path) -> BTreeMap<String, String> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let kind = meta.file_type();
            let body = if kind.is_file() {
                format!("size {} {}", meta.len(), diff_id(&fs::read(&path).unwrap()))
            } else if kind.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else {
                format!("device {}", meta.rdev())
            };
            let links = if kind.is_dir() { 0 } else { meta.nlink() };
            let (mode, uid, gid, time) = (meta.mode(), meta.uid(), meta.gid(), meta.mtime());
            let fd = open_any(&path);
            let xattrs: BTreeMap<_, _> = xattr::all(fd.as_fd())
                .unwrap()
                .into_iter()
                .filter(|(name, _)| !name.to_bytes().starts_with(b"trusted.overlay."))
                .map(|(name, value)| (name.into_string().unwrap(), value))
                .collect();
            let text = format!("{mode:o} {uid}:{gid} links {links} time {time} {body} {xattrs:?}");
            seen.insert(path.strip_prefix(root).unwrap().display().to_string(), text);
            if kind.is_dir() {
                todo.push(path);
            }
        }
    }
    seen
}

fn open_any(path: &Path) -> OwnedFd {
    nix::fcntl::open(
        path,
        OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .unwrap()
}

/// Differences by path, so that a failure can be read.
pub(crate) fn assert_same(got: &BTreeMap<String, String>, want: &BTreeMap<String, String>) {
    let paths: BTreeSet<_> = got.keys().chain(want.keys()).collect();
    let differ = |p: &&&String| got.get(**p) != want.get(**p);
    let lines: Vec<_> = paths
        .iter()
        .filter(differ)
        .map(|p| format!("{p}\n   got  {:?}\n   want {:?}", got.get(*p), want.get(*p)))
        .collect();
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}

pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn new(lower: &[PathBuf], root: &Path) -> Mounted {
        let target = root.join("merged");
        mount_rootfs(lower, &root.join("upper"), &root.join("work"), &target, None).unwrap();
        Mounted(target)
    }
}

impl std::ops::Deref for Mounted {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What another test forks in this moment may hold a file of it, until its execve.
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Everything a file system can hold.
fn nasty(root: &Path) {
    let at = |name: &str| root.join(name);
    for dir in ["plain", "sticky", "deep/er/and/deeper", "no access"] {
        fs::create_dir_all(at(dir)).unwrap();
    }
    fs::write(at("plain/file"), "hello").unwrap();
    fs::write(at("plain/empty"), "").unwrap();
    fs::write(at("plain/setuid"), "#!").unwrap();
    fs::write(at("plain/new\nline and ünïcode"), "x").unwrap();
    fs::write(at("deep/er/and/deeper/big"), vec![0x5a; 300_000]).unwrap();
    let long = "n".repeat(200);
    fs::create_dir(at(&long)).unwrap();
    fs::write(at(&format!("{long}/{long}")), "long").unwrap();
    symlink(format!("{long}/{long}"), at("long link")).unwrap();
    symlink("/etc/passwd", at("absolute")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    fs::hard_link(at("plain/file"), at("deep/hard")).unwrap();
    fs::hard_link(at("dangling"), at("hard symlink")).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    use std::os::unix::fs::FileExt;
    sparse.write_at(b"start", 0).unwrap();
    for piece in 1..40 {
        sparse.write_at(b"piece", piece * 100_000).unwrap();
    }
    sparse.set_len(5_000_000).unwrap();
    File::create(at("only a hole")).unwrap().set_len(4_000_000).unwrap();
    for (name, kind, major) in [
        ("char", SFlag::S_IFCHR, 1),
        ("block", SFlag::S_IFBLK, 259),
        ("fifo", SFlag::S_IFIFO, 0),
    ] {
        nix::sys::stat::mknod(&at(name), kind, Mode::from_bits_truncate(0o640), makedev(major, 300)).unwrap();
    }
    for (name, uid, gid) in [
        ("plain/setuid", 1000, 50),
        ("sticky", 7, 8),
        ("dangling", 9, 10),
        ("fifo", 3_000_000, 4),
    ] {
        std::os::unix::fs::lchown(at(name), Some(uid), Some(gid)).unwrap();
    }
    for (name, mode) in [
        ("plain/setuid", 0o6755),
        ("sticky", 0o1777),
        ("no access", 0o000),
        ("plain/empty", 0o400),
    ] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    xattr::set(open_any(&at("plain/file")).as_fd(), c"security.capability", &capability).unwrap();
    xattr::set(open_any(&at("plain")).as_fd(), c"user.note", b"bin\0ary\nvalue=1").unwrap();
    // Whole seconds: not every format has more.
    let paths: Vec<_> = census(root).into_keys().collect();
    for (i, path) in paths.iter().rev().enumerate() {
        let time = TimeSpec::new(1_500_000_000 + i as i64, 0);
        utimensat(
            nix::fcntl::AT_FDCWD,
            &at(path),
            &time,
            &time,
            UtimensatFlags::NoFollowSymlink,
        )
        .unwrap();
    }
}

fn tar_of(dir: &Path, options: &[&str]) -> Vec<u8> {
    let out = Command::new("tar")
        .args(options)
        .args(["--numeric-owner", "-C"])
        .arg(dir)
        .args(["-c", "."])
        .output();
    let out = out.expect("GNU tar must be installed for this test");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}

#[test]
fn a_nasty_tree_in_every_format() {
    let root = tempfile::tempdir().unwrap();
    let source = root.path().join("source");
    fs::create_dir(&source).unwrap();
    nasty(&source);
    let want = census(&source);
    let formats: [&[&str]; 5] = [
        &["--format=posix", "--xattrs", "--xattrs-include=*"],
        &[
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "-S",
            "--sparse-version=1.0",
        ],
        &[
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "-S",
            "--sparse-version=0.1",
        ],
        &[
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "-S",
            "--sparse-version=0.0",
        ],
        &["--format=gnu", "-S"],
    ];
    for (i, format) in formats.into_iter().enumerate() {
        let tar = tar_of(&source, format);
        let dir = root.path().join(format!("{i}/fs"));
        fs::create_dir_all(&dir).unwrap();
        let meta = unpack(&tar[..], &diff_id(&tar), &dir, &[], &Limits::default()).unwrap();
        let mut want = want.clone();
        if format.contains(&"--format=gnu") {
            for text in want.values_mut() {
                *text = text.split(" {").next().unwrap().to_string() + " {}";
            }
        }
        assert_same(&census(&dir), &want);
        let sparse = fs::metadata(dir.join("sparse")).unwrap();
        if format.contains(&"-S") {
            assert!(sparse.blocks() * 512 < 500_000, "holes stay holes: {format:?}");
            assert!(meta.bytes < 2_000_000, "{}", meta.bytes);
        }
        let again = verify::tree(File::open(&dir).unwrap().as_fd()).unwrap();
        assert_eq!(again.0, meta.tree);
    }
}

#[test]
fn compressed_and_damaged() {
    let root = tempfile::tempdir().unwrap();
    let tar = Layer::default().file("a", &"x".repeat(5000)).end();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::encode_all(&tar[..], 1).unwrap();
    let mut count = 0;
    let mut run = |bytes: &[u8], id: &Digest, limits: Limits| {
        count += 1;
        let dir = root.path().join(format!("{count}/fs"));
        fs::create_dir_all(&dir).unwrap();
        unpack(bytes, id, &dir, &[], &limits)
    };
    let id = diff_id(&tar);
    let first = run(&tar, &id, Limits::default()).unwrap();
    assert_eq!(run(&gzip, &id, Limits::default()).unwrap(), first);
    assert_eq!(run(&zstd, &id, Limits::default()).unwrap(), first);
    let half = gzip.len() / 2;
    assert!(matches!(
        run(&gzip[..half], &id, Limits::default()),
        Err(Error::Invalid { .. })
    ));
    let mut flipped = tar.clone();
    flipped[600] ^= 1;
    assert!(matches!(
        run(&flipped, &id, Limits::default()),
        Err(Error::Digest { .. })
    ));
    let small = Limits {
        bytes: 4000,
        ..Limits::default()
    };
    assert!(matches!(run(&zstd, &id, small), Err(Error::TooBig { .. })));
    let few = Limits {
        entries: 0,
        ..Limits::default()
    };
    assert!(matches!(run(&tar, &id, few), Err(Error::Invalid { .. })));
}

#[test]
fn whiteouts_links_and_missing_parents_over_layers() {
    let root = tempfile::tempdir().unwrap();
    let base = Layer::default()
        .dir("d", 0o750)
        .file("d/old", "old")
        .dir("gone", 0o755)
        .file("gone/x", "x")
        .dir("opaque", 0o755)
        .file("opaque/low", "low")
        .dir("owned", 0o2710)
        .dir("owned/sub", 0o1733)
        .file("owned/sub/f", "f")
        .file("shared", "shared")
        .file("replaced", "was a file")
        .dir("was-dir", 0o755)
        .file("was-dir/f", "f")
        .symlink("to", "owned/sub")
        .end();
    let middle = Layer::default()
        .raw(".wh.gone", ::tar::EntryType::Regular, "", 0o644, b"")
        .file("opaque/here", "here") // before its mark
        .raw("opaque/.wh..wh..opq", ::tar::EntryType::Regular, "", 0o644, b"")
        // A whiteout and a new directory of that name, in both orders.
        .raw(".wh.d", ::tar::EntryType::Regular, "", 0o644, b"")
        .dir("d", 0o700)
        .file("d/new", "new")
        .dir("was-dir", 0o711)
        .raw(".wh.was-dir", ::tar::EntryType::Regular, "", 0o644, b"")
        .file("owned/sub/g", "no entry for the parents")
        .link("hard", "shared")
        .link("hard2", "hard")
        .link("owned/through", "to/f")
        .link("owned/through-too", "to/f")
        .dir("replaced", 0o755)
        .file("replaced/f", "in a directory")
        .end();
    let top = Layer::default()
        .raw(".wh.hard2", ::tar::EntryType::Regular, "", 0o644, b"")
        .link("again", "hard")
        .dir("gone", 0o755)
        .raw("replaced/.wh.f", ::tar::EntryType::Regular, "", 0o644, b"")
        .raw(".wh.never-was", ::tar::EntryType::Regular, "", 0o644, b"")
        .raw(".wh..wh.plnk/left", ::tar::EntryType::Regular, "", 0o644, b"")
        .end();
    let lower = unpack_all(root.path(), vec![base, middle, top]).unwrap();
    let merged = Mounted::new(&lower, root.path());
    let at = |name: &str| merged.join(name);
    let names = |dir: &str| {
        let mut names: Vec<_> = fs::read_dir(at(dir))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let mode = |name: &str| fs::metadata(at(name)).unwrap().mode() & 0o7777;
    assert_eq!(
        names(""),
        [
            "again", "d", "gone", "hard", "opaque", "owned", "replaced", "shared", "to", "was-dir"
        ]
        .map(String::from)
    );
    assert_eq!(names("d"), ["new"]);
    assert_eq!(names("gone"), [""; 0]);
    assert_eq!(names("opaque"), ["here"]);
    assert_eq!(names("owned/sub"), ["f", "g"]);
    assert_eq!(names("was-dir"), [""; 0]);
    assert_eq!(names("replaced"), [""; 0]);
    assert_eq!(
        (mode("d"), mode("owned"), mode("owned/sub"), mode("opaque")),
        (0o700, 0o2710, 0o1733, 0o755)
    );
    assert_eq!(fs::metadata(at("owned/sub")).unwrap().mtime(), 1_000_000);
    let inode = |name: &str| fs::metadata(at(name)).unwrap().ino();
    for name in ["hard", "again", "shared"] {
        assert_eq!(fs::read_to_string(at(name)).unwrap(), "shared");
    }
    // `again` copied up what `hard` names, and only that; in the middle layer the three were one file.
    assert_eq!(inode("again"), inode("hard"));
    let middle_inode = |name: &str| fs::metadata(lower[1].join(name)).unwrap().ino();
    assert_eq!(middle_inode("hard"), middle_inode("shared"));
    assert_eq!(middle_inode("hard"), middle_inode("hard2"));
    assert_eq!(fs::read_to_string(at("owned/through")).unwrap(), "f");
    assert_eq!(middle_inode("owned/through"), middle_inode("owned/through-too"));
    assert!(
        fs::symlink_metadata(lower[1].join("to")).is_err(),
        "the link below is not hidden"
    );
}

#[test]
fn links_to_below_that_are_replaced_or_hidden() {
    let root = tempfile::tempdir().unwrap();
    let base = Layer::default()
        .file("f", "f")
        .file("g", "g")
        .file("h", "h")
        .dir("real", 0o755)
        .symlink("to", "real")
        .end();
    let top = Layer::default()
        .dir("real", 0o755)
        .symlink("also", "real")
        .link("real/replaced", "f")
        .file("also/replaced", "new") // the same name by another way
        .link("kept", "f")
        .raw(".wh.kept", ::tar::EntryType::Regular, "", 0o644, b"")
        .link("copied", "f")
        .file("f", "another f")
        .link("a", "g")
        .link("g", "h") // what the link before it meant is another file
        .link("z", "g")
        .dir("dropped", 0o755)
        .link("dropped/x", "f")
        .file("dropped", "a file now")
        .end();
    let lower = unpack_all(root.path(), vec![base, top]).unwrap();
    let merged = Mounted::new(&lower, root.path());
    let read = |name: &str| fs::read_to_string(merged.join(name)).unwrap();
    assert_eq!(read("real/replaced"), "new");
    assert_eq!(
        (read("kept"), read("copied"), read("f")),
        ("f".into(), "f".into(), "another f".into())
    );
    assert_eq!(["a", "g", "z", "h"].map(read), ["g", "h", "h", "h"]);
    assert_eq!(read("dropped"), "a file now");
    let inode = |name: &str| fs::metadata(lower[0].join(name)).unwrap().ino();
    assert_eq!(inode("kept"), inode("copied"));
}

/// What an entry hid stays hidden when a later one of the same layer replaces it.
#[test]
fn a_directory_in_place_of_a_file_is_a_new_one() {
    let root = tempfile::tempdir().unwrap();
    let names = ["file", "link", "device", "whiteout"];
    let base = names.iter().fold(Layer::default().file("f", "f"), |layer, name| {
        layer.dir(name, 0o755).file(&format!("{name}/low"), "low")
    });
    let top = Layer::default()
        .file("file", "hides the directory")
        .link("link", "f")
        .raw("device", ::tar::EntryType::Fifo, "", 0o644, b"")
        .raw(".wh.whiteout", ::tar::EntryType::Regular, "", 0o644, b"");
    let top = names.iter().fold(top, |layer, name| layer.dir(name, 0o711));
    let lower = unpack_all(root.path(), vec![base.end(), top.end()]).unwrap();
    let merged = Mounted::new(&lower, root.path());
    for name in names {
        let dir = merged.join(name);
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, 0o711, "{name}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "{name}");
    }
}

#[test]
fn an_opaque_root_hides_all_below() {
    let root = tempfile::tempdir().unwrap();
    let base = Layer::default().file("a", "a").dir("d", 0o755).file("d/low", "x").end();
    let top = Layer::default()
        .raw(".wh..wh..opq", ::tar::EntryType::Regular, "", 0o644, b"")
        .dir("d", 0o755)
        .file("d/high", "x")
        .end();
    let lower = unpack_all(root.path(), vec![base, top]).unwrap();
    let merged = Mounted::new(&lower, root.path());
    assert_eq!(census(&merged).into_keys().collect::<Vec<_>>(), ["d", "d/high"]);
}

#[test]
fn later_members_replace_earlier_ones() {
    let root = tempfile::tempdir().unwrap();
    let tar = Layer::default()
        .file("f", "first")
        .link("g", "f")
        .file("f", "second")
        .dir("d", 0o755)
        .file("d/x", "x")
        .dir("d", 0o700)
        .symlink("l", "d")
        .file("l/through", "t")
        .dir("l", 0o755)
        .file("l/own", "o")
        .dir("e", 0o755)
        .file("e/y", "y")
        .file("e", "now a file")
        .link("g", "g")
        .raw("null", ::tar::EntryType::Char, "", 0o666, b"")
        .raw("null", ::tar::EntryType::Fifo, "", 0o600, b"")
        .end();
    let lower = unpack_all(root.path(), vec![tar]).unwrap();
    let at = |name: &str| lower[0].join(name);
    assert_eq!(fs::read_to_string(at("f")).unwrap(), "second");
    assert_eq!(fs::read_to_string(at("g")).unwrap(), "first");
    assert_eq!(fs::read_to_string(at("e")).unwrap(), "now a file");
    assert_eq!(fs::metadata(at("d")).unwrap().mode() & 0o777, 0o700);
    assert!(at("d/x").exists() && at("d/through").exists() && at("l/own").exists());
    assert!(!at("l/through").exists() && !at("d/own").exists());
    use std::os::unix::fs::FileTypeExt;
    assert!(fs::metadata(at("null")).unwrap().file_type().is_fifo());
    assert_eq!(
        fs::read_dir(root.path().join("l0")).unwrap().count(),
        1,
        "nothing is left aside"
    );
}

/// Hostile members: what must be refused, and what must stay inside; either way nothing outside may change.
#[test]
fn nothing_gets_out() {
    let root = tempfile::tempdir().unwrap();
    let outside = root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "untouched").unwrap();
    fs::set_permissions(outside.join("precious"), fs::Permissions::from_mode(0o600)).unwrap();
    let before = census(&outside);
    let out = outside.to_str().unwrap();
    let up = "../".repeat(20);
    let l = Layer::default;
    // No path is as long as that, but behind the links the last one lies 280 deep.
    let forty = ["d"; 40].join("/");
    let deep = (0..7).fold(l().dir(&forty, 0o755).symlink("l0", &forty), |layer, i| {
        let below = format!("l{i}/{forty}");
        layer.dir(&below, 0o755).symlink(&format!("l{}", i + 1), &below)
    });
    type Case = (&'static str, Layer, bool);
    let cases: Vec<Case> = vec![
        ("dots", l().file("../evil", "x"), false),
        ("dots within", l().file("a/../../evil", "x"), false),
        ("harmless dots", l().file("a/../b", "x"), true),
        ("absolute", l().file(&format!("{out}/evil"), "x"), true),
        ("absolute link", l().symlink("l", out).file("l/evil", "x"), true),
        (
            "relative link",
            l().symlink("l", &format!("{up}{out}")).file("l/evil", "x"),
            true,
        ),
        (
            "link over link",
            l().symlink("a", "/")
                .symlink("b", "a/..")
                .file(&format!("b{out}/evil"), "x"),
            true,
        ),
        (
            "write through a link",
            l().symlink("l", &format!("{out}/precious")).file("l", "x"),
            true,
        ),
        (
            "directory on a link",
            l().symlink("l", out).dir("l", 0o777).file("l/evil", "x"),
            true,
        ),
        (
            "hard link out",
            l().link("h", "../../outside/precious").file("h", "x"),
            false,
        ),
        ("hard link absolute", l().link("h", &format!("{out}/precious")), false),
        (
            "hard link via link",
            l().symlink("l", out).link("h", "l/precious").file("h", "x"),
            true,
        ),
        ("hard link to nothing", l().link("h", "absent"), false),
        ("hard link to a directory", l().dir("d", 0o755).link("h", "d"), false),
        ("hard link to the root", l().link("h", "/"), false),
        ("below a file", l().file("f", "x").file("f/g", "x"), false),
        ("whiteout of dots", l().file(".wh...", "x"), false),
        ("whiteout of the directory", l().file("d/.wh..", "x"), false),
        ("whiteout of nothing", l().file("d/.wh.", "x"), false),
        (
            "whiteout via link",
            l().symlink("l", out).file("l/.wh.precious", ""),
            true,
        ),
        (
            "opaque via link",
            l().symlink("l", out).file("l/.wh..wh..opq", ""),
            true,
        ),
        ("below a whiteout", l().file(".wh.x/y", ""), false),
        ("loop", l().symlink("a", "b").symlink("b", "a").file("a/x", "x"), false),
        ("link to itself below", l().symlink("a", "a/a").file("a/x", "x"), false),
        (
            "magic",
            l().symlink("p", "/proc/self/root").file(&format!("p{out}/evil"), "x"),
            true,
        ),
        ("long name", l().pax(&[("path", &[b'a'; 5000])]).file("x", "x"), false),
        (
            "long component",
            l().pax(&[("path", &[b'a'; 300])]).file("x", "x"),
            false,
        ),
        (
            "deep",
            l().pax(&[("path", "a/".repeat(1500).as_bytes())]).file("x", "x"),
            false,
        ),
        ("deeper by a link each time", deep, false),
        ("nul", l().pax(&[("path", b"a\0b")]).file("x", "x"), false),
        ("pax dots", l().pax(&[("path", b"../evil")]).file("x", "x"), false),
        (
            "pax size lies",
            l().pax(&[("size", b"99999999999")]).file("x", "x"),
            false,
        ),
        (
            "pax garbage",
            l().raw("p", ::tar::EntryType::XHeader, "", 0o644, b"99 path=x\n"),
            false,
        ),
        (
            "hard link in place of its directory",
            l().dir("d", 0o755).file("d/f", "x").link("d", "d/f"),
            false,
        ),
        (
            "sparse without a map",
            l().pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"10")])
                .file("x", "no map here"),
            false,
        ),
        (
            "sparse beyond all",
            l().pax(&[("GNU.sparse.size", b"9223372036854775807"), ("GNU.sparse.map", b"0,1")])
                .file("x", "x"),
            false,
        ),
        (
            "sparse with overlaps",
            l().pax(&[("GNU.sparse.size", b"9"), ("GNU.sparse.map", b"0,2,1,2")])
                .file("x", "xxxx"),
            false,
        ),
        (
            "unknown type",
            l().raw("v", ::tar::EntryType::new(b'M'), "", 0o644, b""),
            false,
        ),
        ("root as a file", l().file("./", "x"), true),
    ];
    for (what, layer, accepted) in cases {
        let work = tempfile::tempdir_in(root.path()).unwrap();
        let name = layer.0.clone();
        let outcome = unpack_all(work.path(), vec![layer.end()]);
        assert_eq!(outcome.is_ok(), accepted, "{what}: {outcome:?}");
        if let Err(e) = outcome {
            assert_eq!(e.class(), crate::world::linux::content::Class::Permanent, "{what}: {e}");
            assert!(!name.is_empty() && e.to_string().len() < 1000, "{what}: {e}");
        }
        assert_eq!(census(&outside), before, "{what}");
        let beside: Vec<_> = fs::read_dir(root.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(beside.len(), 2, "{what}: {beside:?}");
    }
    assert!(!Path::new("/evil").exists());
}

#[test]
fn overlay_marks_cannot_be_smuggled() {
    let root = tempfile::tempdir().unwrap();
    let base = Layer::default().dir("d", 0o755).file("d/f", "f").end();
    let top = Layer::default()
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.trusted.overlay.redirect", b"/elsewhere"),
            ("SCHILY.xattr.security.selinux", b"label"),
            ("SCHILY.xattr.user.kept", b"v"),
        ])
        .dir("d", 0o755)
        .end();
    let lower = unpack_all(root.path(), vec![base, top]).unwrap();
    let names: Vec<CString> = xattr::all(open_any(&lower[0].join("d")).as_fd())
        .unwrap()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, [c"user.kept".to_owned()]);
    assert!(Mounted::new(&lower, root.path()).join("d/f").exists());
}

#[test]
fn damaged_archives_are_read_within_bounds() {
    let whole = Layer::default()
        .pax(&[
            ("path", b"long"),
            ("mtime", b"1.5"),
            ("GNU.sparse.size", b"9"),
            ("GNU.sparse.map", b"0,2,4,2"),
        ])
        .file("x", "xxxx")
        .raw("l", ::tar::EntryType::GNULongName, "", 0o644, b"name")
        .file("y", "y")
        .raw("s", ::tar::EntryType::GNUSparse, "", 0o644, b"")
        .end();
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..1 + next(4) {
            let at = next(bytes.len());
            bytes[at] = next(256) as u8;
        }
        // Checksums right, or nothing behind them is reached.
        for block in bytes.chunks_exact_mut(512).filter(|b| b[257..262] == *b"ustar") {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let mut reader = tar::Reader::new(&bytes[..], 4096);
        let mut read = 0;
        while let Ok(Some(_)) = reader.next_entry() {
            read += std::io::copy(&mut reader, &mut std::io::sink()).unwrap_or(0);
        }
        assert!(read <= bytes.len() as u64);
    }
}
