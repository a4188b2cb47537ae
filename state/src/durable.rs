//! Records on disk: sled behind a guard. No other file names sled.
//!
//! sled's `flush` does not call fdatasync on Linux and takes damage for the end of its log. So each commit is one batch
//! that also raises `head`, then `flush`, then our own `sync_data` on a second descriptor; every value has a checksum;
//! and a watermark file beside the database says what must be there.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::disk::{Found, Op};
use crate::error::{Error, Result};
use crate::fault;
use crate::guard::{Ballast, Mark, Watermark, failed, sync_dir};

/// Version of the values' form. Raise it whenever an older program could not read, or would lose, what is written.
pub(crate) const FORMAT: u32 = 1;
const HEAD: &str = "head";
/// Databases set aside that are kept.
const KEEP_DAMAGED: u32 = 4;

/// The database of one root, used by one thread.
pub(crate) struct Disk {
    root: PathBuf,
    id: String,
    /// `None` after a failed write: the next commit opens it again.
    open: Option<Database>,
    head: Mark,
    watermark: Watermark,
    ballast: Ballast,
    marked: Instant,
    /// Keys of unreadable records: they stay as they are.
    kept: HashSet<String>,
    /// A failed database could not be closed: it keeps its lock.
    stuck: bool,
}

struct Database {
    /// Taken by `drop` only.
    sled: Option<sled::Db>,
    /// Our own descriptor of sled's file, for fdatasync.
    file: File,
}

impl Database {
    /// Closes it, which flushes; false if that does not end. sled may then wait for ever for a write that has failed.
    fn close(mut self) -> bool {
        self.closed()
    }

    fn closed(&mut self) -> bool {
        let Some(sled) = self.sled.take() else { return true };
        let (send, receive) = std::sync::mpsc::channel();
        let close = move || {
            // Damage may be met here too.
            if let Err(problem) = guarded(|| drop(sled)) {
                tracing::warn!(problem, "closing the store's database");
            }
            let _ = send.send(());
        };
        let closing = std::thread::Builder::new().name("store-close".into()).spawn(close);
        closing.is_ok() && receive.recv_timeout(Duration::from_secs(10)).is_ok()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if !self.closed() {
            tracing::error!("the store's database does not close");
        }
    }
}

/// Why a database cannot be used.
enum Trouble {
    /// Not the database's fault (permissions, no space, a newer format): leave it as it is.
    Stop(Error),
    Damaged(String),
}

type Records = Vec<(String, Result<Vec<u8>, String>)>;

impl Disk {
    /// Opens the database; one that is damaged is set aside and an empty one takes its place. `id` is the root's.
    pub fn open(root: &Path, id: &str) -> Result<(Disk, Found)> {
        let watermark = Watermark::open(root)?;
        let mut disk = Disk {
            root: root.to_owned(),
            id: id.to_owned(),
            open: None,
            head: watermark.mark.unwrap_or_default(),
            watermark,
            ballast: Ballast::new(root),
            marked: Instant::now(),
            kept: HashSet::new(),
            stuck: false,
        };
        let found = match disk.load() {
            Ok(Some(records)) => Found::Records(records),
            Ok(None) => Found::Nothing {
                gone: disk.watermark.mark.is_some(),
            },
            Err(Trouble::Stop(error)) => return Err(error),
            Err(Trouble::Damaged(why)) => {
                disk.open = None;
                let aside = disk.set_aside()?;
                match disk.load() {
                    Ok(_) => Found::Damaged(format!("{why}; kept as {}", aside.display())),
                    Err(Trouble::Stop(error)) => return Err(error),
                    Err(Trouble::Damaged(why)) => return Err(disk.storage(format!("a new database fails: {why}"))),
                }
            }
        };
        disk.ballast.room();
        Ok((disk, found))
    }

    fn path(&self) -> PathBuf {
        self.root.join("store")
    }

    fn storage(&self, problem: String) -> Error {
        Error::Storage {
            path: self.path().display().to_string(),
            problem,
        }
    }

    /// Opens sled and reads everything. `None`: it is new and empty.
    fn load(&mut self) -> Result<Option<Records>, Trouble> {
        let fresh = !self.path().join("db").exists();
        let database = self.open_with_ballast()?;
        let content = guarded(|| read_all(&database)).map_err(Trouble::Damaged)??;
        self.open = Some(database);
        let Some(head) = content.head else {
            // A database is born with its head, in its first batch.
            if content.records.is_empty() && (fresh || self.watermark.mark.is_none()) {
                return Ok(None);
            }
            return Err(Trouble::Damaged("its head is missing".into()));
        };
        if head.root != self.id {
            let problem = format!("it belongs to root {}, this one is {}", head.root, self.id);
            return Err(Trouble::Damaged(problem));
        }
        if content.records.len() as u64 != head.mark.live {
            let problem = format!(
                "{} records are there, {} should be",
                content.records.len(),
                head.mark.live
            );
            return Err(Trouble::Damaged(problem));
        }
        if let Some(mark) = self.watermark.mark
            && (head.mark.seq < mark.seq || (head.mark.seq == mark.seq && head.mark.live != mark.live))
        {
            let problem = format!("its end is missing: batch {} of {}", head.mark.seq, mark.seq);
            return Err(Trouble::Damaged(problem));
        }
        self.head = head.mark;
        Ok(Some(content.records))
    }

    /// sled cannot even be opened on a full disk: then the ballast goes.
    fn open_with_ballast(&self) -> Result<Database, Trouble> {
        let space = self.ballast.yield_to(0);
        open_sled(&self.path()).map_err(|trouble| match trouble {
            // On a full disk sled's complaint says nothing about what is stored.
            Trouble::Damaged(problem) if !space => Trouble::Stop(self.full(problem)),
            trouble => trouble,
        })
    }

    fn full(&self, problem: String) -> Error {
        Error::Full {
            path: self.path().display().to_string(),
            problem,
        }
    }

    /// Renames the database out of the way.
    fn set_aside(&self) -> Result<PathBuf> {
        let name = |n: u32| self.root.join(format!("store.damaged-{n}"));
        let free = (1..u32::MAX).find(|n| !name(*n).exists()).unwrap_or(u32::MAX);
        let aside = name(free);
        std::fs::rename(self.path(), &aside).map_err(|e| failed(&self.path(), "cannot set it aside", &e))?;
        if free > KEEP_DAMAGED {
            // Enough are kept to look at; the newest replaces the last of them.
            let last = name(KEEP_DAMAGED);
            tracing::warn!(path = %last.display(), "too many damaged databases are kept: the newest takes its place");
            let replaced = std::fs::remove_dir_all(&last).and_then(|()| std::fs::rename(&aside, &last));
            replaced.map_err(|e| failed(&last, "cannot replace it", &e))?;
            sync_dir(&self.root)?;
            return Ok(last);
        }
        sync_dir(&self.root)?;
        Ok(aside)
    }

    fn write(&self, database: &Database, ops: &[Op], head: Mark) -> Result<()> {
        let mut batch = sled::Batch::default();
        for op in ops {
            match &op.value {
                Some(json) => batch.insert(op.key.as_bytes(), encode(&op.key, json)),
                None => batch.remove(op.key.as_bytes()),
            }
        }
        let value = format!("{} {} {}", self.id, head.seq, head.live);
        batch.insert(HEAD, encode(HEAD, value.as_bytes()));
        let written = guarded(|| {
            fault::point("store.commit.before");
            if let Some(sled) = &database.sled {
                sled.apply_batch(batch)?;
                fault::point("store.commit.applied");
                sled.flush()?;
            }
            fault::point("store.commit.torn");
            database.file.sync_data()?;
            fault::point("store.commit.after");
            Ok(())
        });
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(sled::Error::Io(e))) => Err(failed(&self.path(), "cannot write", &e)),
            Ok(Err(e)) => Err(self.storage(format!("cannot write: {e}"))),
            Err(panic) => Err(self.storage(format!("cannot write: {panic}"))),
        }
    }

    /// Closes the database, if it lets itself be closed.
    fn shut(&mut self) {
        if let Some(database) = self.open.take() {
            self.stuck |= !database.close();
        }
    }

    /// Opens the database again after a failed write; its keys and values.
    fn reopen(&mut self) -> Result<HashMap<String, Vec<u8>>> {
        self.shut();
        if self.stuck {
            return Err(self.storage("it hangs after a failed write; start the program again".into()));
        }
        let stop = |trouble| match trouble {
            Trouble::Stop(error) => error,
            Trouble::Damaged(problem) => self.storage(problem),
        };
        let database = open_sled(&self.path()).map_err(stop)?;
        let content = guarded(|| read_all(&database))
            .map_err(|p| self.storage(p))?
            .map_err(stop)?;
        self.open = Some(database);
        let readable = content
            .records
            .into_iter()
            .filter_map(|(key, json)| Some((key, json.ok()?)));
        Ok(readable.filter(|(key, _)| !self.kept.contains(key)).collect())
    }
}

impl crate::disk::Disk for Disk {
    fn root_id(&self) -> &str {
        &self.id
    }

    fn keep(&mut self, key: String) {
        self.kept.insert(key);
    }

    fn release(&mut self, key: &str) -> bool {
        self.kept.remove(key)
    }

    fn kept(&self) -> usize {
        self.kept.len()
    }

    fn room(&self) -> Result<()> {
        if self.ballast.room() {
            return Ok(());
        }
        Err(self.full("only changes and removals are taken".into()))
    }

    fn commit(&mut self, ops: &[Op], live: u64, all: &dyn Fn() -> Vec<Op>) -> Result<()> {
        let head = Mark {
            seq: self.head.seq + 1,
            live,
        };
        // sled does not survive a full disk, so it must not meet one: it never gives back a large value's place in its
        // log and then waits for it for ever.
        let bytes: usize = ops
            .iter()
            .map(|op| op.key.len() + op.value.as_ref().map_or(0, Vec::len) + 64)
            .sum();
        if !self.ballast.yield_to(2 * bytes as u64) {
            return Err(self.full("the reserve is used up".into()));
        }
        let mut result = match &self.open {
            Some(database) => self.write(database, ops, head),
            None => Err(self.storage("not open".into())),
        };
        if result.is_err() {
            // After any failed write sled refuses all others, and what reached the disk is unknown.
            result = self.reopen().and_then(|present| {
                let mut again = difference(present, all());
                // An unreadable record that is thrown away is in neither.
                again.extend(ops.iter().filter(|op| op.value.is_none()).cloned());
                self.open
                    .as_ref()
                    .map_or_else(|| Ok(()), |database| self.write(database, &again, head))
            });
        }
        match &result {
            Ok(()) => self.head = head,
            Err(error) => {
                tracing::error!(%error, "the store cannot write");
                self.shut();
            }
        }
        result
    }

    fn mark_due(&self) -> Option<Duration> {
        let due = self.marked + Duration::from_secs(1);
        (self.watermark.mark != Some(self.head)).then(|| due.saturating_duration_since(Instant::now()))
    }

    fn mark(&mut self) {
        self.marked = Instant::now();
        fault::point("store.mark.before");
        if let Err(error) = self.watermark.set(self.head) {
            tracing::warn!(%error, "the store's watermark stays behind");
        }
        fault::point("store.mark.after");
    }
}

/// What must change to turn `present` into `wanted`.
fn difference(mut present: HashMap<String, Vec<u8>>, wanted: Vec<Op>) -> Vec<Op> {
    let mut ops: Vec<Op> = wanted
        .into_iter()
        .filter(|op| present.remove(&op.key) != op.value)
        .collect();
    ops.extend(present.into_keys().map(|key| Op { key, value: None }));
    ops
}

fn open_sled(path: &Path) -> Result<Database, Trouble> {
    let config = sled::Config::new().path(path).mode(sled::Mode::LowSpace);
    let config = config.cache_capacity(16 << 20).flush_every_ms(None);
    let started = Instant::now();
    let sled = loop {
        match guarded(|| config.open()).map_err(Trouble::Damaged)? {
            Ok(sled) => break sled,
            // The root's lock is ours, so sled's own is held by the last threads of a handle that this process dropped.
            Err(sled::Error::Io(e)) if is_lock(&e) && started.elapsed() < Duration::from_secs(5) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(sled::Error::Io(e)) if is_lock(&e) || e.raw_os_error().is_some() => {
                return Err(Trouble::Stop(failed(path, "cannot open", &e)));
            }
            Err(e) => return Err(Trouble::Damaged(e.to_string())),
        }
    };
    let durable = || {
        let file = File::open(path.join("db"))?;
        file.sync_all()?;
        File::open(path)?.sync_all()?;
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()?;
        Ok(file)
    };
    let file = durable().map_err(|e| Trouble::Stop(failed(path, "cannot sync", &e)))?;
    Ok(Database { sled: Some(sled), file })
}

fn is_lock(error: &std::io::Error) -> bool {
    error.raw_os_error().is_none() && error.to_string().contains("could not acquire lock")
}

struct Head {
    root: String,
    mark: Mark,
}

struct Content {
    head: Option<Head>,
    records: Records,
}

fn read_all(database: &Database) -> Result<Content, Trouble> {
    let mut content = Content {
        head: None,
        records: Vec::new(),
    };
    for entry in database.sled.iter().flat_map(|sled| sled.iter()) {
        let (key, value) = entry.map_err(|e| Trouble::Damaged(e.to_string()))?;
        let Ok(key) = std::str::from_utf8(&key) else {
            return Err(Trouble::Damaged("a key is not text".into()));
        };
        let value = decode(key, &value);
        if let Err(Unreadable::Newer(found)) = value {
            return Err(Trouble::Stop(Error::NewerFormat {
                path: key.to_owned(),
                found,
                known: FORMAT,
            }));
        }
        if key == HEAD {
            let head = value.ok().and_then(|text| parse_head(&text));
            content.head = Some(head.ok_or_else(|| Trouble::Damaged("its head is unreadable".into()))?);
        } else {
            let value = value.map_err(|_| "its checksum is wrong".to_owned());
            content.records.push((key.to_owned(), value));
        }
    }
    Ok(content)
}

fn parse_head(text: &[u8]) -> Option<Head> {
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    Some(Head {
        root: words.next()?.to_owned(),
        mark: Mark {
            seq: words.next()?.parse().ok()?,
            live: words.next()?.parse().ok()?,
        },
    })
}

enum Unreadable {
    Newer(u32),
    Damaged,
}

/// format, checksum of format, key and body, body
fn encode(key: &str, body: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(8 + body.len());
    value.extend(FORMAT.to_le_bytes());
    value.extend(checksum(FORMAT, key, body).to_le_bytes());
    value.extend(body);
    value
}

fn decode(key: &str, value: &[u8]) -> Result<Vec<u8>, Unreadable> {
    let word = |at: usize| Some(u32::from_le_bytes(value.get(at..at + 4)?.try_into().ok()?));
    let (Some(format), Some(crc)) = (word(0), word(4)) else {
        return Err(Unreadable::Damaged);
    };
    let body = &value[8..];
    if crc != checksum(format, key, body) {
        return Err(Unreadable::Damaged);
    }
    if format > FORMAT {
        return Err(Unreadable::Newer(format));
    }
    Ok(body.to_vec())
}

fn checksum(format: u32, key: &str, body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&format.to_le_bytes());
    crc.update(key.as_bytes());
    crc.update(body);
    crc.finalize()
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs sled's code; a panic (its way to meet damage) becomes an error and prints nothing.
fn guarded<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    result.map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(panic.downcast_ref::<&str>().copied());
        format!("sled: {}", text.unwrap_or("panic"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{ImageKind, ImageSpec};
    use crate::store::{Copies, New, Put, Store};
    use crate::{Image, Meta};

    /// A root with two images, whose database is then changed by `damage`.
    fn damaged(damage: impl FnOnce(&sled::Db, &str)) -> (tempfile::TempDir, Vec<std::sync::Arc<Image>>) {
        let root = tempfile::tempdir().unwrap();
        let none = Copies {
            all: Box::new(Vec::new),
            one: Box::new(|_, _| None),
        };
        let (store, _) = Store::open(root.path(), none).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let images = ["a", "b"].map(|name| {
            let new = New::<ImageKind> {
                meta: Meta {
                    name: name.into(),
                    ready_by: Some(5),
                    ..Meta::default()
                },
                spec: ImageSpec::default(),
            };
            match runtime.block_on(store.create(new)).unwrap() {
                Put::Created(object) | Put::Joined(object) => object,
            }
        });
        drop(store);
        let mut database = open_sled(&root.path().join("store")).ok().unwrap();
        damage(database.sled.as_ref().unwrap(), &format!("Image/{}", images[0].uid()));
        database.sled.as_ref().unwrap().flush().unwrap();
        assert!(database.closed());
        (root, images.into())
    }

    fn open(root: &Path, copy: Option<Vec<u8>>) -> Result<(Store, crate::store::Opened)> {
        let copies = Copies {
            all: Box::new(|| panic!("not asked for")),
            one: Box::new(move |_, _| copy.clone()),
        };
        Store::open(root, copies)
    }

    type Damage = fn(&sled::Db, &str);
    const DAMAGES: [(&str, Damage); 4] = [
        ("emptied", |db, key| drop(db.insert(key, &b""[..]).unwrap())),
        ("halved", |db, key| {
            let value = db.get(key).unwrap().unwrap();
            db.insert(key, &value[..value.len() / 2]).unwrap();
        }),
        ("flipped", |db, key| {
            let mut value = db.get(key).unwrap().unwrap().to_vec();
            value[40] ^= 1;
            db.insert(key, value).unwrap();
        }),
        ("not JSON", |db, key| drop(db.insert(key, encode(key, b"{")).unwrap())),
    ];

    #[test]
    fn a_bad_record_is_read_from_its_copy_or_quarantined() {
        for (what, damage) in DAMAGES {
            let (root, images) = damaged(damage);
            let (store, opened) = open(root.path(), None).unwrap();
            assert_eq!(opened.rebuilt, None, "{what}");
            assert_eq!(
                (opened.quarantined.len(), opened.quarantined[0].1.as_str()),
                (1, images[0].uid()),
                "{what}"
            );
            assert!(store.quarantined(images[0].uid()) && !store.quarantined(images[1].uid()));
            assert_eq!(store.list::<ImageKind>().len(), 1);
            drop(store);
            // It stays so, until there is a copy, which counts as delivered.
            assert_eq!(open(root.path(), Some(b"{".to_vec())).unwrap().1.quarantined.len(), 1);
            let (store, opened) = open(root.path(), Some(images[0].to_json().unwrap())).unwrap();
            assert!(opened.quarantined.is_empty(), "{what}");
            assert_eq!(store.by_name::<ImageKind>("a").unwrap().meta.ready_by, None);
            drop(store);
            assert!(open(root.path(), None).unwrap().1.quarantined.is_empty(), "{what}");
        }
    }

    #[test]
    fn a_bad_record_is_thrown_away_when_asked() {
        for (what, damage) in DAMAGES {
            let (root, images) = damaged(damage);
            let (store, _) = open(root.path(), None).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let discard = |uid: &str| runtime.block_on(store.discard("Image", uid)).unwrap();
            assert!(!discard(images[1].uid()), "{what}: it can be read");
            assert!(discard(images[0].uid()) && !discard(images[0].uid()), "{what}");
            assert!(!store.any_quarantined() && !store.quarantined(images[0].uid()));
            drop(store);
            let (store, opened) = open(root.path(), None).unwrap();
            assert!(
                opened.quarantined.is_empty() && opened.rebuilt.is_none(),
                "{what}: {opened:?}"
            );
            assert_eq!(store.list::<ImageKind>().len(), 1);
        }
    }

    /// A value as version 0.1.0 writes it, made by another program.
    #[test]
    fn the_bytes_of_the_first_format_stay_readable() {
        let body = br#"{"apiVersion":"reconcile/v1"}"#;
        let value = [&[0x01, 0, 0, 0, 0x3f, 0xfc, 0x2c, 0x2b][..], body].concat();
        let key = format!("Node/{}", "1a".repeat(32));
        assert!(decode(&key, &value).is_ok_and(|read| read == body));
        assert!(
            decode("Node/other", &value).is_err(),
            "a value moved to another key is none"
        );
    }

    #[test]
    fn a_newer_format_is_refused_and_left_alone() {
        let newer = |key: &str, body: &[u8]| {
            let mut value = 7u32.to_le_bytes().to_vec();
            value.extend(checksum(7, key, body).to_le_bytes());
            value.extend(body);
            value
        };
        let (root, _) = damaged(|db, key| drop(db.insert(key, newer(key, b"?")).unwrap()));
        for _ in 0..2 {
            let error = open(root.path(), None).err().unwrap();
            assert!(
                matches!(error, Error::NewerFormat { found: 7, known: 1, .. }),
                "{error}"
            );
        }
        assert!(!root.path().join("store.damaged-1").exists());
    }
}
