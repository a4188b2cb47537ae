//! The names in the content store: `index.json` of the OCI image layout.

use std::collections::HashMap;
use std::fs::{self, File};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use oci_spec::image::{ANNOTATION_REF_NAME, Descriptor, ImageIndex, ImageIndexBuilder, MediaType};

use super::{Content, Error, Result, sync_dir};

impl Content {
    /// An index that is not there, or that cannot be read, becomes an empty one: blobs are worth more than names, which
    /// the Image records have too.
    pub(super) fn mend_index(&self) -> Result<()> {
        let _lock = self.lock_index()?;
        let path = self.dir.join("index.json");
        match self.read_index() {
            Ok(_) => Ok(()),
            Err(Error::Invalid { problem, .. }) => {
                tracing::warn!(%problem, "index.json of the content store is damaged; set aside");
                let aside = self.dir.join("index.json.damaged");
                fs::rename(&path, &aside).map_err(Error::io("set aside", path.display()))?;
                self.write_index(&empty_index()?)
            }
            Err(_) if !path.exists() => self.write_index(&empty_index()?),
            Err(e) => Err(e),
        }
    }

    /// Makes `reference` name `descriptor`, durably; an older meaning of the name is replaced.
    pub fn tag(&self, reference: &str, descriptor: &Descriptor) -> Result<()> {
        let mut descriptor = descriptor.clone();
        let mut annotations = descriptor.annotations().clone().unwrap_or_default();
        annotations.insert(ANNOTATION_REF_NAME.into(), reference.into());
        descriptor.set_annotations(Some(annotations));
        // The names of the blobs must not be younger than the name that leads to them.
        sync_dir(&self.blobs())?;
        self.change_index(|manifests| {
            manifests.retain(|m| name_of(m) != Some(reference));
            manifests.push(descriptor);
        })
    }

    /// Removes a name; absent is success. The blobs stay.
    pub fn untag(&self, reference: &str) -> Result<()> {
        self.change_index(|manifests| manifests.retain(|m| name_of(m) != Some(reference)))
    }

    /// What `reference` names, exactly as it was given to [`Content::tag`].
    pub fn resolve(&self, reference: &str) -> Result<Option<Descriptor>> {
        Ok(self
            .list()?
            .into_iter()
            .find(|(name, _)| name == reference)
            .map(|(_, descriptor)| descriptor))
    }

    /// Every name with what it means.
    pub fn list(&self) -> Result<Vec<(String, Descriptor)>> {
        let named = |m: &Descriptor| name_of(m).map(|name| (name.to_string(), m.clone()));
        Ok(self.read_index()?.manifests().iter().filter_map(named).collect())
    }

    fn change_index(&self, change: impl FnOnce(&mut Vec<Descriptor>)) -> Result<()> {
        let _lock = self.lock_index()?;
        let mut index = self.read_index()?;
        let mut manifests = index.manifests().clone();
        change(&mut manifests);
        if manifests == *index.manifests() {
            return Ok(());
        }
        index.set_manifests(manifests);
        self.write_index(&index)
    }

    fn lock_index(&self) -> Result<Flock<File>> {
        let path = self.dir.join(".lock");
        loop {
            let file = File::create(&path).map_err(Error::io("create", path.display()))?;
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(lock) => return Ok(lock),
                Err((_, Errno::EINTR)) => {}
                Err((_, errno)) => return Err(Error::io("lock", path.display())(errno)),
            }
        }
    }

    fn read_index(&self) -> Result<ImageIndex> {
        let path = self.dir.join("index.json");
        let bytes = fs::read(&path).map_err(Error::io("read", path.display()))?;
        serde_json::from_slice(&bytes).map_err(|e| Error::invalid(path.display(), e))
    }

    fn write_index(&self, index: &ImageIndex) -> Result<()> {
        let bytes = serde_json::to_vec(index).map_err(|e| Error::invalid("index.json", e))?;
        self.replace_file("index.json", &bytes)
    }
}

fn empty_index() -> Result<ImageIndex> {
    ImageIndexBuilder::default()
        .schema_version(2u32)
        .media_type(MediaType::ImageIndex)
        .manifests(Vec::new())
        .build()
        .map_err(|e| Error::invalid("index.json", e))
}

fn name_of(descriptor: &Descriptor) -> Option<&str> {
    let annotations: Option<&HashMap<String, String>> = descriptor.annotations().as_ref();
    annotations?.get(ANNOTATION_REF_NAME).map(String::as_str)
}
