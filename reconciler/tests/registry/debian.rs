//! Debian's docker-registry: the way in and out again, by http and by TLS with authorities and certificates of our own.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::common::{MANIFEST, access, client, client_with, descriptor, fetch, noise};
use crate::server::digest;

struct Daemon {
    child: Child,
    host: String,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `tls`: with the certificate of [`certificates`], asking for a client's.
fn daemon(dir: &Path, tls: bool) -> Daemon {
    // Below the ports that the kernel gives to any socket.
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port = 30_000 + (std::process::id() % 200) as u16 * 10 + NEXT.fetch_add(1, Ordering::Relaxed);
    let host = format!("127.0.0.1:{port}");
    let path = |name: &str| dir.join(name).display().to_string();
    let tls = if tls {
        let (cert, key, ca) = (path("server.crt"), path("server.key"), path("ca.crt"));
        format!("  tls:\n    certificate: {cert}\n    key: {key}\n    clientcas: [{ca}]\n")
    } else {
        String::new()
    };
    let config = format!(
        "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
         http:\n  addr: {host}\n{tls}",
        path("store")
    );
    fs::write(dir.join("config.yml"), config).unwrap();
    let child = Command::new("docker-registry")
        .args(["serve", &path("config.yml")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("Debian package docker-registry");
    let daemon = Daemon { child, host };
    let began = Instant::now();
    while std::net::TcpStream::connect(&daemon.host).is_err() {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "docker-registry does not listen"
        );
        std::thread::yield_now();
    }
    daemon
}

async fn there_and_back(registry: &reconciler::world::linux::registry::Registry, host: &str, dir: &Path) {
    let access = access(&format!("{host}/a/b:t"));
    let bytes = noise(3_000_000);
    let descriptor = descriptor(&digest(&bytes), bytes.len());
    let file = dir.join("blob");
    fs::write(&file, &bytes).unwrap();
    assert!(registry.upload_blob(&access, &descriptor, &file).await.unwrap());
    assert!(
        !registry.upload_blob(&access, &descriptor, &file).await.unwrap(),
        "sent twice"
    );
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}",
        "config":{{"mediaType":"application/vnd.oci.image.config.v1+json",
        "digest":"{0}","size":{1}}},"layers":[]}}"#,
        digest(&bytes),
        bytes.len()
    );
    let manifest = Bytes::from(manifest);
    registry
        .put_manifest(&access, MANIFEST, manifest.clone())
        .await
        .unwrap();
    let resolved = registry.resolve(&access).await.unwrap();
    assert_eq!(resolved.digest.to_string(), digest(&manifest));
    let got = registry
        .manifest(&access, &resolved.digest, Some(resolved.size))
        .await
        .unwrap();
    assert_eq!(got, manifest);
    assert_eq!(fetch(registry, &access, &descriptor, 0).await.unwrap(), bytes);
    assert_eq!(
        fetch(registry, &access, &descriptor, 2_999_999).await.unwrap(),
        bytes[2_999_999..]
    );
}

#[tokio::test]
async fn by_http() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), false);
    there_and_back(&client(), &daemon.host, dir.path()).await;
}

/// An authority; from it a server's certificate for 127.0.0.1 and a client's.
fn certificates(dir: &Path) {
    let script = "set -e; openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 \
        -subj /CN=authority-$$ -keyout ca.key -out ca.crt; printf 'subjectAltName=IP:127.0.0.1' > san; \
        for name in server client; do openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$name \
        -keyout $name.key -out $name.csr; openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial \
        -days 2 -extfile san -out $name.crt; done";
    let out = Command::new("sh")
        .args(["-c", script])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[tokio::test]
async fn by_tls_with_an_authority_and_a_client_certificate() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let daemon = daemon(dir.path(), true);
    // Without a certificate nobody comes in.
    let refused = client()
        .resolve(&access(&format!("{}/a/b:t", daemon.host)))
        .await
        .unwrap_err();
    assert!(
        refused.to_string().contains("asks for a client certificate"),
        "{refused}"
    );
    let hosts = dir.path().join("certs.d").join(daemon.host.replace(':', "_") + "_");
    fs::create_dir_all(&hosts).unwrap();
    let place = |name: &str| dir.path().join(name).display().to_string();
    let write = |ca: &str| {
        let (cert, key) = (place("client.crt"), place("client.key"));
        let text = format!(
            "server = \"https://{}\"\n{ca}client = [[\"{cert}\", \"{key}\"]]\n",
            daemon.host
        );
        fs::write(hosts.join("hosts.toml"), text).unwrap();
    };
    let registry = client_with(vec![dir.path().join("certs.d")]);
    write("");
    let unknown = registry
        .resolve(&access(&format!("{}/a/b:t", daemon.host)))
        .await
        .unwrap_err();
    assert!(unknown.to_string().contains("UnknownIssuer"), "{unknown}");
    write(&format!("ca = \"{}\"\n", place("ca.crt")));
    there_and_back(&registry, &daemon.host, dir.path()).await;
}

/// Of several certificates the one is shown that the server's authority has issued, wherever it stands.
#[tokio::test]
async fn every_client_certificate_is_thought_of() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates(dir.path());
    certificates(other.path());
    let daemon = daemon(dir.path(), true);
    // The authorities' names tell them apart.
    let root = dir.path().join("docker/certs.d");
    let hosts = root.join(&daemon.host);
    fs::create_dir_all(&hosts).unwrap();
    fs::copy(dir.path().join("ca.crt"), hosts.join("ca.crt")).unwrap();
    for (name, from) in [("a", &other), ("b", &dir), ("c", &other)] {
        fs::copy(from.path().join("client.crt"), hosts.join(format!("{name}.cert"))).unwrap();
        fs::copy(from.path().join("client.key"), hosts.join(format!("{name}.key"))).unwrap();
    }
    there_and_back(&client_with(vec![root.clone()]), &daemon.host, dir.path()).await;
    fs::remove_file(hosts.join("b.cert")).unwrap();
    let refused = client_with(vec![root])
        .resolve(&access(&format!("{}/a/b:t", daemon.host)))
        .await;
    assert!(refused.is_err(), "the others' certificates were taken");
}
