//! The CRI's calls: create and join, deadlines, starts and stops, the end signal.

use std::time::{Duration, Instant};

use crate::common::{HELLO, container, import, pod, set_node, unready, within, world};
use cri::runtime::v1;
use state::container::{ContainerGoal, ContainerKind};
use state::sandbox::{SandboxGoal, SandboxKind};
use state::session::SessionKind;
use state::{Store, Truth};
use tonic::Code;

fn run_request(config: v1::PodSandboxConfig) -> v1::RunPodSandboxRequest {
    v1::RunPodSandboxRequest {
        config: Some(config),
        runtime_handler: String::new(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_version_answers_before_the_first_look() {
    let world = unready().await;
    let mut runtime = world.runtime.clone();
    assert_eq!(
        runtime
            .version(v1::VersionRequest::default())
            .await
            .unwrap()
            .into_inner()
            .runtime_name,
        "reconcile"
    );
    for _ in 0..2 {
        let error = runtime.status(v1::StatusRequest::default()).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        let error = world
            .images
            .clone()
            .image_fs_info(v1::ImageFsInfoRequest {})
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert_eq!(world.run(pod("t", 0)).await.unwrap_err().code(), Code::Unavailable);
        set_node(&world.store, Truth::Unknown).await;
    }
    assert!(world.store.list::<SandboxKind>().is_empty());
    set_node(&world.store, Truth::True).await;
    let answer = runtime
        .status(v1::StatusRequest { verbose: true })
        .await
        .unwrap()
        .into_inner();
    let conditions = answer.status.unwrap().conditions;
    assert!(conditions.iter().all(|c| c.status), "{conditions:?}");
    assert_eq!(
        conditions.iter().map(|c| c.r#type.as_str()).collect::<Vec<_>>(),
        ["RuntimeReady", "NetworkReady"]
    );
    let names: Vec<_> = answer.runtime_handlers.iter().map(|h| h.name.as_str()).collect();
    assert_eq!(names, ["", "own"]);
    assert!(
        answer.info["config"].contains("\"stateDir\":\"/run/x\""),
        "{:?}",
        answer.info
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_creates_join_and_a_later_one_is_told_the_id() {
    let world = world().await;
    let mut calls = Vec::new();
    let mut ready_by = 0;
    // Each call has a longer limit than the last: once the record's trial is pushed out, the call has joined.
    for n in 0..20 {
        let request = within(Duration::from_secs(60 + n), run_request(pod("gated", 0)));
        let mut runtime = world.runtime.clone();
        calls.push(tokio::spawn(async move { runtime.run_pod_sandbox(request).await }));
        let pushed = |store: &state::Store| {
            let sandbox = store.list::<SandboxKind>().first().cloned()?;
            sandbox.meta.ready_by.filter(|now| *now > ready_by)
        };
        ready_by = world.until(pushed).await;
    }
    // Hidden while on trial.
    let list = || async {
        let answer = world
            .runtime
            .clone()
            .list_pod_sandbox(v1::ListPodSandboxRequest::default())
            .await;
        answer.unwrap().into_inner().items
    };
    assert!(list().await.is_empty());
    world.gate.notify_one();
    let mut ids = Vec::new();
    for call in calls {
        ids.push(call.await.unwrap().unwrap().into_inner().pod_sandbox_id);
    }
    assert_eq!(list().await.len(), 1);
    ids.dedup();
    assert_eq!((ids.len(), world.store.list::<SandboxKind>().len()), (1, 1));
    let error = world.run(pod("gated", 0)).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(error.message().contains(&ids[0]), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadline_names_the_stage_and_a_changed_retry_replaces() {
    let world = world().await;
    let request = within(Duration::from_secs(1), run_request(pod("slow", 0)));
    let error = world.runtime.clone().run_pod_sandbox(request).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    let message = error.message();
    assert!(
        message.starts_with("sandbox d/slow: network not done after "),
        "{message}"
    );
    assert!(message.ends_with(": waiting for plugin x"), "{message}");
    let first = world.store.list::<SandboxKind>()[0].uid().to_owned();
    // The same request joins, ...
    let request = within(Duration::from_millis(300), run_request(pod("slow", 0)));
    world.runtime.clone().run_pod_sandbox(request).await.unwrap_err();
    assert_eq!(world.store.list::<SandboxKind>()[0].uid(), first);
    // ... a changed one takes the name.
    let mut changed = pod("slow", 0);
    changed.hostname = "other".into();
    let request = within(Duration::from_millis(300), run_request(changed));
    world.runtime.clone().run_pod_sandbox(request).await.unwrap_err();
    world
        .until(|store| store.get::<SandboxKind>(&first).is_none().then_some(()))
        .await;
    assert_eq!(world.store.list::<SandboxKind>().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_create_that_fails_for_good_frees_its_name() {
    let world = world().await;
    let error = world.run(pod("bad", 0)).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Internal, "sandbox d/bad: network: no configuration")
    );
    world
        .until(|store| store.list::<SandboxKind>().is_empty().then_some(()))
        .await;
    let mut good = pod("bad", 0);
    good.hostname = "good".into();
    world.run(good).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_drops_only_its_wait() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let call = tokio::spawn(async move { runtime.run_pod_sandbox(run_request(pod("gated", 0))).await });
    let uid = world
        .until(|store| store.list::<SandboxKind>().first().map(|s| s.uid().to_owned()))
        .await;
    call.abort();
    let cancelled = |store: &Store| store.meter().total("reconcile_rpc_total", &[("code", "Cancelled")]) > 0;
    world.until(|store| cancelled(store).then_some(())).await;
    world.gate.notify_one();
    // Done, it is listed and joinable.
    let list = || async {
        let answer = world
            .runtime
            .clone()
            .list_pod_sandbox(v1::ListPodSandboxRequest::default())
            .await;
        answer.unwrap().into_inner().items
    };
    while list().await.is_empty() {}
    assert_eq!(list().await[0].id, uid);
    assert_eq!(world.run(pod("gated", 0)).await.unwrap(), uid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn life_of_a_container() {
    let world = world().await;
    let sandbox = world.run(pod("t", 0)).await.unwrap();
    let error = world.create(&sandbox, container("app")).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().contains("localhost/hello"), "{error:?}");
    import(&world.store, "localhost/hello:latest", HELLO).await;
    let id = world.create(&sandbox, container("app")).await.unwrap();
    assert_eq!(
        world.create(&sandbox, container("app")).await.unwrap_err().code(),
        Code::AlreadyExists
    );
    let status = world.container_status(&id).await.unwrap();
    assert_eq!(
        (status.state(), status.image_id.as_str()),
        (v1::ContainerState::ContainerCreated, HELLO)
    );
    assert_eq!(status.image.unwrap().image, "localhost/hello:latest");
    // A prefix is as good as the id.
    world.start(&id[..12]).await.unwrap();
    assert_eq!(world.start(&id).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(
        world.container_status(&id).await.unwrap().state(),
        v1::ContainerState::ContainerRunning
    );
    let reopen = v1::ReopenContainerLogRequest {
        container_id: id.clone(),
    };
    world
        .runtime
        .clone()
        .reopen_container_log(reopen.clone())
        .await
        .unwrap();
    assert_eq!(world.store.get::<ContainerKind>(&id).unwrap().spec.log_epoch, 1);
    let stop = v1::StopPodSandboxRequest {
        pod_sandbox_id: sandbox.clone(),
    };
    let mut runtime = world.runtime.clone();
    // The stand-in ends containers on their own wish only, as the reconciler does on the sandbox's.
    let stop_container = v1::StopContainerRequest {
        container_id: id.clone(),
        timeout: 0,
    };
    runtime.stop_container(stop_container.clone()).await.unwrap();
    runtime.stop_container(stop_container).await.unwrap();
    runtime.stop_pod_sandbox(stop.clone()).await.unwrap();
    runtime.stop_pod_sandbox(stop).await.unwrap();
    assert_eq!(
        runtime.reopen_container_log(reopen).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let status = world.container_status(&id).await.unwrap();
    assert_eq!(
        (status.state(), status.exit_code),
        (v1::ContainerState::ContainerExited, 137)
    );
    let error = world.create(&sandbox, container("next")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    for _ in 0..2 {
        let remove = v1::RemovePodSandboxRequest {
            pod_sandbox_id: sandbox.clone(),
        };
        runtime.remove_pod_sandbox(remove).await.unwrap();
        let remove = v1::RemoveContainerRequest {
            container_id: id.clone(),
        };
        runtime.remove_container(remove).await.unwrap();
    }
    assert!(world.store.list::<SandboxKind>().is_empty());
    assert!(world.store.list::<ContainerKind>().is_empty());
    assert_eq!(world.container_status(&id).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_end_as_their_process_does() {
    let world = world().await;
    import(&world.store, "localhost/hello:latest", HELLO).await;
    let sandbox = world.run(pod("t", 0)).await.unwrap();
    let quick = world.create(&sandbox, container("quick")).await.unwrap();
    world.start(&quick).await.unwrap();
    let bad = world.create(&sandbox, container("nostart")).await.unwrap();
    let error = world.start(&bad).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Internal, "container nostart: start: /x: no such file")
    );
    let status = world.container_status(&bad).await.unwrap();
    assert_eq!((status.reason.as_str(), status.exit_code), ("StartError", 128));
    // The start was bound to the call's time.
    let start_by = world.store.get::<ContainerKind>(&bad).unwrap().spec.start_by.unwrap();
    assert!(start_by <= state::store::boottime_ns() + 240_000_000_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_leaves_created_containers_and_only_shortens_the_grace() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let (sandbox, id) = world.running("t", "stubborn").await;
    let created = world.create(&sandbox, container("created")).await.unwrap();
    let stop = |id: &str, timeout| v1::StopContainerRequest {
        container_id: id.into(),
        timeout,
    };
    runtime.stop_container(stop(&created, 5)).await.unwrap();
    assert_eq!(
        world.store.get::<ContainerKind>(&created).unwrap().spec.goal,
        ContainerGoal::Created
    );
    let request = within(Duration::from_millis(300), stop(&id, 30));
    let error = runtime.stop_container(request).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().ends_with("pid 7 is in its grace"), "{error:?}");
    let request = within(Duration::from_millis(300), stop(&id, 60));
    runtime.stop_container(request).await.unwrap_err();
    assert_eq!(world.store.get::<ContainerKind>(&id).unwrap().spec.grace_seconds, 30);
    runtime.stop_container(stop(&id, 2)).await.unwrap();
    assert_eq!(world.store.get::<ContainerKind>(&id).unwrap().spec.grace_seconds, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_limit_is_put_back() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let (_, id) = world.running("t", "app").await;
    let update = |cpu_shares, memory_limit_in_bytes| {
        let linux = Some(v1::LinuxContainerResources {
            cpu_shares,
            memory_limit_in_bytes,
            ..v1::LinuxContainerResources::default()
        });
        let request = v1::UpdateContainerResourcesRequest {
            container_id: id.clone(),
            linux,
            ..v1::UpdateContainerResourcesRequest::default()
        };
        let mut runtime = runtime.clone();
        async move { runtime.update_container_resources(request).await }
    };
    update(512, 1 << 20).await.unwrap();
    let error = update(0, 666).await.unwrap_err();
    assert!(error.message().ends_with("refused by the kernel"), "{error:?}");
    let resources = world
        .container_status(&id)
        .await
        .unwrap()
        .resources
        .unwrap()
        .linux
        .unwrap();
    assert_eq!((resources.cpu_shares, resources.memory_limit_in_bytes), (512, 1 << 20));
    let sandbox = &world.store.list::<SandboxKind>()[0];
    let request = v1::UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: sandbox.uid().into(),
        resources: Some(v1::LinuxContainerResources {
            cpu_shares: 9,
            ..Default::default()
        }),
        overhead: None,
    };
    runtime.update_pod_sandbox_resources(request).await.unwrap();
    let sandbox = world.store.get::<SandboxKind>(sandbox.uid()).unwrap();
    assert_eq!(sandbox.spec.resources.as_ref().unwrap().cpu_shares, 9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exec_sync_maps_outcomes_and_takes_its_session_back() {
    let world = world().await;
    let (_, id) = world.running("t", "app").await;
    let exec = |word: &str, timeout| v1::ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec![word.into()],
        timeout,
    };
    let mut runtime = world.runtime.clone();
    let answer = runtime.exec_sync(exec("hi", 0)).await.unwrap().into_inner();
    assert_eq!((answer.stdout.as_slice(), answer.exit_code), (b"hi".as_slice(), 3));
    assert_eq!(
        runtime.exec_sync(exec("late", 1)).await.unwrap_err().code(),
        Code::DeadlineExceeded
    );
    assert_eq!(
        runtime.exec_sync(exec("dead", 1)).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    assert_eq!(
        runtime.exec_sync(exec("hi", -1)).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    // A client that leaves takes the wish back.
    let mut leaving = world.runtime.clone();
    let request = exec("hang", 0);
    let call = tokio::spawn(async move { leaving.exec_sync(request).await });
    world
        .until(|store| (!store.list::<SessionKind>().is_empty()).then_some(()))
        .await;
    call.abort();
    world
        .until(|store| store.list::<SessionKind>().is_empty().then_some(()))
        .await;
    let stop = v1::StopContainerRequest {
        container_id: id.clone(),
        timeout: 0,
    };
    runtime.stop_container(stop).await.unwrap();
    assert_eq!(
        runtime.exec_sync(exec("hi", 0)).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_map_outcomes_and_refuse_bad_fields() {
    let world = world().await;
    let (_, id) = world.running("t", "app").await;
    let checkpoint = async |location: &str, timeout| {
        let request = v1::CheckpointContainerRequest {
            container_id: id.clone(),
            location: location.into(),
            timeout,
        };
        world.runtime.clone().checkpoint_container(request).await
    };
    checkpoint("/a/b.tar", 0).await.unwrap();
    for (location, timeout, code, text) in [
        ("a/b.tar", 0, Code::InvalidArgument, "location: "),
        ("", 0, Code::InvalidArgument, "location: "),
        ("/a/b.tar", -1, Code::InvalidArgument, "timeout: "),
        ("/a/dir", 0, Code::InvalidArgument, "location: is a directory"),
        (
            "/a/late",
            1,
            Code::DeadlineExceeded,
            "container app: checkpoint: timed out",
        ),
        (
            "/a/none",
            0,
            Code::Unimplemented,
            "CheckpointContainer: not supported here: no CRIU",
        ),
    ] {
        let error = checkpoint(location, timeout).await.unwrap_err();
        assert_eq!(error.code(), code, "{location} {timeout}: {error:?}");
        assert!(error.message().starts_with(text), "{location} {timeout}: {error:?}");
    }
    let unknown = v1::CheckpointContainerRequest {
        container_id: "feed".into(),
        location: "/a/b.tar".into(),
        timeout: 0,
    };
    let error = world.runtime.clone().checkpoint_container(unknown).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    // A client that leaves takes the wish back.
    let mut leaving = world.runtime.clone();
    let request = v1::CheckpointContainerRequest {
        container_id: id.clone(),
        location: "/a/hang".into(),
        timeout: 0,
    };
    let call = tokio::spawn(async move { leaving.checkpoint_container(request).await });
    world
        .until(|store| (!store.list::<SessionKind>().is_empty()).then_some(()))
        .await;
    call.abort();
    world
        .until(|store| store.list::<SessionKind>().is_empty().then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_signal_ends_waits_and_keeps_wishes() {
    let world = world().await;
    let mut runtime = world.runtime.clone();
    let call = tokio::spawn(async move { runtime.run_pod_sandbox(run_request(pod("slow", 0))).await });
    world
        .until(|store| (!store.list::<SandboxKind>().is_empty()).then_some(()))
        .await;
    let started = Instant::now();
    world.closing.send(true).unwrap();
    let error = call.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    world.served.await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(world.store.list::<SandboxKind>()[0].spec.goal, SandboxGoal::Ready);
}
