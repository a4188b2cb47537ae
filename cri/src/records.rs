//! The records service: desired state by name, for the command line.

/// Messages, server and client generated from `proto/records.v1.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("reconcile.records.v1");
}

mod apply;
mod pull;

use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};
use state::container::{ContainerGoal, ContainerKind, ContainerPhase, ContainerSpec};
use state::debt::DebtKind;
use state::image::ImageKind;
use state::node::NodeKind;
use state::pod::PodKind;
use state::resource::API_VERSION;
use state::sandbox::SandboxKind;
use state::secret::SecretKind;
use state::store::Event;
use state::{Container, Kind, Meta, Object, Pod, Reference};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use crate::answer::{Answer, Answers, answer, bounded};
use crate::call::Call;
use crate::converge::{Observed, until, until_erased};
use crate::error::{Error, Result};
use crate::filter::selects;
use crate::services::Services;

#[tonic::async_trait]
impl v1::records_server::Records for Services {
    async fn apply(&self, request: Request<v1::ApplyRequest>) -> Answer<v1::ApplyResponse> {
        let (_, request) = Call::open(request);
        answer(apply::apply(self, request).await)
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Answer<v1::DeleteResponse> {
        let (call, request) = Call::open(request);
        answer(delete(self, &call, request).await)
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Answer<v1::GetResponse> {
        answer(get(self, &request.into_inner()).and_then(|documents| bounded("Get", v1::GetResponse { documents })))
    }

    type WatchStream = Answers<v1::WatchResponse>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        answer(watch(self, request.into_inner()))
    }

    type PullStream = Answers<v1::PullResponse>;

    async fn pull(&self, request: Request<v1::PullRequest>) -> Answer<Self::PullStream> {
        answer(pull::pull(self, request.into_inner()).await)
    }

    async fn once(&self, request: Request<v1::OnceRequest>) -> Answer<v1::OnceResponse> {
        let (_, request) = Call::open(request);
        answer(once(self, request).await)
    }

    async fn reload(&self, request: Request<v1::ReloadRequest>) -> Answer<v1::ReloadResponse> {
        Call::open(request);
        answer(reload(self).await)
    }
}

/// See `ReloadRequest`.
async fn reload(services: &Services) -> Result<v1::ReloadResponse> {
    let Some(hook) = services.config.reload.clone() else {
        return Err(Error::Unimplemented {
            rpc: "Reload",
            why: "whoever serves this socket was not started from a configuration".to_owned(),
        });
    };
    let changes = hook().await.map_err(Error::Reload)?;
    Ok(v1::ReloadResponse { changes })
}

fn is_kind<K: Kind>(text: &str) -> bool {
    text == K::KIND || text == K::PLURAL
}

fn unknown_kind(field: &str, kind: &str) -> Error {
    let problem = format!("{kind:.60?} is none of Pod, PodSandbox, Container, Image, Secret, Node, Debt");
    Error::invalid(field, problem)
}

/// A record as other programs read it.
fn document<K: Kind>(object: &Object<K>) -> Result<v1::Document> {
    let json = serde_json::to_vec(&json!({
        "apiVersion": API_VERSION,
        "kind": K::KIND,
        "metadata": object.meta,
        "spec": object.spec,
        "status": object.status,
    }))?;
    Ok(v1::Document {
        kind: K::KIND.to_owned(),
        json,
    })
}

fn get(services: &Services, request: &v1::GetRequest) -> Result<Vec<v1::Document>> {
    match request.kind.as_str() {
        kind if is_kind::<PodKind>(kind) => get_kind::<PodKind>(services, request),
        kind if is_kind::<SandboxKind>(kind) => get_kind::<SandboxKind>(services, request),
        kind if is_kind::<ContainerKind>(kind) => get_kind::<ContainerKind>(services, request),
        kind if is_kind::<ImageKind>(kind) => {
            let (name, namespace) = (full_name(request.name.clone()), String::new());
            get_kind::<ImageKind>(
                services,
                &v1::GetRequest {
                    name,
                    namespace,
                    ..request.clone()
                },
            )
        }
        // Without what is secret: it has no form to be shown in.
        kind if is_kind::<SecretKind>(kind) => get_kind::<SecretKind>(services, request),
        kind if is_kind::<NodeKind>(kind) => get_kind::<NodeKind>(services, request),
        kind if is_kind::<DebtKind>(kind) => get_kind::<DebtKind>(services, request),
        kind => Err(unknown_kind("kind", kind)),
    }
}

/// The full form of an image reference, as records are named; anything else as it is.
fn full_name(name: String) -> String {
    Reference::parse(&name, "name").map_or(name, |reference| reference.to_string())
}

fn get_kind<K: Kind>(services: &Services, request: &v1::GetRequest) -> Result<Vec<v1::Document>> {
    let wanted = |object: &Object<K>| {
        let meta = &object.meta;
        (request.namespace.is_empty() || meta.namespace == request.namespace)
            && (request.name.is_empty() || meta.name == request.name)
            && meta.uid.starts_with(&request.uid)
            && selects(&request.labels, &meta.labels)
    };
    services
        .store
        .list::<K>()
        .iter()
        .filter(|object| wanted(object))
        .map(|object| document(object))
        .collect()
}

fn watch(services: &Services, request: v1::WatchRequest) -> Result<Answers<v1::WatchResponse>> {
    match request.kind.as_str() {
        kind if is_kind::<PodKind>(kind) => Ok(watch_kind::<PodKind>(services, request.uid)),
        kind if is_kind::<SandboxKind>(kind) => Ok(watch_kind::<SandboxKind>(services, request.uid)),
        kind if is_kind::<ContainerKind>(kind) => Ok(watch_kind::<ContainerKind>(services, request.uid)),
        kind if is_kind::<ImageKind>(kind) => Ok(watch_kind::<ImageKind>(services, request.uid)),
        kind if is_kind::<SecretKind>(kind) => Ok(watch_kind::<SecretKind>(services, request.uid)),
        kind if is_kind::<NodeKind>(kind) => Ok(watch_kind::<NodeKind>(services, request.uid)),
        kind if is_kind::<DebtKind>(kind) => Ok(watch_kind::<DebtKind>(services, request.uid)),
        kind => Err(unknown_kind("kind", kind)),
    }
}

/// Changes that a client may leave unread.
const UNREAD: usize = 4096;

/// Ends when the server stops; a client that fell behind is told to watch again.
fn watch_kind<K: Kind>(services: &Services, uid: String) -> Answers<v1::WatchResponse> {
    let change = move |event: Event<K>| {
        let (object, erased) = match event {
            Event::Applied(object) => (object, false),
            Event::Erased(object) => (object, true),
        };
        let wanted = uid.is_empty() || uid == object.meta.uid;
        std::future::ready(wanted.then(|| {
            let document = Some(document(&object)?);
            Ok(v1::WatchResponse { document, erased })
        }))
    };
    let behind = Err(Status::aborted("the watch fell behind; watch again"));
    let closing = services.clone();
    let changes = ReceiverStream::new(services.store.watch_bounded::<K>(UNREAD)).filter_map(change);
    let changes = changes.chain(futures::stream::iter([behind]));
    Box::pin(changes.take_until(async move { closing.closed().await }))
}

async fn delete(services: &Services, call: &Call, mut request: v1::DeleteRequest) -> Result<v1::DeleteResponse> {
    match request.kind.as_str() {
        kind if is_kind::<PodKind>(kind) => {
            let Some(pod) = find::<PodKind>(services, &request)? else {
                return Ok(v1::DeleteResponse::default());
            };
            if let Some(grace) = request.grace_seconds {
                shorten_pod(services, &pod, grace).await?;
            }
            erase(services, call, pod, request.wait).await
        }
        kind if is_kind::<ContainerKind>(kind) => {
            let Some(container) = find::<ContainerKind>(services, &request)? else {
                return Ok(v1::DeleteResponse::default());
            };
            if let Some(grace) = request.grace_seconds.filter(|grace| *grace > 0) {
                stop(services, call, &container, grace).await?;
            }
            erase(services, call, container, request.wait).await
        }
        kind if is_kind::<SandboxKind>(kind) => match find::<SandboxKind>(services, &request)? {
            Some(sandbox) => erase(services, call, sandbox, request.wait).await,
            None => Ok(v1::DeleteResponse::default()),
        },
        kind if is_kind::<ImageKind>(kind) => {
            request.name = full_name(request.name);
            // Images are the node's, whatever namespace the caller works in.
            request.namespace.clear();
            match find::<ImageKind>(services, &request)? {
                Some(image) => erase(services, call, image, request.wait).await,
                None => Ok(v1::DeleteResponse::default()),
            }
        }
        kind if is_kind::<SecretKind>(kind) => {
            let Some(secret) = find::<SecretKind>(services, &request)? else {
                return Ok(v1::DeleteResponse::default());
            };
            // It stands for nothing on the node.
            services.store.erase::<SecretKind>(&secret.meta.uid).await?;
            let uid = secret.meta.uid.clone();
            Ok(v1::DeleteResponse { uid })
        }
        kind => Err(Error::invalid(
            "kind",
            format!("{kind:.60?} is none of Pod, PodSandbox, Container, Image, Secret"),
        )),
    }
}

/// The record of a uid (or unique prefix) or of a name; what is being deleted is found by uid alone.
fn find<K: Kind>(services: &Services, request: &v1::DeleteRequest) -> Result<Option<Arc<Object<K>>>> {
    if request.uid.is_empty() && request.name.is_empty() {
        return Err(Error::invalid("name", "give a name or a uid"));
    }
    let found = if request.uid.is_empty() {
        let scoped = format!("{}/{}", request.namespace, request.name);
        services.store.by_name::<K>(if request.namespace.is_empty() {
            &request.name
        } else {
            &scoped
        })
    } else if let Some(found) = services.store.get::<K>(&request.uid) {
        Some(found)
    } else {
        match services.store.resolve::<K>(&request.uid) {
            Ok(found) => Some(found),
            Err(state::Error::NotFound { .. }) => None,
            Err(error) => return Err(error.into()),
        }
    };
    let fits = |object: &Arc<Object<K>>| {
        (request.namespace.is_empty() || object.meta.namespace == request.namespace)
            && (request.name.is_empty() || object.meta.name == request.name)
    };
    Ok(found.filter(fits))
}

async fn erase<K: Observed>(
    services: &Services,
    call: &Call,
    object: Arc<Object<K>>,
    wait: bool,
) -> Result<v1::DeleteResponse> {
    call.about(
        format!("{}/{}", object.meta.namespace, object.meta.name),
        &object.meta.uid,
    );
    services.store.delete::<K>(&object.meta.uid).await?;
    if wait {
        until_erased(services, call, &object).await?;
    }
    Ok(v1::DeleteResponse {
        uid: object.meta.uid.clone(),
    })
}

/// Another grace for what a pod runs. What is being deleted already keeps the one that it was deleted with.
async fn shorten_pod(services: &Services, pod: &Pod, grace: i64) -> Result<()> {
    if pod.meta.deleted() {
        return Ok(());
    }
    let sandboxes = services.store.owned::<SandboxKind>(&pod.meta.uid);
    let containers = sandboxes
        .iter()
        .flat_map(|s| services.store.owned::<ContainerKind>(&s.meta.uid));
    for container in containers.filter(|c| !c.meta.deleted()) {
        let change = move |_: &mut Meta, spec: &mut ContainerSpec| {
            spec.grace_seconds = grace.max(0);
            Ok(())
        };
        services
            .store
            .update::<ContainerKind, _>(&container.meta.uid, change)
            .await?;
    }
    Ok(())
}

/// Stops a container within its grace before it is deleted, which kills at once.
async fn stop(services: &Services, call: &Call, container: &Arc<Container>, grace: i64) -> Result<()> {
    let change = move |_: &mut Meta, spec: &mut ContainerSpec| {
        spec.goal = ContainerGoal::Stopped;
        spec.grace_seconds = grace;
        Ok(())
    };
    if container.status.phase != ContainerPhase::Running || container.meta.deleted() {
        return Ok(());
    }
    services
        .store
        .update::<ContainerKind, _>(&container.meta.uid, change)
        .await?;
    until(services, call, container, |now: Option<&Container>| {
        now.is_none_or(|now| now.status.phase == ContainerPhase::Exited)
            .then_some(Ok(()))
    })
    .await
}

async fn once(services: &Services, request: v1::OnceRequest) -> Result<v1::OnceResponse> {
    let Some(hook) = services.config.once.clone() else {
        return Err(Error::Unimplemented {
            rpc: "Once",
            why: "this daemon has no loop to ask".to_owned(),
        });
    };
    let done = tokio::select! {
        done = hook(request) => done.map_err(Error::Once)?,
        () = services.closed() => return Err(Error::Unavailable("shutting down".to_owned())),
    };
    let json = serde_json::to_vec::<Value>(&done.report)?;
    Ok(v1::OnceResponse {
        json,
        exit_code: done.exit_code,
    })
}
