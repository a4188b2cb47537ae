//! Apply: what a user wrote becomes records, new ones or changes of those that bear the name.

use std::sync::Arc;

use serde_json::Value;
use state::container::{ContainerKind, ContainerSpec};
use state::image::{ImageKind, ImageSpec};
use state::pod::{PodKind, PodSpec};
use state::resource::API_VERSION;
use state::sandbox::{PodSandbox, SandboxGoal, SandboxKind, SandboxSpec};
use state::secret::{Opened, SecretKind, SecretSpec};
use state::{Kind, Meta, New, Object, Put, Reference};

use super::{is_kind, unknown_kind, v1};
use crate::error::{Error, Result};
use crate::images::Catalog;
use crate::services::Services;
use crate::translate;

/// Namespace of documents that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// A parsed and checked document.
enum Wish {
    Pod(New<PodKind>),
    Sandbox(New<SandboxKind>),
    Container(New<ContainerKind>),
    Image(New<ImageKind>),
    Secret(New<SecretKind>),
}

/// Checks all documents before the first is written.
pub(super) async fn apply(services: &Services, request: v1::ApplyRequest) -> Result<v1::ApplyResponse> {
    let mut wishes = Vec::new();
    for (i, document) in request.documents.iter().enumerate() {
        wishes.push(parse(&format!("documents[{i}]"), document)?);
    }
    // Pods name secrets, wherever in a file these stand.
    let mut order: Vec<_> = wishes.into_iter().enumerate().collect();
    order.sort_by_key(|(_, wish)| !matches!(wish, Wish::Secret(_)));
    let mut applied = vec![v1::Applied::default(); order.len()];
    for (i, wish) in order {
        applied[i] = match wish {
            Wish::Pod(new) => put(services, new, request.dry_run, change_pod).await?,
            Wish::Sandbox(new) => put(services, new, request.dry_run, change_sandbox).await?,
            Wish::Container(mut new) => {
                place(services, &mut new, request.dry_run)?;
                put(services, new, request.dry_run, change_container).await?
            }
            Wish::Image(new) => put(services, new, request.dry_run, change_image).await?,
            Wish::Secret(new) => put(services, new, request.dry_run, change_secret).await?,
        };
    }
    Ok(v1::ApplyResponse { applied })
}

fn parse(field: &str, document: &v1::Document) -> Result<Wish> {
    match document.kind.as_str() {
        kind if is_kind::<PodKind>(kind) => record::<PodKind>(field, document, |_, _| Ok(())).map(Wish::Pod),
        kind if is_kind::<SandboxKind>(kind) => record::<SandboxKind>(field, document, |meta, spec| {
            if meta.name.is_empty() {
                meta.name = translate::sandbox::identity(&spec.pod);
            }
            Ok(())
        })
        .map(Wish::Sandbox),
        kind if is_kind::<ContainerKind>(kind) => {
            record::<ContainerKind>(field, document, |_, _| Ok(())).map(Wish::Container)
        }
        kind if is_kind::<ImageKind>(kind) => record::<ImageKind>(field, document, |meta, _| {
            meta.namespace.clear();
            meta.name = Reference::parse(&meta.name, "metadata.name")?.to_string();
            Ok(())
        })
        .map(Wish::Image),
        kind if is_kind::<SecretKind>(kind) => secret(field, document).map(Wish::Secret),
        kind => Err(unknown_kind(&format!("{field}.kind"), kind)),
    }
}

/// Of the metadata a user says name, namespace, labels and annotations; the rest is the store's.
fn record<K: Kind>(
    field: &str,
    document: &v1::Document,
    complete: impl FnOnce(&mut Meta, &K::Spec) -> Result<(), state::Error>,
) -> Result<New<K>> {
    let named = |problem: String| Error::invalid(format!("{field} ({})", K::KIND), problem);
    let mut json = json(document).map_err(named)?;
    let mut meta = meta(&mut json).map_err(named)?;
    let spec: K::Spec = typed("spec", json["spec"].take()).map_err(named)?;
    complete(&mut meta, &spec).map_err(|error| named(error.to_string()))?;
    K::validate(&meta, &spec).map_err(|error| named(error.to_string()))?;
    Ok(New { meta, spec })
}

/// A secret, which no error may quote.
fn secret(field: &str, document: &v1::Document) -> Result<New<SecretKind>> {
    let named = |problem: String| Error::invalid(format!("{field} ({})", SecretKind::KIND), problem);
    let mut json = json(document).map_err(named)?;
    let meta = meta(&mut json).map_err(named)?;
    let opened: Opened = serde_json::from_value(json["spec"].take())
        .map_err(|_| named("spec: must have a known type and a config, both text".to_owned()))?;
    let spec = SecretSpec::from(opened);
    SecretKind::validate(&meta, &spec).map_err(|error| named(error.to_string()))?;
    Ok(New { meta, spec })
}

/// A document of our version; an object.
fn json(document: &v1::Document) -> Result<Value, String> {
    let json: Value = serde_json::from_slice(&document.json).map_err(|error| error.to_string())?;
    if !json.is_object() {
        return Err("must be an object with metadata and spec".to_owned());
    }
    let version = json.get("apiVersion").and_then(Value::as_str).unwrap_or(API_VERSION);
    if version != API_VERSION {
        return Err(format!("apiVersion: {version:?} is not {API_VERSION}"));
    }
    Ok(json)
}

fn meta(json: &mut Value) -> Result<Meta, String> {
    let given: Meta = typed("metadata", json["metadata"].take())?;
    Ok(Meta {
        name: given.name,
        namespace: Some(given.namespace)
            .filter(|n| !n.is_empty())
            .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
        labels: given.labels,
        annotations: given.annotations,
        ..Meta::default()
    })
}

fn typed<T: serde::de::DeserializeOwned>(name: &str, value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| match error.path().to_string().as_str() {
        "." => format!("{name}: {}", error.inner()),
        path => format!("{name}.{path}: {}", error.inner()),
    })
}

/// A container's sandbox may be given by uid or by name; its image by any name of one that is here.
fn place(services: &Services, new: &mut New<ContainerKind>, dry_run: bool) -> Result<()> {
    let text = &new.spec.sandbox;
    let sandbox: Option<Arc<PodSandbox>> = services
        .store
        .get::<SandboxKind>(text)
        .or_else(|| services.store.by_name::<SandboxKind>(text));
    let Some(sandbox) = sandbox else {
        if dry_run {
            return Ok(());
        }
        return Err(Error::NotFound {
            what: "sandbox",
            id: format!("{text:.200} (spec.sandbox: uid or name)"),
        });
    };
    new.spec.sandbox.clone_from(&sandbox.meta.uid);
    new.meta.namespace.clone_from(&sandbox.meta.namespace);
    new.meta.owner = Some(translate::container::owner(&sandbox));
    if new.meta.name.is_empty() {
        new.meta.name = translate::container::identity(&new.spec, &sandbox);
    }
    if new.spec.image.id.is_empty() && holder::<ContainerKind>(services, &new.meta).is_none() {
        let catalog = Catalog::read(&services.store);
        new.spec.image.id = catalog.require("spec.image.requested", &new.spec.image.requested)?;
    }
    Ok(())
}

/// Lays what the user wrote over the record's spec, or says why that cannot be.
type Change<K> = fn(&Meta, &mut <K as Kind>::Spec, <K as Kind>::Spec) -> Result<(), state::Error>;

/// Changes the holder of the name, or creates it.
async fn put<K: Kind>(services: &Services, new: New<K>, dry_run: bool, change: Change<K>) -> Result<v1::Applied> {
    if new.meta.name.is_empty() {
        return Err(Error::invalid(
            format!("{}: metadata.name", K::KIND),
            "must not be empty",
        ));
    }
    let Some(old) = holder::<K>(services, &new.meta) else {
        if dry_run {
            return Ok(applied::<K>(&new.meta, v1::applied::Outcome::Created));
        }
        let (Put::Created(record) | Put::Joined(record)) = services.store.create(new).await?;
        return Ok(applied::<K>(&record.meta, v1::applied::Outcome::Created));
    };
    let edit = move |meta: &mut Meta, spec: &mut K::Spec| {
        change(meta, spec, new.spec)?;
        meta.labels = new.meta.labels;
        meta.annotations = new.meta.annotations;
        Ok(())
    };
    let now = if dry_run {
        let (mut meta, mut spec) = (old.meta.clone(), old.spec.clone());
        edit(&mut meta, &mut spec)?;
        Object::new(meta, spec, old.status.clone())
    } else {
        services
            .store
            .update::<K, _>(&old.meta.uid, edit)
            .await?
            .as_ref()
            .clone()
    };
    let same =
        now.spec == old.spec && now.meta.labels == old.meta.labels && now.meta.annotations == old.meta.annotations;
    let outcome = if same {
        v1::applied::Outcome::Unchanged
    } else {
        v1::applied::Outcome::Configured
    };
    Ok(applied::<K>(&now.meta, outcome))
}

/// The record that bears the name in its namespace, and for a child in its owner.
fn holder<K: Kind>(services: &Services, meta: &Meta) -> Option<Arc<Object<K>>> {
    if let Some(owner) = &meta.owner {
        let mut owned = services.store.owned::<K>(&owner.uid);
        owned.retain(|object| object.meta.name == meta.name && !object.meta.deleted());
        return owned.into_iter().next();
    }
    if meta.namespace.is_empty() {
        return services.store.by_name::<K>(&meta.name);
    }
    let found = services
        .store
        .by_name::<K>(&format!("{}/{}", meta.namespace, meta.name))?;
    Some(found).filter(|found| found.meta.namespace == meta.namespace)
}

fn applied<K: Kind>(meta: &Meta, outcome: v1::applied::Outcome) -> v1::Applied {
    v1::Applied {
        kind: K::KIND.to_owned(),
        namespace: meta.namespace.clone(),
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        generation: meta.generation,
        outcome: outcome.into(),
    }
}

fn refused<K: Kind>(meta: &Meta, problem: &str) -> state::Error {
    state::Error::Conflict {
        kind: K::KIND,
        name: meta.name.clone(),
        problem: problem.to_owned(),
    }
}

fn change_pod(_: &Meta, old: &mut PodSpec, new: PodSpec) -> Result<(), state::Error> {
    *old = new;
    Ok(())
}

/// A sandbox is made once; only what later calls may change can differ.
fn change_sandbox(meta: &Meta, old: &mut SandboxSpec, new: SandboxSpec) -> Result<(), state::Error> {
    if old.goal == SandboxGoal::Stopped && new.goal == SandboxGoal::Ready {
        return Err(refused::<SandboxKind>(
            meta,
            "a stopped sandbox never returns; delete it first",
        ));
    }
    let allowed = SandboxSpec {
        goal: new.goal,
        overhead: new.overhead.clone(),
        resources: new.resources.clone(),
        ..old.clone()
    };
    if allowed != new {
        return Err(refused::<SandboxKind>(
            meta,
            "only goal, overhead and resources can change; delete it first",
        ));
    }
    *old = new;
    Ok(())
}

fn change_container(meta: &Meta, old: &mut ContainerSpec, mut new: ContainerSpec) -> Result<(), state::Error> {
    if new.goal < old.goal {
        return Err(refused::<ContainerKind>(
            meta,
            "the goal can only rise; a restart is a new attempt",
        ));
    }
    if new.image.id.is_empty() {
        new.image.id.clone_from(&old.image.id);
    }
    new.start_by = old.start_by;
    new.log_epoch = new.log_epoch.max(old.log_epoch);
    let allowed = ContainerSpec {
        goal: new.goal,
        grace_seconds: new.grace_seconds,
        log_epoch: new.log_epoch,
        resources: new.resources.clone(),
        ..old.clone()
    };
    if allowed != new {
        return Err(refused::<ContainerKind>(
            meta,
            "only goal, graceSeconds and resources can change; delete it first",
        ));
    }
    *old = new;
    Ok(())
}

fn change_secret(_: &Meta, old: &mut SecretSpec, new: SecretSpec) -> Result<(), state::Error> {
    *old = new;
    Ok(())
}

fn change_image(_: &Meta, old: &mut ImageSpec, new: ImageSpec) -> Result<(), state::Error> {
    let pull_epoch = new.pull_epoch.max(old.pull_epoch);
    let mut digest = new.digest.clone();
    // What was pulled stands until a later epoch asks again.
    if digest.is_empty() && pull_epoch == old.pull_epoch && new.source == old.source {
        digest.clone_from(&old.digest);
    }
    *old = ImageSpec {
        pull_epoch,
        digest,
        ..new
    };
    Ok(())
}
