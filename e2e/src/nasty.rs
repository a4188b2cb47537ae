//! Archives that lie, climb or never end. Importing any of them must fail with a clear message and change nothing,
//! or stay inside the image's own directory.

use serde_json::json;

use crate::corpus::tar::{self, Body, Dialect, Holes, Member};
use crate::images::{Compression::Plain, Image, Layer, digest};

/// What must become of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The import fails, the message holds this text, the image list and the disk stay as they were.
    Refused(&'static str),
    /// The import may succeed or fail, but nothing outside the layer's directory is touched.
    Contained,
}

/// A name for the case, the archive, its fate. `outside` is a directory on the host that entries try to write to.
pub fn archives(outside: &str) -> Vec<(&'static str, Vec<u8>, Fate)> {
    let out = outside.trim_start_matches('/');
    let up = "../".repeat(20);
    let layer = || Layer::new(Plain);
    let image = |layer: Layer| Image::new("localhost/nasty:1", vec![layer], json!({})).oci();
    let (here, sneak) = (format!("/{out}/absolute"), format!("{up}{out}/climbed"));
    let deep = (0..40).map(|_| "d").collect::<Vec<_>>().join("/");
    vec![
        (
            "a file named by ..",
            image(layer().file(&sneak, 0o644, "x")),
            Fate::Contained,
        ),
        (
            "an absolute file",
            image(layer().file(&here, 0o644, "x")),
            Fate::Contained,
        ),
        (
            "a write through a symlink",
            image(
                layer()
                    .symlink("way", &format!("/{out}"))
                    .file("way/through", 0o644, "x"),
            ),
            Fate::Contained,
        ),
        (
            "a write through a relative symlink",
            image(
                layer()
                    .symlink("way", &format!("{up}{out}"))
                    .file("way/relative", 0o644, "x"),
            ),
            Fate::Contained,
        ),
        (
            "a directory replaced by a symlink, then written to",
            image(
                layer()
                    .dir("d", 0o755)
                    .symlink("d", &format!("/{out}"))
                    .file("d/replaced", 0o644, "x"),
            ),
            Fate::Contained,
        ),
        (
            "a hard link to a file of the host",
            image(
                layer()
                    .hardlink("passwd", &format!("/{out}/victim"))
                    .file("passwd", 0o666, "overwritten"),
            ),
            Fate::Contained,
        ),
        (
            "a whiteout that climbs",
            image(layer().file(&format!("{up}{out}/.wh.victim"), 0o644, "")),
            Fate::Contained,
        ),
        ("a deep directory", image(layer().dir(&deep, 0o755)), Fate::Contained),
        (
            "a device and a hard link through a symlink",
            raw(&[
                ("way", Body::Symlink(format!("/{out}").into())),
                ("way/null", Body::Char(1, 3)),
                ("own", Body::File(b"x".to_vec())),
                ("way/linked", Body::Link(b"own".to_vec())),
            ]),
            Fate::Contained,
        ),
        (
            "a name of 5000 bytes",
            raw(&[(&"name/".repeat(1000), Body::Fifo)]),
            Fate::Refused("name/name"),
        ),
        (
            "directories 300 deep",
            raw(&[(&"deep/".repeat(300), Body::Dir)]),
            Fate::Refused("deep/deep"),
        ),
        (
            "a hole of 4 EiB",
            raw(&[("hole", Body::Sparse(1 << 62, vec![(0, vec![1])], Holes::V10))]),
            Fate::Refused("hole"),
        ),
        ("nothing at all", Vec::new(), Fate::Refused("")),
        ("not a tar", b"this is not an archive\n".repeat(100), Fate::Refused("")),
        (
            "a layer cut short",
            cut(image(layer().file("f", 0o644, vec![7; 100_000]))),
            Fate::Refused(""),
        ),
        (
            "a blob that is not what its digest says",
            forged(),
            Fate::Refused("sha256"),
        ),
        (
            "a docker archive whose layer is missing",
            missing_layer(),
            Fate::Refused("layer"),
        ),
        ("a manifest of no known kind", strange_manifest(), Fate::Refused("")),
    ]
}

/// An image of one layer with these members.
fn raw(members: &[(&str, Body)]) -> Vec<u8> {
    let member = |(path, body): &(&str, Body)| Member {
        path: path.trim_end_matches('/').into(),
        body: body.clone(),
        mode: 0o666,
        uid: 0,
        gid: 0,
        mtime: (0, 0),
        xattrs: Vec::new(),
    };
    let tar = tar::write(&members.iter().map(member).collect::<Vec<_>>(), Dialect::Pax);
    let layer = Layer::stored(tar.clone(), tar, "");
    Image::new("localhost/nasty:1", vec![layer], json!({})).oci()
}

fn cut(mut archive: Vec<u8>) -> Vec<u8> {
    archive.truncate(archive.len() / 2);
    archive
}

/// The layer's blob with one bit turned, under its old name.
fn forged() -> Vec<u8> {
    let mut archive = Image::new(
        "localhost/nasty:1",
        vec![Layer::new(Plain).file("f", 0o644, "truth")],
        json!({}),
    )
    .oci();
    let at = archive
        .windows(5)
        .position(|window| window == b"truth")
        .expect("the file's content");
    archive[at] ^= 1;
    archive
}

fn missing_layer() -> Vec<u8> {
    let manifest = json!([{ "Config": "c.json", "RepoTags": ["localhost/nasty:1"], "Layers": ["gone/layer.tar"] }]);
    let config = json!({ "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [digest(b"gone")] } });
    Layer::new(Plain)
        .file("c.json", 0o644, config.to_string())
        .file("manifest.json", 0o644, manifest.to_string())
        .tar()
}

fn strange_manifest() -> Vec<u8> {
    let blob = br#"{"schemaVersion":9,"mediaType":"text/plain"}"#;
    let name = digest(blob);
    let index = json!({ "schemaVersion": 2, "manifests": [
        { "mediaType": "text/plain", "digest": name, "size": blob.len(),
          "annotations": { "org.opencontainers.image.ref.name": "localhost/nasty:1" } }] });
    Layer::new(Plain)
        .file("oci-layout", 0o644, r#"{"imageLayoutVersion":"1.0.0"}"#)
        .file("index.json", 0o644, index.to_string())
        .file(&format!("blobs/sha256/{}", &name["sha256:".len()..]), 0o644, blob)
        .tar()
}
