//! Image archives made by the tests: OCI layouts and docker archives, layers plain, gzip or zstd.
//!
//! An [`Image`] is a list of [`Layer`]s and an image config; [`Image::oci`] and [`Image::docker`] write the tar that
//! `reconcile images import` reads. [`real`] has `umoci` and `skopeo` make one that no code of ours touched.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// How a layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Plain,
    Gzip,
    Zstd,
}

/// One layer: tar entries in the order they were added.
#[derive(Clone, Debug)]
pub struct Layer {
    entries: Vec<Entry>,
    compression: Compression,
    /// Ready made: tar, blob, suffix of its media type.
    stored: Option<(Vec<u8>, Vec<u8>, &'static str)>,
}

#[derive(Clone, Debug)]
struct Entry {
    kind: EntryType,
    path: String,
    mode: u32,
    owner: u64,
    link: String,
    data: Vec<u8>,
}

impl Layer {
    /// An empty layer, stored as `compression` says.
    pub fn new(compression: Compression) -> Layer {
        Layer {
            entries: Vec::new(),
            compression,
            stored: None,
        }
    }

    /// A layer that somebody else wrote: its tar, the blob that holds it, the suffix of its media type.
    pub fn stored(tar: Vec<u8>, blob: Vec<u8>, suffix: &'static str) -> Layer {
        Layer {
            stored: Some((tar, blob, suffix)),
            ..Layer::new(Compression::Plain)
        }
    }

    fn push(mut self, kind: EntryType, path: &str, mode: u32, link: &str, data: &[u8]) -> Layer {
        let (path, link) = (path.to_owned(), link.to_owned());
        self.entries.push(Entry {
            kind,
            path,
            mode,
            owner: 0,
            link,
            data: data.to_vec(),
        });
        self
    }

    pub fn file(self, path: &str, mode: u32, data: impl AsRef<[u8]>) -> Layer {
        self.push(EntryType::Regular, path, mode, "", data.as_ref())
    }

    pub fn dir(self, path: &str, mode: u32) -> Layer {
        self.push(EntryType::Directory, path, mode, "", b"")
    }

    pub fn symlink(self, path: &str, target: &str) -> Layer {
        self.push(EntryType::Symlink, path, 0o777, target, b"")
    }

    pub fn hardlink(self, path: &str, target: &str) -> Layer {
        self.push(EntryType::Link, path, 0o644, target, b"")
    }

    pub fn fifo(self, path: &str) -> Layer {
        self.push(EntryType::Fifo, path, 0o644, "", b"")
    }

    /// Whiteout: `path` of a lower layer is gone (OCI image-spec, layer.md).
    pub fn remove(self, path: &str) -> Layer {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let whiteout = if dir.is_empty() {
            format!(".wh.{name}")
        } else {
            format!("{dir}/.wh.{name}")
        };
        self.file(&whiteout, 0o644, b"")
    }

    /// Opaque whiteout: nothing of lower layers shows in `dir`.
    pub fn opaque(self, dir: &str) -> Layer {
        self.file(&format!("{dir}/.wh..wh..opq"), 0o644, b"")
    }

    /// Owner and group of the entry added last.
    pub fn owned_by(mut self, id: u64) -> Layer {
        self.entries.last_mut().expect("an entry to own").owner = id;
        self
    }

    /// The uncompressed tar. Names are written byte for byte, `..` and all: the importer has to cope.
    pub fn tar(&self) -> Vec<u8> {
        if let Some((tar, ..)) = &self.stored {
            return tar.clone();
        }
        let mut tar = Builder::new(Vec::new());
        for entry in &self.entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(entry.kind);
            header.set_mode(entry.mode);
            header.set_size(entry.data.len() as u64);
            header.set_uid(entry.owner);
            header.set_gid(entry.owner);
            header.set_mtime(1_700_000_000);
            raw(&mut header.as_old_mut().name, &entry.path);
            raw(&mut header.as_old_mut().linkname, &entry.link);
            header.set_cksum();
            tar.append(&header, entry.data.as_slice()).expect("write to memory");
        }
        tar.into_inner().expect("write to memory")
    }

    /// The blob as stored, and its media type's suffix.
    pub fn blob(&self) -> (Vec<u8>, &'static str) {
        if let Some((_, blob, suffix)) = &self.stored {
            return (blob.clone(), suffix);
        }
        let tar = self.tar();
        match self.compression {
            Compression::Plain => (tar, ""),
            Compression::Gzip => {
                let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gzip.write_all(&tar).expect("write to memory");
                (gzip.finish().expect("write to memory"), "+gzip")
            }
            Compression::Zstd => (zstd::encode_all(tar.as_slice(), 1).expect("write to memory"), "+zstd"),
        }
    }
}

fn raw(field: &mut [u8; 100], text: &str) {
    assert!(text.len() <= field.len(), "a name of more than 100 bytes: {text}");
    field[..text.len()].copy_from_slice(text.as_bytes());
}

/// An image: layers from the base up, and the `config` object of its OCI config (Env, Cmd, User, …).
#[derive(Clone, Debug)]
pub struct Image {
    /// Reference it is imported under, `localhost/x:tag`.
    pub name: String,
    pub layers: Vec<Layer>,
    pub config: Value,
}

impl Image {
    pub fn new(name: &str, layers: Vec<Layer>, config: Value) -> Image {
        Image {
            name: name.to_owned(),
            layers,
            config,
        }
    }

    /// `busybox-static` of Debian with all its applets, users `root` and `app` (1001, in group `extra`).
    pub fn busybox(name: &str) -> Result<Image> {
        let layer = busybox_layer(Compression::Gzip)?;
        Ok(Image::new(
            name,
            vec![layer],
            json!({ "Cmd": ["/bin/sh"], "Env": ["FROM_IMAGE=yes"] }),
        ))
    }

    fn oci_config(&self) -> Vec<u8> {
        let diff_ids: Vec<_> = self.layers.iter().map(|layer| digest(&layer.tar())).collect();
        let arch = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        };
        let config = json!({ "architecture": arch, "os": "linux", "config": self.config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids } });
        config.to_string().into_bytes()
    }

    /// An OCI image layout as a tar.
    pub fn oci(&self) -> Vec<u8> {
        let mut files = Files::default();
        let blob = |files: &mut Files, kind: String, data: &[u8]| {
            let digest = digest(data);
            files.add(&format!("blobs/sha256/{}", &digest["sha256:".len()..]), data);
            json!({ "mediaType": kind, "digest": digest, "size": data.len() })
        };
        let config = blob(
            &mut files,
            "application/vnd.oci.image.config.v1+json".into(),
            &self.oci_config(),
        );
        let mut layers = Vec::new();
        for layer in &self.layers {
            let (data, suffix) = layer.blob();
            layers.push(blob(
                &mut files,
                format!("application/vnd.oci.image.layer.v1.tar{suffix}"),
                &data,
            ));
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers });
        let mut manifest = blob(&mut files, kind.into(), manifest.to_string().as_bytes());
        manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": self.name });
        files.add(
            "index.json",
            json!({ "schemaVersion": 2, "manifests": [manifest] })
                .to_string()
                .as_bytes(),
        );
        files.add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
        files.tar()
    }

    /// A docker archive (`docker save`) as a tar.
    pub fn docker(&self) -> Vec<u8> {
        let mut files = Files::default();
        let config = self.oci_config();
        let config_name = format!("{}.json", &digest(&config)["sha256:".len()..]);
        files.add(&config_name, &config);
        let mut layers = Vec::new();
        for (n, layer) in self.layers.iter().enumerate() {
            let name = format!("layer{n}/layer.tar");
            files.add(&name, &layer.blob().0);
            layers.push(name);
        }
        let manifest = json!([{ "Config": config_name, "RepoTags": [self.name], "Layers": layers }]);
        files.add("manifest.json", manifest.to_string().as_bytes());
        files.tar()
    }
}

pub fn busybox_layer(compression: Compression) -> Result<Layer> {
    let program = fs::read("/bin/busybox").context("busybox: install the Debian package busybox-static")?;
    let list = Command::new("/bin/busybox")
        .arg("--list")
        .output()
        .context("run busybox --list")?;
    let passwd = "root:x:0:0:root:/root:/bin/sh\napp:x:1001:1001:app:/home/app:/bin/sh\n";
    let group = "root:x:0:\napp:x:1001:\nextra:x:2002:app\n";
    let mut layer = Layer::new(compression)
        .dir("bin", 0o755)
        .file("bin/busybox", 0o755, program)
        .dir("etc", 0o755)
        .file("etc/passwd", 0o644, passwd)
        .file("etc/group", 0o644, group)
        .dir("root", 0o700)
        .dir("home", 0o755)
        .dir("home/app", 0o755)
        .owned_by(1001)
        .dir("tmp", 0o1777);
    for applet in String::from_utf8(list.stdout)?
        .lines()
        .filter(|name| *name != "busybox")
    {
        layer = layer.symlink(&format!("bin/{applet}"), "busybox");
    }
    Ok(layer)
}

/// Files of an archive, in order.
#[derive(Default)]
struct Files(Vec<(String, Vec<u8>)>);

impl Files {
    fn add(&mut self, path: &str, data: &[u8]) {
        if !self.0.iter().any(|(name, _)| name == path) {
            self.0.push((path.to_owned(), data.to_vec()));
        }
    }

    fn tar(&self) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        for (path, data) in &self.0 {
            let mut header = Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(data.len() as u64);
            tar.append_data(&mut header, path, data.as_slice())
                .expect("write to memory");
        }
        tar.into_inner().expect("write to memory")
    }
}

/// `sha256:…` of `data`.
pub fn digest(data: &[u8]) -> String {
    let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Tools that are not ours make a three-layer busybox image in `dir`: base; files added; one removed, one directory
/// emptied and refilled. Returns a docker archive and an OCI archive of it, both named `localhost/real:1`.
pub fn real(dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let (layout, bundle) = (dir.join("layout"), dir.join("bundle"));
    let image = format!("{}:1", layout.display());
    let umoci = |args: &[&str]| crate::tools::check(Command::new("umoci").args(args)).context("Debian package umoci");
    umoci(&["init", "--layout", &layout.display().to_string()])?;
    umoci(&["new", "--image", &image])?;
    umoci(&["unpack", "--image", &image, &bundle.display().to_string()])?;
    let rootfs = bundle.join("rootfs");
    for step in 0..3 {
        edit(&rootfs, step)?;
        umoci(&[
            "repack",
            "--refresh-bundle",
            "--image",
            &image,
            &bundle.display().to_string(),
        ])?;
    }
    umoci(&[
        "config",
        "--image",
        &image,
        "--config.cmd",
        "/bin/sh",
        "--config.env",
        "FROM_IMAGE=real",
    ])?;
    let archives = (dir.join("docker.tar"), dir.join("oci.tar"));
    let copy = |to: String| {
        let from = format!("oci:{image}");
        let mut skopeo = Command::new("skopeo");
        crate::tools::check(skopeo.args(["--insecure-policy", "copy", &from, &to])).context("Debian package skopeo")
    };
    copy(format!("docker-archive:{}:localhost/real:1", archives.0.display()))?;
    copy(format!("oci-archive:{}:localhost/real:1", archives.1.display()))?;
    Ok(archives)
}

fn edit(rootfs: &Path, step: u32) -> Result<()> {
    match step {
        0 => {
            fs::create_dir_all(rootfs.join("bin"))?;
            fs::create_dir_all(rootfs.join("data"))?;
            fs::create_dir_all(rootfs.join("full"))?;
            fs::copy("/bin/busybox", rootfs.join("bin/busybox")).context("busybox-static")?;
            for applet in [
                "sh", "cat", "ls", "sleep", "echo", "id", "seq", "nc", "ip", "wget", "httpd", "test",
            ] {
                std::os::unix::fs::symlink("busybox", rootfs.join("bin").join(applet))?;
            }
            fs::write(rootfs.join("data/removed"), "of the first layer\n")?;
            fs::write(rootfs.join("full/old"), "of the first layer\n")?;
        }
        1 => {
            fs::write(rootfs.join("data/kept"), "of the second layer\n")?;
            fs::hard_link(rootfs.join("data/kept"), rootfs.join("data/link"))?;
        }
        _ => {
            fs::remove_file(rootfs.join("data/removed"))?;
            fs::remove_dir_all(rootfs.join("full"))?;
            fs::create_dir(rootfs.join("full"))?;
            fs::write(rootfs.join("full/new"), "of the third layer\n")?;
        }
    }
    ensure!(rootfs.join("bin/busybox").exists(), "the rootfs lost its busybox");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `skopeo` reads what we write: the archives are what the formats say, not what our importer happens to accept.
    #[test]
    fn skopeo_reads_both_kinds_of_archive() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let upper = Layer::new(Compression::Zstd)
            .dir("d", 0o755)
            .file("d/new", 0o644, "x")
            .opaque("d");
        let mut image = Image::busybox("localhost/made:1").unwrap();
        image.layers.push(
            Layer::new(Compression::Plain)
                .dir("d", 0o755)
                .file("d/old", 0o644, "x")
                .remove("tmp"),
        );
        fs::write(dir.path().join("docker.tar"), image.docker()).unwrap();
        image.layers.push(upper);
        fs::write(dir.path().join("oci.tar"), image.oci()).unwrap();
        for (transport, layers) in [("docker-archive", 2), ("oci-archive", 3)] {
            let file = dir.path().join(transport.replace("-archive", ".tar"));
            let out = Command::new("skopeo")
                .args(["inspect", "--config", &format!("{transport}:{}", file.display())])
                .output()
                .expect("Debian package skopeo");
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let config: Value = serde_json::from_slice(&out.stdout).unwrap();
            assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), layers);
        }
    }

    #[test]
    fn tools_that_are_not_ours_make_three_layers_with_whiteouts() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (docker, oci) = real(dir.path()).unwrap();
        assert!(docker.exists() && oci.exists());
        let mut archive = tar::Archive::new(fs::File::open(&oci).unwrap());
        let mut whiteouts = Vec::new();
        let mut layers = 0;
        for entry in archive.entries().unwrap() {
            let mut gzip = flate2::read::GzDecoder::new(entry.unwrap());
            if gzip.header().is_none() {
                continue;
            }
            layers += 1;
            let mut layer = tar::Archive::new(&mut gzip);
            for entry in layer.entries().unwrap() {
                let path = entry.unwrap().path().unwrap().display().to_string();
                whiteouts.extend(path.contains(".wh.").then_some(path));
            }
        }
        assert_eq!(layers, 3);
        assert!(whiteouts.contains(&"data/.wh.removed".to_owned()), "{whiteouts:?}");
    }
}
