//! What an image's documents say: manifest, index, configuration. Pure.

use std::str::FromStr;

use oci_spec::image::{
    Arch, Descriptor, Digest, History, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os,
};
use sha2::{Digest as _, Sha256};
use state::image::{ImageConfig, ImageOrigin, ImageStep};

use crate::world::linux::content::{Content, Error, Result, digest_of};

pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Identifies a layer together with all below it (OCI image-spec, config, "Layer ChainID").
pub type ChainId = Digest;

/// How deep indexes may nest.
const NESTING: usize = 4;
/// Steps of a history, and annotations, that are kept in mind.
const STEPS: usize = 500;
const ANNOTATIONS: usize = 64;
/// Characters of a text for people.
const TEXT: usize = 4096;
/// What overlay can stack.
const LAYERS: usize = 500;
/// Commas of a document: what has more is made to fill the memory with empty entries.
const ENTRIES: usize = 100_000;

/// What a manifest-like document is.
#[derive(Clone, Debug)]
pub enum Document {
    Manifest(Box<ImageManifest>),
    Index(Box<ImageIndex>),
}

/// Parses a manifest or an index, OCI or docker schema 2, by its fields (which a media type must not contradict).
pub fn parse(object: &str, media_type: Option<&MediaType>, bytes: &[u8]) -> Result<Document> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Probe {
        schema_version: Option<u32>,
        media_type: Option<String>,
        #[serde(default)]
        manifests: Option<serde::de::IgnoredAny>,
        #[serde(default)]
        layers: Option<serde::de::IgnoredAny>,
    }
    let bad = |e: serde_json::Error| Error::invalid(object, e);
    sparing(object, bytes)?;
    let probe: Probe = serde_json::from_slice(bytes).map_err(bad)?;
    if probe.schema_version == Some(1) {
        return Err(Error::invalid(
            object,
            "docker manifest schema 1 is not supported; push the image again",
        ));
    }
    // A document that is both would be read as one thing here and as another elsewhere.
    if probe.manifests.is_some() && probe.layers.is_some() {
        return Err(Error::invalid(object, "has both `manifests` and `layers`"));
    }
    let told = media_type
        .map(|m| m.to_string())
        .or(probe.media_type)
        .unwrap_or_default();
    let index = probe.manifests.is_some();
    if is_index(&told) && !index || is_manifest(&told) && index {
        return Err(Error::invalid(
            object,
            format!("its media type {told} is not what it holds"),
        ));
    }
    if index {
        Ok(Document::Index(serde_json::from_slice(bytes).map_err(bad)?))
    } else {
        Ok(Document::Manifest(serde_json::from_slice(bytes).map_err(bad)?))
    }
}

/// Refuses a document of more entries than any honest one has: parsed, they take many times their bytes.
fn sparing(object: &str, bytes: &[u8]) -> Result<()> {
    if bytes.iter().filter(|byte| **byte == b',').count() > ENTRIES {
        return Err(Error::invalid(object, format!("has more than {ENTRIES} entries")));
    }
    Ok(())
}

pub fn is_index(media_type: &str) -> bool {
    media_type == DOCKER_MANIFEST_LIST || media_type == MediaType::ImageIndex.as_ref()
}

pub fn is_manifest(media_type: &str) -> bool {
    media_type == DOCKER_MANIFEST || media_type == MediaType::ImageManifest.as_ref()
}

/// What a node runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    pub os: Os,
    pub arch: Arch,
    /// Accepted variants, best first; an absent one is read as the architecture's usual.
    pub variants: Vec<&'static str>,
}

impl Platform {
    /// This machine. x86-64 levels come from the CPU, as a level too high would die of SIGILL.
    pub fn host() -> Platform {
        let variants = match std::env::consts::ARCH {
            "x86_64" => x86_levels(),
            "aarch64" => vec!["v8"],
            "arm" => vec!["v7", "v6", "v5"],
            _ => vec![],
        };
        Platform {
            os: Os::Linux,
            arch: Arch::default(),
            variants,
        }
    }

    /// How well an entry suits: lower is better, `None` not at all.
    fn rank(&self, descriptor: &Descriptor) -> Option<usize> {
        let Some(platform) = descriptor.platform() else {
            return Some(usize::MAX); // says nothing: last choice
        };
        if *platform.os() != self.os || *platform.architecture() != self.arch {
            return None;
        }
        let usual = match self.arch {
            Arch::Amd64 => "v1",
            Arch::ARM64 => "v8",
            Arch::ARM => "v7",
            _ => "",
        };
        let variant = platform.variant().as_deref().filter(|v| !v.is_empty()).unwrap_or(usual);
        match self.variants.iter().position(|v| *v == variant) {
            None if variant == usual => Some(self.variants.len()),
            other => other,
        }
    }

    /// The best entry of an index; ties go to the first. Attestations (`unknown/unknown`) never suit.
    pub fn choose<'a>(&self, entries: &'a [Descriptor]) -> Result<&'a Descriptor> {
        let usable = |m: &&Descriptor| is_index(m.media_type().as_ref()) || is_manifest(m.media_type().as_ref());
        let ranked = entries.iter().filter(usable).filter_map(|m| Some((self.rank(m)?, m)));
        // `min_by_key` keeps the first of equals.
        ranked
            .min_by_key(|(rank, _)| *rank)
            .map(|(_, m)| m)
            .ok_or_else(|| Error::NoPlatform {
                wanted: format!("{}/{}", self.os, self.arch),
                offered: offered(entries),
            })
    }
}

fn offered(entries: &[Descriptor]) -> String {
    let name = |m: &Descriptor| match m.platform() {
        Some(p) => format!(
            "{}/{}{}",
            p.os(),
            p.architecture(),
            variant_suffix(p.variant().as_deref())
        ),
        None => m.media_type().to_string(),
    };
    let names: Vec<_> = entries.iter().take(20).map(name).collect();
    if names.is_empty() {
        "nothing".into()
    } else {
        names.join(", ")
    }
}

fn variant_suffix(variant: Option<&str>) -> String {
    variant.map_or_else(String::new, |v| format!("/{v}"))
}

#[cfg(target_arch = "x86_64")]
fn x86_levels() -> Vec<&'static str> {
    let v2 = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("popcnt");
    let v3 = v2
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("movbe");
    match (v3, v2) {
        (true, _) => vec!["v3", "v2", "v1"],
        (_, true) => vec!["v2", "v1"],
        _ => vec!["v1"],
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn x86_levels() -> Vec<&'static str> {
    vec![]
}

/// An image for one platform, read from the content store.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The manifest's own descriptor.
    pub descriptor: Descriptor,
    /// Of the indexes that led to it, outermost first.
    pub indexes: Vec<Descriptor>,
    pub manifest: ImageManifest,
    pub configuration: ImageConfiguration,
    /// Bottom first.
    pub diff_ids: Vec<Digest>,
    /// Bottom first, as many as layers.
    pub chain_ids: Vec<ChainId>,
}

impl Loaded {
    /// The image id everywhere: the configuration's digest.
    pub fn id(&self) -> &Digest {
        self.manifest.config().digest()
    }

    /// Bytes of manifest, configuration and layers as transported.
    pub fn size(&self) -> u64 {
        let layers: u64 = self
            .manifest
            .layers()
            .iter()
            .fold(0, |sum, l| sum.saturating_add(l.size()));
        layers
            .saturating_add(self.manifest.config().size())
            .saturating_add(self.descriptor.size())
    }

    /// What running it takes, and an archive of it holds: manifest, configuration, layers.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        [&self.descriptor, self.manifest.config()]
            .into_iter()
            .chain(self.manifest.layers())
    }

    /// Digests of all that must stay while the image does: its blobs, the indexes on the way, its unpacked layers.
    pub fn needs(&self) -> impl Iterator<Item = String> {
        let blobs = self.blobs().chain(&self.indexes).map(|blob| blob.digest().to_string());
        blobs.chain(self.chain_ids.iter().map(ToString::to_string))
    }

    pub fn config(&self) -> ImageConfig {
        image_config(&self.configuration)
    }

    /// What the image says of its making.
    pub fn origin(&self) -> ImageOrigin {
        let text = |text: &Option<String>| text.as_deref().map(bounded);
        let c = &self.configuration;
        let step = |step: &History| ImageStep {
            created: text(step.created()),
            created_by: text(step.created_by()),
            author: text(step.author()),
            comment: text(step.comment()),
            empty_layer: step.empty_layer(),
        };
        let annotations = self.manifest.annotations().iter().flatten().take(ANNOTATIONS);
        ImageOrigin {
            created: text(c.created()),
            author: text(c.author()),
            architecture: c.architecture().to_string(),
            os: c.os().to_string(),
            variant: text(c.variant()),
            diff_ids: self.diff_ids.iter().map(ToString::to_string).collect(),
            history: c.history().iter().flatten().take(STEPS).map(step).collect(),
            annotations: annotations.map(|(key, value)| (bounded(key), bounded(value))).collect(),
        }
    }
}

/// Follows indexes from `start` down to the manifest for `platform`, all in the content store. Answers the manifest's
/// descriptor, the manifest, and the indexes' descriptors.
pub fn find_manifest(
    content: &Content,
    start: &Descriptor,
    platform: &Platform,
) -> Result<(Descriptor, ImageManifest, Vec<Descriptor>)> {
    let (mut at, mut indexes) = (start.clone(), Vec::new());
    for _ in 0..NESTING {
        let bytes = content.read(at.digest())?;
        match parse(at.digest().as_ref(), Some(at.media_type()), &bytes)? {
            Document::Manifest(manifest) => return Ok((at, *manifest, indexes)),
            Document::Index(index) => {
                let next = platform.choose(index.manifests())?.clone();
                indexes.push(std::mem::replace(&mut at, next));
            }
        }
    }
    Err(Error::invalid(
        start.digest(),
        format!("indexes nest deeper than {NESTING}"),
    ))
}

/// Reads manifest and configuration, whose blobs must be here; the layers need not.
pub fn load(content: &Content, start: &Descriptor, platform: &Platform) -> Result<Loaded> {
    let (descriptor, manifest, indexes) = find_manifest(content, start, platform)?;
    let configuration = configuration(content, manifest.config().digest())?;
    let diff_ids = diff_ids(&descriptor, &manifest, &configuration)?;
    let chain_ids = chain_ids(&diff_ids);
    Ok(Loaded {
        descriptor,
        indexes,
        manifest,
        configuration,
        diff_ids,
        chain_ids,
    })
}

fn configuration(content: &Content, digest: &Digest) -> Result<ImageConfiguration> {
    let bytes = content.read(digest)?;
    sparing(digest.as_ref(), &bytes)?;
    serde_json::from_slice(&bytes).map_err(|e| Error::invalid(digest, e))
}

/// Reads the image whose manifest or index has this digest.
pub fn by_digest(content: &Content, digest: &str) -> Result<Loaded> {
    let digest = Digest::from_str(digest).map_err(|e| Error::invalid(digest, e))?;
    let bytes = content.read(&digest)?;
    let media_type = match parse(digest.as_ref(), None, &bytes)? {
        Document::Manifest(manifest) => manifest.media_type().clone().unwrap_or(MediaType::ImageManifest),
        Document::Index(index) => index.media_type().clone().unwrap_or(MediaType::ImageIndex),
    };
    load(
        content,
        &Descriptor::new(media_type, bytes.len() as u64, digest),
        &Platform::host(),
    )
}

fn diff_ids(at: &Descriptor, manifest: &ImageManifest, configuration: &ImageConfiguration) -> Result<Vec<Digest>> {
    let ids = configuration.rootfs().diff_ids();
    if ids.len() > LAYERS {
        return Err(Error::invalid(
            at.digest(),
            format!("has {} layers, at most {LAYERS} can be mounted", ids.len()),
        ));
    }
    if ids.len() != manifest.layers().len() {
        let problem = format!(
            "has {} layers, its configuration lists {}",
            manifest.layers().len(),
            ids.len()
        );
        return Err(Error::invalid(at.digest(), problem));
    }
    let parse = |(i, id): (usize, &String)| {
        let digest = Digest::from_str(id).map_err(|e| e.to_string());
        digest.map_err(|e| Error::invalid(at.digest(), format!("rootfs.diff_ids[{i}]: {e}")))
    };
    ids.iter().enumerate().map(parse).collect()
}

/// ChainID(L0) = diff ID of L0; ChainID(L0..n) = sha256("ChainID(L0..n-1) DiffID(Ln)").
pub fn chain_ids(diff_ids: &[Digest]) -> Vec<ChainId> {
    let mut chain: Vec<ChainId> = Vec::with_capacity(diff_ids.len());
    for diff in diff_ids {
        let next = match chain.last() {
            None => diff.clone(),
            Some(below) => digest_of(Sha256::new_with_prefix(format!("{below} {diff}"))),
        };
        chain.push(next);
    }
    chain
}

fn bounded(text: &str) -> String {
    text.chars().take(TEXT).collect()
}

/// The part of a configuration that running needs.
pub fn image_config(configuration: &ImageConfiguration) -> ImageConfig {
    let Some(config) = configuration.config() else {
        return ImageConfig::default();
    };
    let mut volumes = config.volumes().clone().unwrap_or_default();
    volumes.sort();
    ImageConfig {
        entrypoint: config.entrypoint().clone().unwrap_or_default(),
        cmd: config.cmd().clone().unwrap_or_default(),
        env: config.env().clone().unwrap_or_default(),
        working_dir: config.working_dir().clone().unwrap_or_default(),
        user: config.user().clone().unwrap_or_default(),
        stop_signal: config.stop_signal().clone().unwrap_or_default(),
        volumes,
        labels: config.labels().clone().unwrap_or_default().into_iter().collect(),
    }
}

#[cfg(test)]
mod tests;
