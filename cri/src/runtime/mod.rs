//! `RuntimeService` of the CRI: every RPC in one place, each handed to the file of its family.

mod checkpoint;
mod container;
mod events;
mod exec;
mod lists;
mod metrics;
mod node;
mod sandbox;
mod session;
mod stats;
mod streaming;
mod verbose;

pub(crate) use events::Feed;

/// Messages, servers and clients generated from `proto/runtime.v1.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("runtime.v1");
}

use tonic::Request;

use crate::answer::{Answer, Answers, answer, bounded, chunked, unimplemented};
use crate::call::Call;
use crate::services::Services;

const NO_POD_CHECKPOINT: &str = "a pod's containers would have to be frozen and captured by CRIU as one, which this \
                                 runtime does not do; CheckpointContainer saves one of them";
const NO_RESTORE: &str = "this runtime writes checkpoints of containers and does not restore them";

#[tonic::async_trait]
impl v1::runtime_service_server::RuntimeService for Services {
    async fn version(&self, _: Request<v1::VersionRequest>) -> Answer<v1::VersionResponse> {
        answer(Ok(node::version(self)))
    }

    async fn run_pod_sandbox(&self, request: Request<v1::RunPodSandboxRequest>) -> Answer<v1::RunPodSandboxResponse> {
        let (call, request) = Call::open(request);
        answer(sandbox::run(self, &call, request).await)
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<v1::StopPodSandboxRequest>,
    ) -> Answer<v1::StopPodSandboxResponse> {
        let (call, request) = Call::open(request);
        answer(sandbox::stop(self, &call, request).await)
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<v1::RemovePodSandboxRequest>,
    ) -> Answer<v1::RemovePodSandboxResponse> {
        let (call, request) = Call::open(request);
        answer(sandbox::remove(self, &call, request).await)
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<v1::PodSandboxStatusRequest>,
    ) -> Answer<v1::PodSandboxStatusResponse> {
        answer(sandbox::status(self, request.into_inner()))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<v1::ListPodSandboxRequest>,
    ) -> Answer<v1::ListPodSandboxResponse> {
        answer(
            lists::sandboxes(self, request.into_inner().filter)
                .and_then(|items| bounded("ListPodSandbox", v1::ListPodSandboxResponse { items })),
        )
    }

    type StreamPodSandboxesStream = Answers<v1::StreamPodSandboxesResponse>;

    async fn stream_pod_sandboxes(
        &self,
        request: Request<v1::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        answer(
            lists::sandboxes(self, request.into_inner().filter)
                .map(|all| chunked(all, |pod_sandboxes| v1::StreamPodSandboxesResponse { pod_sandboxes })),
        )
    }

    async fn create_container(
        &self,
        request: Request<v1::CreateContainerRequest>,
    ) -> Answer<v1::CreateContainerResponse> {
        let (call, request) = Call::open(request);
        answer(container::create(self, &call, request).await)
    }

    async fn start_container(&self, request: Request<v1::StartContainerRequest>) -> Answer<v1::StartContainerResponse> {
        let (call, request) = Call::open(request);
        answer(container::start(self, &call, request).await)
    }

    async fn stop_container(&self, request: Request<v1::StopContainerRequest>) -> Answer<v1::StopContainerResponse> {
        let (call, request) = Call::open(request);
        answer(container::stop(self, &call, request).await)
    }

    async fn remove_container(
        &self,
        request: Request<v1::RemoveContainerRequest>,
    ) -> Answer<v1::RemoveContainerResponse> {
        let (call, request) = Call::open(request);
        answer(container::remove(self, &call, request).await)
    }

    async fn list_containers(&self, request: Request<v1::ListContainersRequest>) -> Answer<v1::ListContainersResponse> {
        answer(
            lists::containers(self, request.into_inner().filter)
                .and_then(|containers| bounded("ListContainers", v1::ListContainersResponse { containers })),
        )
    }

    type StreamContainersStream = Answers<v1::StreamContainersResponse>;

    async fn stream_containers(
        &self,
        request: Request<v1::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        answer(
            lists::containers(self, request.into_inner().filter)
                .map(|all| chunked(all, |containers| v1::StreamContainersResponse { containers })),
        )
    }

    async fn container_status(
        &self,
        request: Request<v1::ContainerStatusRequest>,
    ) -> Answer<v1::ContainerStatusResponse> {
        answer(container::status(self, request.into_inner()))
    }

    async fn update_container_resources(
        &self,
        request: Request<v1::UpdateContainerResourcesRequest>,
    ) -> Answer<v1::UpdateContainerResourcesResponse> {
        let (call, request) = Call::open(request);
        answer(container::update_resources(self, &call, request).await)
    }

    async fn reopen_container_log(
        &self,
        request: Request<v1::ReopenContainerLogRequest>,
    ) -> Answer<v1::ReopenContainerLogResponse> {
        let (call, request) = Call::open(request);
        answer(container::reopen_log(self, &call, request).await)
    }

    async fn exec_sync(&self, request: Request<v1::ExecSyncRequest>) -> Answer<v1::ExecSyncResponse> {
        let (call, request) = Call::open(request);
        answer(exec::sync(self, &call, request).await)
    }

    async fn exec(&self, request: Request<v1::ExecRequest>) -> Answer<v1::ExecResponse> {
        let (call, request) = Call::open(request);
        answer(streaming::exec(self, &call, request).await)
    }

    async fn attach(&self, request: Request<v1::AttachRequest>) -> Answer<v1::AttachResponse> {
        let (call, request) = Call::open(request);
        answer(streaming::attach(self, &call, request).await)
    }

    async fn port_forward(&self, request: Request<v1::PortForwardRequest>) -> Answer<v1::PortForwardResponse> {
        let (call, request) = Call::open(request);
        answer(streaming::port_forward(self, &call, request).await)
    }

    async fn container_stats(&self, request: Request<v1::ContainerStatsRequest>) -> Answer<v1::ContainerStatsResponse> {
        answer(stats::container(self, request.into_inner()).await)
    }

    async fn list_container_stats(
        &self,
        request: Request<v1::ListContainerStatsRequest>,
    ) -> Answer<v1::ListContainerStatsResponse> {
        let stats = stats::containers(self, request.into_inner().filter).await;
        answer(stats.and_then(|stats| bounded("ListContainerStats", v1::ListContainerStatsResponse { stats })))
    }

    type StreamContainerStatsStream = Answers<v1::StreamContainerStatsResponse>;

    async fn stream_container_stats(
        &self,
        request: Request<v1::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        let stats = stats::containers(self, request.into_inner().filter).await;
        answer(stats.map(|all| {
            chunked(all, |container_stats| v1::StreamContainerStatsResponse {
                container_stats,
            })
        }))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<v1::PodSandboxStatsRequest>,
    ) -> Answer<v1::PodSandboxStatsResponse> {
        answer(stats::sandbox(self, request.into_inner()).await)
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<v1::ListPodSandboxStatsRequest>,
    ) -> Answer<v1::ListPodSandboxStatsResponse> {
        let stats = stats::sandboxes(self, request.into_inner().filter).await;
        answer(stats.and_then(|stats| bounded("ListPodSandboxStats", v1::ListPodSandboxStatsResponse { stats })))
    }

    type StreamPodSandboxStatsStream = Answers<v1::StreamPodSandboxStatsResponse>;

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<v1::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        let stats = stats::sandboxes(self, request.into_inner().filter).await;
        answer(stats.map(|all| {
            chunked(all, |pod_sandbox_stats| v1::StreamPodSandboxStatsResponse {
                pod_sandbox_stats,
            })
        }))
    }

    async fn update_runtime_config(
        &self,
        request: Request<v1::UpdateRuntimeConfigRequest>,
    ) -> Answer<v1::UpdateRuntimeConfigResponse> {
        let (_, request) = Call::open(request);
        answer(node::update_config(self, request).await)
    }

    async fn status(&self, request: Request<v1::StatusRequest>) -> Answer<v1::StatusResponse> {
        answer(node::status(self, &request.into_inner()))
    }

    async fn checkpoint_container(
        &self,
        request: Request<v1::CheckpointContainerRequest>,
    ) -> Answer<v1::CheckpointContainerResponse> {
        let (call, request) = Call::open(request);
        answer(checkpoint::container(self, &call, request).await)
    }

    async fn checkpoint_pod(&self, _: Request<v1::CheckpointPodRequest>) -> Answer<v1::CheckpointPodResponse> {
        unimplemented("CheckpointPod", NO_POD_CHECKPOINT)
    }

    async fn restore_pod(&self, _: Request<v1::RestorePodRequest>) -> Answer<v1::RestorePodResponse> {
        unimplemented("RestorePod", NO_RESTORE)
    }

    type GetContainerEventsStream = Answers<v1::ContainerEventResponse>;

    async fn get_container_events(&self, _: Request<v1::GetEventsRequest>) -> Answer<Self::GetContainerEventsStream> {
        answer(Ok(events::subscribe(self)))
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<v1::ListMetricDescriptorsRequest>,
    ) -> Answer<v1::ListMetricDescriptorsResponse> {
        answer(metrics::descriptors(self).await)
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<v1::ListPodSandboxMetricsRequest>,
    ) -> Answer<v1::ListPodSandboxMetricsResponse> {
        let metrics = metrics::sandboxes(self).await;
        answer(metrics.and_then(|pod_metrics| {
            bounded(
                "ListPodSandboxMetrics",
                v1::ListPodSandboxMetricsResponse { pod_metrics },
            )
        }))
    }

    type StreamPodSandboxMetricsStream = Answers<v1::StreamPodSandboxMetricsResponse>;

    async fn stream_pod_sandbox_metrics(
        &self,
        _: Request<v1::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        let metrics = metrics::sandboxes(self).await;
        answer(metrics.map(|all| {
            chunked(all, |pod_sandbox_metrics| v1::StreamPodSandboxMetricsResponse {
                pod_sandbox_metrics,
            })
        }))
    }

    async fn runtime_config(&self, _: Request<v1::RuntimeConfigRequest>) -> Answer<v1::RuntimeConfigResponse> {
        answer(Ok(node::runtime_config(self)))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<v1::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<v1::UpdatePodSandboxResourcesResponse> {
        let (call, request) = Call::open(request);
        answer(sandbox::update_resources(self, &call, request).await)
    }
}
