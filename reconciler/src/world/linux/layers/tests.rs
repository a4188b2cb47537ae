//! Whole images: made here, judged by umoci and skopeo. Needs root.

use std::io::Write;
use std::process::{Command, Stdio};

use oci_spec::image::MediaType;
use serde_json::json;

use super::super::archive::{Imported, import};
use super::super::content::Content;
use super::super::mounts::detached;
use super::super::passwd::{UserRequest, lookup};
use super::super::unpack::tests::{Layer, Mounted, assert_same, census, diff_id};
use super::*;
use crate::image::manifest::{self, Platform};
use crate::image::{builtin, manifest::load};

/// Stores an image of these layers (bottom first) under the name `test`.
fn store(content: &Content, layers: &[Vec<u8>]) -> Loaded {
    let mut blobs = Vec::new();
    for (i, tar) in layers.iter().enumerate() {
        // Every compression in turn.
        let (media_type, bytes) = match i % 3 {
            0 => {
                let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gzip.write_all(tar).unwrap();
                (MediaType::ImageLayerGzip, gzip.finish().unwrap())
            }
            1 => (MediaType::ImageLayer, tar.clone()),
            _ => (MediaType::ImageLayerZstd, zstd::encode_all(&tar[..], 1).unwrap()),
        };
        blobs.push(content.ingest_bytes(media_type, &bytes).unwrap());
    }
    let diff_ids: Vec<_> = layers.iter().map(|tar| diff_id(tar)).collect();
    let config = json!({
        "architecture": oci_spec::image::Arch::default(), "os": "linux",
        "config": { "User": "app", "Env": ["A=b"], "Cmd": ["/bin/true"], "Volumes": { "/v": {} } },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let config = content
        .ingest_bytes(MediaType::ImageConfig, config.to_string().as_bytes())
        .unwrap();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MediaType::ImageManifest, "config": config, "layers": blobs,
    });
    let manifest = content
        .ingest_bytes(MediaType::ImageManifest, manifest.to_string().as_bytes())
        .unwrap();
    content.tag("test", &manifest).unwrap();
    load(content, &manifest, &Platform::host()).unwrap()
}

/// What a build tool would write: each directory listed, deletions of what is there.
fn three_layers() -> Vec<Vec<u8>> {
    let base = Layer::default()
        .dir("bin", 0o755)
        .file("bin/sh", "#!")
        .raw("bin/su", tar::EntryType::Regular, "", 0o4755, b"suid")
        .dir("etc", 0o755)
        .file("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/:/bin/sh\n")
        .file("etc/deleted", "x")
        .dir("srv", 0o755)
        .dir("srv/a", 0o755)
        .file("srv/a/f", "f")
        .dir("tmp", 0o1777)
        .symlink("lib", "bin")
        .raw("null", tar::EntryType::Char, "", 0o666, b"")
        .end();
    let middle = Layer::default()
        .dir("etc", 0o711)
        .raw("etc/.wh.deleted", tar::EntryType::Regular, "", 0o644, b"")
        .raw("srv/.wh.a", tar::EntryType::Regular, "", 0o644, b"")
        .file("etc/new", "new")
        .link("etc/hard", "etc/new")
        .end();
    let top = Layer::default()
        .pax(&[
            ("mtime", b"1234567.25"),
            ("SCHILY.xattr.user.key", b"value"),
            ("uid", b"3000000"),
        ])
        .file("etc/new", "newer")
        .dir("srv", 0o700)
        .dir("srv/a", 0o700)
        .file("srv/a/g", "g")
        .raw("fifo", tar::EntryType::Fifo, "", 0o600, b"")
        .end();
    vec![base, middle, top]
}

struct Node {
    root: tempfile::TempDir,
    content: Content,
    layers: Layers,
}

impl Node {
    fn new() -> Node {
        let root = tempfile::tempdir().unwrap();
        let content = Content::open(root.path()).unwrap();
        let layers = Layers::open(root.path(), Limits::default()).unwrap();
        Node { root, content, layers }
    }

    fn merged(&self, chain: &[ChainId]) -> Mounted {
        let place = self.root.path().join(format!("mount-{}", token()));
        fs::create_dir(&place).unwrap();
        Mounted::new(&self.layers.lower(chain).unwrap(), &place)
    }

    fn import(&self, reader: impl io::Read + Send, name: Option<&str>) -> Result<Vec<Imported>> {
        import(reader, &self.content, name)
    }

    fn load(&self, imported: &Imported) -> Loaded {
        load(&self.content, &imported.target, &Platform::host()).unwrap()
    }

    fn in_trash(&self) -> usize {
        fs::read_dir(self.root.path().join("trash")).unwrap().count()
    }
}

fn tool(program: &str, args: &[&str]) {
    let out = Command::new(program).args(args).output();
    let out = out.unwrap_or_else(|e| panic!("{program} judges this test and must be installed: {e}"));
    assert!(
        out.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
fn an_image_is_as_umoci_unpacks_it() {
    let node = Node::new();
    // umoci 0.4 knows no zstd.
    let image = store(&node.content, &three_layers()[..2]);
    let chain = node.layers.ensure(&node.content, &image).unwrap();
    let bundle = node.root.path().join("bundle");
    let source = format!("{}:test", node.content.dir().display());
    tool("umoci", &["unpack", "--image", &source, bundle.to_str().unwrap()]);
    assert_same(&census(&node.merged(&chain)), &census(&bundle.join("rootfs")));
}

/// Where overlay does not work, the copy has to be the same to the last attribute.
#[test]
fn a_copy_is_what_overlay_shows() {
    let node = Node::new();
    let image = store(&node.content, &three_layers());
    let chain = node.layers.ensure(&node.content, &image).unwrap();
    let copy = node.root.path().join("copy");
    super::super::copy::merge(&node.layers.lower(&chain).unwrap(), &copy, None).unwrap();
    let mut want = census(&node.merged(&chain));
    // Overlay still counts the other name, which a higher layer hides.
    let hard = want.get_mut("etc/hard").unwrap();
    *hard = hard.replace("links 2", "links 1");
    assert_same(&census(&copy), &want);
}

#[test]
fn three_layers_make_one_tree() {
    let node = Node::new();
    let image = store(&node.content, &three_layers());
    assert_eq!(image.config().user, "app");
    assert_eq!(image.config().volumes, ["/v"]);
    let chain = node.layers.ensure(&node.content, &image).unwrap();
    let merged = node.merged(&chain);
    let seen = census(&merged);
    let names: Vec<&str> = seen.keys().map(String::as_str).collect();
    let want = [
        "bin",
        "bin/sh",
        "bin/su",
        "etc",
        "etc/hard",
        "etc/new",
        "etc/passwd",
        "fifo",
        "lib",
        "null",
        "srv",
        "srv/a",
        "srv/a/g",
        "tmp",
    ];
    assert_eq!(names, want);
    assert!(seen["bin/su"].starts_with("104755 0:0 "), "{}", seen["bin/su"]);
    assert!(
        seen["etc"].starts_with("40711 0:0 links 0 time 1000000 "),
        "{}",
        seen["etc"]
    );
    assert!(
        seen["etc/new"].starts_with("100644 3000000:0 links 1 time 1234567 size 5 "),
        "{}",
        seen["etc/new"]
    );
    assert!(
        seen["etc/new"].ends_with(r#"{"user.key": [118, 97, 108, 117, 101]}"#),
        "{}",
        seen["etc/new"]
    );
    assert_eq!(fs::read_to_string(merged.join("etc/hard")).unwrap(), "new");
    drop(merged);
    let view = detached(&node.layers.lower(&chain).unwrap()).unwrap();
    let user = UserRequest {
        image_user: image.config().user,
        ..UserRequest::default()
    };
    use std::os::fd::AsFd;
    assert_eq!(lookup(view.as_fd(), &user).unwrap().uid, 1000);

    let usage = node.layers.usage().unwrap();
    assert!(usage.inodes >= 16 && usage.bytes > 0, "{usage:?}");
    assert_eq!(node.layers.list().unwrap().len(), 3);
    for id in &chain {
        assert_eq!(node.layers.verify(id).unwrap(), Soundness::Sound);
    }
    // Removal of one, and making it again.
    node.layers.remove(&chain[1]).unwrap();
    node.layers.remove(&chain[1]).unwrap();
    assert_eq!(node.layers.verify(&chain[1]).unwrap(), Soundness::Absent);
    let have = node.layers.observe(&chain).unwrap();
    assert_eq!(
        have.iter().map(Option::is_some).collect::<Vec<_>>(),
        [true, false, true]
    );
    assert_eq!(node.layers.ensure(&node.content, &image).unwrap(), chain);
    assert_same(&census(&node.merged(&chain)), &seen);
}

#[test]
fn twenty_callers_unpack_once() {
    let node = Node::new();
    let tall = store(&node.content, &three_layers());
    let short = store(&node.content, &three_layers()[..2]);
    std::thread::scope(|scope| {
        for i in 0..20 {
            let (node, image) = (&node, if i % 2 == 0 { &tall } else { &short });
            scope.spawn(move || node.layers.ensure(&node.content, image).unwrap());
        }
    });
    // A second unpacking of a layer would have buried the first one.
    assert_eq!(node.in_trash(), 0);
    assert_eq!(node.layers.names().unwrap().len(), 3);
    assert!(node.layers.claims.is_empty() && *node.layers.unpacking.borrow() == 0);
}

#[test]
fn what_a_crash_leaves_is_redone() {
    let node = Node::new();
    let image = store(&node.content, &three_layers());
    let dir = node.root.path().join("layers");
    // Dead: nobody locks it. Alive: somebody does.
    for name in ["tmp-dead", "tmp-alive"] {
        fs::create_dir_all(dir.join(name).join("fs/half")).unwrap();
    }
    let alive = Flock::lock(File::open(dir.join("tmp-alive")).unwrap(), FlockArg::LockExclusive).unwrap();
    let layers = Layers::open(node.root.path(), Limits::default()).unwrap();
    assert_eq!(layers.names().unwrap(), ["tmp-alive"]);
    drop(alive);
    // Renamed without its metadata, or with a torn one: not whole, made again.
    let bottom = layers.layer(&image.chain_ids[0]).unwrap();
    fs::create_dir_all(bottom.join("fs/half")).unwrap();
    let middle = layers.layer(&image.chain_ids[1]).unwrap();
    fs::create_dir_all(middle.join("fs/half")).unwrap();
    fs::write(middle.join("meta.json"), "{\"diffId\":").unwrap();
    let chain = layers.ensure(&node.content, &image).unwrap();
    assert!(!census(&node.merged(&chain)).contains_key("half"));

    // Damage that a power cut would leave is seen, and mended from the blob.
    let file = layers.fs(&chain[0]).unwrap().join("etc/passwd");
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    let damaged = File::options().write(true).open(&file).unwrap();
    damaged.set_len(0).unwrap();
    damaged.set_modified(time).unwrap();
    let found: Vec<_> = chain.iter().map(|c| layers.verify(c).unwrap()).collect();
    assert_eq!(found, [Soundness::Damaged, Soundness::Sound, Soundness::Sound]);
    layers.remove(&chain[0]).unwrap();
    layers.ensure(&node.content, &image).unwrap();
    assert_eq!(layers.verify(&chain[0]).unwrap(), Soundness::Sound);
}

const VICTIM: &str = "RECONCILE_TEST_VICTIM";

/// Run by the test below in a process of its own.
#[test]
#[ignore = "child of unpacking_is_killed"]
fn victim() {
    let root = std::env::var_os(VICTIM).expect("set by the parent");
    let content = Content::open(Path::new(&root)).unwrap();
    let layers = Layers::open(Path::new(&root), Limits::default()).unwrap();
    let target = content.resolve("test").unwrap().unwrap();
    layers
        .ensure(&content, &load(&content, &target, &Platform::host()).unwrap())
        .unwrap();
}

#[test]
fn unpacking_is_killed() {
    let node = Node::new();
    let big = Layer::default()
        .file("small", "s")
        .file("big", &"b".repeat(1 << 20))
        .end();
    let image = store(&node.content, &[three_layers().remove(0), big]);
    // The second layer's blob becomes a pipe, so that the unpacking stops where we want.
    let blob = node
        .content
        .dir()
        .join("blobs/sha256")
        .join(image.manifest.layers()[1].digest().digest());
    let bytes = fs::read(&blob).unwrap();
    fs::remove_file(&blob).unwrap();
    nix::unistd::mkfifo(&blob, Mode::S_IRWXU).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "world::linux::layers::tests::victim"])
        .env(VICTIM, node.root.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // More than a pipe holds: when it is written, the child is in the middle of the file.
    let mut pipe = File::options().write(true).open(&blob).unwrap();
    pipe.write_all(&bytes[..bytes.len() / 2]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    drop(pipe);
    assert!(node.layers.names().unwrap().iter().any(|n| n.starts_with("tmp-")));

    fs::remove_file(&blob).unwrap();
    fs::write(&blob, &bytes).unwrap();
    let layers = Layers::open(node.root.path(), Limits::default()).unwrap();
    assert_eq!(layers.names().unwrap(), [""; 0]);
    let chain = layers.ensure(&node.content, &image).unwrap();
    assert_eq!(
        fs::metadata(layers.fs(&chain[1]).unwrap().join("big")).unwrap().len(),
        1 << 20
    );
    layers.trash.empty().unwrap();
    assert_eq!(node.in_trash(), 0);
}

#[test]
fn a_bad_layer_leaves_nothing_and_is_named() {
    let node = Node::new();
    let mut layers = three_layers();
    layers[1] = Layer::default().file("../evil", "x").end();
    let image = store(&node.content, &layers);
    let error = node.layers.ensure(&node.content, &image).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("\"../evil\"") && text.contains(image.manifest.layers()[1].digest().as_ref()),
        "{text}"
    );
    assert_eq!(node.layers.names().unwrap(), [""; 0]);
    node.content.remove_blob(image.manifest.layers()[0].digest()).unwrap();
    layers[1] = three_layers().remove(1);
    let image = Loaded {
        manifest: image.manifest,
        ..store(&node.content, &layers)
    };
    assert!(node.layers.ensure(&node.content, &image).is_err());
    assert_eq!(node.layers.names().unwrap(), [""; 0]);
}

#[test]
fn archives_of_skopeo_come_in_by_pipe() {
    let source = Node::new();
    // skopeo converts neither zstd nor odd layers; two layers do.
    let original = store(&source.content, &three_layers()[..2]);
    let from = format!("oci:{}:test", source.content.dir().display());
    for (format, name, compress) in [
        ("oci-archive", "localhost/test:1", "none"),
        ("oci-archive", "localhost/test:1", "gzip"),
        ("docker-archive", "localhost/test:1", "none"),
        ("docker-archive", "localhost/test:1", "zstd"),
    ] {
        let node = Node::new();
        let path = node.root.path().join("archive.tar");
        tool(
            "skopeo",
            &[
                "copy",
                "--insecure-policy",
                &from,
                &format!("{format}:{}:{name}", path.display()),
            ],
        );
        let bytes = fs::read(&path).unwrap();
        let bytes = match compress {
            "gzip" => {
                let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gzip.write_all(&bytes).unwrap();
                gzip.finish().unwrap()
            }
            "zstd" => zstd::encode_all(&bytes[..], 1).unwrap(),
            _ => bytes,
        };
        // A real pipe, with short reads and no seeking.
        let mut cat = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut writer, reader) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        let imported = std::thread::scope(|scope| {
            scope.spawn(move || writer.write_all(&bytes).unwrap());
            node.import(reader, None).unwrap()
        });
        assert!(cat.wait().unwrap().success());
        assert_eq!(imported.len(), 1, "{format}");
        assert_eq!(imported[0].reference.as_deref(), Some(name), "{format}");
        let image = node.load(&imported[0]);
        assert_eq!(image.chain_ids, original.chain_ids, "{format}");
        assert_eq!(image.config().env, ["A=b"], "{format}");
        let chain = node.layers.ensure(&node.content, &image).unwrap();
        assert!(census(&node.merged(&chain)).contains_key("etc/hard"), "{format}");
    }
}

/// A tar of these files, for archives that no tool would write.
fn archive(files: &[(&str, Vec<u8>)], links: &[(&str, &str)]) -> Vec<u8> {
    let mut all = Layer::default();
    for (name, data) in files {
        all = all
            .pax(&[("path", name.as_bytes())])
            .raw("x", tar::EntryType::Regular, "", 0o644, data);
    }
    for (name, to) in links {
        all = all.symlink(name, to);
    }
    all.end()
}

#[test]
fn legacy_docker_archives_with_links() {
    let node = Node::new();
    let layers = three_layers();
    let image = store(&node.content, &layers);
    let config = node.content.read(image.id()).unwrap();
    let zstd = zstd::encode_all(&layers[2][..], 1).unwrap();
    let list = json!([{
        "Config": "config.json",
        "RepoTags": ["a:1", "b:2"],
        "Layers": ["aa/layer.tar", "bb/layer.tar", "cc.tar"],
    }]);
    let tar = archive(
        &[
            ("aa/VERSION", b"1.0".to_vec()),
            ("aa/layer.tar", layers[0].clone()),
            ("real/layer.tar", layers[1].clone()),
            ("cc.tar", zstd),
            ("config.json", config),
            ("manifest.json", list.to_string().into_bytes()),
        ],
        &[("bb/layer.tar", "../real/layer.tar")],
    );
    let fresh = Node::new();
    let imported = fresh.import(&tar[..], None).unwrap();
    let names: Vec<_> = imported.iter().map(|i| i.reference.as_deref()).collect();
    assert_eq!(names, [Some("a:1"), Some("b:2")]);
    let loaded = fresh.load(&imported[0]);
    assert_eq!(loaded.chain_ids, image.chain_ids);
    let types: Vec<_> = loaded
        .manifest
        .layers()
        .iter()
        .map(|l| l.media_type().clone())
        .collect();
    assert_eq!(
        types,
        [MediaType::ImageLayer, MediaType::ImageLayer, MediaType::ImageLayerZstd]
    );
    fresh.layers.ensure(&fresh.content, &loaded).unwrap();
    // The same archive is the same image; a name given wins.
    let again = fresh.import(&tar[..], Some("mine")).unwrap();
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].reference.as_deref(), Some("mine"));
    assert_eq!(again[0].target, imported[0].target);
}

#[test]
fn layouts_with_nested_and_foreign_platforms() {
    let source = Node::new();
    let image = store(&source.content, &three_layers()[..1]);
    let blob = |digest: &Digest| {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut source.content.open_blob(digest).unwrap(), &mut bytes).unwrap();
        (format!("blobs/sha256/{}", digest.digest()), bytes)
    };
    let here = Platform::host();
    let foreign = diff_id(b"not in the archive");
    let index = json!({ "schemaVersion": 2, "mediaType": MediaType::ImageIndex, "manifests": [
        { "mediaType": MediaType::ImageManifest, "digest": foreign, "size": 5,
          "platform": { "os": "linux", "architecture": "s390x" } },
        { "mediaType": MediaType::ImageManifest, "digest": foreign, "size": 5,
          "platform": { "os": "unknown", "architecture": "unknown" } },
        { "mediaType": MediaType::ImageManifest, "digest": image.descriptor.digest(), "size": image.descriptor.size(),
          "platform": { "os": "linux", "architecture": here.arch } },
    ]})
    .to_string()
    .into_bytes();
    let nested = diff_id(&index);
    let top = |digest: &Digest, size: usize, name: &str| {
        json!({ "schemaVersion": 2, "manifests": [
            { "mediaType": MediaType::ImageIndex, "digest": digest, "size": size,
              "annotations": { "io.containerd.image.name": name, "org.opencontainers.image.ref.name": "1" } } ] })
        .to_string()
        .into_bytes()
    };
    let mut files: Vec<(String, Vec<u8>)> = image.blobs().map(|b| blob(b.digest())).collect();
    files.push((format!("blobs/sha256/{}", nested.digest()), index.clone()));
    files.push(("index.json".into(), top(&nested, index.len(), "host/multi:1")));
    let pack = |files: &[(String, Vec<u8>)]| {
        archive(
            &files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect::<Vec<_>>(),
            &[],
        )
    };
    let node = Node::new();
    let imported = node.import(&pack(&files)[..], None).unwrap();
    assert_eq!(imported[0].reference.as_deref(), Some("host/multi:1"));
    assert_eq!(
        *imported[0].target.digest(),
        nested,
        "the index is what the name resolves to"
    );
    assert_eq!(imported[0].manifest.digest(), image.descriptor.digest());

    // What is wrong is named.
    let told = |files: &[(String, Vec<u8>)]| Node::new().import(&pack(files)[..], None).unwrap_err().to_string();
    let layer = image.manifest.layers()[0].digest().to_string();
    let without: Vec<_> = files
        .iter()
        .filter(|(n, _)| !n.contains(&layer[7..]))
        .cloned()
        .collect();
    assert!(told(&without).contains(&layer), "{}", told(&without));
    let mut flipped = files.clone();
    flipped[2].1[40] ^= 1;
    assert!(told(&flipped).contains(&flipped[2].0), "{}", told(&flipped));
    let mut lost = files.clone();
    lost.last_mut().unwrap().1 = top(&foreign, 5, "x");
    assert!(told(&lost).contains(foreign.as_ref()), "{}", told(&lost));
    let mut other = files.clone();
    let at = other.len() - 2;
    let text = String::from_utf8(index)
        .unwrap()
        .replace(&format!("\"{}\"", here.arch), "\"mips\"");
    other[at] = (
        format!("blobs/sha256/{}", diff_id(text.as_bytes()).digest()),
        text.clone().into_bytes(),
    );
    other[at + 1].1 = top(&diff_id(text.as_bytes()), text.len(), "x");
    assert!(told(&other).contains("linux/s390x"), "{}", told(&other));
    assert!(
        told(&files[..3]).contains("neither index.json"),
        "{}",
        told(&files[..3])
    );
    let mut out = files.clone();
    out.push(("../evil".into(), b"x".to_vec()));
    assert!(told(&out).contains("../evil"), "{}", told(&out));
    assert!(Node::new().import(&b"no archive at all"[..], None).is_err());
    assert!(Node::new().import(&b""[..], None).is_err());
}

#[test]
fn the_built_in_image() {
    let node = Node::new();
    let shim = node.root.path().join("shim");
    fs::write(&shim, b"\x7fELF and so on").unwrap();
    let digest = builtin::ensure(&node.content, &shim).unwrap();
    assert_eq!(builtin::ensure(&node.content, &shim).unwrap(), digest);
    let target = node.content.resolve(builtin::REFERENCE).unwrap().unwrap();
    assert_eq!(*target.digest(), digest);
    let image = load(&node.content, &target, &Platform::host()).unwrap();
    assert_eq!(image.config().entrypoint, ["/hello"]);
    let chain = node.layers.ensure(&node.content, &image).unwrap();
    let seen = census(&node.merged(&chain));
    assert!(
        seen["hello"].starts_with("100755 0:0 ") && seen["tmp"].starts_with("41777 "),
        "{seen:?}"
    );
    // Deterministic; follows the shim; a lost blob is made again.
    let other = Node::new();
    assert_eq!(builtin::ensure(&other.content, &shim).unwrap(), digest);
    node.content.remove_blob(image.manifest.layers()[0].digest()).unwrap();
    assert_eq!(builtin::ensure(&node.content, &shim).unwrap(), digest);
    assert!(node.content.exists(&image.manifest.layers()[0]).unwrap());
    fs::write(&shim, b"\x7fELF and more so").unwrap();
    assert_ne!(builtin::ensure(&node.content, &shim).unwrap(), digest);
    tool(
        "skopeo",
        &[
            "inspect",
            &format!("oci:{}:{}", node.content.dir().display(), builtin::REFERENCE),
        ],
    );
}

#[test]
fn platforms() {
    let entry = |arch: &str, variant: &str| -> Descriptor {
        let mut platform = json!({ "os": "linux", "architecture": arch });
        if !variant.is_empty() {
            platform["variant"] = variant.into();
        }
        let size = variant.len() + 1;
        serde_json::from_value(json!({
            "mediaType": MediaType::ImageManifest, "digest": diff_id(variant.as_bytes()), "size": size,
            "platform": platform,
        }))
        .unwrap()
    };
    let amd = |variants: Vec<&'static str>| Platform {
        os: oci_spec::image::Os::Linux,
        arch: oci_spec::image::Arch::Amd64,
        variants,
    };
    let all = [
        entry("arm64", "v8"),
        entry("amd64", ""),
        entry("amd64", "v3"),
        entry("amd64", "v2"),
    ];
    let choose = |p: Platform| p.choose(&all).map(|d| d.platform().clone().unwrap().variant().clone());
    assert_eq!(choose(amd(vec!["v3", "v2", "v1"])).unwrap().as_deref(), Some("v3"));
    assert_eq!(choose(amd(vec!["v2", "v1"])).unwrap().as_deref(), Some("v2"));
    assert_eq!(choose(amd(vec!["v1"])).unwrap(), None);
    let none = amd(vec!["v1"])
        .choose(&[entry("amd64", "v4"), entry("arm64", "v8")])
        .unwrap_err();
    assert!(none.to_string().contains("linux/amd64/v4, linux/arm64/v8"), "{none}");
    let both = br#"{"schemaVersion":2,"manifests":[],"layers":[]}"#;
    assert!(manifest::parse("x", None, both).is_err());
    let old = br#"{"schemaVersion":1,"fsLayers":[]}"#;
    assert!(
        manifest::parse("x", None, old)
            .unwrap_err()
            .to_string()
            .contains("schema 1")
    );
}

#[test]
fn nothing_is_built_on_a_layer_in_doubt() {
    let root = tempfile::tempdir().unwrap();
    let content = Content::open(root.path()).unwrap();
    let under = |boot| Layers::begin(root.path(), Limits::default(), boot, Form::Stacked).unwrap();
    let all = three_layers();
    let base = store(&content, &all[..1]);
    let damage = |layers: &Layers| fs::remove_file(layers.fs(&base.chain_ids[0]).unwrap().join("bin/sh")).unwrap();
    let first = under("one");
    first.ensure(&content, &base).unwrap();
    damage(&first);
    drop(first); // not its end: the power is cut
    let second = under("two");
    let image = store(&content, &all);
    assert_eq!(second.doubtful(&image.chain_ids).unwrap().len(), 1);
    second.ensure(&content, &image).unwrap();
    assert_eq!(second.verify(&base.chain_ids[0]).unwrap(), Soundness::Sound);
    damage(&second);
    drop(second);
    // Whoever looks later leaves alone what was made again meanwhile.
    let third = under("three");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                third.ensure(&content, &base).unwrap();
                assert_eq!(third.verify(&base.chain_ids[0]).unwrap(), Soundness::Sound);
                assert_eq!(third.settle_doubts(&base.chain_ids).unwrap(), 0);
            });
        }
    });
    assert!(third.doubtful(&image.chain_ids[..1]).unwrap().is_empty());
}
