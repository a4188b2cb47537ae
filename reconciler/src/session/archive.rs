//! The archive of a checkpoint: one uncompressed tar with the members that podman, CRI-O, containerd and checkpointctl
//! know. It is complete under its name, or not there.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use state::{Container, PodSandbox};
use tar::{Builder, EntryType, Header};

use crate::container::Stand;
use crate::world::linux::criu::{IMAGES, LOG};
use crate::world::linux::stop::Stop;

/// Names the unfinished archive, in the work directory: whoever comes after us removes it.
pub const UNFINISHED: &str = "unfinished";
/// The layer of what the container has changed.
pub const DIFF: &str = "rootfs-diff.tar";
/// A JSON list of the paths that it has deleted.
pub const DELETED: &str = "deleted.files";
/// The OCI runtime configuration.
pub const SPEC: &str = "spec.dump";
/// What [`config`] makes.
pub const CONFIG: &str = "config.dump";
/// CRIU's figures, if it wrote some.
const STATS: &str = "stats-dump";

/// Our own temporary name beside an archive's: nobody else's file is ever removed.
const PREFIX: &str = ".checkpoint-";
const SUFFIX: &str = ".part";

/// Whose state it is, as checkpointctl reads it (its `ContainerConfig`). Times are ns since the epoch.
pub fn config(sandbox: &PodSandbox, container: &Container, stand: &Stand, now: i64) -> Value {
    let time = |ns: i64| {
        jiff::Timestamp::from_nanosecond(ns.into())
            .unwrap_or_default()
            .to_string()
    };
    let runtime = match sandbox.spec.runtime_handler.as_str() {
        "" => "reconcile",
        handler => handler,
    };
    json!({
        "id": container.uid(),
        "name": container.spec.name,
        "rootfsImage": stand.id,
        "rootfsImageRef": stand.manifest_digest,
        "rootfsImageName": container.spec.image.requested,
        "runtime": runtime,
        "createdTime": time(container.meta.created),
        "checkpointedTime": time(now),
        "restored": false,
    })
}

/// What is wrong with the place for an archive, if anything. It may hang as the file system there may.
pub fn misplaced(archive: &Path) -> Option<String> {
    let (Some(name), Some(parent)) = (archive.file_name(), archive.parent()) else {
        return Some(format!("{} does not name a file", archive.display()));
    };
    if name.len() > 255 || archive.as_os_str().as_bytes().ends_with(b"/") {
        return Some(format!("{} does not name a file", archive.display()));
    }
    match parent.metadata() {
        Err(e) => return Some(format!("{}: {e}", parent.display())),
        Ok(meta) if !meta.is_dir() => return Some(format!("{} is not a directory", parent.display())),
        Ok(_) => {}
    }
    match archive.symlink_metadata() {
        Ok(meta) if !meta.is_file() => Some(format!("{} is there and is no regular file", archive.display())),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Some(format!("{}: {e}", archive.display())),
        _ => None,
    }
}

/// Packs what is in the work directory into `archive`; `token` makes the temporary name unique.
pub fn pack(work: &Path, archive: &Path, token: &str, stop: &Stop) -> io::Result<()> {
    let parent = archive.parent().unwrap_or(Path::new("/"));
    let temp = parent.join(format!("{PREFIX}{token}{SUFFIX}"));
    // Flushed first: after a power cut too it must be known what to remove.
    let mut note = File::create(work.join(UNFINISHED))?;
    note.write_all(temp.as_os_str().as_bytes())?;
    note.sync_all()?;
    File::open(work)?.sync_all()?;
    shim::fault::check("checkpoint.archive.before")?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&temp)?;
    let finished = write(work, &file, stop).and_then(|()| {
        shim::fault::check("checkpoint.archive.torn")?;
        file.sync_all()?;
        stop.check()?;
        fs::rename(&temp, archive)
    });
    if finished.is_err() {
        let _ = fs::remove_file(&temp);
        return finished;
    }
    shim::fault::check("checkpoint.archive.after")?;
    File::open(parent)?.sync_all()
}

/// Removes the unfinished archive that a work directory names; absent is success.
pub fn remove_unfinished(work: &Path) -> io::Result<()> {
    let note = match fs::read(work.join(UNFINISHED)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let temp = PathBuf::from(OsStr::from_bytes(&note));
    let name = temp.file_name().unwrap_or_default().to_string_lossy();
    if !temp.is_absolute() || !name.starts_with(PREFIX) || !name.ends_with(SUFFIX) {
        return Ok(()); // cut while it was written: there is no archive yet
    }
    match fs::remove_file(&temp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn write(work: &Path, to: &File, stop: &Stop) -> io::Result<()> {
    let mut tar = Builder::new(BufWriter::with_capacity(1 << 20, to));
    for name in [CONFIG, SPEC, DELETED, DIFF, LOG, STATS] {
        add(&mut tar, &work.join(name), name, stop)?;
    }
    tar.append_data(
        &mut header(EntryType::Directory, 0o700, 0),
        format!("{IMAGES}/"),
        io::empty(),
    )?;
    let mut images = Vec::new();
    for entry in fs::read_dir(work.join(IMAGES))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            images.push(entry.file_name());
        }
    }
    images.sort();
    for name in images {
        let member = Path::new(IMAGES).join(&name);
        add(&mut tar, &work.join(&member), &member, stop)?;
    }
    tar.into_inner()?.flush()
}

/// A file that is not there is not added.
fn add(tar: &mut Builder<impl Write>, path: &Path, name: impl AsRef<Path>, stop: &Stop) -> io::Result<()> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut header = header(EntryType::Regular, 0o600, file.metadata()?.len());
    tar.append_data(&mut header, name, stop.reader(file))
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn work(dir: &Path) -> PathBuf {
        let work = dir.join("work");
        fs::create_dir_all(work.join(IMAGES)).unwrap();
        for (name, text) in [
            (CONFIG, "{}"),
            (SPEC, "{}"),
            (DIFF, "d"),
            ("checkpoint/pages-1.img", "p"),
            ("criu.err", ""),
        ] {
            fs::write(work.join(name), text).unwrap();
        }
        work
    }

    #[test]
    fn members_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (work, archive) = (work(dir.path()), dir.path().join("a.tar"));
        let (_teller, stop) = Stop::new();
        fs::write(&archive, "an older one").unwrap();
        pack(&work, &archive, "t", &stop).unwrap();
        assert_eq!(archive.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        let mut read = tar::Archive::new(File::open(&archive).unwrap());
        let names = read
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().display().to_string());
        let want = [CONFIG, SPEC, DIFF, "checkpoint/", "checkpoint/pages-1.img"];
        assert_eq!(names.collect::<Vec<_>>(), want);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn an_archive_that_is_cut_short_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (work, archive) = (work(dir.path()), dir.path().join("a.tar"));
        let (teller, stop) = Stop::new();
        teller.send(true).unwrap();
        assert!(pack(&work, &archive, "t", &stop).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // What a crash leaves is named, and only that is removed.
        let temp = dir.path().join(".checkpoint-t.part");
        fs::write(&temp, "").unwrap();
        remove_unfinished(&work).unwrap();
        remove_unfinished(&work).unwrap();
        assert!(!temp.exists());
        fs::write(work.join(UNFINISHED), work.join(CONFIG).as_os_str().as_bytes()).unwrap();
        remove_unfinished(&work).unwrap();
        assert!(work.join(CONFIG).exists());
    }

    #[test]
    fn a_place_must_be_a_file_in_a_directory_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(misplaced(&dir.path().join("a.tar")), None);
        fs::write(dir.path().join("a.tar"), "").unwrap();
        assert_eq!(misplaced(&dir.path().join("a.tar")), None);
        for bad in ["a.tar/b", "none/a", "", "..", "a/"] {
            assert!(misplaced(&dir.path().join(bad)).is_some(), "{bad:?}");
        }
        assert!(misplaced(Path::new("/")).is_some());
    }
}
