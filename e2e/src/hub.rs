//! A real registry, Debian's `docker-registry`, on a port of its own and filled by `skopeo`.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::images::Image;
use crate::{eventually, port, tools};

pub struct Hub {
    dir: TempDir,
    address: SocketAddr,
    server: Child,
}

impl Hub {
    /// A running registry without images.
    pub async fn start() -> Result<Hub> {
        Hub::run(false).await
    }

    /// The same by TLS, with a certificate of nobody's.
    pub async fn with_tls() -> Result<Hub> {
        Hub::run(true).await
    }

    async fn run(tls: bool) -> Result<Hub> {
        let dir = tempfile::Builder::new().prefix("rc-").tempdir_in("/var/tmp")?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port::unused()));
        let (certificate, key) = (dir.path().join("server.crt"), dir.path().join("server.key"));
        let mut secure = String::new();
        if tls {
            tools::check(
                Command::new("openssl")
                    .args([
                        "req",
                        "-x509",
                        "-newkey",
                        "ec",
                        "-pkeyopt",
                        "ec_paramgen_curve:P-256",
                        "-nodes",
                    ])
                    .args(["-days", "2", "-subj", "/CN=hub", "-keyout"])
                    .arg(&key)
                    .arg("-out")
                    .arg(&certificate),
            )?;
            secure = format!(
                ", tls: {{certificate: {}, key: {}}}",
                certificate.display(),
                key.display()
            );
        }
        let config = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: {}}}}}\nstorage:\n  filesystem: \
             {{rootdirectory: {}}}\n  delete: {{enabled: true}}\nhttp: {{addr: '{address}'{secure}}}\n",
            !tls,
            dir.path().join("data").display()
        );
        fs::write(dir.path().join("config.yml"), config)?;
        let server = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.path().join("config.yml"))
            .stdin(Stdio::null())
            .stdout(fs::File::create(dir.path().join("access"))?)
            .stderr(fs::File::create(dir.path().join("log"))?)
            .spawn()
            .context("docker-registry: install the Debian package docker-registry")?;
        let hub = Hub { dir, address, server };
        eventually(Duration::from_secs(20), async || Ok(TcpStream::connect(hub.address)?))
            .await
            .context("docker-registry does not listen")?;
        Ok(hub)
    }

    /// `host:port`
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// A full reference on this registry.
    pub fn name(&self, path_and_tag: &str) -> String {
        format!("{}/{path_and_tag}", self.address)
    }

    /// Pushes an image under `path:tag`, with these further arguments of `skopeo copy`.
    pub fn push(&self, image: &Image, path_and_tag: &str, further: &[&str]) -> Result<String> {
        let archive = self.dir.path().join("push.tar");
        fs::write(&archive, image.oci())?;
        self.copy(&format!("oci-archive:{}", archive.display()), path_and_tag, further)
    }

    /// Pushes what `skopeo` finds at `from`; the full reference.
    pub fn copy(&self, from: &str, path_and_tag: &str, further: &[&str]) -> Result<String> {
        let name = self.name(path_and_tag);
        tools::check(
            Command::new("skopeo")
                .args(["copy", "--quiet", "--dest-tls-verify=false"])
                .args(further)
                .args([from, &format!("docker://{name}")]),
        )?;
        Ok(name)
    }

    /// Digest of what a tag means now.
    pub fn digest(&self, path_and_tag: &str) -> Result<String> {
        let out = tools::check(Command::new("skopeo").args([
            "inspect",
            "--raw",
            "--tls-verify=false",
            &format!("docker://{}", self.name(path_and_tag)),
        ]))?;
        Ok(crate::images::digest(&out.stdout))
    }

    /// Puts a document of this media type under a tag, by the registry's own API.
    pub fn put_manifest(&self, path: &str, tag: &str, media_type: &str, document: &Value) -> Result<()> {
        let file = self.dir.path().join("document.json");
        fs::write(&file, document.to_string())?;
        let out = tools::check(
            Command::new("curl")
                .args(["--silent", "--fail", "-X", "PUT", "-H"])
                .arg(format!("Content-Type: {media_type}"))
                .arg("--data-binary")
                .arg(format!("@{}", file.display()))
                .arg(format!("http://{}/v2/{path}/manifests/{tag}", self.address)),
        )?;
        ensure!(out.stdout.is_empty(), "{}", String::from_utf8_lossy(&out.stdout));
        Ok(())
    }

    /// Who asked for what; with TLS only.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("access")).unwrap_or_default()
    }

    /// Where it keeps its files.
    pub fn data(&self) -> std::path::PathBuf {
        Path::new(self.dir.path()).join("data")
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
