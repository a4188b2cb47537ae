//! CheckpointContainer: with a stand-in for CRIU, since it does not run on every kernel, all that the daemon does about
//! it; with the real one what a checkpoint holds, or the reason why there is none.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::faults::Faults;
use e2e::node::{Node, Options};
use e2e::pods::{self, shell};
use e2e::v1::*;
use e2e::{eventually, tools};
use tonic::{Code, Status};

/// Counts, in its log and in a file, ends at SIGTERM, and has changed its root.
const COUNTER: &str = "trap 'exit 0' TERM; rm /etc/group; m=$(cat /proc/sys/kernel/random/uuid); echo needle-$m; i=0; \
                       while :; do i=$((i+1)); echo $i; echo $i >/count; sleep 0.02; done";

/// Answers as CRIU does. `hang` in its directory keeps a dump from ending, `fail` makes it fail, `unfit` the check.
const STAND_IN: &str = r#"#!/bin/sh
dir=${0%/*}
if [ "$1" = check ]; then
  [ ! -e "$dir/unfit" ] && exit 0
  echo 'Error (criu/kernel.c:1): this kernel is not to its taste' >&2
  exit 1
fi
echo "$*" >>"$dir/dumps"
while [ $# -gt 0 ]; do
  case $1 in
    --images-dir) images=$2 ;;
    --work-dir) work=$2 ;;
    --freeze-cgroup) group=$2 ;;
  esac
  shift
done
echo "$images" >"$images/pages-1.img"
cat "$group/freezer.state" "$group/cgroup.events" >"$images/freezer.img" 2>/dev/null
echo stats >"$work/stats-dump"
echo '(00.1) Error (criu/files.c:2): what cannot be dumped' >"$work/dump.log"
echo begun >>"$dir/begun"
while [ -e "$dir/hang" ]; do sleep 0.02; done
[ ! -e "$dir/fail" ]
"#;

/// A node with a stand-in, and a container that counts.
struct Scene {
    node: Node,
    faults: Faults,
    sandbox: String,
    pod: PodSandboxConfig,
    id: String,
}

impl Scene {
    async fn new() -> Result<Scene> {
        let (mut node, faults) = Faults::node(Options::default())?;
        let dir = node.path("bin");
        fs::create_dir(&dir)?;
        fs::create_dir(node.path("out"))?;
        node.program("bin/criu", STAND_IN)?;
        let path = std::env::var("PATH").unwrap_or_default();
        node.options.env.push(("PATH", format!("{}:{path}", dir.display())));
        node.serve().await?;
        Scene::on(node, faults).await
    }

    async fn on(node: Node, faults: Faults) -> Result<Scene> {
        node.busybox().await?;
        let pod = pods::host_network(node.pod("checkpoint"));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let id = node.cri.launch(&sandbox, &pod, &shell("c", COUNTER)).await?;
        let scene = Scene {
            node,
            faults,
            sandbox,
            pod,
            id,
        };
        scene.counts().await?;
        Ok(scene)
    }

    fn archive(&self, name: &str) -> PathBuf {
        self.node.path("out").join(name)
    }

    fn tell(&self, word: &str) -> Result<()> {
        Ok(fs::write(self.node.path("bin").join(word), "")?)
    }

    fn hush(&self, word: &str) -> Result<()> {
        Ok(fs::remove_file(self.node.path("bin").join(word))?)
    }

    /// A call of its own, which can be let go of.
    fn begin(&self, name: &str, timeout: i64) -> tokio::task::JoinHandle<Result<(), Status>> {
        let request = CheckpointContainerRequest {
            container_id: self.id.clone(),
            location: self.archive(name).display().to_string(),
            timeout,
        };
        let mut cri = self.node.cri.runtime.clone();
        tokio::spawn(async move {
            let request = within(Duration::from_secs(60), request);
            cri.checkpoint_container(request).await.map(drop)
        })
    }

    /// Until the stand-in has written its images `times` times.
    async fn begun(&self, times: usize) -> Result<()> {
        eventually(Duration::from_secs(10), async || {
            let text = fs::read_to_string(self.node.path("bin/begun"))?;
            ensure!(text.lines().count() >= times, "{text:?}");
            Ok(())
        })
        .await
    }

    async fn last(&self) -> Result<u64> {
        let texts = pods::log_texts(self.node.cri.container(&self.id).await?.log_path)?;
        texts.last().context("an empty log")?.parse().context("a number")
    }

    /// The container runs: it counts on.
    async fn counts(&self) -> Result<()> {
        let before = eventually(Duration::from_secs(10), async || self.last().await).await?;
        eventually(Duration::from_secs(10), async || {
            let now = self.last().await?;
            ensure!(now > before, "it stands at {now}");
            Ok(())
        })
        .await
        .context("the container does not run on")
    }

    async fn freezer(&self) -> Result<String> {
        freezer(self.node.cri.container_pid(&self.id).await?)
    }

    /// Nothing half made is left, and the container runs on.
    async fn clean(&self) -> Result<()> {
        eventually(Duration::from_secs(10), async || self.tidy()).await?;
        self.counts().await
    }

    fn tidy(&self) -> Result<()> {
        let pods = self.node.root().join("pods");
        let own = pods.join(&self.sandbox).join("containers").join(&self.id);
        for dir in [own, self.node.path("out")] {
            for entry in fs::read_dir(&dir)?.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                ensure!(!name.contains("checkpoint-"), "{name} is left in {}", dir.display());
            }
        }
        let running = self.node.processes()?;
        let left: Vec<_> = running.iter().filter(|line| line.contains("criu")).collect();
        ensure!(left.is_empty(), "{left:#?}");
        Ok(())
    }
}

/// What the kernel says of the freezer of a process's cgroup: `THAWED`, or `frozen 0`.
fn freezer(pid: i32) -> Result<String> {
    let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    for line in lines.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (names, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let path = path.trim_start_matches('/');
        if names == "freezer" {
            let file = Path::new("/sys/fs/cgroup/freezer").join(path).join("freezer.state");
            return Ok(fs::read_to_string(file)?.trim().to_owned());
        }
        let events = Path::new("/sys/fs/cgroup").join(path).join("cgroup.events");
        if names.is_empty() && events.exists() {
            let text = fs::read_to_string(events)?;
            return Ok(text
                .lines()
                .find(|line| line.starts_with("frozen"))
                .context("no freezer")?
                .to_owned());
        }
    }
    anyhow::bail!("no freezer: {lines}")
}

fn is_frozen(state: &str) -> bool {
    ["FROZEN", "frozen 1"].contains(&state)
}

/// The members of a tar, with their bytes.
fn members(mut tar: impl Read) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut archive = tar::Archive::new(&mut tar);
    let mut all = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        all.insert(entry.path()?.display().to_string(), bytes);
    }
    Ok(all)
}

fn text(members: &BTreeMap<String, Vec<u8>>, name: &str) -> Result<String> {
    let bytes = members
        .get(name)
        .with_context(|| format!("no {name}: {:?}", members.keys()))?;
    Ok(String::from_utf8(bytes.clone())?)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_archive_is_what_tools_expect_and_the_container_runs_on() -> Result<()> {
    let scene = Scene::new().await?;
    scene.begin("a.tar", 30).await??;
    let meta = scene.archive("a.tar").metadata()?;
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o600, 0));
    let all = members(fs::File::open(scene.archive("a.tar"))?)?;
    let want = [
        "checkpoint/",
        "checkpoint/freezer.img",
        "checkpoint/pages-1.img",
        "config.dump",
        "deleted.files",
        "dump.log",
        "rootfs-diff.tar",
        "spec.dump",
        "stats-dump",
    ];
    assert_eq!(all.keys().collect::<Vec<_>>(), want);
    let frozen = text(&all, "checkpoint/freezer.img")?;
    assert!(frozen.lines().any(is_frozen), "it is dumped frozen: {frozen}");
    assert_eq!(text(&all, "deleted.files")?, r#"["/etc/group"]"#);
    let config: serde_json::Value = serde_json::from_str(&text(&all, "config.dump")?)?;
    assert_eq!(config["id"], scene.id.as_str());
    assert_eq!(
        (&config["name"], &config["rootfsImageName"]),
        (&"c".into(), &pods::BUSYBOX.into())
    );
    let spec: serde_json::Value = serde_json::from_str(&text(&all, "spec.dump")?)?;
    assert_eq!(spec["process"]["args"][0], "/bin/sh");
    assert_eq!(spec["annotations"]["io.kubernetes.cri.container-name"], "c");
    let diff = members(&all["rootfs-diff.tar"][..])?;
    assert!(diff.contains_key("etc/.wh.group"), "{:?}", diff.keys());
    let counted: u64 = text(&diff, "count")?.trim().parse()?;
    assert!(counted > 0 && scene.last().await? >= counted);
    // What CRIU was told: the cgroup that it may freeze, and the streams that are not the container's.
    let told = fs::read_to_string(scene.node.path("bin/dumps"))?;
    for word in [
        "--leave-running",
        "--freeze-cgroup",
        "--external file[",
        "mnt[/etc/hosts]:/etc/hosts",
    ] {
        assert!(told.contains(word), "{word} is not in {told}");
    }
    scene.clean().await?;
    // Another one in its place.
    scene.begin("a.tar", 0).await??;
    scene.clean().await?;
    scene.node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn when_time_is_over_or_the_caller_leaves_the_container_is_thawed() -> Result<()> {
    let scene = Scene::new().await?;
    scene.tell("hang")?;
    let started = Instant::now();
    let call = scene.begin("a.tar", 3);
    scene.begun(1).await?;
    assert!(is_frozen(&scene.freezer().await?));
    // A pass over the container meanwhile leaves it frozen.
    let limits = LinuxContainerResources {
        memory_limit_in_bytes: 512 << 20,
        ..Default::default()
    };
    scene.node.cri.update(&scene.id, limits).await?;
    assert!(is_frozen(&scene.freezer().await?));
    let late = call.await?.expect_err("it hangs");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    scene.clean().await?;
    let call = scene.begin("a.tar", 0);
    scene.begun(2).await?;
    assert!(is_frozen(&scene.freezer().await?));
    call.abort();
    scene.clean().await?;
    assert!(!scene.archive("a.tar").exists());
    scene.node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_leaves_what_the_next_one_repairs() -> Result<()> {
    let mut scene = Scene::new().await?;
    scene.tell("hang")?;
    let call = scene.begin("a.tar", 0);
    scene.begun(1).await?;
    scene.node.kill9().await?;
    call.await?.expect_err("it died");
    eventually(Duration::from_secs(20), async || {
        let running = scene.node.processes()?;
        ensure!(!running.iter().any(|line| line.contains("bin/criu")), "{running:#?}");
        Ok(())
    })
    .await
    .context("CRIU dies with the daemon")?;
    scene.node.serve().await?;
    scene.clean().await?;
    // One that is asked to end thaws before it does.
    let call = scene.begin("a.tar", 0);
    scene.begun(2).await?;
    let pid = scene.node.cri.container_pid(&scene.id).await?;
    assert!(is_frozen(&freezer(pid)?));
    scene.node.stop().await?;
    call.await?.expect_err("it ended");
    assert!(!is_frozen(&freezer(pid)?), "it is left frozen");
    scene.node.serve().await?;
    scene.clean().await?;
    scene.hush("hang")?;
    for point in ["before", "torn", "after"] {
        scene.faults.arm(&format!("checkpoint.archive.{point}=abort"))?;
        scene.begin("a.tar", 0).await?.expect_err("it died");
        assert!(scene.faults.hit(), "{point}");
        eventually(Duration::from_secs(10), async || {
            ensure!(scene.node.has_ended()?, "the daemon runs");
            Ok(())
        })
        .await?;
        scene.faults.disarm();
        let left = fs::read_dir(scene.node.path("out"))?.count();
        assert_eq!(left, usize::from(point != "before"), "{point}");
        scene.node.serve().await?;
        scene.clean().await?;
        assert_eq!(scene.archive("a.tar").exists(), point == "after", "{point}");
    }
    members(fs::File::open(scene.archive("a.tar"))?)?;
    scene.node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_get_an_archive_each() -> Result<()> {
    let scene = Scene::new().await?;
    scene.tell("hang")?;
    let calls = [scene.begin("a.tar", 30), scene.begin("b.tar", 30)];
    scene.begun(1).await?;
    scene.hush("hang")?;
    for call in calls {
        call.await??;
    }
    let mut images = Vec::new();
    for name in ["a.tar", "b.tar"] {
        let all = members(fs::File::open(scene.archive(name))?)?;
        images.push(text(&all, "checkpoint/pages-1.img")?);
    }
    assert_ne!(images[0], images[1], "each has its own images");
    scene.clean().await?;
    scene.node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_it() -> Result<()> {
    let mut scene = Scene::new().await?;
    scene.tell("hang")?;
    for pod in [false, true] {
        let call = scene.begin("a.tar", 0);
        scene.begun(1 + usize::from(pod)).await?;
        let started = Instant::now();
        match pod {
            false => scene.node.cri.stop(&scene.id, 30).await?,
            true => scene.node.cri.stop_sandbox(&scene.sandbox).await?,
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        let ended = call.await?.expect_err("it was stopped");
        assert_eq!(ended.code(), Code::FailedPrecondition, "{ended:?}");
        assert!(ended.message().contains("container c"), "{ended:?}");
        if !pod {
            assert_eq!(
                scene.node.cri.container(&scene.id).await?.exit_code,
                0,
                "it got its signal"
            );
        }
        eventually(Duration::from_secs(10), async || scene.tidy()).await?;
        if !pod {
            let mut again = shell("c", COUNTER);
            again.metadata.as_mut().context("metadata")?.attempt = 1;
            again.log_path = "again.log".into();
            scene.id = scene.node.cri.launch(&scene.sandbox, &scene.pod, &again).await?;
            scene.counts().await?;
        }
    }
    // Nor does one that ends by itself hold anything up.
    let gone = scene.begin("a.tar", 0).await?.expect_err("it does not run");
    assert_eq!(gone.code(), Code::FailedPrecondition, "{gone:?}");
    scene.node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_and_changes_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    fs::create_dir(scene.archive("dir"))?;
    for (name, timeout, field) in [
        ("../none/a.tar", 0, "location: "),
        ("dir", 0, "location: "),
        ("a.tar/", 0, "location: "),
        ("a.tar", -1, "timeout: "),
    ] {
        let refused = scene.begin(name, timeout).await?.expect_err(name);
        assert_eq!(refused.code(), Code::InvalidArgument, "{name}: {refused:?}");
        assert!(refused.message().starts_with(field), "{name}: {refused:?}");
    }
    scene.tell("fail")?;
    let failed = scene.begin("a.tar", 0).await?.expect_err("CRIU fails");
    assert_eq!(failed.code(), Code::Internal, "{failed:?}");
    assert!(failed.message().contains("what cannot be dumped"), "{failed:?}");
    scene.clean().await?;
    scene.tell("unfit")?;
    let unfit = scene.begin("a.tar", 0).await?.expect_err("CRIU does not work here");
    assert_eq!(unfit.code(), Code::Unimplemented, "{unfit:?}");
    assert!(unfit.message().contains("this kernel is not to its taste"), "{unfit:?}");
    scene.hush("criu")?;
    if !Path::new("/usr/sbin/criu").exists() {
        let absent = scene.begin("a.tar", 0).await?.expect_err("there is no CRIU");
        assert_eq!(absent.code(), Code::Unimplemented, "{absent:?}");
        assert!(absent.message().contains("install"), "{absent:?}");
    }
    scene.clean().await?;
    assert_eq!(fs::read_dir(scene.node.path("out"))?.count(), 1);
    scene.node.finish().await
}

/// With the real CRIU: the memory is in the images, the changed file in the difference. Where it does not work on this
/// kernel the answer has its reason.
#[tokio::test(flavor = "multi_thread")]
async fn the_real_criu_dumps_a_counter_or_says_why_not() -> Result<()> {
    if !tools::installed("criu") {
        return Ok(());
    }
    let (mut node, faults) = Faults::node(Options::default())?;
    fs::create_dir(node.path("out"))?;
    node.serve().await?;
    let scene = Scene::on(node, faults).await?;
    let answer = scene.begin("a.tar", 50).await?;
    let checked = std::process::Command::new("criu").arg("check").output()?;
    if !checked.status.success() {
        let refused = answer.expect_err("criu check fails");
        assert_eq!(refused.code(), Code::Unimplemented, "{refused:?}");
        let printed = String::from_utf8_lossy(&checked.stderr).into_owned();
        let said = refused.message().split("`criu check`: ").nth(1).context("no reason")?;
        assert!(printed.contains(said), "{said:?} is not what CRIU says: {printed}");
        scene.clean().await?;
        println!("criu does not work on this kernel: {said}");
        return scene.node.finish().await;
    }
    answer?;
    let all = members(fs::File::open(scene.archive("a.tar"))?)?;
    let log = pods::log_texts(scene.node.cri.container(&scene.id).await?.log_path)?;
    // Its variable: what it printed was overwritten in its buffer.
    let needle = log.first().and_then(|line| line.trim().strip_prefix("needle-"));
    let needle = needle.context("its first line")?.as_bytes();
    assert_eq!(needle.len(), 36, "not a UUID");
    let mut pages = all.iter().filter(|(name, _)| name.starts_with("checkpoint/pages-"));
    let holds = |bytes: &Vec<u8>| bytes.windows(needle.len()).any(|window| window == needle);
    assert!(pages.any(|(_, bytes)| holds(bytes)), "its memory is not in the images");
    let diff = members(&all["rootfs-diff.tar"][..])?;
    assert!(text(&diff, "count")?.trim().parse::<u64>()? > 0);
    assert!(diff.contains_key("etc/.wh.group"), "{:?}", diff.keys());
    for name in [
        "checkpoint/inventory.img",
        "checkpoint/pstree.img",
        "dump.log",
        "stats-dump",
    ] {
        assert!(all.contains_key(name), "{name}: {:?}", all.keys());
    }
    scene.clean().await?;
    scene.node.finish().await
}
