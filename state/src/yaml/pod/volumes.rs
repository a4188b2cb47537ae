//! A pod's volumes and where containers mount them.

use super::super::kubernetes as k8s;
use super::super::locate::At;
use super::super::{Reader, quantity};
use super::join;
use crate::pod::{Volume, VolumeMount, VolumeSource};

impl Reader<'_> {
    pub(super) fn volume_mount(&mut self, at: &str, mount: k8s::VolumeMount) -> VolumeMount {
        self.unsupported(
            at,
            &[
                (
                    "mountPropagation",
                    mount.mount_propagation.as_deref().is_some_and(|p| p != "None"),
                ),
                (
                    "recursiveReadOnly",
                    mount.recursive_read_only.as_deref().is_some_and(|p| p != "Disabled"),
                ),
                ("subPathExpr", mount.sub_path_expr.is_some()),
            ],
        );
        VolumeMount {
            name: mount.name,
            mount_path: mount.mount_path,
            sub_path: mount.sub_path.unwrap_or_default(),
            read_only: mount.read_only.unwrap_or(false),
        }
    }

    pub(super) fn volume(&mut self, at: &str, volume: k8s::Volume) -> Option<Volume> {
        let source = match (&volume.empty_dir, &volume.host_path) {
            (Some(_), Some(_)) => {
                self.at(at, At::Value, "has two sources, emptyDir and hostPath".into());
                return None;
            }
            (Some(empty), None) => {
                let mediums = [("", false), ("Memory", true)];
                let medium = empty.medium.as_deref().unwrap_or_default();
                let memory = self.word(&join(at, "emptyDir.medium"), medium, &mediums)?;
                let limit = empty
                    .size_limit
                    .as_ref()
                    .map_or(Ok(0), |limit| quantity::whole(&limit.0));
                let limit = limit.map_err(|problem| self.at(&join(at, "emptyDir.sizeLimit"), At::Value, problem));
                VolumeSource::EmptyDir {
                    memory,
                    size_limit: limit.ok()?.unsigned_abs(),
                }
            }
            (None, Some(host)) => VolumeSource::HostPath {
                path: host.path.clone(),
                kind: host.kind.clone().unwrap_or_default(),
            },
            (None, None) => {
                let others = [
                    ("configMap", volume.config_map.is_some()),
                    ("csi", volume.csi.is_some()),
                    ("downwardAPI", volume.downward_api.is_some()),
                    ("ephemeral", volume.ephemeral.is_some()),
                    ("image", volume.image.is_some()),
                    ("iscsi", volume.iscsi.is_some()),
                    ("nfs", volume.nfs.is_some()),
                    ("persistentVolumeClaim", volume.persistent_volume_claim.is_some()),
                    ("projected", volume.projected.is_some()),
                    ("secret", volume.secret.is_some()),
                ];
                self.unsupported(at, &others);
                if !others.iter().any(|(_, given)| *given) {
                    self.at(at, At::Value, "has no source, e.g. emptyDir: {}".into());
                }
                return None;
            }
        };
        Some(Volume {
            name: volume.name,
            source,
        })
    }
}
