//! Images from archives: an OCI layout or what `docker save` writes, from a file or a pipe, as a whole compressed or
//! not.
//!
//! The archive is read once, front to back. Each member goes straight into the content store under its digest, whatever
//! its name says; only the few documents that tell what is what stay in memory. So a hostile archive can make blobs,
//! and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::str::FromStr;
use std::sync::Arc;

use oci_spec::image::{ANNOTATION_REF_NAME, Descriptor, Digest, ImageIndex, MediaType};
use serde::Deserialize;
use serde_json::json;

use super::content::{Content, DOCUMENT_LIMIT, Error, Result};
use super::unpack::tar::{Entry, Kind, Reader, printable, stream};
use super::unpack::verify::{Compression, decompress};
use crate::image::manifest::{self, Platform};

/// Members of an archive, at most.
const MEMBERS: u64 = 100_000;
const NAME: usize = 4096;
/// Links followed from one name.
const LINKS: usize = 16;
/// What containerd and docker call an image in an index; more exact than the reference name, often a bare tag.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// One image of an archive. Not tagged yet: the caller writes its record, then tags.
#[derive(Clone, Debug)]
pub struct Imported {
    /// As the caller or the archive wrote it, not normalized; `None` if neither names it.
    pub reference: Option<String>,
    /// What the name resolves to: an index or a manifest, which is in the content store.
    pub target: Descriptor,
    /// The manifest for this machine. Its configuration and layers are in the content store too.
    pub manifest: Descriptor,
}

/// Reads an archive into `content`. `name` names its one image, whatever the archive calls it; with several images in
/// the archive it is an error.
pub fn import(reader: impl Read + Send, content: &Content, name: Option<&str>) -> Result<Vec<Imported>> {
    let mut archive = Archive {
        content,
        blobs: HashMap::new(),
        links: HashMap::new(),
        documents: HashMap::new(),
    };
    archive.read(reader)?;
    let mut images = if archive.documents.contains_key("index.json") {
        archive.layout()?
    } else if archive.documents.contains_key("manifest.json") {
        archive.docker()?
    } else {
        let problem = "has neither index.json nor manifest.json; it is not an image archive";
        return Err(Error::invalid("archive", problem));
    };
    if let Some(name) = name {
        let first = images.first().map(|i| i.manifest.digest().clone());
        if images.iter().any(|i| Some(i.manifest.digest()) != first.as_ref()) {
            let problem = format!(
                "holds {} images, so it cannot be imported under the one name {name}",
                images.len()
            );
            return Err(Error::invalid("archive", problem));
        }
        images.truncate(1);
        images.iter_mut().for_each(|i| i.reference = Some(name.to_string()));
    }
    Ok(images)
}

struct Archive<'a> {
    content: &'a Content,
    /// By member name.
    blobs: HashMap<String, (Digest, u64)>,
    links: HashMap<String, String>,
    documents: HashMap<String, Vec<u8>>,
}

/// An entry of docker's manifest.json.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

impl Archive<'_> {
    fn read(&mut self, reader: impl Read + Send) -> Result<()> {
        let (_, plain) = decompress(reader, &Arc::default()).map_err(|e| stream("archive", e))?;
        let mut reader = Reader::new(plain, NAME);
        let mut members = 0;
        while let Some(entry) = reader.next_entry()? {
            members += 1;
            if members > MEMBERS {
                return Err(Error::invalid("archive", format!("has more than {MEMBERS} members")));
            }
            self.member(&entry, &mut reader)?;
        }
        // To the end, so that whoever writes the pipe does not die of SIGPIPE and a checksum at the end counts.
        reader.drain()
    }

    fn member(&mut self, entry: &Entry, data: &mut dyn Read) -> Result<()> {
        let shown = || format!("archive member {}", entry.name());
        let Ok(raw) = std::str::from_utf8(&entry.path) else {
            return Ok(());
        };
        let Some(name) = tidy("", raw) else {
            return Err(Error::invalid(shown(), "leads out of the archive by `..`"));
        };
        match entry.kind {
            Kind::Symlink | Kind::HardLink => {
                let dir = if entry.kind == Kind::Symlink {
                    name.rsplit_once('/').map_or("", |(d, _)| d)
                } else {
                    ""
                };
                if let Some(target) = std::str::from_utf8(&entry.link).ok().and_then(|l| tidy(dir, l)) {
                    self.links.insert(name, target);
                }
                return Ok(());
            }
            Kind::File => {}
            _ => return Ok(()),
        }
        if entry.pieces.is_some() {
            return Err(Error::invalid(shown(), "is a sparse file"));
        }
        if ["index.json", "manifest.json", "oci-layout"].contains(&&*name) {
            if entry.size > DOCUMENT_LIMIT {
                return Err(Error::TooBig {
                    object: shown(),
                    limit: DOCUMENT_LIMIT,
                });
            }
            let mut bytes = Vec::new();
            data.read_to_end(&mut bytes).map_err(|e| stream(&shown(), e))?;
            self.documents.insert(name, bytes);
            return Ok(());
        }
        // What docker wrote for its own older versions.
        if name.ends_with("/VERSION") || name.ends_with("/json") || name == "repositories" {
            return Ok(());
        }
        let expected = match name.strip_prefix("blobs/") {
            Some(path) => match path
                .strip_prefix("sha256/")
                .map(|hex| Digest::from_str(&format!("sha256:{hex}")))
            {
                Some(Ok(digest)) => Some(digest),
                Some(Err(_)) => return Err(Error::invalid(shown(), "is not named by a SHA-256 digest")),
                None => return Ok(()), // another algorithm
            },
            None => None,
        };
        let media_type = MediaType::Other("application/octet-stream".into());
        let blob = self
            .content
            .ingest(media_type, data, expected.as_ref(), Some(entry.size));
        let blob = blob.map_err(|e| e.of_member(&shown()))?;
        self.blobs.insert(name, (blob.digest().clone(), blob.size()));
        Ok(())
    }

    fn document<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T> {
        let bytes = self.documents.get(name).map(Vec::as_slice).unwrap_or_default();
        serde_json::from_slice(bytes).map_err(|e| Error::invalid(format!("{name} of the archive"), e))
    }

    // ---- OCI image layout ----

    fn layout(&self) -> Result<Vec<Imported>> {
        let index: ImageIndex = self.document("index.json")?;
        // One name may stand at several entries, one for each platform.
        let mut groups: Vec<(Option<String>, Vec<Descriptor>)> = Vec::new();
        for entry in index.manifests() {
            let name = |key| {
                entry
                    .annotations()
                    .as_ref()
                    .and_then(|a| a.get(key))
                    .filter(|n| !n.is_empty())
                    .cloned()
            };
            let reference = name(CONTAINERD_NAME).or_else(|| name(ANNOTATION_REF_NAME));
            let lonely = reference.is_none() && entry.platform().is_none();
            match groups.iter_mut().find(|(have, _)| *have == reference && !lonely) {
                Some((_, entries)) => entries.push(entry.clone()),
                None => groups.push((reference, vec![entry.clone()])),
            }
        }
        if groups.is_empty() {
            return Err(Error::invalid("index.json of the archive", "lists no image"));
        }
        groups
            .into_iter()
            .map(|(reference, entries)| self.of_layout(reference, &entries))
            .collect()
    }

    fn of_layout(&self, reference: Option<String>, entries: &[Descriptor]) -> Result<Imported> {
        let platform = Platform::host();
        let target = platform.choose(entries)?.clone();
        self.need(&target, "index.json of the archive")?;
        let (manifest, ..) = manifest::find_manifest(self.content, &target, &platform).map_err(|e| match e {
            Error::NotFound(digest) => Error::invalid(
                "index.json of the archive",
                format!("leads to {digest}, which the archive does not hold"),
            ),
            other => other.of_member("index.json of the archive"),
        })?;
        self.whole(&manifest)?;
        Ok(Imported {
            reference,
            target: bare(&target),
            manifest: bare(&manifest),
        })
    }

    /// Whether all that running needs is in the content store, from this archive or before.
    fn whole(&self, manifest: &Descriptor) -> Result<()> {
        let image = manifest::load(self.content, manifest, &Platform::host())?;
        for blob in image.blobs() {
            self.need(blob, &format!("manifest {}", manifest.digest()))?;
        }
        Ok(())
    }

    fn need(&self, blob: &Descriptor, by: &str) -> Result<()> {
        if self.content.exists(blob)? {
            // A collection under way does not know the record that will keep it.
            return self.content.freshen(blob.digest());
        }
        let (kind, digest) = (blob.media_type(), blob.digest());
        Err(Error::invalid(
            by,
            format!("names {digest} ({kind}), which the archive does not hold with that size"),
        ))
    }

    // ---- docker save ----

    fn docker(&self) -> Result<Vec<Imported>> {
        let listed: Vec<DockerImage> = self.document("manifest.json")?;
        if listed.is_empty() {
            return Err(Error::invalid("manifest.json of the archive", "lists no image"));
        }
        let mut images = Vec::new();
        for image in &listed {
            let manifest = self.convert(image)?;
            let tags = image
                .repo_tags
                .iter()
                .flatten()
                .filter(|t| !t.is_empty())
                .cloned()
                .map(Some);
            let names: Vec<_> = tags.collect();
            for reference in if names.is_empty() { vec![None] } else { names } {
                images.push(Imported {
                    reference,
                    target: manifest.clone(),
                    manifest: manifest.clone(),
                });
            }
        }
        Ok(images)
    }

    /// Writes the OCI manifest that the archive lacks.
    fn convert(&self, image: &DockerImage) -> Result<Descriptor> {
        let (digest, size) = self.find(&image.config)?;
        let config = Descriptor::new(MediaType::ImageConfig, size, digest);
        let mut layers = Vec::new();
        let mut types: BTreeMap<String, MediaType> = BTreeMap::new();
        for name in &image.layers {
            let (digest, size) = self.find(name)?;
            let media_type = match types.get(digest.as_ref()) {
                Some(known) => known.clone(),
                None => types
                    .entry(digest.to_string())
                    .or_insert(self.layer_type(&digest)?)
                    .clone(),
            };
            layers.push(Descriptor::new(media_type, size, digest));
        }
        let document = json!({
            "schemaVersion": 2,
            "mediaType": MediaType::ImageManifest,
            "config": config,
            "layers": layers,
        });
        let bytes = serde_json::to_vec(&document).map_err(|e| Error::invalid("manifest.json of the archive", e))?;
        let manifest = self.content.ingest_bytes(MediaType::ImageManifest, &bytes)?;
        self.whole(&manifest)?;
        Ok(manifest)
    }

    fn layer_type(&self, digest: &Digest) -> Result<MediaType> {
        let mut start = Vec::new();
        self.content
            .open_blob(digest)?
            .take(4)
            .read_to_end(&mut start)
            .map_err(Error::io("read", digest))?;
        Ok(match Compression::of(&start) {
            Compression::None => MediaType::ImageLayer,
            Compression::Gzip => MediaType::ImageLayerGzip,
            Compression::Zstd => MediaType::ImageLayerZstd,
        })
    }

    /// The blob of a member, through the links between members.
    fn find(&self, name: &str) -> Result<(Digest, u64)> {
        let absent = || {
            let shown = printable(name.as_bytes());
            Error::invalid(
                "manifest.json of the archive",
                format!("names {shown}, which the archive does not hold"),
            )
        };
        let mut at = tidy("", name).ok_or_else(absent)?;
        for _ in 0..LINKS {
            if let Some(blob) = self.blobs.get(&at) {
                return Ok(blob.clone());
            }
            at = self.links.get(&at).ok_or_else(absent)?.clone();
        }
        Err(absent())
    }
}

/// Cleans a member's name, which may be relative to `dir`; `None` if `..` leads above the top.
fn tidy(dir: &str, name: &str) -> Option<String> {
    let mut parts = Vec::new();
    let dir = if name.starts_with('/') { "" } else { dir };
    for part in dir.split('/').chain(name.split('/')) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// A descriptor without what the archive says beside it.
fn bare(descriptor: &Descriptor) -> Descriptor {
    Descriptor::new(
        descriptor.media_type().clone(),
        descriptor.size(),
        descriptor.digest().clone(),
    )
}
