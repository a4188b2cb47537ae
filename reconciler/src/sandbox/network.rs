//! Stage `network`: addresses, routes and host ports, from CNI or the built-in bridge.

use std::path::PathBuf;

use state::PodSandbox;
use state::sandbox::{Protocol, SandboxKind, SandboxStatus};

use super::host_network;
use crate::debt;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::linux::netns::Pin;
use crate::world::linux::network::{self, Attachment, State, Want};

pub struct Network;

/// `state` is `None` with host network.
pub struct Have {
    state: Option<State>,
    attachment: Option<Attachment>,
}

/// What a sandbox asks of its network.
pub fn want(cx: &Context, object: &PodSandbox) -> Result<Want> {
    let spec = &object.spec;
    let mut ports = Vec::new();
    for (i, port) in spec.ports.iter().enumerate().filter(|(_, p)| p.host_port != 0) {
        let host_ip =
            match port.host_ip.as_str() {
                "" => None,
                text => Some(text.parse().map_err(|_| {
                    Error::Refused(format!("port_mappings[{i}].host_ip: {text:?} is not an IP address"))
                })?),
            };
        ports.push(network::PortMapping {
            protocol: match port.protocol {
                Protocol::Tcp => network::Protocol::Tcp,
                Protocol::Udp => network::Protocol::Udp,
                Protocol::Sctp => network::Protocol::Sctp,
            },
            container_port: port.container_port,
            host_port: port.host_port,
            host_ip,
        });
    }
    let dns = spec.dns.clone().unwrap_or_default();
    Ok(Want {
        uid: object.uid().to_owned(),
        namespace: spec.pod.namespace.clone(),
        name: spec.pod.name.clone(),
        pod_uid: spec.pod.uid.clone(),
        netns: cx.world.paths.netns(object.uid()),
        dir: cx.world.paths.pod(object.uid()),
        ports,
        dns: network::Dns {
            servers: dns.servers,
            searches: dns.searches,
            options: dns.options,
        },
        annotations: object.meta.annotations.clone(),
        cgroup_parent: spec.cgroup_parent.clone(),
        // What stands goes by its attachment; see `conf_dir`.
        cni_conf_dir: None,
        from_cri: object.meta.owner.is_none(),
    })
}

/// The CNI directory of the sandbox's handler, if it has its own.
///
/// What was given already is repaired by its attachment, whatever has become of the handler.
fn conf_dir(cx: &Context, object: &PodSandbox, want: &Want) -> Result<Option<PathBuf>> {
    match super::handler(&cx.live(), object) {
        Ok(handler) => Ok(handler.cni_conf_dir.clone()),
        Err(_) if cx.world.network.attachment(&want.dir)?.is_some() => Ok(None),
        Err(e) => Err(e),
    }
}

impl Stage<SandboxKind> for Network {
    type Have = Have;
    const NAME: &'static str = "network";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        if host_network(&object.spec) {
            return Ok(Have {
                state: None,
                attachment: None,
            });
        }
        let want = want(cx, object)?;
        let state = cx.world.network.observe(&want).await?;
        // Its addresses are the sandbox's also while something of it is being repaired.
        let attachment = match &state {
            State::Drifted(_) => cx.world.network.attachment(&want.dir)?,
            State::Attached(attachment) => Some((**attachment).clone()),
            State::Absent | State::Partial(_) => None,
        };
        Ok(Have {
            state: Some(state),
            attachment,
        })
    }

    fn diff(_: &PodSandbox, have: &Have) -> Step {
        match &have.state {
            None | Some(State::Attached(_)) => Step::Keep,
            Some(State::Absent) => Step::Make(Why::new("Absent", "")),
            Some(State::Partial(what)) => Step::Remake(Why::new("Incomplete", what.clone())),
            Some(State::Drifted(what)) => Step::Remake(Why::risky("Drifted", what.clone())),
        }
    }

    fn present(have: &Have) -> bool {
        !matches!(have.state, None | Some(State::Absent))
    }

    fn report(have: &Have, status: &mut SandboxStatus) {
        let Some(attachment) = &have.attachment else { return };
        let (first, rest) = attachment.ips();
        status.ip = first.map(|ip| ip.to_string()).unwrap_or_default();
        status.additional_ips = rest.iter().map(ToString::to_string).collect();
        status.network_result = attachment.cni.as_ref().and_then(|cni| cni.result.clone());
    }

    async fn act(cx: &Context, object: &PodSandbox, _: &Step) -> Result<()> {
        // A CIDR that was just told counts for the first pod.
        crate::node::tell_network(cx);
        let mut want = want(cx, object)?;
        want.cni_conf_dir = conf_dir(cx, object, &want)?;
        let attachment = cx.world.network.ensure(&want).await?;
        tracing::info!(ip = ?attachment.ips().0, "network attached");
        Ok(())
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        let paths = &cx.world.paths;
        let pin = paths.netns(object.uid());
        let live = matches!(cx.world.netns.observe(&pin), Ok(Pin::Ns { .. }));
        let pin = live.then_some(pin.as_path());
        let dir = paths.pod(object.uid());
        let Err(e) = cx.world.network.remove(object.uid(), &dir, pin).await else {
            return Ok(Undone::Done);
        };
        if since(object, Self::NAME, cx.world.clock.now_ns()) < debt::PATIENCE {
            return Err(e.into());
        }
        // The promise: Stop and Remove end, and what is owed is written down before its receipt goes.
        let Some(attachment) = cx.world.network.attachment(&dir)? else {
            return Err(e.into());
        };
        tracing::warn!("network teardown is owed from now on: {e}");
        debt::owe(cx, object, &attachment, e.to_string()).await?;
        cx.world.network.forget(&dir)?;
        Ok(Undone::Done)
    }
}

/// For how long the stage's condition has been false.
fn since(object: &PodSandbox, stage: &str, now: i64) -> std::time::Duration {
    let failing = object
        .status
        .conditions
        .iter()
        .find(|c| c.stage == stage && c.status == state::Truth::False);
    let ns = failing.map_or(0, |c| now.saturating_sub(c.since));
    std::time::Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
}
