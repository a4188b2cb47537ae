//! Images as volumes (CRI `Mount.image`): mounted read-only, once for a pod, and taken down with its sandbox.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use state::{Container, PodSandbox};

use super::Stand;
use crate::engine::Context;
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::linux::mounts::{self, Mapping};
use crate::world::linux::netns::UserPin;
use crate::world::linux::{content, images};

/// Sources of the container's image volumes, by their place among its mounts; mounts what is not mounted yet.
///
/// # Errors
/// If a sub path is no directory of its image. The text has `ImageVolumeMountFailed`, which the kubelet looks for.
pub async fn ensure(
    cx: &Context,
    sandbox: &PodSandbox,
    object: &Container,
    stand: &Stand,
    label: Option<&str>,
) -> Result<BTreeMap<usize, PathBuf>> {
    let mut sources = BTreeMap::new();
    for (i, image) in &stand.volumes {
        let wish = &object.spec.mounts[*i];
        let hex = image.id.rsplit(':').next().unwrap_or_default();
        let target = cx.world.paths.image_volumes(sandbox.uid()).join(hex);
        let lower = cx.world.images.lower(&image.chain_ids)?;
        let user = sandbox::pins(&cx.world.paths, sandbox).user;
        let sub_path = wish.image_sub_path.clone();
        let label = label.map(str::to_owned);
        let done = tokio::task::spawn_blocking(move || {
            mount(&lower, &target, label.as_deref(), user.as_ref())?;
            Ok(directory(&target, Path::new(&sub_path)))
        });
        let done = done.await.map_err(|source| Error::Task {
            op: "mount image volume",
            source,
        })?;
        let name = wish.image.as_ref().map_or("", |image| &image.requested);
        let source = done.map_err(images::failed(name))?.map_err(|e| {
            Error::Refused(format!(
                "spec.mounts[{i}].imageSubPath: ImageVolumeMountFailed: {:?} of image {name}: {e}",
                wish.image_sub_path
            ))
        })?;
        sources.insert(*i, source);
    }
    Ok(sources)
}

fn mount(lower: &[PathBuf], target: &Path, label: Option<&str>, user: Option<&UserPin>) -> content::Result<()> {
    let Some(user) = user else {
        return mounts::mount_view(lower, target, label);
    };
    let pin = File::open(&user.path).map_err(content::Error::io("open", user.path.display()))?;
    let mapping = Mapping {
        userns: pin.as_fd(),
        root: user.root(),
    };
    mounts::mount_view_mapped(lower, target, label, mapping)
}

/// The directory of a mounted image that a sub path leads to; it cannot lead out of it.
fn directory(root: &Path, sub_path: &Path) -> std::io::Result<PathBuf> {
    if sub_path.as_os_str().is_empty() {
        return Ok(root.to_owned());
    }
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let found = openat2(File::open(root)?, sub_path, how)?;
    fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
}
