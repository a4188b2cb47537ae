//! File systems whose server never answers: whoever looks at them waits.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The request with which a FUSE begins (linux/fuse.h).
const INIT: u32 = 26;
/// Bytes of a request's header and of an answer's.
const HEADER: (usize, usize) = (40, 16);
/// The kernel gives nothing to a server that reads less at once.
const LONGEST: usize = 1 << 20;

/// A mounted one; gone when dropped.
pub struct Hung {
    point: PathBuf,
    server: Option<File>,
    reader: Option<JoinHandle<()>>,
}

impl Hung {
    /// Whoever waits can be killed: the server has not taken the request yet.
    pub fn mount(point: PathBuf) -> Result<Hung> {
        fs::create_dir(&point)?;
        let server = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            server.as_raw_fd()
        );
        mount(Some("hung"), &point, Some("fuse"), MsFlags::empty(), Some(&*options)).context("mount a FUSE")?;
        Ok(Hung {
            point,
            server: Some(server),
            reader: None,
        })
    }

    /// The server takes every request, and from then on nothing but its answer ends the wait.
    pub fn unkillable(point: PathBuf) -> Result<Hung> {
        let mut hung = Hung::mount(point)?;
        let server = hung.server.take().context("its server")?;
        hung.reader = Some(std::thread::spawn(move || take_all(server)));
        Ok(hung)
    }

    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Whoever waits is told that there is no server.
    pub fn let_go(&mut self) {
        self.server = None;
        // Ends the connection, whatever is under way.
        let _ = umount2(&self.point, MntFlags::MNT_FORCE);
        let _ = umount2(&self.point, MntFlags::MNT_DETACH);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Answers the first request, so that others come, and no other.
fn take_all(mut server: File) {
    let mut request = vec![0; LONGEST];
    while let Ok(len) = server.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]]);
        if len < HEADER.0 + 8 || word(4) != INIT {
            continue;
        }
        // The kernel's own version; longest write, one page. The rest of fuse_init_out is 0.
        let mut body = [0u8; 64];
        body[..8].copy_from_slice(&request[HEADER.0..HEADER.0 + 8]);
        body[20..24].copy_from_slice(&4096u32.to_ne_bytes());
        let mut answer = Vec::from(((HEADER.1 + body.len()) as u32).to_ne_bytes());
        answer.extend(0u32.to_ne_bytes());
        answer.extend(&request[8..16]);
        answer.extend(body);
        let _ = server.write_all(&answer);
    }
}
