//! CNI: plugins made of shell that keep a journal, and the real ones where they are installed.

use std::fs;

use serde_json::{Value, json};

use super::*;

/// Journals, keeps its input, then does what `$BEHAVE/<plugin>.<verb>` says.
const PLUGIN: &str = r#"#!/bin/sh
me=$(basename "$0")
top=$(dirname "$(dirname "$0")")
echo "$CNI_COMMAND $me netns=$CNI_NETNS" >> "$top/journal"
cat > "$top/$me.$CNI_COMMAND.json"
echo "$CNI_CONTAINERID $CNI_IFNAME $CNI_ARGS $CNI_PATH" > "$top/$me.env"
[ -f "$top/$me.$CNI_COMMAND.sh" ] && . "$top/$me.$CNI_COMMAND.sh"
[ "$CNI_COMMAND" = ADD ] && cat "$top/result"
exit 0
"#;

const RESULT: &str = r#"{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],
  "ips":[{"interface":0,"address":"10.9.0.5/24"},{"interface":0,"address":"fd09::5/64"}]}"#;

/// A root whose CNI configuration is a chain of these plugins.
struct Fake {
    root: Root,
    top: PathBuf,
}

impl Fake {
    fn new(plugins: &[&str]) -> Fake {
        let root = Root::new(Mode::Auto);
        let top = root.config.cni_conf_dir.parent().unwrap().to_owned();
        let chain: Vec<Value> = plugins
            .iter()
            .map(|p| json!({"type": p, "capabilities": {"portMappings": *p == "b", "dns": false}}))
            .collect();
        let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": chain});
        fs::write(root.config.cni_conf_dir.join("10-net.conflist"), list.to_string()).unwrap();
        fs::write(top.join("result"), RESULT).unwrap();
        let fake = Fake { root, top };
        plugins.iter().for_each(|p| fake.install(p));
        fake
    }

    fn install(&self, plugin: &str) {
        let path = self.root.config.cni_bin_dirs[0].join(plugin);
        crate::tests::install(&path, PLUGIN);
    }

    /// What a plugin does besides.
    fn behave(&self, plugin: &str, verb: &str, script: &str) {
        fs::write(self.top.join(format!("{plugin}.{verb}.sh")), script).unwrap();
    }

    fn good(&self, plugin: &str, verb: &str) {
        fs::remove_file(self.top.join(format!("{plugin}.{verb}.sh"))).unwrap();
    }

    /// The journal since the last look, namespaces left out.
    fn journal(&self) -> Vec<String> {
        let lines = self.full_journal();
        lines
            .iter()
            .map(|l| l.rsplit_once(" netns").unwrap().0.to_string())
            .collect()
    }

    fn full_journal(&self) -> Vec<String> {
        let text = fs::read_to_string(self.top.join("journal")).unwrap_or_default();
        let _ = fs::remove_file(self.top.join("journal"));
        text.lines().map(str::to_string).collect()
    }

    fn input(&self, plugin: &str, verb: &str) -> Value {
        serde_json::from_slice(&fs::read(self.top.join(format!("{plugin}.{verb}.json"))).unwrap()).unwrap()
    }

    /// A pod that has the interface the plugins only speak of.
    async fn pod(&self, name: &str) -> Want {
        let pod = Want {
            from_cri: true,
            ..self.root.pod(name, &[tcp(8080, 80), tcp(0, 81)])
        };
        let inside = Links::inside(&pod.netns, || Ok(())).await.unwrap();
        let stand_in = rtnetlink::LinkBridge::new("eth0").up().build();
        inside.handle().link().add(stand_in).execute().await.unwrap();
        let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
        for address in ["10.9.0.5/24", "fd09::5/64"] {
            inside.add_address(eth0.index, address.parse().unwrap()).await.unwrap();
        }
        pod
    }
}

#[test]
fn a_chain_forth_and_back() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a", "b", "c"]);
        let network = fake.root.start().await;
        let mut pod = fake.pod("pod").await;
        pod.dns.servers.push("192.0.2.53".into());
        assert_eq!(network.observe(&pod).await.unwrap(), State::Absent);
        let attachment = network.ensure(&pod).await.unwrap();
        assert_eq!(fake.journal(), ["ADD a", "ADD b", "ADD c"]);
        assert_eq!(attachment.ips().0.unwrap().to_string(), "10.9.0.5");
        let env = fs::read_to_string(fake.top.join("a.env")).unwrap();
        let bin = fake.root.config.cni_bin_dirs[0].display();
        let (uid, args) = (&pod.uid, "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod");
        assert_eq!(
            env.trim(),
            format!("{uid} eth0 {args};K8S_POD_INFRA_CONTAINER_ID={uid};K8S_POD_UID=uid-pod {bin}")
        );
        let (a, b) = (fake.input("a", "ADD"), fake.input("b", "ADD"));
        assert_eq!((&a["name"], &a["cniVersion"]), (&json!("net"), &json!("1.0.0")));
        assert_eq!((a.get("prevResult"), a.get("runtimeConfig")), (None, None));
        let result: Value = serde_json::from_str(RESULT).unwrap();
        assert_eq!(b["prevResult"], result);
        let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""});
        assert_eq!(
            b["runtimeConfig"],
            json!({"portMappings": [mapping]}),
            "declared, and host port 0 left out"
        );
        // Again: kept, nothing run. Nor by a new daemon.
        assert_eq!(network.ensure(&pod).await.unwrap(), attachment);
        assert_eq!(fake.root.start().await.ensure(&pod).await.unwrap(), attachment);
        assert_eq!(attached(network.observe(&pod).await.unwrap()), attachment);
        assert!(fake.journal().is_empty());
        // Back, by the stored configuration.
        fs::remove_dir_all(&fake.root.config.cni_conf_dir).unwrap();
        network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
        assert_eq!(fake.journal(), ["DEL c", "DEL b", "DEL a"]);
        assert_eq!(fake.input("a", "DEL")["prevResult"], result);
        assert!(fake.input("b", "DEL")["runtimeConfig"].is_object());
        network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
        assert!(fake.journal().is_empty());
        assert_eq!(network.observe(&pod).await.unwrap(), State::Absent);
    });
}

#[test]
fn a_failed_add_is_taken_back() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a", "b", "c"]);
        let network = fake.root.start().await;
        let pod = fake.pod("pod").await;
        fake.behave(
            "b",
            "ADD",
            r#"printf %s '{"code":11,"msg":"try later","details":"the pool\nis empty"}'; exit 1"#,
        );
        let error = network.ensure(&pod).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "CNI plugin b ADD failed (code 11): try later: the pool is empty"
        );
        assert_eq!(fake.journal(), ["ADD a", "ADD b", "DEL c", "DEL b", "DEL a"]);
        assert_eq!(network.observe(&pod).await.unwrap(), State::Absent);
        // If taking back fails as well, the attachment stays, and the next try begins with it.
        fake.behave("c", "DEL", "echo broken >&2; exit 3");
        assert!(network.ensure(&pod).await.is_err());
        assert_eq!(fake.journal(), ["ADD a", "ADD b", "DEL c", "DEL b", "DEL a"]);
        assert!(matches!(network.observe(&pod).await.unwrap(), State::Partial(_)));
        let error = network.ensure(&pod).await.unwrap_err().to_string();
        assert!(
            error.contains("CNI plugin c DEL") && error.contains("broken"),
            "{error}"
        );
        assert_eq!(fake.journal(), ["DEL c", "DEL b", "DEL a"], "all tried");
        fake.good("b", "ADD");
        fake.good("c", "DEL");
        network.ensure(&pod).await.unwrap();
        assert_eq!(fake.journal(), ["DEL c", "DEL b", "DEL a", "ADD a", "ADD b", "ADD c"]);
    });
}

#[test]
fn odd_plugins_are_bounded() {
    on_a_host(|_outside| async move {
        let mut fake = Fake::new(&["a"]);
        fake.root.config.cni_timeout = Duration::from_secs(2);
        let network = fake.root.start().await;
        let pod = fake.pod("pod").await;
        let fails = async |script: &str, words: &str| {
            fake.behave("a", "ADD", script);
            let error = network.ensure(&pod).await.unwrap_err().to_string();
            assert!(error.contains(words), "{script}: {error}");
        };
        fails("sleep 1000 & echo $! > \"$top/sleeper\"; wait", "did not end").await;
        fails("cat /dev/zero", "more than 1048576 bytes").await;
        fails("cat /dev/zero >&2", "did not end").await;
        fails("echo no JSON; exit 0", "not JSON").await;
        fails("exit 0", "no result").await;
        fails("echo '[]'; exit 0", "no result").await;
        fails("echo '{}'; exit 0", "no address on eth0").await;
        fails("kill -9 $$", "signal: 9").await;
        // What a hanging plugin started is killed with it.
        let sleeper = fs::read_to_string(fake.top.join("sleeper")).unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", sleeper.trim())).unwrap_or_default();
        assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
        // One that leaves a process behind with its output open does not hang.
        fake.behave("a", "ADD", "sleep 5 & echo $! > \"$top/sleeper\"");
        network.ensure(&pod).await.unwrap();
        let sleeper = fs::read_to_string(fake.top.join("sleeper"))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(sleeper), nix::sys::signal::SIGKILL).unwrap();
    });
}

#[test]
fn nothing_configured() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a"]);
        let conf = fake.root.config.cni_conf_dir.join("10-net.conflist");
        let kept = fs::read(&conf).unwrap();
        fs::write(&conf, "{").unwrap();
        let network = fake.root.start().await;
        let ready = network.ready();
        assert!(!ready.ok && ready.message.contains("10-net.conflist"), "{ready:?}");
        assert_eq!(ready.reason, "NetworkPluginNotReady");
        let pod = fake.pod("pod").await;
        let error = network.ensure(&pod).await.unwrap_err();
        assert!(matches!(error, Error::NotReady(_)), "{error}");
        assert_eq!(network.observe(&pod).await.unwrap(), State::Absent);
        // A pod of YAML takes the bridge, and stays there when CNI comes.
        let mine = fake.root.pod("mine", &[]);
        let bridged = network.ensure(&mine).await.unwrap();
        let mut changes = network.changes();
        fs::write(&conf, kept).unwrap();
        changes.wait_for(|_| network.ready().ok).await.unwrap();
        assert_eq!(network.ensure(&mine).await.unwrap(), bridged);
        network.ensure(&pod).await.unwrap();
        assert_eq!(fake.journal(), ["ADD a"]);
        assert_eq!(network.list().await.unwrap(), [mine.uid.clone(), pod.uid.clone()]);
        // A plugin that is not there is named, with where it was looked for.
        fs::remove_file(fake.root.config.cni_bin_dirs[0].join("a")).unwrap();
        let late = fake.pod("late").await;
        let error = network.ensure(&late).await.unwrap_err().to_string();
        assert!(
            error.contains("plugin a: not found in") && error.contains("/bin"),
            "{error}"
        );
    });
}

/// A runtime handler's own directory: its sandboxes wait for it, and what it gave is repaired and taken back by it,
/// whatever the table and the directory say by then.
#[test]
fn the_directory_of_a_handler() {
    on_a_host(|_outside| async move {
        let mut fake = Fake::new(&["a"]);
        // It goes before the mode, too.
        fake.root.config.mode = Mode::Builtin;
        fake.install("h");
        let network = fake.root.start().await;
        let dir = fake.top.join("h.d");
        network.use_conf_dirs(&[dir.clone()].into()).unwrap();
        let want = Want {
            cni_conf_dir: Some(dir.clone()),
            ..fake.pod("pod").await
        };
        let yaml = Want {
            from_cri: false,
            ..want.clone()
        };
        for want in [&want, &yaml] {
            let error = network.ensure(want).await.unwrap_err();
            let told = error.to_string();
            assert!(matches!(error, Error::NotReady(_)) && told.contains("h.d"), "{told}");
        }
        assert_eq!(network.observe(&want).await.unwrap(), State::Absent);
        let bad = network.misconfigured();
        assert_eq!(bad.iter().map(|(dir, _)| dir).collect::<Vec<_>>(), [&dir]);

        let mut changes = network.changes();
        changes.mark_unchanged();
        fs::create_dir(&dir).unwrap();
        let list = json!({"cniVersion": "1.0.0", "name": "of-h", "plugins": [{"type": "h"}]});
        fs::write(dir.join("new"), list.to_string()).unwrap();
        fs::rename(dir.join("new"), dir.join("1.conflist")).unwrap();
        changes.changed().await.unwrap();
        changes.wait_for(|_| network.misconfigured().is_empty()).await.unwrap();
        let told = network.describe();
        assert_eq!(
            told["ofHandlers"][dir.display().to_string()]["conflist"]["name"],
            "of-h"
        );
        let attachment = network.ensure(&want).await.unwrap();
        assert_eq!(fake.journal(), ["ADD h"]);
        let cni = attachment.cni.clone().unwrap();
        assert_eq!(
            (cni.conf_dir, &cni.conflist["name"]),
            (Some(dir.clone()), &json!("of-h"))
        );
        assert!(network.ready().ok, "the node's own is another matter");

        // The handler is gone, and its directory; a half is done again by the same plugin, and taken back.
        network.use_conf_dirs(&Default::default()).unwrap();
        assert!(changes.has_changed().unwrap());
        fs::remove_dir_all(&dir).unwrap();
        let half = Attachment {
            complete: false,
            ..attachment.clone()
        };
        half.write(&want.dir).unwrap();
        let today = Want {
            cni_conf_dir: None,
            ..want.clone()
        };
        assert_eq!(network.ensure(&today).await.unwrap(), attachment);
        assert_eq!(fake.journal(), ["DEL h", "ADD h"]);
        network.remove(&want.uid, &want.dir, Some(&want.netns)).await.unwrap();
        assert_eq!(fake.journal(), ["DEL h"]);
        // Out of the table in this very moment, it still says why.
        let error = network.ensure(&want).await.unwrap_err().to_string();
        assert!(error.contains("h.d"), "{error}");
        assert_eq!(network.misconfigured(), []);
    });
}

#[test]
fn a_debt_is_paid_once() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a", "b"]);
        let network = fake.root.start().await;
        let pod = fake.pod("pod").await;
        let attachment = network.ensure(&pod).await.unwrap();
        fake.journal();
        // The plugin is gone, and so is the configuration; the pin goes too.
        fs::remove_file(fake.root.config.cni_bin_dirs[0].join("a")).unwrap();
        fs::remove_dir_all(&fake.root.config.cni_conf_dir).unwrap();
        let error = network
            .remove(&pod.uid, &pod.dir, Some(&pod.netns))
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("plugin a: not found"), "{error}");
        assert_eq!(fake.full_journal(), [format!("DEL b netns={}", pod.netns.display())]);
        netns::remove(&pod.netns).unwrap();
        assert!(matches!(network.observe(&pod).await.unwrap(), State::Drifted(why) if why.contains("is gone")));
        fake.install("a");
        network.detach(&attachment, Some(&pod.netns)).await.unwrap();
        assert_eq!(fake.full_journal(), ["DEL b netns=", "DEL a netns="]);
    });
}

#[test]
fn halves_and_reboots_are_done_again() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a"]);
        let network = fake.root.start().await;
        let pod = fake.pod("pod").await;
        let whole = network.ensure(&pod).await.unwrap();
        fake.journal();
        let begun = Attachment {
            complete: false,
            addresses: Vec::new(),
            ..whole.clone()
        };
        let old = Attachment {
            boot_id: "another".into(),
            ..whole.clone()
        };
        for half in [begun, old] {
            half.write(&pod.dir).unwrap();
            assert!(matches!(network.observe(&pod).await.unwrap(), State::Partial(_)));
            assert_eq!(network.ensure(&pod).await.unwrap(), whole);
            assert_eq!(fake.journal(), ["DEL a", "ADD a"]);
        }
        // Gone from the interface: seen, named, given anew.
        let inside = Links::inside(&pod.netns, || Ok(())).await.unwrap();
        let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
        inside.delete_address(eth0.index, whole.addresses[0]).await.unwrap();
        assert_eq!(
            network.observe(&pod).await.unwrap(),
            State::Drifted("eth0 lacks 10.9.0.5/24".into())
        );
    });
}

#[test]
fn status_of_the_plugins() {
    on_a_host(|_outside| async move {
        let fake = Fake::new(&["a"]);
        let conf = fake.root.config.cni_conf_dir.join("10-net.conflist");
        let new = fs::read_to_string(&conf).unwrap().replace("1.0.0", "1.1.0");
        fs::write(&conf, new).unwrap();
        let network = fake.root.start().await;
        fake.behave("a", "STATUS", r#"echo '{"code":50,"msg":"not available"}'; exit 1"#);
        network.probe().await;
        let ready = network.ready();
        assert!(!ready.ok && ready.message.contains("not available"), "{ready:?}");
        fake.good("a", "STATUS");
        network.probe().await;
        assert!(network.ready().ok);
    });
}

/// The plugins of the distribution, where they are installed.
#[test]
fn real_plugins() {
    let bin = Path::new("/usr/lib/cni");
    if !bin.join("bridge").exists() {
        return eprintln!("skipped: no CNI plugins in {}", bin.display());
    }
    let portmap =
        std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join("iptables").exists()));
    on_a_host(move |outside| async move {
        let mut root = Root::new(Mode::Cni);
        root.config.cni_bin_dirs = vec![bin.to_owned()];
        let leases = root.config.cni_conf_dir.parent().unwrap().join("leases");
        let ranges = json!([[{"subnet": "10.77.0.0/29"}], [{"subnet": "fd77::/64"}]]);
        let ipam = json!({
            "type": "host-local", "dataDir": leases, "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        });
        let bridge = json!({"type": "bridge", "bridge": "cnitest0", "isGateway": true, "ipam": ipam});
        let mut plugins = vec![bridge];
        if portmap {
            plugins.push(json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}));
        }
        let list = json!({"cniVersion": "1.0.0", "name": "real", "plugins": plugins});
        fs::write(root.config.cni_conf_dir.join("10-real.conflist"), list.to_string()).unwrap();
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        let network = root.start().await;
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let begun = Instant::now();
        let attachment = network.ensure(&pod).await.unwrap();
        println!("real plugins: ADD {:?}, portmap {portmap}", begun.elapsed());
        assert_eq!(
            (attachment.addresses.len(), attachment.gateways.len()),
            (2, 2),
            "{attachment:?}"
        );
        assert_eq!(attached(network.observe(&pod).await.unwrap()), attachment);
        serve(Some(&pod.netns), 80, "pod").await;
        assert!(
            ask(None, &format!("{}:80", four(&attachment)))
                .await
                .unwrap()
                .starts_with("pod")
        );
        if portmap {
            assert!(ask(Some(&outside), "192.0.2.1:8080").await.unwrap().starts_with("pod"));
        }
        // More pods than the five addresses there are, one after the other, the namespace gone before DEL.
        let leased = || {
            fs::read_dir(leases.join("real"))
                .unwrap()
                .flatten()
                .filter(|e| e.file_name().to_str().is_some_and(|n| n.starts_with("10.77.")))
                .count()
        };
        for n in 0..6 {
            let other = root.pod(&format!("other{n}"), &[]);
            network.ensure(&other).await.unwrap();
            assert_eq!(leased(), 2);
            netns::remove(&other.netns).unwrap();
            network
                .remove(&other.uid, &other.dir, Some(&other.netns))
                .await
                .unwrap();
        }
        let begun = Instant::now();
        network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
        println!("real plugins: DEL {:?}", begun.elapsed());
        assert_eq!(leased(), 0);
    });
}
