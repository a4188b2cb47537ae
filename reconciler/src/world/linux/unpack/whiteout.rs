//! Deletions in a layer: from the names of the image specification to the marks of overlay.

use std::os::fd::BorrowedFd;

use nix::sys::stat::{FileStat, Mode, SFlag, makedev, mknodat};

use super::super::xattr;

/// What the name of a member means (OCI image-spec, layer, "Whiteouts").
#[derive(Debug, PartialEq, Eq)]
pub enum Mark<'a> {
    /// Nothing special.
    None,
    /// `.wh.NAME`: NAME of the layers below is gone.
    Whiteout(&'a [u8]),
    /// `.wh..wh..opq`: all that the layers below have in this directory is gone.
    Opaque,
    /// Left over by aufs.
    Ignored,
    /// `.wh.` of nothing.
    Malformed,
}

pub fn mark(name: &[u8]) -> Mark<'_> {
    match name.strip_prefix(b".wh.") {
        None => Mark::None,
        Some(b".wh..opq") => Mark::Opaque,
        Some(b"" | b"." | b"..") => Mark::Malformed,
        Some(rest) if rest.starts_with(b".wh.") => Mark::Ignored,
        Some(rest) => Mark::Whiteout(rest),
    }
}

/// The image specification's own name for the whiteout of a whole directory, and of one name.
pub const OPAQUE: &[u8] = b".wh..wh..opq";

pub fn marker(name: &[u8]) -> Vec<u8> {
    [b".wh.", name].concat()
}

/// Overlay's whiteout: a character device 0:0.
pub fn is_whiteout(stat: &FileStat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == 0
}

pub fn make_whiteout(parent: BorrowedFd<'_>, name: &[u8]) -> nix::Result<()> {
    mknodat(parent, name, SFlag::S_IFCHR, Mode::empty(), makedev(0, 0))
}

pub fn make_opaque(dir: BorrowedFd<'_>) -> nix::Result<()> {
    xattr::set(dir, c"trusted.overlay.opaque", b"y")
}

pub fn is_opaque(dir: BorrowedFd<'_>) -> nix::Result<bool> {
    let all = xattr::all(dir)?;
    Ok(all
        .iter()
        .any(|(name, value)| name.as_c_str() == c"trusted.overlay.opaque" && value == b"y"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(mark(b"a.wh.b"), Mark::None);
        assert_eq!(mark(b".wh.b"), Mark::Whiteout(b"b"));
        assert_eq!(mark(b".wh..b"), Mark::Whiteout(b".b"));
        assert_eq!(mark(b".wh..wh..opq"), Mark::Opaque);
        assert_eq!(mark(b".wh..wh.plnk"), Mark::Ignored);
        for bad in [&b".wh."[..], b".wh..", b".wh..."] {
            assert_eq!(mark(bad), Mark::Malformed, "{bad:?}");
        }
    }
}
