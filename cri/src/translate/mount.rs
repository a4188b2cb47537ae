//! Mounts and devices of a container.

use state::container::{Device, Mount, Propagation};

use super::{absolute, image, known, security, text};
use crate::error::{Error, Result};
use crate::runtime::v1;

pub(super) fn mounts(from: &[v1::Mount]) -> Result<Vec<Mount>> {
    let one = |(i, from)| mount(&format!("config.mounts[{i}]"), from);
    from.iter().enumerate().map(one).collect()
}

fn mount(field: &str, from: &v1::Mount) -> Result<Mount> {
    absolute(&format!("{field}.container_path"), &from.container_path)?;
    let propagation = match known::<v1::MountPropagation>(&format!("{field}.propagation"), from.propagation)? {
        v1::MountPropagation::PropagationPrivate => Propagation::Private,
        v1::MountPropagation::PropagationHostToContainer => Propagation::HostToContainer,
        v1::MountPropagation::PropagationBidirectional => Propagation::Bidirectional,
    };
    // An image message without an image is how some clients say "none".
    let image = from.image.as_ref().filter(|image| !image.image.is_empty());
    if image.is_some() {
        if !from.host_path.is_empty() {
            return Err(Error::invalid(
                format!("{field}.host_path"),
                "must be empty beside an image",
            ));
        }
        if !from.readonly {
            return Err(Error::invalid(format!("{field}.readonly"), "must be true for an image"));
        }
    } else {
        absolute(&format!("{field}.host_path"), &from.host_path)?;
        if !from.image_sub_path.is_empty() {
            return Err(Error::invalid(format!("{field}.image_sub_path"), "needs an image"));
        }
    }
    if from.recursive_read_only && (!from.readonly || propagation != Propagation::Private) {
        let problem = "needs readonly and propagation PRIVATE";
        return Err(Error::invalid(format!("{field}.recursive_read_only"), problem));
    }
    text(&format!("{field}.image_sub_path"), &from.image_sub_path)?;
    Ok(Mount {
        container_path: from.container_path.clone(),
        host_path: from.host_path.clone(),
        readonly: from.readonly,
        recursive_read_only: from.recursive_read_only,
        selinux_relabel: from.selinux_relabel,
        propagation,
        uid_mappings: security::id_mappings(&from.uid_mappings),
        gid_mappings: security::id_mappings(&from.gid_mappings),
        image: image.map(|image| image::from_proto(image, String::new())),
        image_sub_path: from.image_sub_path.clone(),
        options: from.mount_options.clone(),
    })
}

pub(super) fn to_proto(from: &Mount) -> v1::Mount {
    v1::Mount {
        container_path: from.container_path.clone(),
        host_path: from.host_path.clone(),
        readonly: from.readonly,
        selinux_relabel: from.selinux_relabel,
        propagation: match from.propagation {
            Propagation::Private => v1::MountPropagation::PropagationPrivate,
            Propagation::HostToContainer => v1::MountPropagation::PropagationHostToContainer,
            Propagation::Bidirectional => v1::MountPropagation::PropagationBidirectional,
        }
        .into(),
        uid_mappings: security::id_mappings_to_proto(&from.uid_mappings),
        gid_mappings: security::id_mappings_to_proto(&from.gid_mappings),
        recursive_read_only: from.recursive_read_only,
        image: from.image.as_ref().map(image::to_proto),
        image_sub_path: from.image_sub_path.clone(),
        mount_options: from.options.clone(),
    }
}

pub(super) fn devices(from: &[v1::Device]) -> Result<Vec<Device>> {
    let one = |(i, from): (usize, &v1::Device)| {
        let field = |part: &str| format!("config.devices[{i}].{part}");
        absolute(&field("container_path"), &from.container_path)?;
        absolute(&field("host_path"), &from.host_path)?;
        if !from.permissions.chars().all(|c| "rwm".contains(c)) {
            return Err(Error::invalid(field("permissions"), "may hold r, w and m only"));
        }
        Ok(Device {
            container_path: from.container_path.clone(),
            host_path: from.host_path.clone(),
            permissions: from.permissions.clone(),
        })
    };
    from.iter().enumerate().map(one).collect()
}
