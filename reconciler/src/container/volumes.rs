//! Anonymous volumes: a directory of the container's own for each path in the image's `Volumes`, filled with what the
//! image has there. They go with the container's directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use state::Container;

use super::{Stand, dir};
use crate::engine::Context;
use crate::error::{Error, Result};
use crate::world::linux::content;
use crate::world::linux::{images, mounts, seed, selinux};
use crate::world::paths::make_dir;

/// Most volumes of one image.
const MOST: usize = 256;

/// Makes what is missing; answers each volume's directory by its path in the container. Where the image has a file it
/// makes none: that file is the container's own already. All files get the SELinux label.
pub async fn ensure(
    cx: &Context,
    object: &Container,
    stand: &Stand,
    label: Option<&str>,
) -> Result<BTreeMap<String, PathBuf>> {
    let clean = |path: &str| super::spec::clean(Path::new(path));
    let mounted = |path: &str| {
        object
            .spec
            .mounts
            .iter()
            .any(|mount| clean(&mount.container_path) == clean(path))
    };
    let paths = stand.config.volumes.iter().filter(|path| !mounted(path));
    let mut wanted: BTreeSet<String> = paths.map(|path| clean(path).display().to_string()).collect();
    wanted.remove("/");
    if wanted.is_empty() {
        return Ok(BTreeMap::new());
    }
    if wanted.len() > MOST {
        let why = format!(
            "the image's configuration has {} volumes, at most {MOST} are made",
            wanted.len()
        );
        return Err(Error::Refused(why));
    }
    let own = dir(&cx.world.paths, object).join("volumes");
    make_dir(&own)?;
    let lower = cx.world.images.lower(&stand.chain_ids)?;
    let image = object.spec.image.requested.clone();
    let label = label.map(str::to_owned);
    let done = tokio::task::spawn_blocking(move || {
        let view = mounts::detached(&lower)?;
        let mut volumes = BTreeMap::new();
        for (i, path) in wanted.into_iter().enumerate() {
            let target = own.join(i.to_string());
            let half = own.join(format!("{i}.new"));
            let failed = |e| content::Error::io("fill the volume", &path)(nix::errno::Errno::from_raw(code(&e)));
            if !target.is_dir() {
                let gone = fs::remove_dir_all(&half);
                gone.or_else(absent).map_err(failed)?;
                if !seed::tree(view.as_fd(), Path::new(&path), &half).map_err(failed)? {
                    continue;
                }
                if let Some(label) = &label {
                    selinux::set_all(&half, label).map_err(failed)?;
                }
                fs::rename(&half, &target).map_err(failed)?;
            }
            volumes.insert(path, target);
        }
        Ok(volumes)
    });
    let done = done.await.map_err(|source| Error::Task {
        op: "make volumes",
        source,
    })?;
    done.map_err(images::failed(&image))
}

fn absent(e: std::io::Error) -> std::io::Result<()> {
    match e.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(e),
    }
}

fn code(e: &std::io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}
