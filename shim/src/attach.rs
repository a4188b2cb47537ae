//! Who follows a container's output live, and writes its stdin.
//!
//! Each gets the reading ends of pipes of its own: what it has not read yet is in there, not in the shim. One whose
//! pipe is full is cut off, so nobody ever waits for it: not the container, not the log, not the others.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use shim::Code;
use shim::api::{AttachRequest, Phase, StreamKind, Streams};

use crate::log::Kind;
use crate::process::{Caller, Proc};
use crate::service::{Refusal, Service, internal};
use crate::sys;

/// Bytes that a reader may lag.
const LAG: i32 = 1 << 20;
/// Most at once in one pod.
const ATTACHED: usize = 128;

/// One reader.
pub struct Attached {
    pub caller: Caller,
    /// Writing ends for stdout and stderr.
    pipes: [Option<File>; 2],
    is_lagging: bool,
}

impl Attached {
    fn pipe(&mut self, kind: Kind) -> &mut Option<File> {
        &mut self.pipes[usize::from(kind == Kind::Stderr)]
    }
}

/// Gives everyone new output.
pub fn spread(attached: &mut [Attached], kind: Kind, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    for one in attached {
        let Some(pipe) = one.pipe(kind) else { continue };
        // Whole or, with the reader too slow or gone, never again.
        match pipe.write(bytes) {
            Ok(written) if written == bytes.len() => continue,
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            _ => one.is_lagging = true,
        }
        *one.pipe(kind) = None;
    }
}

/// A stream has ended: its readers see that, once they have read all.
pub fn end(attached: &mut [Attached], kind: Kind) {
    for one in attached {
        *one.pipe(kind) = None;
    }
}

impl Service {
    pub fn attach(&mut self, caller: Caller, request: AttachRequest) -> Result<(), Refusal> {
        let count: usize = self.procs.iter().map(|proc| proc.attached.len()).sum();
        if count >= ATTACHED {
            return Err((Code::ResourceExhausted, format!("{ATTACHED} attached in this pod")));
        }
        let proc = self.find(&request.id)?;
        if proc.phase != Phase::Running || proc.task.pause {
            let why = format!("{} is not a running container", request.id);
            return Err((Code::FailedPrecondition, why));
        }
        let key = proc.key;
        let (mut given, mut pipes) = (Vec::new(), [None, None]);
        for (at, kind) in [Kind::Stdout, Kind::Stderr].into_iter().enumerate() {
            let is_wanted = [request.stdout, request.stderr][at];
            if is_wanted && proc.streams.iter().any(|stream| stream.kind() == kind) {
                let (ours, theirs) = output_pipe().map_err(internal)?;
                pipes[at] = Some(ours);
                given.push(([StreamKind::Stdout, StreamKind::Stderr][at], theirs));
            }
        }
        // Last: a stdin that ends with its first client is given away only once.
        let terminal = proc.terminal();
        if terminal.is_none() && request.stdin {
            given.extend(stdin(proc)?.map(|stdin| (StreamKind::Stdin, stdin)));
        }
        let fds: Vec<RawFd> = given.iter().map(|(_, fd)| fd.as_raw_fd()).chain(terminal).collect();
        let kinds = given.iter().map(|(kind, _)| *kind as i32);
        let kinds = kinds.chain(terminal.map(|_| StreamKind::Terminal as i32)).collect();
        let is_lagging = false;
        if self.hand_over(caller, &Streams { kinds }, &fds)
            && let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key)
        {
            proc.attached.push(Attached {
                caller,
                pipes,
                is_lagging,
            });
        }
        Ok(())
    }

    pub fn cut_off_laggards(&mut self) {
        let mut cut = Vec::new();
        for proc in &mut self.procs {
            if proc.attached.iter().any(|one| one.is_lagging) {
                cut.extend(proc.attached.extract_if(.., |one| one.is_lagging));
            }
        }
        for one in cut {
            let why = format!("the reader is {LAG} bytes behind and was cut off");
            self.answer(one.caller, Err((Code::ResourceExhausted, why)));
        }
    }
}

/// (writing end, reading end), with room for [`LAG`] if the system allows so much.
fn output_pipe() -> std::io::Result<(File, OwnedFd)> {
    let (read, write) = sys::pipe(libc::O_NONBLOCK)?;
    // SAFETY: no pointers.
    unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, LAG) };
    Ok((write.into(), read))
}

/// The writing end of a container's stdin, if it has one left.
fn stdin(proc: &mut Proc) -> Result<Option<OwnedFd>, Refusal> {
    let Some(run) = proc.task.run.as_ref().filter(|run| run.stdin) else {
        return Ok(None);
    };
    if run.stdin_once {
        return Ok(proc.stdin.take());
    }
    let path = Path::new(&run.fifo_dir).join("stdin");
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let opened = OpenOptions::new().write(true).custom_flags(flags).open(&path);
    opened
        .map(|file| Some(file.into()))
        .map_err(|error| internal(format_args!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_reader_that_lags_is_cut_off_and_the_others_go_on() {
        let (mut ends, mut attached) = (Vec::new(), Vec::new());
        for n in 0..2 {
            let (ours, theirs) = output_pipe().unwrap();
            ends.push(File::from(theirs));
            attached.push(Attached {
                caller: (n, 1),
                pipes: [Some(ours), None],
                is_lagging: false,
            });
        }
        let bytes = vec![7; 64 << 10];
        let mut read = vec![0; bytes.len()];
        for _ in 0..64 {
            spread(&mut attached, Kind::Stdout, &bytes);
            spread(&mut attached, Kind::Stderr, &bytes);
            ends[1].read_exact(&mut read).unwrap();
        }
        assert!(attached[0].is_lagging && attached[0].pipes[0].is_none());
        assert!(!attached[1].is_lagging && attached[1].pipes[0].is_some());
        end(&mut attached, Kind::Stdout);
        assert_eq!(ends[1].read(&mut read).unwrap(), 0);
    }
}
