//! Pulls: each Pull record is one caller's wish, done at most once. Its Image records are written when all is there, so
//! a pull that is taken back leaves none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use state::image::{ImageKind, ImagePhase, ImageSource, ImageSpec};
use state::pull::{PullFailure, PullKind, PullOutcome, PullSpec, PullStatus};
use state::secret::PullSecret;
use state::store::New;
use state::{Image, Kind, Meta, Owner, Pull, Reference};

use crate::engine::Context;
use crate::engine::controller::Next;
use crate::error::{Class, Error, Result};
use crate::world::linux::pull::{Failure, Progress, Pulled};
use crate::world::linux::registry::{Access, AuthConfig, Credential, Keyring};

/// How often progress is told to who looks.
const TELL: Duration = Duration::from_millis(200);
/// For the look at what a pull has just put there.
const LOOK: Duration = Duration::from_secs(120);

/// Claims the pull before acting; stops as soon as its record is deleted.
pub async fn pass(cx: &Arc<Context>, object: &Arc<Pull>) -> Result<Next> {
    if object.meta.deleted() {
        cx.store.erase::<PullKind>(object.uid()).await?;
        return Ok(Next::Gone);
    }
    if object.status.claimed {
        return Ok(Next::Await);
    }
    let mut status = PullStatus {
        claimed: true,
        ..PullStatus::default()
    };
    cx.store.set_status::<PullKind>(object.uid(), status.clone());
    let progress = Arc::new(Progress::default());
    let dropped = cx.store.wait::<PullKind, (), _>(object.uid(), None, |now| {
        now.is_none_or(|now| now.meta.deleted()).then_some(())
    });
    let told = async || -> std::convert::Infallible {
        let mut ticks = tokio::time::interval(TELL);
        loop {
            ticks.tick().await;
            let layers = progress.layers();
            let claimed = true;
            let now = PullStatus {
                claimed,
                layers,
                ..PullStatus::default()
            };
            cx.store.set_status::<PullKind>(object.uid(), now);
            if !object.spec.progress {
                std::future::pending::<()>().await;
            }
        }
    };
    let outcome = tokio::select! {
        outcome = run(cx, object, &progress) => outcome,
        _ = dropped => {
            tracing::info!(image = object.spec.image, "pull stopped: nobody waits for it any more");
            return Ok(Next::Again(Duration::ZERO));
        }
        never = told() => match never {},
    };
    status.layers = if object.spec.progress {
        progress.layers()
    } else {
        Vec::new()
    };
    status.outcome = Some(outcome);
    status.finished_at = cx.world.clock.now_ns();
    let restored = matches!(&status.outcome, Some(PullOutcome::Done { .. })) && of_image(object);
    cx.store.set_status::<PullKind>(object.uid(), status);
    if restored {
        // Its image looks again and finds all there; nobody else asks.
        cx.store.delete::<PullKind>(object.uid()).await?;
    }
    Ok(Next::Await)
}

/// Is it an Image's own, to bring back what it lost?
fn of_image(object: &Pull) -> bool {
    object.meta.owner.as_ref().is_some_and(|o| o.kind == ImageKind::KIND)
}

async fn run(cx: &Context, object: &Pull, progress: &Arc<Progress>) -> PullOutcome {
    let failed = |why, message: String| PullOutcome::Failed { why, message };
    let reference = match Reference::parse(&object.spec.image, "spec.image") {
        Ok(reference) => reference,
        Err(e) => return failed(PullFailure::Invalid, e.to_string()),
    };
    let present = cx.store.by_name::<ImageKind>(&reference.to_string());
    let local = present.filter(|image| local(image));
    if let Some(image) = local.as_deref().filter(|image| only_local(image, &reference)) {
        return done(image);
    }
    let credentials = match credentials(&object.spec, &reference).await {
        Ok(credentials) => credentials,
        Err(message) => return failed(PullFailure::PermissionDenied, message),
    };
    let begun = Instant::now();
    let access = Access { reference, credentials };
    let pulled = match cx.world.images.pull(&access, progress).await {
        Ok(pulled) => pulled,
        Err(failure) => return refused(object, &failure, local.as_deref()),
    };
    match record(cx, object, &access.reference, &pulled).await {
        Ok(id) => {
            let (digest, ms) = (pulled.digest.to_string(), begun.elapsed().as_millis());
            tracing::info!(image = %access.reference, digest, id, ms, "pulled");
            PullOutcome::Done { id, digest }
        }
        Err(e) => {
            let full = matches!(e, Error::State(state::Error::Full { .. })) || e.reason() == "NoSpace";
            let why = if full {
                PullFailure::NoSpace
            } else {
                PullFailure::Failed
            };
            failed(why, e.to_string())
        }
    }
}

/// Came by another way than a registry, and is whole.
fn local(image: &Image) -> bool {
    image.spec.source != ImageSource::Registry && image.status.phase == ImagePhase::Ready
}

/// No registry can have it.
fn only_local(image: &Image, reference: &Reference) -> bool {
    image.spec.source == ImageSource::BuiltIn || reference.host() == "localhost"
}

fn done(image: &Image) -> PullOutcome {
    PullOutcome::Done {
        id: image.status.id.clone(),
        digest: image.status.digest.clone(),
    }
}

/// An imported image stands in where no registry gives it.
fn refused(object: &Pull, failure: &Failure, local: Option<&Image>) -> PullOutcome {
    let (why, mut message) = (failure.why(), failure.to_string());
    let elsewhere = matches!(
        why,
        PullFailure::NotFound | PullFailure::PermissionDenied | PullFailure::RegistryUnavailable
    );
    if let Some(image) = local.filter(|_| elsewhere) {
        tracing::info!(image = object.spec.image, "the imported image is taken: {message}");
        return done(image);
    }
    // Registries answer "not found" to those who may not see what is there.
    if matches!(why, PullFailure::NotFound | PullFailure::PermissionDenied) {
        message.push_str(&unknown_secrets(&object.spec.secrets));
    }
    tracing::warn!(image = object.spec.image, ?why, "pull failed: {message}");
    PullOutcome::Failed { why, message }
}

fn unknown_secrets(secrets: &[PullSecret]) -> String {
    let unknown = secrets.iter().filter(|secret| secret.found.is_none());
    let names: Vec<_> = unknown.map(|secret| secret.name.as_str()).collect();
    match names[..] {
        [] => String::new(),
        _ => format!(
            "; imagePullSecrets {}: not known to this daemon, which keeps secrets in memory only: apply the file with \
             this Secret (again), and the pull is tried at once",
            names.join(", ")
        ),
    }
}

/// Those of the request, then the pod's secrets, then those of this node.
async fn credentials(spec: &PullSpec, reference: &Reference) -> Result<Vec<Credential>, String> {
    let mut all = Vec::new();
    for auth in &spec.credentials {
        let config = AuthConfig {
            username: auth.username.clone(),
            password: auth.password.clone(),
            auth: auth.auth.clone(),
            server_address: auth.server_address.clone(),
            identity_token: auth.identity_token.clone(),
            registry_token: auth.registry_token.clone(),
        };
        all.extend(Credential::from_auth_config(&auth.source, &config).map_err(|e| e.to_string())?);
    }
    let secret = |secret: &PullSecret| {
        let config = &secret.found.as_ref()?.spec.config;
        let source = format!("imagePullSecrets {}", secret.name);
        Some((source, config.reveal().as_bytes().to_vec()))
    };
    let secrets = spec.secrets.iter().filter_map(secret).collect();
    let keyring = match spec.node_credentials {
        true => Keyring::of_user(secrets),
        false => Keyring {
            secrets,
            files: Vec::new(),
        },
    };
    let (found, unread) = keyring.matching(reference).await;
    all.extend(found);
    for problem in unread {
        tracing::warn!("registry credentials: {problem}");
    }
    Ok(all)
}

/// Writes what a pull found under the reference and under its digest, and waits until the image is ready; its id. For
/// the Image that asked, its own record is enough.
async fn record(cx: &Context, object: &Pull, reference: &Reference, pulled: &Pulled) -> Result<String> {
    let digest = pulled.digest.to_string();
    if let Some(owner) = object.meta.owner.as_ref().filter(|_| of_image(object)) {
        let wanted = digest.clone();
        let resolve = move |_: &mut Meta, spec: &mut ImageSpec| {
            spec.digest = wanted;
            Ok(())
        };
        cx.store.update::<ImageKind, _>(&owner.uid, resolve).await?;
        return Ok(pulled.image.id().to_string());
    }
    let by_digest = format!("{}@{digest}", reference.repository());
    let name = reference.to_string();
    let (image, other) = tokio::join!(put(cx, &name, &digest), put(cx, &by_digest, &digest));
    let image = image?;
    other?;
    cx.queues.images.look(image.uid(), "pull");
    let (generation, gone) = (
        image.meta.generation,
        Error::Pending(format!("image {name} was removed meanwhile")),
    );
    let ready = cx.store.wait::<ImageKind, _, _>(
        image.uid(),
        Some(tokio::time::Instant::now().into_std() + LOOK),
        |now| match now {
            Some(now) if !now.meta.deleted() => {
                let status = &now.status;
                match status.phase {
                    _ if status.observed_generation < generation => None,
                    ImagePhase::Ready if status.digest == digest => Some(Some(Ok(status.id.clone()))),
                    ImagePhase::Failed => Some(Some(Err(conditions(now)))),
                    _ => None,
                }
            }
            _ => Some(None),
        },
    );
    match ready.await? {
        Some(Ok(id)) => Ok(id),
        Some(Err(problem)) => Err(Error::Image {
            image: name,
            problem,
            class: Class::Transient,
        }),
        None => Err(gone),
    }
}

fn conditions(image: &Image) -> String {
    let first = image.status.conditions.first();
    first.map(|c| c.message.clone()).unwrap_or_default()
}

/// Makes the name stand for the digest.
async fn put(cx: &Context, name: &str, digest: &str) -> Result<Arc<Image>> {
    loop {
        let Some(old) = cx.store.by_name::<ImageKind>(name) else {
            let meta = Meta {
                name: name.to_owned(),
                ..Meta::default()
            };
            let spec = ImageSpec {
                digest: digest.to_owned(),
                ..ImageSpec::default()
            };
            match cx.store.create::<ImageKind>(New { meta, spec }).await {
                Ok(state::Put::Created(image) | state::Put::Joined(image)) => return Ok(image),
                Err(state::Error::AlreadyExists { .. }) => continue,
                Err(e) => return Err(e.into()),
            }
        };
        let wanted = digest.to_owned();
        let change = move |_: &mut Meta, spec: &mut ImageSpec| {
            spec.source = ImageSource::Registry;
            spec.digest = wanted;
            Ok(())
        };
        match cx.store.update::<ImageKind, _>(old.uid(), change).await {
            // Removed between the look and the write: the name is free again.
            Err(state::Error::Conflict { .. } | state::Error::NotFound { .. }) => {}
            other => return Ok(other?),
        }
    }
}

/// The pull that brings back what an image has lost, or that a user's own Image record asks for.
pub async fn again(cx: &Context, object: &Image) -> Result<()> {
    let reference = Reference::parse(&object.meta.name, "metadata.name")?;
    // A tag may mean something else by now; what was pulled is what is missing.
    let image = match object.spec.digest.as_str() {
        "" => reference.to_string(),
        digest => format!("{}@{digest}", reference.repository()),
    };
    let pending = || Error::Pending(format!("{image} is being pulled"));
    let mine = cx.store.owned::<PullKind>(object.uid());
    let Some(pull) = mine
        .iter()
        .find(|pull| !pull.meta.deleted() && pull.spec.image == image)
    else {
        start(cx, owner(object), image.clone(), &image, 0, Vec::new()).await?;
        return Err(pending());
    };
    let Some(outcome) = &pull.status.outcome else {
        return Err(pending());
    };
    cx.store.delete::<PullKind>(pull.uid()).await?;
    match outcome {
        PullOutcome::Done { .. } => Ok(()),
        PullOutcome::Failed { message, .. } => Err(Error::Image {
            image,
            problem: message.clone(),
            class: Class::Transient,
        }),
    }
}

fn owner(object: &Image) -> Owner {
    Owner {
        kind: ImageKind::KIND.to_owned(),
        uid: object.uid().to_owned(),
    }
}

/// Starts a pull for a Pod or an Image, with these secrets and then the credentials of this node. `tries` have failed
/// before.
pub async fn start(
    cx: &Context,
    owner: Owner,
    name: String,
    image: &str,
    tries: u32,
    secrets: Vec<PullSecret>,
) -> Result<()> {
    let meta = Meta {
        name,
        owner: Some(owner),
        ..Meta::default()
    };
    let spec = PullSpec {
        image: image.to_owned(),
        secrets,
        node_credentials: true,
        tries,
        ..PullSpec::default()
    };
    match cx.store.create::<PullKind>(New { meta, spec }).await {
        Ok(_) | Err(state::Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Takes back the pulls of a Pod or an Image.
pub async fn stop(cx: &Context, owner: &str) -> Result<()> {
    for pull in cx.store.owned::<PullKind>(owner) {
        cx.store.delete::<PullKind>(pull.uid()).await?;
    }
    Ok(())
}
