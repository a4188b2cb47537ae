//! The run record: one file per container or pause, the receipt of its life.
//!
//! ```text
//! 0        512       1024                    4096
//! | start   | stop    | end                    |     slot: magic u32 | length u32 | crc32 u32 | prost message
//! ```
//!
//! A slot whose checksum does not hold is absent. Start and stop are not flushed (another boot means Lost anyway); end
//! is flushed *before* the file is closed, so IN_CLOSE_WRITE tells of a durable end. Nothing keeps the file open for
//! writing, and an end is never overwritten, whoever comes first.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use prost::Message;

pub use crate::api::{EndSlot as End, StartSlot as Start, StopSlot as Stop};
use crate::{Error, Result, fault};

/// Reason of a container that never ran (CRI).
pub const START_ERROR: &str = "StartError";
/// Reason of an end whose status nobody saw.
pub const UNKNOWN: &str = "Unknown";

const MAGIC: u32 = u32::from_le_bytes(*b"RCR1");
const HEAD: usize = 12;
const START: (u64, usize) = (0, 512);
const STOP: (u64, usize) = (512, 512);
const END: (u64, usize) = (1024, 3072);
/// Longest `End::message` kept, bytes.
const MESSAGE: usize = 2048;

/// All that a run record says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunRecord {
    /// The process began.
    pub start: Option<Start>,
    /// It was asked to stop.
    pub stop: Option<Stop>,
    /// It ended. Never changes.
    pub end: Option<End>,
}

impl End {
    /// It never ran; CRI's code 128.
    pub fn start_error(message: impl Into<String>, now: i64) -> End {
        End {
            code: 128,
            finished_at: now,
            reason: START_ERROR.into(),
            message: message.into(),
            ..End::default()
        }
    }

    /// It is gone and nobody saw how; code 255, as CRI's peers say it.
    pub fn lost(now: i64) -> End {
        let message = "exit status lost".into();
        End {
            code: 255,
            finished_at: now,
            reason: UNKNOWN.into(),
            message,
            ..End::default()
        }
    }

    /// From a wait status.
    pub fn from_wait(status: i32, oom: bool, now: i64) -> End {
        let signal = if libc::WIFSIGNALED(status) {
            libc::WTERMSIG(status)
        } else {
            0
        };
        let code = if signal != 0 {
            128 + signal
        } else {
            libc::WEXITSTATUS(status)
        };
        let reason = match (oom, code) {
            (true, _) => "OOMKilled",
            (false, 0) => "Completed",
            (false, _) => "Error",
        };
        End {
            code,
            signal,
            oom,
            finished_at: now,
            reason: reason.into(),
            message: String::new(),
        }
    }
}

/// Reads a record; `None` if there is no file.
pub fn read(path: &Path) -> Result<Option<RunRecord>> {
    match File::open(path) {
        Ok(file) => read_file(&file).map(Some).map_err(Error::io("read run record", path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("open run record", path)(error)),
    }
}

/// Writes the start slot, making the file. Not flushed.
///
/// # Errors
/// If the record has a start already: a container never starts twice.
pub fn write_start(path: &Path, start: &Start) -> Result<()> {
    let file = open(path)?;
    let at = Error::io("write start to run record", path);
    let old = match read_file(&file) {
        Ok(old) => old,
        Err(error) => return Err(at(error)),
    };
    if old.start.is_some() || old.end.is_some() {
        return Err(at(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "it has started before",
        )));
    }
    write(&file, START, start).map_err(at)
}

/// Records a stop; returns what now holds: the first signal for ever, the earliest deadline. Not flushed.
pub fn write_stop(path: &Path, stop: Stop) -> Result<Stop> {
    let file = open(path)?;
    let at = Error::io("write stop to run record", path);
    let old = match read_file(&file) {
        Ok(record) => record.stop,
        Err(error) => return Err(at(error)),
    };
    let new = match &old {
        Some(old) => Stop {
            signal: old.signal,
            deadline: old.deadline.min(stop.deadline),
        },
        None => stop,
    };
    if old.as_ref() != Some(&new) {
        write(&file, STOP, &new).map_err(at)?;
    }
    Ok(new)
}

/// Writes the end slot durably unless there is one; returns the one that stands.
pub fn write_end(path: &Path, mut end: End) -> Result<End> {
    let file = open(path)?;
    if let Some(old) = read_file(&file).map_err(Error::io("read run record", path))?.end {
        return Ok(old);
    }
    end.message.truncate(end.message.floor_char_boundary(MESSAGE));
    write(&file, END, &end)
        .and_then(|()| file.sync_data())
        .map_err(Error::io("write end to run record", path))?;
    fault::point("record.end.flushed");
    Ok(end)
}

/// Opens for writing under the lock that makes read-then-write one step; closing releases it.
fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path);
    let file = file.map_err(Error::io("open run record", path))?;
    // SAFETY: flock on a descriptor that `file` owns.
    while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(Error::io("lock run record", path)(error));
        }
    }
    Ok(file)
}

fn read_file(file: &File) -> io::Result<RunRecord> {
    let mut bytes = [0; (END.0 as usize) + END.1];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64)? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(RunRecord {
        start: slot(&bytes, START)?,
        stop: slot(&bytes, STOP)?,
        end: slot(&bytes, END)?,
    })
}

/// `None` if it was never written or is torn. One of a later form is an error: taken for absent, its container would
/// start a second time.
fn slot<M: Message + Default>(bytes: &[u8], place: (u64, usize)) -> io::Result<Option<M>> {
    let Some((magic, body)) = whole(bytes, place) else {
        return Ok(None);
    };
    match magic.to_le_bytes() {
        _ if magic == MAGIC => Ok(M::decode(body).ok()),
        [b'R', b'C', b'R', version] => {
            let version = char::from(version);
            let why = format!("its form {version:?} is newer than this program, which knows '1'; upgrade it");
            Err(io::Error::new(io::ErrorKind::Unsupported, why))
        }
        _ => Ok(None),
    }
}

/// Magic and body of a slot whose checksum holds.
fn whole(bytes: &[u8], (offset, size): (u64, usize)) -> Option<(u32, &[u8])> {
    let slot = bytes.get(offset as usize..offset as usize + size)?;
    let word = |at: usize| slot[at..].first_chunk().map(|word| u32::from_le_bytes(*word));
    let body = slot.get(HEAD..HEAD.checked_add(word(4)? as usize)?)?;
    (word(8)? == crc32(body)).then_some((word(0)?, body))
}

fn write(file: &File, (offset, size): (u64, usize), message: &impl Message) -> io::Result<()> {
    let body = message.encode_to_vec();
    if HEAD + body.len() > size {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too long for its slot"));
    }
    let mut slot = Vec::with_capacity(HEAD + body.len());
    slot.extend(MAGIC.to_le_bytes());
    slot.extend((body.len() as u32).to_le_bytes());
    slot.extend(crc32(&body).to_le_bytes());
    slot.extend(body);
    if fault::armed() {
        write_in_halves(file, &slot, offset)?;
    }
    file.write_all_at(&slot, offset)
}

/// For a test that cuts it short.
fn write_in_halves(file: &File, slot: &[u8], offset: u64) -> io::Result<()> {
    let name = [(START, "start"), (STOP, "stop"), (END, "end")]
        .into_iter()
        .find_map(|((at, _), name)| (at == offset).then_some(name))
        .unwrap_or_default();
    fault::check(&format!("record.{name}.before"))?;
    file.write_all_at(&slot[..slot.len() / 2], offset)?;
    fault::check(&format!("record.{name}.torn"))?;
    file.write_all_at(slot, offset)?;
    fault::check(&format!("record.{name}.written"))
}

/// CRC-32 (IEEE), bit by bit: the slots are small and rare, a table would cost a resident kilobyte.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    /// The slots of a record as version 0.1.0 writes them, encoded by another program.
    const GOLDEN: [(usize, &str); 3] = [
        (
            0,
            "5243523120000000e2bd9bef08d20910d5bb031a0d35613363306637652d626f6f7420959a97ece39fe7cb17",
        ),
        (512, "52435231090000003df313f9080f1080bcf0e6f002"),
        (
            1024,
            "524352311e0000001ea080ba082a18012080bc9898d4a2e7cb172a094f4f4d4b696c6c65643203776879",
        ),
    ];

    #[test]
    fn the_bytes_of_the_first_version_stay_readable() {
        let mut bytes = vec![0; 4096];
        for (at, hex) in GOLDEN {
            for (n, pair) in hex.as_bytes().chunks(2).enumerate() {
                bytes[at + n] = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        std::fs::write(&path, bytes).unwrap();
        let wanted = RunRecord {
            start: Some(Start {
                pid: 1234,
                start_ticks: 56789,
                boot_id: "5a3c0f7e-boot".into(),
                started_at: 1_700_000_000_123_456_789,
            }),
            stop: Some(Stop {
                signal: 15,
                deadline: 99_000_000_000,
            }),
            end: Some(End {
                code: 42,
                signal: 0,
                oom: true,
                finished_at: 1_700_000_099_000_000_000,
                reason: "OOMKilled".into(),
                message: "why".into(),
            }),
        };
        assert_eq!(read(&path).unwrap(), Some(wanted));
    }

    #[test]
    fn a_newer_record_is_refused_and_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let start = Start {
            boot_id: "a boot".into(),
            ..Start::default()
        };
        write_start(&path, &start).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[3] = b'2';
        std::fs::write(&path, &bytes).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("newer"));
        assert!(write_start(&path, &Start::default()).is_err());
        assert!(write_stop(&path, Stop::default()).is_err());
        assert!(write_end(&path, End::lost(1)).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        // Torn, whatever its first bytes are, is absent.
        bytes[15] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path).unwrap(), Some(RunRecord::default()));
    }

    #[test]
    fn slots_read_back_and_ends_stand() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        assert_eq!(read(&path).unwrap(), None);
        let start = Start {
            pid: 7,
            start_ticks: 9,
            boot_id: "b".into(),
            started_at: 1,
        };
        write_start(&path, &start).unwrap();
        assert!(write_start(&path, &start).is_err());
        assert_eq!(
            write_stop(
                &path,
                Stop {
                    signal: 15,
                    deadline: 100
                }
            )
            .unwrap()
            .deadline,
            100
        );
        assert_eq!(
            write_stop(
                &path,
                Stop {
                    signal: 9,
                    deadline: 50
                }
            )
            .unwrap(),
            Stop {
                signal: 15,
                deadline: 50
            }
        );
        assert_eq!(
            write_stop(
                &path,
                Stop {
                    signal: 9,
                    deadline: 70
                }
            )
            .unwrap()
            .deadline,
            50
        );
        let end = write_end(&path, End::from_wait(9, true, 5)).unwrap();
        assert_eq!((end.code, end.signal, end.reason.as_str()), (137, 9, "OOMKilled"));
        assert_eq!(write_end(&path, End::lost(6)).unwrap(), end);
        let record = read(&path).unwrap().unwrap();
        assert_eq!((record.start, record.end), (Some(start), Some(end)));
    }

    #[test]
    fn a_torn_slot_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        write_end(&path, End::lost(6)).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), RunRecord::default());
        write_end(&path, End::start_error("é".repeat(4000), 7)).unwrap();
        assert_eq!(read(&path).unwrap().unwrap().end.unwrap().message.len(), MESSAGE);
    }
}
