//! What a container has changed, from the upper directory of its overlay, as a layer's tar (OCI image-spec, layer):
//! changed files with owners and extended attributes, whiteouts for what is gone.
//!
//! The names and links in there are the container's. The tree is walked by descriptors, link by link never followed,
//! and nothing is opened but regular files and directories.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, major, minor};
use state::sandbox::{IdMapping, UserNamespace};
use tar::{Builder, EntryType, Header};

use super::stop::Stop;
use super::unpack::whiteout::{OPAQUE, is_opaque, is_whiteout, marker};
use super::xattr;

/// Directories within directories, as many as a layer may have.
const DEPTH: usize = 256;
/// Bytes of a name or link that a header has room for; longer ones stand in an extended header.
const SHORT: usize = 100;
/// Attributes of overlay's own.
const OVERLAY: &[u8] = b"trusted.overlay.";

/// Writes the layer; answers the paths (absolute inside) of what the container has deleted. `user`: the owners on disk
/// are those of this user namespace on the host, and in the layer they are those inside.
pub fn write(upper: &Path, user: Option<&UserNamespace>, to: impl Write, stop: &Stop) -> io::Result<Vec<String>> {
    let top = nix::fcntl::open(upper, DIRECTORY, Mode::empty())?;
    let mut layer = Layer {
        tar: Builder::new(to),
        links: HashMap::new(),
        deleted: Vec::new(),
        user,
        stop,
    };
    layer.directory(top.as_fd(), b"", 0)?;
    layer.tar.into_inner()?.flush()?;
    Ok(layer.deleted)
}

struct Layer<'a, W: Write> {
    tar: Builder<W>,
    /// Where the first name of a file with several is.
    links: HashMap<u64, Vec<u8>>,
    deleted: Vec<String>,
    user: Option<&'a UserNamespace>,
    stop: &'a Stop,
}

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);
const ANY: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

impl<W: Write> Layer<'_, W> {
    /// What is in a directory; `path` is empty or ends in a slash.
    fn directory(&mut self, dir: BorrowedFd<'_>, path: &[u8], depth: usize) -> io::Result<()> {
        if depth > DEPTH {
            let problem = format!("directories of the container are nested more than {DEPTH} deep");
            return Err(io::Error::other(problem));
        }
        if is_opaque(dir)? {
            let header = plain(EntryType::Regular, 0);
            self.member(header, &[path, OPAQUE].concat(), &[], Vec::new(), io::empty())?;
        }
        for name in names(dir)? {
            self.stop.check()?;
            let name = name.as_bytes();
            let fd = openat(dir, OsStr::from_bytes(name), ANY, Mode::empty())?;
            let stat = fstat(&fd)?;
            let full = [path, name].concat();
            if is_whiteout(&stat) {
                self.deleted.push(format!("/{}", String::from_utf8_lossy(&full)));
                let header = plain(EntryType::Regular, 0);
                let mark = [path, &marker(name)].concat();
                self.member(header, &mark, &[], Vec::new(), io::empty())?;
            } else if kind(&stat) == SFlag::S_IFDIR {
                let below = openat(dir, OsStr::from_bytes(name), DIRECTORY, Mode::empty())?;
                let full = [&full[..], b"/"].concat();
                let header = self.header(EntryType::Directory, &stat, 0);
                self.member(header, &full, &[], attributes(&fd)?, io::empty())?;
                self.directory(below.as_fd(), &full, depth + 1)?;
            } else {
                self.file(&fd, &stat, full)?;
            }
        }
        Ok(())
    }

    fn file(&mut self, fd: &OwnedFd, stat: &FileStat, path: Vec<u8>) -> io::Result<()> {
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&stat.st_ino) {
                let (first, header) = (first.clone(), self.header(EntryType::Link, stat, 0));
                return self.member(header, &path, &first, Vec::new(), io::empty());
            }
            self.links.insert(stat.st_ino, path.clone());
        }
        match kind(stat) {
            SFlag::S_IFREG => {
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                let header = self.header(EntryType::Regular, stat, size);
                // The very file that was looked at, by its descriptor. Exactly its size, whoever writes to it now.
                let file = File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
                let data = file.chain(io::repeat(0)).take(size);
                self.member(header, &path, &[], attributes(fd)?, data)
            }
            SFlag::S_IFLNK => {
                let target = readlinkat(fd, "")?;
                let header = self.header(EntryType::Symlink, stat, 0);
                self.member(header, &path, target.as_bytes(), attributes(fd)?, io::empty())
            }
            // A socket is made anew by whoever listens; a tar has no room for one.
            SFlag::S_IFSOCK => Ok(()),
            special => {
                let entry = match special {
                    SFlag::S_IFIFO => EntryType::Fifo,
                    SFlag::S_IFBLK => EntryType::Block,
                    _ => EntryType::Char,
                };
                let mut header = self.header(entry, stat, 0);
                header.set_device_major(u32::try_from(major(stat.st_rdev)).map_err(io::Error::other)?)?;
                header.set_device_minor(u32::try_from(minor(stat.st_rdev)).map_err(io::Error::other)?)?;
                self.member(header, &path, &[], attributes(fd)?, io::empty())
            }
        }
    }

    fn header(&self, entry: EntryType, stat: &FileStat, size: u64) -> Header {
        let mut header = plain(entry, size);
        let inside = |id: u32, maps: Option<&[IdMapping]>| maps.map_or(id, |maps| inside(id, maps));
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(inside(stat.st_uid, self.user.map(|user| &user.uids[..])).into());
        header.set_gid(inside(stat.st_gid, self.user.map(|user| &user.gids[..])).into());
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header
    }

    fn member(
        &mut self,
        mut header: Header,
        path: &[u8],
        link: &[u8],
        mut extensions: Vec<(String, Vec<u8>)>,
        data: impl Read,
    ) -> io::Result<()> {
        let old = header.as_old_mut();
        for (bytes, field, key) in [(path, &mut old.name, "path"), (link, &mut old.linkname, "linkpath")] {
            let fits = bytes.len().min(SHORT);
            field[..fits].copy_from_slice(&bytes[..fits]);
            if bytes.len() > SHORT {
                extensions.push((key.to_owned(), bytes.to_vec()));
            }
        }
        header.set_cksum();
        if !extensions.is_empty() {
            let records = extensions.iter().map(|(key, value)| (key.as_str(), &value[..]));
            self.tar.append_pax_extensions(records)?;
        }
        self.tar.append(&header, self.stop.reader(data))
    }
}

fn plain(entry: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(entry);
    header.set_size(size);
    header.set_mode(0);
    for zero in [Header::set_uid, Header::set_gid, Header::set_mtime] {
        zero(&mut header, 0);
    }
    header
}

/// The id that a user namespace has for one of the host's; what it does not map is kept.
fn inside(id: u32, maps: &[IdMapping]) -> u32 {
    let map = maps
        .iter()
        .find(|map| id >= map.host_id && id - map.host_id < map.length);
    map.map_or(id, |map| map.container_id.saturating_add(id - map.host_id))
}

/// Extended attributes as a layer has them, but overlay's own and names that an extended header cannot hold.
fn attributes(fd: &OwnedFd) -> io::Result<Vec<(String, Vec<u8>)>> {
    let all = xattr::all(fd.as_fd())?.into_iter();
    let named = all.filter_map(|(name, value)| {
        let own = name.as_bytes().starts_with(OVERLAY);
        let name = name.to_str().ok().filter(|name| !own && !name.contains('='))?;
        Some((format!("SCHILY.xattr.{name}"), value))
    });
    Ok(named.collect())
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut list = Vec::new();
    for entry in Dir::from_fd(openat(dir, ".", DIRECTORY, Mode::empty())?)?.iter() {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            list.push(entry.file_name().to_owned());
        }
    }
    list.sort();
    Ok(list)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::super::unpack::tests::{Layer as Lower, Mounted, assert_same, census, unpack_all};
    use super::super::unpack::whiteout::{make_opaque, make_whiteout};
    use super::*;

    fn layer(upper: &Path, user: Option<&UserNamespace>) -> (Vec<u8>, Vec<String>) {
        let (_teller, stop) = Stop::new();
        let mut tar = Vec::new();
        let deleted = write(upper, user, &mut tar, &stop).unwrap();
        (tar, deleted)
    }

    /// The layer put over the same image shows what the overlay showed.
    #[test]
    fn it_is_a_layer_that_gives_the_same_tree() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let base = Lower::default()
            .dir("etc/", 0o755)
            .file("etc/gone", "1")
            .file("etc/changed", "1")
            .dir("old/", 0o755)
            .file("old/below", "1")
            .end();
        let lower = unpack_all(&dir.path().join("a"), vec![base.clone()]).unwrap();
        let shown = {
            let mounted = Mounted::new(&lower, dir.path());
            let at = |name: &str| mounted.join(name);
            fs::remove_file(at("etc/gone")).unwrap();
            fs::write(at("etc/changed"), "22").unwrap();
            fs::set_permissions(at("etc/changed"), fs::Permissions::from_mode(0o4711)).unwrap();
            chown(at("etc/changed"), Some(3_000_000), Some(12)).unwrap();
            fs::remove_dir_all(at("old")).unwrap();
            fs::create_dir(at("old")).unwrap();
            fs::write(at("old/new"), "n").unwrap();
            fs::hard_link(at("old/new"), at("old/other")).unwrap();
            symlink("./a//b", at("link")).unwrap();
            symlink("x".repeat(300), at(&"y".repeat(200))).unwrap();
            let file = File::open(at("etc/changed")).unwrap();
            xattr::set(file.as_fd(), c"user.note", b"\0=\n").unwrap();
            nix::unistd::mkfifo(&at("fifo"), Mode::from_bits_truncate(0o600)).unwrap();
            std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
            fs::remove_file(at("socket")).unwrap();
            census(&mounted)
        };
        let (tar, deleted) = layer(&dir.path().join("upper"), None);
        assert_eq!(deleted, ["/etc/gone"]);
        let both = unpack_all(&dir.path().join("b"), vec![base, tar]).unwrap();
        fs::create_dir(dir.path().join("c")).unwrap();
        let mounted = Mounted::new(&both, &dir.path().join("c"));
        assert_same(&census(&mounted), &shown);
    }

    #[test]
    fn marks_of_overlay_become_those_of_a_layer() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        let d = nix::fcntl::open(&dir.path().join("d"), DIRECTORY, Mode::empty()).unwrap();
        make_opaque(d.as_fd()).unwrap();
        make_whiteout(d.as_fd(), b"w").unwrap();
        let (tar, deleted) = layer(dir.path(), None);
        assert_eq!(deleted, ["/d/w"]);
        let mut archive = tar::Archive::new(&tar[..]);
        let names: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path_bytes().into_owned())
            .collect();
        assert_eq!(names, [&b"d/"[..], b"d/.wh..wh..opq", b"d/.wh.w"]);
    }

    #[test]
    fn owners_are_those_inside() {
        let maps = [IdMapping {
            host_id: 100_000,
            container_id: 0,
            length: 65_536,
        }];
        assert_eq!(
            [100_000, 165_535, 165_536, 5].map(|id| inside(id, &maps)),
            [0, 65_535, 165_536, 5]
        );
    }

    #[test]
    fn it_ends_early_when_it_is_told() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "1").unwrap();
        let (teller, stop) = Stop::new();
        teller.send(true).unwrap();
        assert!(write(dir.path(), None, io::sink(), &stop).is_err());
    }
}
