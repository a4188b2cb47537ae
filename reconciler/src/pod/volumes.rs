//! Stage `volumes`: emptyDir directories of a pod, and checks of its host paths.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use state::Pod;
use state::pod::{PodKind, Volume, VolumeSource};

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::Paths;
use crate::world::linux::files::{is_mount_point, unmount};
use crate::world::paths::make_dir;

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
                    let mounted = is_mount_point(&path)?;
                    have.mounted |= mounted;
                    mounted
                }
                VolumeSource::EmptyDir { .. } => path.is_dir(),
                VolumeSource::HostPath { kind, .. } => kind.is_empty() || path.exists(),
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
            make(&path(&cx.world.paths, object, volume), &volume.source)?;
        }
        Ok(())
    }

    async fn undo(cx: &Context, object: &Pod) -> Result<Undone> {
        for volume in &object.spec.volumes {
            if let VolumeSource::EmptyDir { memory: true, .. } = volume.source {
                unmount(&path(&cx.world.paths, object, volume))?;
            }
        }
        Ok(Undone::Done)
    }
}

fn make(path: &Path, source: &VolumeSource) -> Result<()> {
    match source {
        VolumeSource::EmptyDir { memory, size_limit } => {
            make_dir(path)?;
            if *memory && !is_mount_point(path)? {
                let size = if *size_limit > 0 {
                    format!(",size={size_limit}")
                } else {
                    String::new()
                };
                let options = format!("mode=1777{size}");
                let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
                let mounted = mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options.as_str()));
                mounted.map_err(Error::sys("mount tmpfs on", path))?;
            }
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).map_err(Error::io("set mode of", path))
        }
        VolumeSource::HostPath { kind, .. } => match kind.as_str() {
            "DirectoryOrCreate" => fs::create_dir_all(path).map_err(Error::io("make directory", path)),
            "FileOrCreate" if !path.exists() => fs::write(path, b"").map_err(Error::io("make", path)),
            "Directory" | "File" if !path.exists() => Err(Error::Refused(format!(
                "spec.volumes: hostPath {} does not exist",
                path.display()
            ))),
            _ => Ok(()),
        },
    }
}
