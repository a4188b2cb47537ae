//! Extended attributes of open descriptors, `O_PATH` ones too.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// The descriptor's magic link: leads to the very file, link or not.
fn magic(fd: BorrowedFd<'_>) -> CString {
    // Digits hold no NUL.
    CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default()
}

fn in_dir(dir: BorrowedFd<'_>, name: &[u8]) -> nix::Result<CString> {
    let mut path = magic(dir).into_bytes();
    path.push(b'/');
    path.extend(name);
    CString::new(path).map_err(|_| Errno::EINVAL)
}

pub fn set(fd: BorrowedFd<'_>, name: &CStr, value: &[u8]) -> nix::Result<()> {
    // SAFETY: both names are NUL-terminated, and the value is as long as stated; all outlive the call.
    let result = unsafe { libc::setxattr(magic(fd).as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    Errno::result(result).map(drop)
}

pub fn remove(fd: BorrowedFd<'_>, name: &CStr) -> nix::Result<()> {
    // SAFETY: both names are NUL-terminated and outlive the call.
    let result = unsafe { libc::removexattr(magic(fd).as_ptr(), name.as_ptr()) };
    Errno::result(result).map(drop)
}

/// On the last component of `name` in `dir` itself, also if it is a symbolic link.
pub fn set_at(dir: BorrowedFd<'_>, name: &[u8], key: &CStr, value: &[u8]) -> nix::Result<()> {
    let path = in_dir(dir, name)?;
    // SAFETY: as in `set`.
    let result = unsafe { libc::lsetxattr(path.as_ptr(), key.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    Errno::result(result).map(drop)
}

/// Of the last component of `name` in `dir` itself, also if it is a symbolic link.
pub fn get_at(dir: BorrowedFd<'_>, name: &[u8], key: &CStr) -> nix::Result<Vec<u8>> {
    let path = in_dir(dir, name)?;
    // SAFETY: both names are NUL-terminated, the buffer as long as stated.
    sized(|buf| unsafe { libc::lgetxattr(path.as_ptr(), key.as_ptr(), buf.as_mut_ptr().cast(), buf.len()) })
}

/// All attributes; a file system without any gives none.
pub fn all(fd: BorrowedFd<'_>) -> nix::Result<Vec<(CString, Vec<u8>)>> {
    let path = magic(fd);
    // SAFETY: the buffer is as long as stated.
    let read = |buf: &mut [u8]| unsafe { libc::listxattr(path.as_ptr(), buf.as_mut_ptr().cast(), buf.len()) };
    let names = match sized(read) {
        Err(Errno::ENOTSUP) => return Ok(Vec::new()),
        other => other?,
    };
    let mut attributes = Vec::new();
    for name in names.split(|b| *b == 0).filter(|n| !n.is_empty()) {
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the name is NUL-terminated, the buffer as long as stated.
        let read = |buf: &mut [u8]| unsafe {
            libc::getxattr(path.as_ptr(), name.as_ptr(), buf.as_mut_ptr().cast(), buf.len())
        };
        match sized(read) {
            Ok(value) => attributes.push((name, value)),
            Err(Errno::ENODATA) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(attributes)
}

/// Attributes are at most 64 KiB (xattr(7)), name lists as well.
fn sized(read: impl Fn(&mut [u8]) -> isize) -> nix::Result<Vec<u8>> {
    let mut buffer = vec![0; 64 << 10];
    let n = Errno::result(read(&mut buffer))?;
    buffer.truncate(n as usize);
    Ok(buffer)
}
