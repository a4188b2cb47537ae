//! Ids, lists, images, and input that must change nothing.

use cri::runtime::v1;
use state::container::ContainerKind;
use state::sandbox::SandboxKind;
use tonic::Code;

use crate::common::{HELLO, container, import, pod, world};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_nothing() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let none = "f".repeat(64);
    runtime
        .stop_pod_sandbox(v1::StopPodSandboxRequest {
            pod_sandbox_id: none.clone(),
        })
        .await
        .unwrap();
    runtime
        .remove_pod_sandbox(v1::RemovePodSandboxRequest {
            pod_sandbox_id: none.clone(),
        })
        .await
        .unwrap();
    runtime
        .stop_container(v1::StopContainerRequest {
            container_id: none.clone(),
            timeout: 1,
        })
        .await
        .unwrap();
    runtime
        .remove_container(v1::RemoveContainerRequest {
            container_id: none.clone(),
        })
        .await
        .unwrap();
    let status = |id: &str| v1::PodSandboxStatusRequest {
        pod_sandbox_id: id.into(),
        verbose: false,
    };
    assert_eq!(
        runtime.pod_sandbox_status(status(&none)).await.unwrap_err().code(),
        Code::NotFound
    );
    assert_eq!(world.start(&none).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(
        world.create(&none, container("c")).await.unwrap_err().code(),
        Code::NotFound
    );
    // The empty id means nothing, never everything.
    let error = runtime
        .remove_pod_sandbox(v1::RemovePodSandboxRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::InvalidArgument, "pod_sandbox_id: must not be empty")
    );
    // An ambiguous beginning is not "not found": that would let garbage collection go on.
    for n in 0..17 {
        world.run(pod(&format!("p{n}"), 0)).await.unwrap();
    }
    let all = world.store.list::<SandboxKind>();
    let first = |digit: char| all.iter().filter(|s| s.uid().starts_with(digit)).count();
    let digit = ('0'..='9').chain('a'..='f').find(|digit| first(*digit) > 1).unwrap();
    let error = runtime
        .pod_sandbox_status(status(&digit.to_string()))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_are_filtered_and_streamed() {
    let world = world().await;
    let (sandbox, id) = world.running("a", "app").await;
    let (other, _) = world.running("b", "app").await;
    let mut runtime = world.runtime.clone();
    let sandboxes = |filter: v1::PodSandboxFilter| {
        let mut runtime = runtime.clone();
        async move {
            let request = v1::ListPodSandboxRequest { filter: Some(filter) };
            let items = runtime.list_pod_sandbox(request).await.unwrap().into_inner().items;
            items.into_iter().map(|item| item.id).collect::<Vec<_>>()
        }
    };
    let plain = v1::PodSandboxFilter::default;
    assert_eq!(sandboxes(plain()).await, [other.clone(), sandbox.clone()]);
    assert_eq!(
        sandboxes(v1::PodSandboxFilter {
            id: sandbox[..20].into(),
            ..plain()
        })
        .await,
        std::slice::from_ref(&sandbox)
    );
    assert!(
        sandboxes(v1::PodSandboxFilter {
            id: "zz".into(),
            ..plain()
        })
        .await
        .is_empty()
    );
    let label_selector = [("app".to_owned(), "b".to_owned())].into();
    assert_eq!(
        sandboxes(v1::PodSandboxFilter {
            label_selector,
            ..plain()
        })
        .await,
        [other]
    );
    let state = Some(v1::PodSandboxStateValue {
        state: v1::PodSandboxState::SandboxNotready.into(),
    });
    assert!(sandboxes(v1::PodSandboxFilter { state, ..plain() }).await.is_empty());
    let filter = Some(v1::ContainerFilter {
        pod_sandbox_id: sandbox[..20].into(),
        ..Default::default()
    });
    let list = runtime
        .list_containers(v1::ListContainersRequest { filter })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        list.containers.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(),
        [id.as_str()]
    );
    let filter = Some(v1::ContainerFilter {
        state: Some(v1::ContainerStateValue { state: 9 }),
        ..Default::default()
    });
    let error = runtime
        .list_containers(v1::ListContainersRequest { filter })
        .await
        .unwrap_err();
    assert!(error.message().starts_with("filter.state.state: "), "{error:?}");
    let request = v1::StreamContainersRequest::default();
    let mut stream = runtime.stream_containers(request).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().containers.len(), 2);
    assert!(stream.message().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_are_merged_resolved_and_removed() {
    let world = world().await;
    for name in ["localhost/hello:latest", "r.example/hello:1"] {
        import(&world.store, name, HELLO).await;
    }
    let mut images = world.images.clone();
    let spec = |image: &str| {
        Some(v1::ImageSpec {
            image: image.into(),
            ..Default::default()
        })
    };
    let list = images
        .list_images(v1::ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner()
        .images;
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].repo_tags, ["localhost/hello:latest", "r.example/hello:1"]);
    let request = v1::ImageStatusRequest {
        image: spec("localhost/hello"),
        verbose: true,
    };
    let answer = images.image_status(request).await.unwrap().into_inner();
    assert_eq!(answer.image.unwrap().id, HELLO);
    assert!(answer.info["info"].contains("imageSpec"));
    let pull = |name| v1::PullImageRequest {
        image: spec(name),
        ..Default::default()
    };
    assert_eq!(
        images
            .pull_image(pull("localhost/hello"))
            .await
            .unwrap()
            .into_inner()
            .image_ref,
        HELLO
    );
    let error = images.pull_image(pull("r.example/other")).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(error.message(), "image r.example/other:latest: no such manifest");
    let error = images.pull_image(pull("r.example/away")).await.unwrap_err();
    assert_eq!(
        error.code(),
        Code::Unknown,
        "the only code whose text the kubelet reads"
    );
    assert!(error.message().starts_with("RegistryUnavailable: "), "{error:?}");
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let mut images = world.images.clone();
            tokio::spawn(async move {
                images
                    .remove_image(v1::RemoveImageRequest { image: spec(HELLO) })
                    .await
                    .unwrap();
                let request = v1::ImageStatusRequest {
                    image: spec(HELLO),
                    verbose: false,
                };
                images.image_status(request).await.unwrap().into_inner().image
            })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), None);
    }
    images
        .remove_image(v1::RemoveImageRequest {
            image: spec("r.example/none"),
        })
        .await
        .unwrap();
    let error = images
        .remove_image(v1::RemoveImageRequest { image: spec("") })
        .await
        .unwrap_err();
    assert_eq!(error.message(), "image.image: must not be empty");
    let usage = images
        .image_fs_info(v1::ImageFsInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        usage.image_filesystems[0].fs_id.as_ref().unwrap().mountpoint,
        "/var/lib/x"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_changes_nothing() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let error = runtime
        .run_pod_sandbox(v1::RunPodSandboxRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::InvalidArgument, "config: must be set")
    );
    let request = v1::RunPodSandboxRequest {
        config: Some(pod("t", 0)),
        runtime_handler: "none".into(),
    };
    let error = runtime.run_pod_sandbox(request).await.unwrap_err();
    assert!(error.message().starts_with("runtime_handler: \"none\""), "{error:?}");
    let mut large = pod("t", 0);
    large.annotations.insert("a".into(), "x".repeat(300_000));
    let error = world.run(large).await.unwrap_err();
    assert!(error.message().starts_with("config.annotations: "), "{error:?}");
    // Over the limit of a message.
    let mut huge = pod("t", 0);
    huge.hostname = "x".repeat(cri::MESSAGE_LIMIT);
    let error = world.run(huge).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(world.store.list::<SandboxKind>().is_empty());
    let sandbox = world.run(pod("t", 0)).await.unwrap();
    let request = v1::CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container("c")),
        sandbox_config: None,
    };
    let error = runtime.create_container(request).await.unwrap_err();
    assert_eq!(error.message(), "sandbox_config: must be set");
    let mut privileged = container("c");
    privileged.linux = Some(v1::LinuxContainerConfig {
        security_context: Some(v1::LinuxContainerSecurityContext {
            privileged: true,
            ..Default::default()
        }),
        resources: None,
    });
    let error = world.create(&sandbox, privileged).await.unwrap_err();
    assert!(
        error
            .message()
            .starts_with("config.linux.security_context.privileged: "),
        "{error:?}"
    );
    let config = v1::RuntimeConfig {
        network_config: Some(v1::NetworkConfig {
            pod_cidr: "10.0.0.0/99".into(),
        }),
    };
    let request = v1::UpdateRuntimeConfigRequest {
        runtime_config: Some(config),
    };
    let error = runtime.update_runtime_config(request).await.unwrap_err();
    assert!(
        error.message().starts_with("runtime_config.network_config.pod_cidr: "),
        "{error:?}"
    );
    assert!(world.store.list::<ContainerKind>().is_empty());
    let error = runtime.exec(v1::ExecRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let error = runtime
        .checkpoint_pod(v1::CheckpointPodRequest::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().starts_with("CheckpointPod: "), "{error:?}");
}
