//! The service as a whole: stream forms answer what the lists answer; what is not implemented says so by name.

use anyhow::{Context, Result, ensure};
use e2e::node::Node;
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use tonic::{Code, Status};

#[tokio::test(flavor = "multi_thread")]
async fn stream_forms_answer_what_the_lists_answer() -> Result<()> {
    let node = Node::start().await?;
    let mut runtime = node.cri.runtime.clone();
    let empty = runtime
        .stream_pod_sandboxes(StreamPodSandboxesRequest::default())
        .await?
        .into_inner()
        .message()
        .await?;
    assert!(empty.is_none(), "nothing, then the end: {empty:?}");
    for name in ["a", "b", "c"] {
        let pod = pods::host_network(node.pod(name));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        node.cri
            .create(&sandbox, &pod, &pods::container("c", HELLO, &[]))
            .await?;
    }
    let mut sandboxes = Vec::new();
    let mut stream = runtime
        .stream_pod_sandboxes(StreamPodSandboxesRequest::default())
        .await?
        .into_inner();
    while let Some(chunk) = stream.message().await? {
        sandboxes.extend(chunk.pod_sandboxes);
    }
    assert_eq!(sandboxes, node.cri.sandboxes(None).await?);
    let mut containers = Vec::new();
    let mut stream = runtime
        .stream_containers(StreamContainersRequest::default())
        .await?
        .into_inner();
    while let Some(chunk) = stream.message().await? {
        containers.extend(chunk.containers);
    }
    assert_eq!(containers, node.cri.containers(None).await?);
    let mut images = Vec::new();
    let mut service = node.cri.images.clone();
    let mut stream = service
        .stream_images(StreamImagesRequest::default())
        .await?
        .into_inner();
    while let Some(chunk) = stream.message().await? {
        images.extend(chunk.images);
    }
    assert_eq!(images, node.cri.list_images().await?);
    node.finish().await
}

/// Either it works, or it is Unimplemented and the message bears its name; never another error, never silence.
fn honest<T>(name: &str, answer: Result<T, Status>) -> Result<()> {
    let Err(status) = answer else { return Ok(()) };
    ensure!(status.code() == Code::Unimplemented, "{name}: {status:?}");
    ensure!(
        status.message().contains(name),
        "{name} does not name itself: {:?}",
        status.message()
    );
    println!("{name} is not implemented");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_implemented_says_so_by_name() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("wire"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(
            &sandbox,
            &pod,
            &pods::container("c", HELLO, &["/hello", "sleep", "1000"]),
        )
        .await?;
    let mut cri = node.cri.runtime.clone();
    let cmd = vec!["/hello".into(), "exit".into(), "0".into()];
    let exec = ExecRequest {
        container_id: id.clone(),
        cmd,
        stdout: true,
        ..Default::default()
    };
    honest("Exec", cri.exec(exec).await)?;
    let attach = AttachRequest {
        container_id: id.clone(),
        stdout: true,
        ..Default::default()
    };
    honest("Attach", cri.attach(attach).await)?;
    let forward = PortForwardRequest {
        pod_sandbox_id: sandbox.clone(),
        port: vec![8080],
    };
    honest("PortForward", cri.port_forward(forward).await)?;
    honest(
        "ContainerStats",
        cri.container_stats(ContainerStatsRequest {
            container_id: id.clone(),
        })
        .await,
    )?;
    honest(
        "ListContainerStats",
        cri.list_container_stats(ListContainerStatsRequest::default()).await,
    )?;
    honest(
        "StreamContainerStats",
        cri.stream_container_stats(StreamContainerStatsRequest::default()).await,
    )?;
    let stats = PodSandboxStatsRequest {
        pod_sandbox_id: sandbox.clone(),
    };
    honest("PodSandboxStats", cri.pod_sandbox_stats(stats).await)?;
    honest(
        "ListPodSandboxStats",
        cri.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).await,
    )?;
    honest(
        "StreamPodSandboxStats",
        cri.stream_pod_sandbox_stats(StreamPodSandboxStatsRequest::default())
            .await,
    )?;
    honest(
        "GetContainerEvents",
        cri.get_container_events(GetEventsRequest {}).await,
    )?;
    honest(
        "ListMetricDescriptors",
        cri.list_metric_descriptors(ListMetricDescriptorsRequest {}).await,
    )?;
    honest(
        "ListPodSandboxMetrics",
        cri.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await,
    )?;
    honest(
        "StreamPodSandboxMetrics",
        cri.stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest {}).await,
    )?;
    let location = node.path("checkpoint.tar").display().to_string();
    let checkpoint = CheckpointContainerRequest {
        container_id: id,
        location,
        timeout: 5,
    };
    honest("CheckpointContainer", cri.checkpoint_container(checkpoint).await)?;
    honest(
        "CheckpointPod",
        cri.checkpoint_pod(CheckpointPodRequest::default()).await,
    )?;
    honest("RestorePod", cri.restore_pod(RestorePodRequest::default()).await)?;
    let resources = UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: sandbox,
        ..Default::default()
    };
    honest(
        "UpdatePodSandboxResources",
        cri.update_pod_sandbox_resources(resources).await,
    )?;
    node.finish().await
}

/// A client that was cut off amid everything leaves a daemon that still answers.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_socket_harms_nobody() -> Result<()> {
    use tokio::io::AsyncWriteExt;
    let node = Node::start().await?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(node.socket())?.permissions());
    assert_eq!(mode & 0o777, 0o600, "the socket is root's alone");
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 10_000],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xff",
    ] {
        let mut stream = tokio::net::UnixStream::connect(node.socket())
            .await
            .context("connect")?;
        let _ = stream.write_all(bytes).await;
    }
    let idle = futures::future::join_all((0..100).map(|_| tokio::net::UnixStream::connect(node.socket()))).await;
    assert!(idle.iter().filter(|stream| stream.is_ok()).count() > 50);
    node.cri.version().await?;
    node.finish().await
}
