//! SELinux: is it on, which labels its policy knows, and files that get one.

use std::ffi::CStr;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::{Mode, SFlag, fstatat};

use super::xattr;

/// Where selinuxfs is mounted.
const FS: &str = "/sys/fs/selinux";
const LABEL: &CStr = c"security.selinux";
/// Deeper trees than this are a mistake or an attack: each level holds two descriptors.
const DEPTH: usize = 200;

/// Has the kernel a policy?
pub fn is_on() -> bool {
    Path::new(FS).join("enforce").exists()
}

/// Does the policy know this label? Its file system answers a write of an unknown one with EINVAL.
pub fn knows(label: &str) -> io::Result<bool> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .open(Path::new(FS).join("context"))?;
    match file.write_all(&[label.as_bytes(), b"\0"].concat()) {
        Ok(()) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Labels the file of that name itself.
pub fn set(path: &Path, label: &str) -> io::Result<()> {
    let file = open(
        path,
        OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    let value = [label.as_bytes(), b"\0"].concat();
    able(xattr::set(file.as_fd(), LABEL, &value)).map_err(Into::into)
}

/// Labels a file, or a directory with all that is in it, links themselves and never where they lead. What bears the
/// label already is left alone.
pub fn set_all(path: &Path, label: &str) -> io::Result<()> {
    set(path, label)?;
    let how = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    match open(path, how, Mode::empty()) {
        Ok(dir) => below(dir, &[label.as_bytes(), b"\0"].concat(), 0),
        Err(Errno::ENOTDIR | Errno::ELOOP) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn below(dir: OwnedFd, label: &[u8], depth: usize) -> io::Result<()> {
    if depth > DEPTH {
        return Err(Errno::ENAMETOOLONG.into());
    }
    let mut list = Dir::from_fd(dir.try_clone()?)?;
    for entry in list.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        match one(dir.as_fd(), name, label, depth) {
            // The tree is in use: what has gone meanwhile needs none.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

fn one(dir: BorrowedFd<'_>, name: &CStr, label: &[u8], depth: usize) -> io::Result<()> {
    if xattr::get_at(dir, name.to_bytes(), LABEL).ok().as_deref() != Some(label) {
        able(xattr::set_at(dir, name.to_bytes(), LABEL, label))?;
    }
    let meta = fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    if SFlag::from_bits_truncate(meta.st_mode & SFlag::S_IFMT.bits()) != SFlag::S_IFDIR {
        return Ok(());
    }
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    below(openat2(dir, name, how)?, label, depth + 1)
}

/// A file system without labels has nothing to set (the CRI wants that ignored).
fn able(result: nix::Result<()>) -> nix::Result<()> {
    match result {
        Err(Errno::EOPNOTSUPP) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label_of(path: &Path) -> Option<String> {
        let dir = open(path.parent().unwrap(), OFlag::O_PATH, Mode::empty()).unwrap();
        let name = path.file_name().unwrap().as_encoded_bytes();
        let value = xattr::get_at(dir.as_fd(), name, LABEL).ok()?;
        Some(String::from_utf8(value).unwrap().trim_end_matches('\0').to_owned())
    }

    /// Without SELinux the kernel keeps the attribute as it does any other of root's.
    #[test]
    fn a_tree_is_labelled_and_what_its_links_lead_to_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("tree/a/b")).unwrap();
        std::fs::create_dir(at("outside")).unwrap();
        for file in ["tree/a/b/file", "outside/file", "alone"] {
            std::fs::write(at(file), "x").unwrap();
        }
        std::os::unix::fs::symlink(at("outside"), at("tree/a/out")).unwrap();
        std::os::unix::fs::symlink(at("outside/file"), at("tree/out")).unwrap();
        set(&at("tree/a/b"), "other").unwrap();
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        set_all(&at("tree"), label).unwrap();
        set_all(&at("alone"), label).unwrap();
        set_all(&at("tree/out"), label).unwrap();
        for labelled in [
            "tree",
            "tree/a",
            "tree/a/b",
            "tree/a/b/file",
            "tree/a/out",
            "tree/out",
            "alone",
        ] {
            assert_eq!(label_of(&at(labelled)).as_deref(), Some(label), "{labelled}");
        }
        for other in ["outside", "outside/file"] {
            assert_eq!(label_of(&at(other)), None, "{other}");
        }
    }
}
