//! A CRI client on the daemon's socket, one short method a call; errors stay `tonic::Status`, for tests judge codes.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status};

use crate::v1::image_service_client::ImageServiceClient;
use crate::v1::runtime_service_client::RuntimeServiceClient;
use crate::v1::*;

/// Both services on one socket. Connects at the first call and again whenever the daemon was restarted.
#[derive(Clone, Debug)]
pub struct Cri {
    pub runtime: RuntimeServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
}

/// A request that the server must answer within `limit`.
pub fn within<T>(limit: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

/// A request under the deadline that suits a busy two-core machine.
fn ask<T>(message: T) -> Request<T> {
    within(Duration::from_secs(60), message)
}

impl Cri {
    pub fn new(socket: &Path) -> Cri {
        let socket = socket.to_owned();
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect);
        let limit = 16 << 20;
        Cri {
            runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(limit),
            images: ImageServiceClient::new(channel).max_decoding_message_size(limit),
        }
    }

    pub async fn version(&self) -> Result<VersionResponse, Status> {
        let ask = within(Duration::from_secs(5), VersionRequest { version: "v1".into() });
        Ok(self.runtime.clone().version(ask).await?.into_inner())
    }

    pub async fn run_sandbox(&self, config: &PodSandboxConfig) -> Result<String, Status> {
        let request = RunPodSandboxRequest {
            config: Some(config.clone()),
            ..Default::default()
        };
        Ok(self
            .runtime
            .clone()
            .run_pod_sandbox(ask(request))
            .await?
            .into_inner()
            .pod_sandbox_id)
    }

    pub async fn stop_sandbox(&self, id: &str) -> Result<(), Status> {
        let request = StopPodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        self.runtime.clone().stop_pod_sandbox(ask(request)).await.map(drop)
    }

    pub async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let request = RemovePodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        self.runtime.clone().remove_pod_sandbox(ask(request)).await.map(drop)
    }

    pub async fn sandbox_answer(&self, id: &str) -> Result<PodSandboxStatusResponse, Status> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: id.into(),
            verbose: true,
        };
        Ok(self
            .runtime
            .clone()
            .pod_sandbox_status(ask(request))
            .await?
            .into_inner())
    }

    pub async fn sandbox(&self, id: &str) -> Result<PodSandboxStatus, Status> {
        self.sandbox_answer(id)
            .await?
            .status
            .ok_or_else(|| Status::data_loss("PodSandboxStatus without status"))
    }

    pub async fn sandboxes(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>, Status> {
        Ok(self
            .runtime
            .clone()
            .list_pod_sandbox(ask(ListPodSandboxRequest { filter }))
            .await?
            .into_inner()
            .items)
    }

    /// First address of a sandbox.
    pub async fn ip(&self, id: &str) -> Result<std::net::IpAddr> {
        let status = self.sandbox(id).await?;
        let network = status.network.context("status without network")?;
        network
            .ip
            .parse()
            .with_context(|| format!("the sandbox's ip is {:?}", network.ip))
    }

    pub async fn create(
        &self,
        sandbox: &str,
        pod: &PodSandboxConfig,
        container: &ContainerConfig,
    ) -> Result<String, Status> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(container.clone()),
            sandbox_config: Some(pod.clone()),
        };
        Ok(self
            .runtime
            .clone()
            .create_container(ask(request))
            .await?
            .into_inner()
            .container_id)
    }

    pub async fn start(&self, id: &str) -> Result<(), Status> {
        self.runtime
            .clone()
            .start_container(ask(StartContainerRequest {
                container_id: id.into(),
            }))
            .await
            .map(drop)
    }

    /// Create and start.
    pub async fn launch(&self, sandbox: &str, pod: &PodSandboxConfig, container: &ContainerConfig) -> Result<String> {
        let id = self.create(sandbox, pod, container).await.context("CreateContainer")?;
        self.start(&id).await.context("StartContainer")?;
        Ok(id)
    }

    /// `grace` in seconds.
    pub async fn stop(&self, id: &str, grace: i64) -> Result<(), Status> {
        let request = StopContainerRequest {
            container_id: id.into(),
            timeout: grace,
        };
        self.runtime.clone().stop_container(ask(request)).await.map(drop)
    }

    pub async fn remove(&self, id: &str) -> Result<(), Status> {
        self.runtime
            .clone()
            .remove_container(ask(RemoveContainerRequest {
                container_id: id.into(),
            }))
            .await
            .map(drop)
    }

    pub async fn container_answer(&self, id: &str) -> Result<ContainerStatusResponse, Status> {
        let request = ContainerStatusRequest {
            container_id: id.into(),
            verbose: true,
        };
        Ok(self.runtime.clone().container_status(ask(request)).await?.into_inner())
    }

    pub async fn container(&self, id: &str) -> Result<ContainerStatus, Status> {
        self.container_answer(id)
            .await?
            .status
            .ok_or_else(|| Status::data_loss("ContainerStatus without status"))
    }

    pub async fn containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>, Status> {
        Ok(self
            .runtime
            .clone()
            .list_containers(ask(ListContainersRequest { filter }))
            .await?
            .into_inner()
            .containers)
    }

    /// Waits for the container's end and returns its last status.
    pub async fn exited(&self, id: &str) -> Result<ContainerStatus> {
        let start = Instant::now();
        loop {
            let status = self.container(id).await?;
            match status.state() {
                ContainerState::ContainerExited => return Ok(status),
                other if start.elapsed() > Duration::from_secs(30) => {
                    bail!("container {id} is still {other:?}")
                }
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// The pid of a container or a sandbox's pause, from the verbose status.
    pub fn pid(info: &std::collections::BTreeMap<String, String>) -> Result<i32> {
        let text = info.get("info").context("verbose status without the key `info`")?;
        let json: serde_json::Value = serde_json::from_str(text).context("verbose info is not JSON")?;
        let pid = json["pid"].as_i64().with_context(|| format!("no pid in {json:#}"))?;
        Ok(i32::try_from(pid)?)
    }

    pub async fn container_pid(&self, id: &str) -> Result<i32> {
        Cri::pid(&self.container_answer(id).await?.info)
    }

    pub async fn sandbox_pid(&self, id: &str) -> Result<i32> {
        Cri::pid(&self.sandbox_answer(id).await?.info)
    }

    /// `timeout` in seconds, 0 for none.
    pub async fn exec(&self, id: &str, command: &[&str], timeout: i64) -> Result<ExecSyncResponse, Status> {
        let cmd = command.iter().map(|&word| word.into()).collect();
        let request = ExecSyncRequest {
            container_id: id.into(),
            cmd,
            timeout,
        };
        Ok(self.runtime.clone().exec_sync(ask(request)).await?.into_inner())
    }

    pub async fn reopen_log(&self, id: &str) -> Result<(), Status> {
        let request = ReopenContainerLogRequest {
            container_id: id.into(),
        };
        self.runtime.clone().reopen_container_log(ask(request)).await.map(drop)
    }

    pub async fn update(&self, id: &str, linux: LinuxContainerResources) -> Result<(), Status> {
        let request = UpdateContainerResourcesRequest {
            container_id: id.into(),
            linux: Some(linux),
            ..Default::default()
        };
        self.runtime
            .clone()
            .update_container_resources(ask(request))
            .await
            .map(drop)
    }

    pub async fn list_images(&self) -> Result<Vec<Image>, Status> {
        Ok(self
            .images
            .clone()
            .list_images(ask(ListImagesRequest { filter: None }))
            .await?
            .into_inner()
            .images)
    }

    pub async fn image(&self, name: &str) -> Result<Option<Image>, Status> {
        let image = Some(ImageSpec {
            image: name.into(),
            ..Default::default()
        });
        Ok(self
            .images
            .clone()
            .image_status(ask(ImageStatusRequest { image, verbose: false }))
            .await?
            .into_inner()
            .image)
    }

    /// The id of the pulled image.
    pub async fn pull(&self, name: &str) -> Result<String, Status> {
        self.pull_with(Duration::from_secs(60), name, None).await
    }

    pub async fn pull_with(&self, limit: Duration, name: &str, auth: Option<AuthConfig>) -> Result<String, Status> {
        let image = Some(ImageSpec {
            image: name.into(),
            ..Default::default()
        });
        let request = PullImageRequest {
            image,
            auth,
            sandbox_config: None,
        };
        let answer = self.images.clone().pull_image(within(limit, request)).await?;
        Ok(answer.into_inner().image_ref)
    }

    pub async fn remove_image(&self, name: &str) -> Result<(), Status> {
        let image = Some(ImageSpec {
            image: name.into(),
            ..Default::default()
        });
        self.images
            .clone()
            .remove_image(ask(RemoveImageRequest { image }))
            .await
            .map(drop)
    }
}
