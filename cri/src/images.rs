//! `ImageService`: Image records are names; what has one id is one image with all its names.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use state::image::{Image, ImageConfig, ImageKind, ImagePhase, ImageStatus};
use state::usage::{Ask, DiskUsage};
use state::{Reference, Store};
use tonic::Request;

use crate::answer::{Answer, Answers, answer, bounded, chunked};
use crate::call::Call;
use crate::error::{Error, Result};
use crate::pull::Pull;
use crate::runtime::v1;
use crate::services::{Services, Told};
use crate::translate;
use crate::translate::container::ImageNames;

/// One image of the catalog.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Config digest, `sha256:…`.
    pub(crate) id: String,
    /// Full names with a tag, sorted.
    tags: Vec<String>,
    /// `repository@digest`, sorted.
    digests: Vec<String>,
    /// The records of its names, newest first.
    records: Vec<Arc<Image>>,
}

/// The images that are here, newest first.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    entries: Vec<Entry>,
}

impl Catalog {
    /// Merges the records by image id. What is not here yet, failed, or being removed is not shown.
    pub(crate) fn read(store: &Store) -> Catalog {
        Catalog::of(store.list::<ImageKind>())
    }

    fn of(records: Vec<Arc<Image>>) -> Catalog {
        let mut catalog = Catalog::default();
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        for record in records {
            let status = &record.status;
            if record.meta.deleted() || status.phase != ImagePhase::Ready || status.id.is_empty() {
                continue;
            }
            let place = *places.entry(status.id.clone()).or_insert_with(|| {
                catalog.entries.push(Entry {
                    id: status.id.clone(),
                    tags: Vec::new(),
                    digests: Vec::new(),
                    records: Vec::new(),
                });
                catalog.entries.len() - 1
            });
            catalog.entries[place].add(record);
        }
        catalog
    }

    /// What `text` means: an id, else a name, else the only id that it is the beginning of. The error names `field`.
    pub(crate) fn resolve(&self, field: &str, text: &str) -> Result<Option<&Entry>> {
        if text.is_empty() {
            return Err(Error::invalid(field, "must not be empty"));
        }
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        let is_hex = state::reference::is_hex(hex);
        let id = format!("sha256:{hex}");
        if state::reference::is_digest(&id) {
            return Ok(self.by_id(&id));
        }
        let reference = Reference::parse(text, field);
        if let Ok(reference) = &reference
            && let Some(entry) = self.by_name(reference)
        {
            return Ok(Some(entry));
        }
        let mut beginning = self.entries.iter().filter(|entry| is_hex && entry.id.starts_with(&id));
        match (beginning.next(), beginning.next()) {
            (Some(_), Some(_)) => Err(Error::invalid(field, format!("{text} begins more than one image id"))),
            (Some(entry), None) => Ok(Some(entry)),
            // Neither a name nor the beginning of an id.
            (None, _) if !is_hex => reference.map(|_| None).map_err(Error::from),
            (None, _) => Ok(None),
        }
    }

    /// Id of an image that has to be here.
    pub(crate) fn require(&self, field: &str, text: &str) -> Result<String> {
        let missing = || Error::NotFound {
            what: "image on this node",
            id: format!("{text:.200} ({field}): pull or import it first"),
        };
        self.resolve(field, text)?
            .map(|entry| entry.id.clone())
            .ok_or_else(missing)
    }

    fn by_id(&self, id: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    fn by_name(&self, reference: &Reference) -> Option<&Entry> {
        let full = reference.to_string();
        let named = |entry: &&Entry| entry.tags.contains(&full) || entry.digests.contains(&full);
        let manifest = |entry: &&Entry| {
            let repository = format!("{}@", reference.repository());
            reference.digest().is_some_and(|digest| {
                entry.digests.iter().any(|name| name.starts_with(&repository))
                    && entry
                        .records
                        .iter()
                        .any(|record| record.status.manifest_digest == digest)
            })
        };
        self.entries
            .iter()
            .find(named)
            .or_else(|| self.entries.iter().find(manifest))
    }

    /// What a container's status says of its image.
    pub(crate) fn names(&self, id: &str) -> ImageNames {
        let Some(entry) = self.by_id(id) else {
            return ImageNames::default();
        };
        ImageNames {
            tag: entry.tags.first().cloned(),
            digest: entry.digests.first().cloned(),
        }
    }
}

impl Entry {
    fn add(&mut self, record: Arc<Image>) {
        let name = &record.meta.name;
        if let Ok(reference) = Reference::parse(name, "metadata.name") {
            match reference.digest() {
                None => insert(&mut self.tags, name.clone()),
                Some(_) => insert(&mut self.digests, name.clone()),
            }
            if !record.status.digest.is_empty() && reference.digest().is_none() {
                insert(
                    &mut self.digests,
                    format!("{}@{}", reference.repository(), record.status.digest),
                );
            }
        }
        self.records.push(record);
    }

    fn to_proto(&self, told: &Told) -> v1::Image {
        let status = &self.records[0].status;
        let (uid, username) = translate::image::user(&status.config);
        v1::Image {
            id: self.id.clone(),
            repo_tags: self.tags.clone(),
            repo_digests: self.digests.clone(),
            // Clients take 0 for a broken answer.
            size: status.size.max(1),
            uid,
            username,
            spec: Some(v1::ImageSpec {
                image: self.id.clone(),
                annotations: status.origin.annotations.clone().into_iter().collect(),
                ..v1::ImageSpec::default()
            }),
            pinned: self
                .records
                .iter()
                .any(|record| record.spec.pinned || told.pinned.contains(&record.meta.name)),
        }
    }

    fn info(&self) -> BTreeMap<String, String> {
        let status = &self.records[0].status;
        let info = json!({
            "chainID": status.chain_ids.last(),
            "imageSpec": oci_configuration(status),
            "manifestDigest": status.manifest_digest,
            "names": self.records.iter().map(|r| r.meta.name.as_str()).collect::<Vec<_>>(),
        });
        BTreeMap::from([("info".to_owned(), info.to_string())])
    }
}

/// Keeps `list` sorted and without doubles.
fn insert(list: &mut Vec<String>, item: String) {
    if let Err(place) = list.binary_search(&item) {
        list.insert(place, item);
    }
}

/// The OCI image configuration, as far as it is kept.
fn oci_configuration(status: &ImageStatus) -> Value {
    let mut all = json!(*status.origin);
    all["config"] = oci_config(&status.config);
    all["rootfs"] = json!({ "type": "layers", "diff_ids": status.origin.diff_ids });
    all
}

/// The `config` object of an OCI image configuration.
fn oci_config(config: &ImageConfig) -> Value {
    let volumes: serde_json::Map<String, Value> = config.volumes.iter().map(|v| (v.clone(), json!({}))).collect();
    json!({
        "User": config.user,
        "Env": config.env,
        "Entrypoint": config.entrypoint,
        "Cmd": config.cmd,
        "Volumes": volumes,
        "WorkingDir": config.working_dir,
        "Labels": config.labels,
        "StopSignal": config.stop_signal,
    })
}

#[tonic::async_trait]
impl v1::image_service_server::ImageService for Services {
    async fn list_images(&self, request: Request<v1::ListImagesRequest>) -> Answer<v1::ListImagesResponse> {
        answer(
            list(self, request.into_inner().filter)
                .and_then(|images| bounded("ListImages", v1::ListImagesResponse { images })),
        )
    }

    type StreamImagesStream = Answers<v1::StreamImagesResponse>;

    async fn stream_images(&self, request: Request<v1::StreamImagesRequest>) -> Answer<Self::StreamImagesStream> {
        answer(
            list(self, request.into_inner().filter)
                .map(|all| chunked(all, |images| v1::StreamImagesResponse { images })),
        )
    }

    async fn image_status(&self, request: Request<v1::ImageStatusRequest>) -> Answer<v1::ImageStatusResponse> {
        answer(status(self, request.into_inner()))
    }

    async fn pull_image(&self, request: Request<v1::PullImageRequest>) -> Answer<v1::PullImageResponse> {
        let (call, request) = Call::open(request);
        answer(pull(self, &call, request).await)
    }

    async fn remove_image(&self, request: Request<v1::RemoveImageRequest>) -> Answer<v1::RemoveImageResponse> {
        let (call, request) = Call::open(request);
        answer(remove(self, &call, request).await)
    }

    async fn image_fs_info(&self, _: Request<v1::ImageFsInfoRequest>) -> Answer<v1::ImageFsInfoResponse> {
        answer(fs_info(self).await)
    }
}

fn list(services: &Services, filter: Option<v1::ImageFilter>) -> Result<Vec<v1::Image>> {
    let (catalog, told) = (Catalog::read(&services.store), services.told());
    let wanted = filter
        .and_then(|filter| filter.image)
        .map(|spec| spec.image)
        .unwrap_or_default();
    if wanted.is_empty() {
        return Ok(catalog.entries.iter().map(|entry| entry.to_proto(&told)).collect());
    }
    let entry = catalog.resolve("filter.image.image", &wanted)?;
    Ok(entry.map(|entry| entry.to_proto(&told)).into_iter().collect())
}

/// An unknown image is an answer without one, never an error.
fn status(services: &Services, request: v1::ImageStatusRequest) -> Result<v1::ImageStatusResponse> {
    let spec = translate::present("image", &request.image)?;
    let catalog = Catalog::read(&services.store);
    let entry = catalog.resolve("image.image", &spec.image)?;
    Ok(v1::ImageStatusResponse {
        image: entry.map(|entry| entry.to_proto(&services.told())),
        info: entry.filter(|_| request.verbose).map(Entry::info).unwrap_or_default(),
    })
}

/// An id can only be that of an image that is here; a name is asked for, every time.
async fn pull(services: &Services, call: &Call, request: v1::PullImageRequest) -> Result<v1::PullImageResponse> {
    let text = &translate::present("image", &request.image)?.image;
    let reference = match Reference::parse(text, "image.image") {
        Ok(reference) => reference,
        Err(error) => {
            let catalog = Catalog::read(&services.store);
            let entry = catalog.resolve("image.image", text).ok().flatten().ok_or(error)?;
            call.about("", &entry.id);
            return Ok(v1::PullImageResponse {
                image_ref: entry.id.clone(),
            });
        }
    };
    let credentials = request.auth.map(translate::image::credential).into_iter().collect();
    let pull = Pull::begin(&services.store, &reference, credentials, false).await?;
    let image_ref = pull.done(services, call).await?;
    call.about("", &image_ref);
    Ok(v1::PullImageResponse { image_ref })
}

/// Drops all names of the image. Containers that use it keep its layers; a deleted record is invisible at once.
async fn remove(services: &Services, call: &Call, request: v1::RemoveImageRequest) -> Result<v1::RemoveImageResponse> {
    let text = &translate::present("image", &request.image)?.image;
    let catalog = Catalog::read(&services.store);
    if let Some(entry) = catalog.resolve("image.image", text)? {
        call.about("", &entry.id);
        for record in &entry.records {
            services.store.delete::<ImageKind>(&record.meta.uid).await?;
        }
    } else if let Ok(reference) = Reference::parse(text, "image.image")
        && let Some(record) = services.store.by_name::<ImageKind>(&reference.to_string())
    {
        // A name that is not here yet, or failed.
        services.store.delete::<ImageKind>(&record.meta.uid).await?;
    }
    Ok(v1::RemoveImageResponse {})
}

/// One file system holds everything: what the node keeps for images and what containers write into their own layers is
/// the use of the first list (contract of the kubelet), what containers write that of the second.
async fn fs_info(services: &Services) -> Result<v1::ImageFsInfoResponse> {
    let node = services
        .node()
        .ok_or_else(|| Error::Unavailable("the node was not looked at yet".into()))?;
    let status = &node.status;
    let ask = Ask {
        writable: true,
        ..Ask::default()
    };
    let written = match services.store.ask(ask).await {
        Ok(answer) => answer.writable.unwrap_or_default(),
        // Nobody samples: what was counted before is told.
        Err(state::Error::Unanswered) => DiskUsage::default(),
        Err(error) => return Err(error.into()),
    };
    let entry = |bytes, inodes| v1::FilesystemUsage {
        timestamp: status.image_sampled.max(written.at),
        fs_id: Some(v1::FilesystemIdentifier {
            mountpoint: status.image_store.clone(),
        }),
        used_bytes: Some(v1::UInt64Value { value: bytes }),
        inodes_used: Some(v1::UInt64Value { value: inodes }),
    };
    let all = entry(
        status.image_bytes.saturating_add(written.bytes),
        status.image_inodes.saturating_add(written.inodes),
    );
    Ok(v1::ImageFsInfoResponse {
        image_filesystems: vec![all],
        container_filesystems: vec![entry(written.bytes, written.inodes)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::image::ImageSpec;
    use state::{Meta, Object};

    fn id(c: char) -> String {
        format!("sha256:{}", c.to_string().repeat(64))
    }

    fn image(name: &str, id: &str, digest: &str) -> Arc<Image> {
        let meta = Meta {
            name: name.to_owned(),
            ..Meta::default()
        };
        let status = ImageStatus {
            phase: ImagePhase::Ready,
            id: id.to_owned(),
            digest: digest.to_owned(),
            size: 9,
            ..ImageStatus::default()
        };
        Arc::new(Object::new(meta, ImageSpec::default(), status))
    }

    fn catalog() -> Catalog {
        let mut pending = image("docker.io/library/late:latest", &id('c'), "");
        Arc::make_mut(&mut pending).status.phase = ImagePhase::Pending;
        let mut deleted = image("docker.io/library/gone:latest", &id('d'), "");
        Arc::make_mut(&mut deleted).meta.deletion = Some(1);
        Catalog::of(vec![
            image("r.example/web:v2", &id('a'), &id('e')),
            image(&format!("r.example/web@{}", id('e')), &id('a'), &id('e')),
            image("localhost/hello:latest", &id('b'), ""),
            image("docker.io/library/web:latest", &id('a'), &id('f')),
            pending,
            deleted,
        ])
    }

    #[test]
    fn merges_names_by_id() {
        let catalog = catalog();
        assert_eq!(catalog.entries.len(), 2);
        let image = catalog.entries[0].to_proto(&Told::default());
        assert_eq!(image.id, id('a'));
        assert_eq!(image.repo_tags, ["docker.io/library/web:latest", "r.example/web:v2"]);
        let digests = [
            format!("docker.io/library/web@{}", id('f')),
            format!("r.example/web@{}", id('e')),
        ];
        assert_eq!(image.repo_digests, digests);
        let names = catalog.names(&id('b'));
        assert_eq!(
            (names.tag.as_deref(), names.digest),
            (Some("localhost/hello:latest"), None)
        );
    }

    #[test]
    fn resolves_ids_names_and_prefixes() {
        let catalog = catalog();
        let hex = "a".repeat(64);
        let digest_name = format!("r.example/web:other@{}", id('e'));
        for (text, found) in [
            (id('a').as_str(), Some('a')),
            (hex.as_str(), Some('a')),
            (id('c').as_str(), None),
            ("web", Some('a')),
            ("r.example/web:v2", Some('a')),
            ("r.example/web", None),
            (digest_name.as_str(), Some('a')),
            ("localhost/hello", Some('b')),
            ("bbb", Some('b')),
            ("sha256:bb", Some('b')),
            ("ccc", None),
            ("late", None),
            ("gone", None),
        ] {
            let entry = catalog
                .resolve("image.image", text)
                .unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(entry.map(|e| e.id.clone()), found.map(id), "{text}");
        }
    }

    #[test]
    fn bad_names_are_errors_with_the_field() {
        for text in ["", "A B", "x@sha256:1", "../x"] {
            let error = catalog().resolve("image.image", text).unwrap_err();
            assert!(error.to_string().starts_with("image.image: "), "{error}");
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
        }
        let two = Catalog::of(vec![
            image("a:1", &format!("sha256:12{}", "a".repeat(62)), ""),
            image("b:1", &format!("sha256:12{}", "b".repeat(62)), ""),
        ]);
        let error = two.resolve("image.image", "12").unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        let error = catalog().require("config.image.image", "nothing").unwrap_err();
        assert_eq!(error.code(), tonic::Code::NotFound);
        assert!(error.to_string().contains("nothing"), "{error}");
    }
}
