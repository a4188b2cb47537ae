//! Stage `volumes`: emptyDir directories of a pod, and checks of its host paths.

use std::path::{Path, PathBuf};

use state::Pod;
use state::pod::{PodKind, Volume, VolumeSource};

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::paths::DIR_MODE;
use crate::world::{Paths, World};

pub struct Volumes;

/// Where a volume lies on the host.
pub fn path(paths: &Paths, pod: &Pod, volume: &Volume) -> PathBuf {
    match &volume.source {
        VolumeSource::HostPath { path, .. } => path.into(),
        VolumeSource::EmptyDir { .. } => super::dir(paths, pod).join("volumes").join(&volume.name),
    }
}

pub struct Have {
    missing: Option<String>,
    mounted: bool,
}

impl Stage<PodKind> for Volumes {
    type Have = Have;
    const NAME: &'static str = "volumes";

    async fn observe(cx: &Context, object: &Pod) -> Result<Have> {
        let mut have = Have {
            missing: None,
            mounted: false,
        };
        for volume in &object.spec.volumes {
            let path = path(&cx.world.paths, object, volume);
            let there = match &volume.source {
                VolumeSource::EmptyDir { memory: true, .. } => {
                    let mounted = cx.world.mounts.is_mounted(&path)?;
                    have.mounted |= mounted;
                    mounted
                }
                VolumeSource::EmptyDir { .. } => cx.world.files.exists(&path),
                VolumeSource::HostPath { kind, .. } => kind.is_empty() || cx.world.files.exists(&path),
            };
            if !there {
                have.missing.get_or_insert_with(|| volume.name.clone());
            }
        }
        Ok(have)
    }

    fn diff(_: &Pod, have: &Have) -> Step {
        match &have.missing {
            None => Step::Keep,
            Some(name) => Step::Make(Why::new("Absent", format!("volume {name} is not there"))),
        }
    }

    fn present(have: &Have) -> bool {
        have.mounted
    }

    async fn act(cx: &Context, object: &Pod, _: &Step) -> Result<()> {
        for volume in &object.spec.volumes {
            make(&cx.world, &path(&cx.world.paths, object, volume), &volume.source)?;
        }
        Ok(())
    }

    async fn undo(cx: &Context, object: &Pod) -> Result<Undone> {
        for volume in &object.spec.volumes {
            if let VolumeSource::EmptyDir { memory: true, .. } = volume.source {
                cx.world.mounts.unmount(&path(&cx.world.paths, object, volume))?;
            }
        }
        Ok(Undone::Done)
    }
}

fn make(world: &World, path: &Path, source: &VolumeSource) -> Result<()> {
    let files = &world.files;
    match source {
        VolumeSource::EmptyDir { memory, size_limit } => {
            files.make_dir(path, DIR_MODE)?;
            if *memory {
                world.mounts.tmpfs(path, *size_limit)?;
            }
            files.set_mode(path, 0o777)
        }
        VolumeSource::HostPath { kind, .. } => match kind.as_str() {
            "DirectoryOrCreate" => files.make_dir(path, 0o777),
            "FileOrCreate" if !files.exists(path) => files.replace(path, b""),
            "Directory" | "File" if !files.exists(path) => Err(Error::Refused(format!(
                "spec.volumes: hostPath {} does not exist",
                path.display()
            ))),
            _ => Ok(()),
        },
    }
}
