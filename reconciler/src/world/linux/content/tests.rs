//! The store on a real file system.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

fn fresh() -> (tempfile::TempDir, Content) {
    let root = tempfile::tempdir().unwrap();
    let content = Content::open(root.path()).unwrap();
    (root, content)
}

fn of(bytes: &[u8]) -> Digest {
    digest_of(Sha256::new_with_prefix(bytes))
}

fn any() -> MediaType {
    MediaType::ImageLayer
}

/// Fails the test if it is read.
struct Untouched;

impl Read for Untouched {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("read although the blob is here")
    }
}

#[test]
fn blobs_are_verified_and_kept_once() {
    let (_root, content) = fresh();
    let bytes = vec![7; 300_000];
    let digest = of(&bytes);
    let unknown = content.ingest(any(), &mut &bytes[..], None, None).unwrap();
    assert_eq!((unknown.digest(), unknown.size()), (&digest, 300_000));
    let again = content
        .ingest(any(), &mut Untouched, Some(&digest), Some(300_000))
        .unwrap();
    assert_eq!(again, unknown);
    assert_eq!(content.list_blobs().unwrap(), [(digest.clone(), 300_000)]);
    assert!(content.partials().unwrap().is_empty());
    assert!(content.usage().unwrap().bytes >= 300_000);
    content.remove_blob(&digest).unwrap();
    content.remove_blob(&digest).unwrap();
    assert!(!content.exists(&unknown).unwrap());
    assert!(matches!(content.open_blob(&digest), Err(Error::NotFound(_))));

    let wrong = content
        .ingest(any(), &mut &b"other"[..], Some(&digest), None)
        .unwrap_err();
    assert!(matches!(wrong, Error::Digest { .. }), "{wrong}");
    let long = content
        .ingest(any(), &mut &bytes[..], Some(&digest), Some(1000))
        .unwrap_err();
    assert!(matches!(long, Error::TooBig { limit: 1000, .. }), "{long}");
    let short = content.ingest(any(), &mut &bytes[..], None, Some(300_001)).unwrap_err();
    assert!(short.to_string().contains("300000 bytes"), "{short}");
    assert!(content.list_blobs().unwrap().is_empty());
    assert!(
        content.partials().unwrap().is_empty(),
        "nothing that cannot be resumed stays"
    );
}

#[test]
fn a_cut_off_blob_is_resumed() {
    let (root, content) = fresh();
    let bytes: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    let (digest, size) = (of(&bytes), bytes.len() as u64);
    let mut writer = content.writer(&digest, Some(size)).unwrap().unwrap();
    writer.write_all(&bytes[..150_000]).unwrap();
    assert!(matches!(
        content.begin(&digest, Some(size), false).unwrap(),
        Begin::Taken
    ));
    drop(writer);
    let content = Content::open(root.path()).unwrap();
    let partials = content.partials().unwrap();
    let known = partials.iter().find(|p| p.name.starts_with("sha256-")).unwrap();
    assert_eq!(known.bytes, 150_000);
    assert!(!content.remove_partial(known, Duration::from_secs(3600)).unwrap());
    let mut writer = content.writer(&digest, Some(size)).unwrap().unwrap();
    assert_eq!(writer.offset(), 150_000);
    writer.write_all(&bytes[150_000..]).unwrap();
    assert_eq!(writer.commit(any()).unwrap().size(), size);
    assert!(content.sound(&digest).unwrap());
    let hour = Duration::from_secs(3600);
    assert_eq!(content.list_older(Duration::ZERO).unwrap().len(), 1);
    let blob = root.path().join("content/blobs/sha256").join(digest.digest());
    File::open(&blob)
        .unwrap()
        .set_modified(SystemTime::now() - 2 * hour)
        .unwrap();
    assert_eq!(content.list_older(hour).unwrap(), [(digest.clone(), size)]);
    assert!(matches!(
        content.begin(&digest, Some(size), true).unwrap(),
        Begin::Present
    ));
    assert!(content.list_older(hour).unwrap().is_empty(), "it is wanted again");
}

#[test]
fn writers_of_one_digest_share() {
    let (_root, content) = fresh();
    let bytes = vec![3; 1 << 20];
    let digest = of(&bytes);
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                if let Some(mut writer) = content.writer(&digest, None).unwrap() {
                    reads.fetch_add(1, Ordering::Relaxed);
                    writer.write_all(&bytes).unwrap();
                    writer.commit(any()).unwrap();
                }
            });
        }
    });
    assert_eq!(reads.into_inner(), 1);
}

/// A pipe that says nothing.
struct Stalled(std::sync::mpsc::Receiver<()>);

impl Read for Stalled {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.0.recv().map(|()| 0).map_err(io::Error::other)
    }
}

#[test]
fn a_reader_that_stalls_keeps_nobody_waiting() {
    let (root, content) = fresh();
    let (go, pipe) = std::sync::mpsc::channel();
    let digest = of(b"some bytes");
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| content.ingest(any(), &mut Stalled(pipe), Some(&digest), Some(10)));
        while content.partials().unwrap().is_empty() {
            std::thread::yield_now();
        }
        let other = Content::open(root.path()).unwrap();
        let mut writer = other.writer(&digest, Some(10)).unwrap().unwrap();
        writer.write_all(b"some bytes").unwrap();
        writer.commit(any()).unwrap();
        drop(go);
        assert!(stalled.join().unwrap().is_err());
    });
    assert!(content.sound(&digest).unwrap());
    assert!(content.partials().unwrap().is_empty());
}

#[test]
fn nothing_is_collected_while_somebody_imports() {
    let (root, content) = fresh();
    let other = Content::open(root.path()).unwrap();
    let (one, two) = (content.importing().unwrap(), other.importing().unwrap());
    assert!(content.collecting().unwrap().is_none());
    drop(one);
    assert!(other.collecting().unwrap().is_none());
    drop(two);
    assert!(other.collecting().unwrap().is_some());
}

#[test]
fn damage_is_fetched_again_but_a_lie_is_not_believed() {
    let (root, content) = fresh();
    let blob = content.ingest_bytes(any(), b"some bytes").unwrap();
    let lie = content
        .ingest(any(), &mut Untouched, Some(blob.digest()), Some(3))
        .unwrap_err();
    assert_eq!(lie.class(), Class::Permanent, "{lie}");
    assert!(content.exists(&blob).unwrap());
    let path = root.path().join("content/blobs/sha256").join(blob.digest().digest());
    fs::write(&path, b"some").unwrap();
    assert!(!content.exists(&blob).unwrap());
    assert!(matches!(content.read(blob.digest()), Err(Error::Digest { .. })));
    assert_eq!(content.ingest_bytes(any(), b"some bytes").unwrap(), blob);
    assert_eq!(content.read(blob.digest()).unwrap(), b"some bytes");
    let big = vec![b' '; DOCUMENT_LIMIT as usize + 1];
    let big = content.ingest_bytes(any(), &big).unwrap();
    assert!(matches!(content.read(big.digest()), Err(Error::TooBig { .. })));
}

#[test]
fn names() {
    let (root, content) = fresh();
    let a = content.ingest_bytes(any(), b"a").unwrap();
    let b = content.ingest_bytes(any(), b"b").unwrap();
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (content, a) = (&content, &a);
            scope.spawn(move || content.tag(&format!("host/image:{i}"), a).unwrap());
        }
    });
    content.tag("host/image:3", &b).unwrap();
    content.untag("host/image:4").unwrap();
    content.untag("host/image:4").unwrap();
    let content = Content::open(root.path()).unwrap();
    assert_eq!(content.list().unwrap().len(), 7);
    assert_eq!(content.resolve("host/image:3").unwrap().unwrap().digest(), b.digest());
    assert_eq!(content.resolve("host/image:4").unwrap(), None);
    fs::write(root.path().join("content/index.json"), "{\"torn").unwrap();
    let content = Content::open(root.path()).unwrap();
    assert!(content.list().unwrap().is_empty());
    content.tag("x", &a).unwrap();
}
