//! What a call is about, and how its request is shown: for the log and for metrics, never for a decision.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use state::sandbox::SandboxKind;

use crate::records::v1 as records;
use crate::runtime::v1;
use crate::services::{Services, pod_of};

/// A mutating call's request.
pub(crate) trait Wish: Debug + Clone {
    /// What it says of its subject.
    fn about(&self) -> About {
        About::default()
    }

    /// Takes out what must not be logged: credentials, and what may hold some.
    fn hide(&mut self) {}
}

/// Each is empty where not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    /// `namespace/name`
    pub(crate) pod: String,
    pub(crate) id: String,
    /// Name of the runtime handler, `default` for the empty one.
    pub(crate) handler: String,
}

/// One call's subject, filled in as it becomes known.
#[derive(Clone, Default)]
pub(crate) struct Subject {
    services: Option<Services>,
    /// Name of the RPC.
    rpc: Arc<str>,
    about: Arc<Mutex<About>>,
}

impl Subject {
    pub(crate) fn new(services: Services, rpc: &str) -> Subject {
        Subject {
            services: Some(services),
            rpc: rpc.into(),
            about: Arc::default(),
        }
    }

    pub(crate) fn get(&self) -> About {
        self.about.lock().map(|about| about.clone()).unwrap_or_default()
    }

    /// Sets what is not empty.
    pub(crate) fn set(&self, pod: String, id: &str) {
        if let Ok(mut about) = self.about.lock() {
            if !pod.is_empty() {
                about.pod = pod;
            }
            id.clone_into(&mut about.id);
        }
    }

    /// Notes and logs that a call begins.
    pub(crate) fn begin<T: Wish>(&self, request: &T) {
        let mut about = request.about();
        self.complete(&mut about);
        let rpc = &*self.rpc;
        tracing::info!(rpc, pod = about.pod, id = about.id, "call begins");
        if tracing::enabled!(tracing::Level::DEBUG) {
            let mut shown = request.clone();
            shown.hide();
            tracing::debug!(rpc, request = ?shown, "request");
        }
        if let Ok(mut kept) = self.about.lock() {
            *kept = about;
        }
    }

    /// Looks up pod and handler by the id.
    fn complete(&self, about: &mut About) {
        let Some(services) = &self.services else { return };
        if !about.id.is_empty() {
            let container = services.container("id", &about.id).ok();
            let sandbox = match &container {
                Some(container) => services.store.get::<SandboxKind>(&container.spec.sandbox),
                None => services.sandbox("id", &about.id).ok(),
            };
            if let Some(sandbox) = sandbox {
                about.pod = pod_of(&sandbox);
                about.handler.clone_from(&sandbox.spec.runtime_handler);
                if about.handler.is_empty() {
                    about.handler = DEFAULT.to_owned();
                }
            }
        }
        // Names that only a client knows are no label.
        let known = about.handler == DEFAULT || services.told().handler(&about.handler).is_some();
        if !known && !about.handler.is_empty() {
            about.handler = "unknown".to_owned();
        }
    }
}

const DEFAULT: &str = "default";
const HIDDEN: &str = "(hidden)";

fn handler(name: &str) -> String {
    if name.is_empty() { DEFAULT } else { name }.to_owned()
}

fn of_config(config: Option<&v1::PodSandboxConfig>) -> String {
    let metadata = config.and_then(|config| config.metadata.as_ref());
    metadata
        .map(|m| format!("{:.253}/{:.253}", m.namespace, m.name))
        .unwrap_or_default()
}

/// Ids of requests are the client's words until they are looked up.
fn by_id(id: &str) -> About {
    About {
        id: format!("{id:.100}"),
        ..About::default()
    }
}

macro_rules! by_id {
    ($($field:ident: $($request:ident),+;)+) => { $($(impl Wish for v1::$request {
        fn about(&self) -> About {
            by_id(&self.$field)
        }
    })+)+ };
}

by_id! {
    pod_sandbox_id: StopPodSandboxRequest, RemovePodSandboxRequest, UpdatePodSandboxResourcesRequest,
        PortForwardRequest, CheckpointPodRequest;
    container_id: StartContainerRequest, StopContainerRequest, RemoveContainerRequest, ReopenContainerLogRequest,
        UpdateContainerResourcesRequest, ExecSyncRequest, ExecRequest, AttachRequest, CheckpointContainerRequest;
}

impl Wish for v1::RunPodSandboxRequest {
    fn about(&self) -> About {
        About {
            pod: of_config(self.config.as_ref()),
            id: String::new(),
            handler: handler(&self.runtime_handler),
        }
    }
}

impl Wish for v1::CreateContainerRequest {
    fn about(&self) -> About {
        by_id(&self.pod_sandbox_id)
    }

    fn hide(&mut self) {
        hide_environment(self.config.as_mut());
    }
}

impl Wish for v1::RestorePodRequest {
    fn about(&self) -> About {
        About {
            pod: of_config(self.config.as_ref()),
            id: String::new(),
            handler: handler(&self.runtime_handler),
        }
    }

    fn hide(&mut self) {
        self.container_configs
            .iter_mut()
            .for_each(|config| hide_environment(Some(config)));
    }
}

impl Wish for v1::UpdateRuntimeConfigRequest {}

impl Wish for v1::PullImageRequest {
    fn about(&self) -> About {
        About {
            pod: of_config(self.sandbox_config.as_ref()),
            id: self
                .image
                .as_ref()
                .map(|image| format!("{:.500}", image.image))
                .unwrap_or_default(),
            handler: String::new(),
        }
    }

    fn hide(&mut self) {
        if let Some(auth) = &mut self.auth {
            for secret in [
                &mut auth.password,
                &mut auth.auth,
                &mut auth.identity_token,
                &mut auth.registry_token,
            ] {
                blank(secret);
            }
        }
    }
}

impl Wish for v1::RemoveImageRequest {
    fn about(&self) -> About {
        by_id(self.image.as_ref().map_or("", |image| &image.image))
    }
}

impl Wish for records::ApplyRequest {
    fn hide(&mut self) {
        // A record's environment and volumes may hold secrets.
        self.documents.iter_mut().for_each(|document| document.json.clear());
    }
}

impl Wish for records::DeleteRequest {
    fn about(&self) -> About {
        About {
            pod: match (self.kind.as_str(), self.name.as_str()) {
                ("Pod" | "pods", name) if !name.is_empty() => format!("{:.253}/{name:.253}", self.namespace),
                _ => String::new(),
            },
            ..by_id(&self.uid)
        }
    }
}

impl Wish for records::OnceRequest {}

impl Wish for records::ReloadRequest {}

#[cfg(test)]
impl Wish for () {}

/// The kubelet puts the values of Secrets there.
fn hide_environment(config: Option<&mut v1::ContainerConfig>) {
    for variable in config.into_iter().flat_map(|config| &mut config.envs) {
        HIDDEN.as_bytes().clone_into(&mut variable.value);
    }
}

fn blank(secret: &mut String) {
    if !secret.is_empty() {
        HIDDEN.clone_into(secret);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let mut pull = v1::PullImageRequest {
            image: Some(v1::ImageSpec {
                image: "r.example/web".into(),
                ..v1::ImageSpec::default()
            }),
            auth: Some(v1::AuthConfig {
                username: "me".into(),
                password: "s3cret".into(),
                auth: "s3cret".into(),
                server_address: "r.example".into(),
                identity_token: "s3cret".into(),
                registry_token: "s3cret".into(),
            }),
            sandbox_config: None,
        };
        assert_eq!(pull.about().id, "r.example/web");
        pull.hide();
        let shown = format!("{pull:?}");
        assert!(!shown.contains("s3cret") && shown.contains("r.example"), "{shown}");

        let variable = v1::KeyValue {
            key: "TOKEN".into(),
            value: b"s3cret".to_vec(),
        };
        let mut create = v1::CreateContainerRequest {
            config: Some(v1::ContainerConfig {
                envs: vec![variable],
                ..v1::ContainerConfig::default()
            }),
            ..v1::CreateContainerRequest::default()
        };
        create.hide();
        let shown = format!("{create:?}");
        assert!(
            !shown.contains(&format!("{:?}", b"s3cret")) && shown.contains("TOKEN"),
            "{shown}"
        );

        let document = records::Document {
            kind: "Pod".into(),
            json: b"s3cret".to_vec(),
        };
        let mut apply = records::ApplyRequest {
            documents: vec![document],
            dry_run: false,
        };
        apply.hide();
        assert!(apply.documents[0].json.is_empty());
    }

    #[test]
    fn requests_name_their_subject() {
        let run = v1::RunPodSandboxRequest {
            config: Some(v1::PodSandboxConfig {
                metadata: Some(v1::PodSandboxMetadata {
                    name: "web".into(),
                    namespace: "prod".into(),
                    ..v1::PodSandboxMetadata::default()
                }),
                ..v1::PodSandboxConfig::default()
            }),
            runtime_handler: String::new(),
        };
        let about = run.about();
        assert_eq!((about.pod.as_str(), about.handler.as_str()), ("prod/web", DEFAULT));
        let stop = v1::StopContainerRequest {
            container_id: "abc".into(),
            timeout: 1,
        };
        assert_eq!(stop.about().id, "abc");
    }
}
