//! Lists of sandboxes and containers, answered from memory.

use std::sync::Arc;

use state::container::Container;
use state::sandbox::PodSandbox;

use super::v1;
use crate::error::Result;
use crate::filter::{meant, selects};
use crate::images::Catalog;
use crate::services::Services;
use crate::translate;

pub(super) fn sandboxes(services: &Services, filter: Option<v1::PodSandboxFilter>) -> Result<Vec<v1::PodSandbox>> {
    let filter = filter.unwrap_or_default();
    let state = match filter.state {
        Some(value) => Some(translate::known::<v1::PodSandboxState>(
            "filter.state.state",
            value.state,
        )?),
        None => None,
    };
    let all = chosen_sandboxes(services, &filter.id);
    let wanted = |sandbox: &PodSandbox| {
        state.is_none_or(|state| translate::sandbox::state(sandbox) == state)
            && selects(&filter.label_selector, &sandbox.meta.labels)
    };
    Ok(all
        .iter()
        .filter(|s| wanted(s))
        .map(|s| translate::sandbox::item(s))
        .collect())
}

pub(super) fn containers(services: &Services, filter: Option<v1::ContainerFilter>) -> Result<Vec<v1::Container>> {
    let filter = filter.unwrap_or_default();
    let state = match filter.state {
        Some(value) => Some(translate::known::<v1::ContainerState>(
            "filter.state.state",
            value.state,
        )?),
        None => None,
    };
    let all = chosen(services, &filter.id, &filter.pod_sandbox_id);
    let wanted = |container: &Container| {
        state.is_none_or(|state| translate::container::state(container.status.phase) == state)
            && selects(&filter.label_selector, &container.meta.labels)
    };
    let catalog = Catalog::read(&services.store);
    let item = |c: &Container| translate::container::item(c, &catalog.names(&c.spec.image.id));
    Ok(all.iter().filter(|c| wanted(c)).map(|c| item(c)).collect())
}

/// The containers that ids or prefixes of a filter mean; an empty one means any.
pub(super) fn chosen(services: &Services, id: &str, sandbox: &str) -> Vec<Arc<Container>> {
    let mut all = services.containers();
    if !id.is_empty() {
        let id = meant(id, all.iter().map(|c| c.uid()));
        all.retain(|container| Some(container.uid()) == id.as_deref());
    }
    if !sandbox.is_empty() {
        let sandboxes = services.sandboxes();
        let id = meant(sandbox, sandboxes.iter().map(|s| s.uid()));
        all.retain(|container| Some(container.spec.sandbox.as_str()) == id.as_deref());
    }
    all
}

/// The same of sandboxes.
pub(super) fn chosen_sandboxes(services: &Services, id: &str) -> Vec<Arc<PodSandbox>> {
    let mut all = services.sandboxes();
    if !id.is_empty() {
        let id = meant(id, all.iter().map(|s| s.uid()));
        all.retain(|sandbox| Some(sandbox.uid()) == id.as_deref());
    }
    all
}
