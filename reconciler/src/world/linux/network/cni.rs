//! The network of a CNI configuration list: ADD first to last, DEL last to first, results read.

use std::net::IpAddr;
use std::path::Path;

use serde_json::{Map, Value, json};
use shim::fault;

use super::attachment::{Attachment, Cni as Stored, Kind, boot_id};
use super::conflist::{Conflist, Loaded, Plugin};
use super::error::{Error, Result};
use super::links::Links;
use super::plugin::{Environment, Runner, Verb, netns_text};
use super::{Cidr, State, Want};
use crate::world::linux::netns::{self, Pin};

/// Runs chains of plugins.
#[derive(Debug, Clone)]
pub struct Cni {
    runner: Runner,
}

impl Cni {
    pub fn new(runner: Runner) -> Cni {
        Cni { runner }
    }

    /// Gives a sandbox its network. `have` is what it was given before: kept if whole, else taken back and given anew
    /// by the same plugins. `today` is the configuration that counts for a sandbox that has none yet.
    pub async fn ensure(&self, want: &Want, have: Option<Attachment>, today: Loaded) -> Result<Attachment> {
        let mut attachment = match have {
            Some(have) => {
                if matches!(self.observe(&have).await?, State::Attached(_)) {
                    return Ok(have);
                }
                // Begun, or gone in part: only the plugins know of what.
                self.delete(&have, Some(&want.netns)).await?;
                Attachment {
                    complete: false,
                    boot_id: boot_id()?,
                    netns: want.netns.clone(),
                    ..have
                }
            }
            None => {
                let list = today.map_err(Error::NotReady)?;
                begin(want, &list)?
            }
        };
        if let Some(cni) = &mut attachment.cni {
            cni.result = None;
        }
        attachment.addresses.clear();
        attachment.gateways.clear();
        attachment.write(&want.dir)?;
        if let Err(error) = self.add(&mut attachment).await {
            // The specification wants DEL after a failed ADD. If that fails too, the attachment stays and is owed.
            match self.delete(&attachment, Some(&want.netns)).await {
                Ok(()) => Attachment::remove(&want.dir)?,
                Err(undo) => {
                    tracing::warn!(uid = want.uid, error = %undo, "DEL after a failed ADD")
                }
            }
            return Err(error);
        }
        attachment.complete = true;
        attachment.write(&want.dir)?;
        tracing::info!(uid = want.uid, addresses = ?attachment.ips(), "attached by CNI");
        Ok(attachment)
    }

    /// Runs ADD of every plugin, each with the result of the one before it.
    async fn add(&self, attachment: &mut Attachment) -> Result<()> {
        let (list, stored) = parts(attachment)?;
        let env = environment(attachment, &stored, Some(&attachment.netns));
        let mut result = None;
        for plugin in &list.plugins {
            let config = config(&list, plugin, &stored, result.as_ref());
            fault::point("cni.add.before");
            let printed = self.runner.run(Verb::Add, &plugin.kind, &config, &env).await?;
            fault::point("cni.add.after");
            let why = || "it printed no result".to_string();
            let odd = |why| Error::PluginOutput {
                plugin: plugin.kind.clone(),
                verb: "ADD",
                why,
            };
            result = Some(printed.filter(Value::is_object).ok_or_else(|| odd(why()))?);
        }
        let result = result.unwrap_or_default();
        let (addresses, gateways) = read(&result, &attachment.ifname);
        if addresses.is_empty() {
            return Err(Error::NoResultAddress {
                network: list.name,
                ifname: attachment.ifname.clone(),
            });
        }
        attachment.addresses = addresses;
        attachment.gateways = gateways;
        if let Some(cni) = &mut attachment.cni {
            cni.result = Some(result);
        }
        Ok(())
    }

    /// Runs DEL of every plugin of the attachment, whatever the others say. `netns` is the pin; plugins are told of it
    /// only if it still is a namespace.
    pub async fn delete(&self, attachment: &Attachment, netns: Option<&Path>) -> Result<()> {
        let (list, stored) = parts(attachment)?;
        let alive = netns.filter(|path| matches!(netns::observe(path), Ok(Pin::Ns { .. })));
        let env = environment(attachment, &stored, alive);
        // prevResult came to DEL with 0.4.0.
        let result = stored.result.as_ref().filter(|_| list.at_least("0.4.0"));
        let mut failures = Vec::new();
        for plugin in list.plugins.iter().rev() {
            let config = config(&list, plugin, &stored, result);
            fault::point("cni.del.before");
            if let Err(error) = self.runner.run(Verb::Del, &plugin.kind, &config, &env).await {
                failures.push(error.to_string());
            }
        }
        fault::point("cni.del.after");
        match failures.is_empty() {
            true => Ok(()),
            false => Err(Error::Delete {
                network: list.name,
                failures: failures.join("; "),
            }),
        }
    }

    /// Runs STATUS of every plugin (CNI 1.1.0): whether the network can take pods.
    pub async fn status(&self, list: &Conflist) -> Result<()> {
        if !list.at_least("1.1.0") {
            return Ok(());
        }
        for plugin in &list.plugins {
            let config = config(list, plugin, &Stored::empty(), None);
            self.runner
                .run(Verb::Status, &plugin.kind, &config, &Environment::default())
                .await?;
        }
        Ok(())
    }

    /// Compares the interface with the result. CHECK is not run: it fails on healthy pods of too many plugins.
    pub async fn observe(&self, attachment: &Attachment) -> Result<State> {
        if !attachment.complete {
            return Ok(State::Partial("ADD did not end".into()));
        }
        if !attachment.of_this_boot() {
            return Ok(State::Partial("made before the machine restarted".into()));
        }
        let gone = |path: &Path| State::Drifted(format!("the network namespace {} is gone", path.display()));
        let links = match Links::inside(&attachment.netns, || Ok(())).await {
            Ok(links) => links,
            Err(Error::NetnsGone(path)) => return Ok(gone(&path)),
            Err(error) => return Err(error),
        };
        let Some(link) = links.by_name(&attachment.ifname).await? else {
            return Ok(State::Drifted(format!("{} is missing", attachment.ifname)));
        };
        let mut faults = Vec::new();
        if !link.up {
            faults.push(format!("{} is down", link.name));
        }
        let addresses: Vec<IpAddr> = links.addresses(link.index).await?.iter().map(|a| a.ip).collect();
        for missing in attachment.addresses.iter().filter(|a| !addresses.contains(&a.ip)) {
            faults.push(format!("{} lacks {missing}", link.name));
        }
        let gateways = links.gateways().await?;
        for missing in attachment.gateways.iter().filter(|g| !gateways.contains(g)) {
            faults.push(format!("the default route by {missing} is missing"));
        }
        Ok(match faults.is_empty() {
            true => State::Attached(Box::new(attachment.clone())),
            false => State::Drifted(faults.join("; ")),
        })
    }
}

impl Stored {
    fn empty() -> Stored {
        Stored {
            conf_dir: None,
            conflist: Value::Null,
            args: String::new(),
            capabilities: Map::new(),
            result: None,
            unknown: Map::new(),
        }
    }
}

fn begin(want: &Want, list: &Conflist) -> Result<Attachment> {
    Ok(Attachment {
        version: 1,
        uid: want.uid.clone(),
        namespace: want.namespace.clone(),
        name: want.name.clone(),
        pod_uid: want.pod_uid.clone(),
        kind: Kind::Cni,
        complete: false,
        boot_id: boot_id()?,
        netns: want.netns.clone(),
        ifname: "eth0".into(),
        addresses: Vec::new(),
        gateways: Vec::new(),
        ports: want.ports.iter().filter(|p| p.host_port != 0).cloned().collect(),
        cni: Some(Stored {
            conf_dir: want.cni_conf_dir.clone(),
            conflist: list.raw.clone(),
            args: arguments(want),
            capabilities: capabilities(want)?,
            result: None,
            unknown: Map::new(),
        }),
        unknown: Map::new(),
    })
}

/// The list and the rest of what an attachment keeps for its plugins.
fn parts(attachment: &Attachment) -> Result<(Conflist, Stored)> {
    let fail = |why: String| Error::Attachment {
        path: attachment.uid.clone().into(),
        why,
    };
    let stored = attachment.cni.clone().ok_or_else(|| fail("has no CNI part".into()))?;
    let list = Conflist::parse(stored.conflist.clone()).map_err(|e| fail(format!("cni.conflist: {e}")))?;
    Ok((list, stored))
}

fn environment(attachment: &Attachment, stored: &Stored, netns: Option<&Path>) -> Environment {
    Environment {
        container_id: attachment.uid.clone(),
        netns: netns_text(netns),
        ifname: attachment.ifname.clone(),
        args: stored.args.clone(),
    }
}

/// `CNI_ARGS` as Kubernetes plugins expect it. `;` separates, so it cannot be in a value; Kubernetes names have none.
fn arguments(want: &Want) -> String {
    let pairs = [
        ("IgnoreUnknown", "1"),
        ("K8S_POD_NAMESPACE", &want.namespace),
        ("K8S_POD_NAME", &want.name),
        ("K8S_POD_INFRA_CONTAINER_ID", &want.uid),
        ("K8S_POD_UID", &want.pod_uid),
    ];
    let clean = |v: &str| v.replace([';', '='], "-");
    pairs.map(|(key, value)| format!("{key}={}", clean(value))).join(";")
}

/// One plugin's configuration: its own, the list's name and version, the capabilities it declares, the result so far.
fn config(list: &Conflist, plugin: &Plugin, stored: &Stored, result: Option<&Value>) -> Value {
    let mut config = plugin.raw.clone();
    config.insert("name".into(), list.name.clone().into());
    config.insert("cniVersion".into(), list.version.clone().into());
    let runtime: Map<String, Value> = stored
        .capabilities
        .iter()
        .filter(|(key, _)| plugin.capabilities.contains(*key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if !runtime.is_empty() {
        config.insert("runtimeConfig".into(), runtime.into());
    }
    if let Some(result) = result {
        config.insert("prevResult".into(), result.clone());
    }
    config.into()
}

/// All that a plugin may ask for by capability (CNI conventions).
fn capabilities(want: &Want) -> Result<Map<String, Value>> {
    let mut all = Map::new();
    let ports = want.ports.iter().filter(|p| p.host_port != 0).map(|p| {
        let host_ip = p.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
        json!({
            "hostPort": p.host_port, "containerPort": p.container_port,
            "protocol": p.protocol.name(), "hostIP": host_ip,
        })
    });
    let ports: Vec<Value> = ports.collect();
    if !ports.is_empty() {
        all.insert("portMappings".into(), ports.into());
    }
    let (ingress, egress) = (
        rate(want, "kubernetes.io/ingress-bandwidth")?,
        rate(want, "kubernetes.io/egress-bandwidth")?,
    );
    if ingress.or(egress).is_some() {
        let mut bandwidth = Map::new();
        for (direction, rate) in [("ingress", ingress), ("egress", egress)] {
            if let Some(rate) = rate {
                bandwidth.insert(format!("{direction}Rate"), rate.into());
                bandwidth.insert(format!("{direction}Burst"), u32::MAX.into());
            }
        }
        all.insert("bandwidth".into(), bandwidth.into());
    }
    if want.dns != Default::default() {
        all.insert("dns".into(), json!(want.dns));
    }
    if !want.cgroup_parent.is_empty() {
        all.insert("cgroupPath".into(), want.cgroup_parent.clone().into());
    }
    if !want.annotations.is_empty() {
        all.insert("io.kubernetes.cri.pod-annotations".into(), json!(want.annotations));
    }
    Ok(all)
}

/// A bandwidth annotation in bits per second, 1k to 1P as Kubernetes has it.
fn rate(want: &Want, key: &str) -> Result<Option<u64>> {
    let Some(text) = want.annotations.get(key) else {
        return Ok(None);
    };
    let fail = |why: &str| Error::Annotation {
        key: key.into(),
        why: format!("{text:?} {why}"),
    };
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let factor: f64 = match suffix {
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        _ => return Err(fail("is not a quantity such as 10M")),
    };
    let rate = number
        .parse::<f64>()
        .map_err(|_| fail("is not a quantity such as 10M"))?
        * factor;
    if !(1e3..=1e15).contains(&rate) {
        return Err(fail("is not between 1k and 1P"));
    }
    Ok(Some(rate as u64))
}

/// The addresses a result gives the interface, and the gateways of its default routes. An address without an interface
/// index is the interface's.
fn read(result: &Value, ifname: &str) -> (Vec<Cidr>, Vec<IpAddr>) {
    let list = |name: &str| result.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
    let (interfaces, ips, routes) = (list("interfaces"), list("ips"), list("routes"));
    let ours = |ip: &Value| match ip.get("interface").and_then(Value::as_u64) {
        None => true,
        Some(n) => interfaces.get(n as usize).is_some_and(|i| {
            i["name"].as_str() == Some(ifname) && i["sandbox"].as_str().is_some_and(|s| !s.is_empty())
        }),
    };
    let ips: Vec<&Value> = ips.iter().filter(|ip| ours(ip)).collect();
    let addresses: Vec<Cidr> = ips
        .iter()
        .filter_map(|ip| ip["address"].as_str()?.parse().ok())
        .collect();
    let gateway_of = |six: bool| {
        ips.iter()
            .filter_map(|ip| ip["gateway"].as_str()?.parse::<IpAddr>().ok())
            .find(|g| g.is_ipv6() == six)
    };
    let gateways = routes.iter().filter_map(|route| {
        let to: Cidr = route["dst"].as_str()?.parse().ok()?;
        let by = route["gw"].as_str().and_then(|gw| gw.parse().ok());
        if to.prefix == 0 {
            by.or_else(|| gateway_of(to.ip.is_ipv6()))
        } else {
            None
        }
    });
    (addresses, gateways.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_interfaces() {
        let result = json!({
            "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": "/x"}, {"name": "net1", "sandbox": "/x"}],
            "ips": [
                {"interface": 0, "address": "10.0.0.1/24"},
                {"interface": 1, "address": "10.0.0.5/24", "gateway": "10.0.0.1"},
                {"interface": 2, "address": "10.1.0.5/24"},
                {"version": "6", "address": "fd00::5/64", "gateway": "fd00::1"},
                {"interface": 9, "address": "10.2.0.5/24"},
                {"address": "nonsense"},
            ],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00::2"}, {"dst": "10.9.0.0/16"}],
        });
        let (addresses, gateways) = read(&result, "eth0");
        assert_eq!(
            addresses.iter().map(Cidr::to_string).collect::<Vec<_>>(),
            ["10.0.0.5/24", "fd00::5/64"]
        );
        assert_eq!(
            gateways.iter().map(IpAddr::to_string).collect::<Vec<_>>(),
            ["10.0.0.1", "fd00::2"]
        );
        assert_eq!(read(&json!([]), "eth0"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn bandwidths() {
        let rate = |text: &str| {
            let annotations = [("k".to_string(), text.to_string())].into();
            rate(
                &Want {
                    annotations,
                    ..Want::default()
                },
                "k",
            )
            .map_err(|e| e.class())
        };
        assert_eq!(rate("10M"), Ok(Some(10_000_000)));
        assert_eq!(rate("1.5k"), Ok(Some(1500)));
        assert_eq!(rate("1P"), Ok(Some(1_000_000_000_000_000)));
        for bad in ["", "1", "2P", "fast", "1m", "-1M", "1.2.3M"] {
            assert_eq!(rate(bad), Err(super::super::Class::Permanent), "{bad}");
        }
    }
}
