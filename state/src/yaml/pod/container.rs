//! A container of a pod: its fields, environment and ports.

use super::super::Reader;
use super::super::kubernetes as k8s;
use super::super::locate::At;
use super::join;
use crate::container::EnvVar;
use crate::pod::{ContainerPort, PodContainer, PullPolicy, RestartPolicy};
use crate::sandbox::{Namespaces, Protocol};

impl Reader<'_> {
    fn container_fields(&mut self, at: &str, init: bool, c: &k8s::Container) {
        self.unsupported(
            at,
            &[
                ("envFrom", c.env_from.is_some()),
                ("lifecycle", c.lifecycle.is_some()),
                ("livenessProbe", c.liveness_probe.is_some()),
                ("readinessProbe", c.readiness_probe.is_some()),
                ("restartPolicy", !init && c.restart_policy.is_some()),
                ("restartPolicyRules", c.restart_policy_rules.is_some()),
                ("startupProbe", c.startup_probe.is_some()),
                ("volumeDevices", c.volume_devices.is_some()),
            ],
        );
        self.meaningless(
            at,
            &[
                ("resizePolicy", c.resize_policy.is_some()),
                ("terminationMessagePath", c.termination_message_path.is_some()),
                ("terminationMessagePolicy", c.termination_message_policy.is_some()),
            ],
        );
    }

    pub(super) fn container(
        &mut self,
        at: &str,
        list: &str,
        c: k8s::Container,
        pod: Option<&k8s::PodSecurityContext>,
        namespaces: &Namespaces,
    ) -> PodContainer {
        let init = list == "initContainers";
        self.container_fields(at, init, &c);
        let restart_policy = c
            .restart_policy
            .as_deref()
            .filter(|_| init)
            .and_then(|policy| self.word(&join(at, "restartPolicy"), policy, &[("Always", RestartPolicy::Always)]));
        let policies = [
            ("Always", PullPolicy::Always),
            ("IfNotPresent", PullPolicy::IfNotPresent),
            ("Never", PullPolicy::Never),
        ];
        let policy = c.image_pull_policy.as_deref();
        let image_pull_policy = policy.and_then(|p| self.word(&join(at, "imagePullPolicy"), p, &policies));
        let env = self.environment(&join(at, "env"), c.env.unwrap_or_default());
        let expand = |texts: Option<Vec<String>>| -> Vec<String> {
            texts
                .unwrap_or_default()
                .iter()
                .map(|text| expand(text, &env))
                .collect()
        };
        let (command, args) = (expand(c.command), expand(c.args));
        let ports = c.ports.unwrap_or_default().into_iter().enumerate();
        let ports = ports
            .filter_map(|(i, port)| self.port(&format!("{at}.ports[{i}]"), port))
            .collect();
        let mounts = c.volume_mounts.unwrap_or_default().into_iter().enumerate();
        let volume_mounts = mounts
            .map(|(i, m)| self.volume_mount(&format!("{at}.volumeMounts[{i}]"), m))
            .collect();
        PodContainer {
            name: c.name,
            image: c.image.unwrap_or_default(),
            image_pull_policy,
            command,
            args,
            working_dir: c.working_dir.unwrap_or_default(),
            env,
            ports,
            volume_mounts,
            resources: self.resources(&join(at, "resources"), c.resources.unwrap_or_default()),
            security: self.security(
                &join(at, "securityContext"),
                c.security_context.unwrap_or_default(),
                pod,
                namespaces,
            ),
            stdin: c.stdin.unwrap_or(false),
            stdin_once: c.stdin_once.unwrap_or(false),
            tty: c.tty.unwrap_or(false),
            stop_signal: String::new(),
            restart_policy,
        }
    }

    /// Each value may refer to the variables before it.
    fn environment(&mut self, at: &str, list: Vec<k8s::EnvVar>) -> Vec<EnvVar> {
        let mut env: Vec<EnvVar> = Vec::new();
        for (i, variable) in list.into_iter().enumerate() {
            self.unsupported(&format!("{at}[{i}]"), &[("valueFrom", variable.value_from.is_some())]);
            let value = expand(&variable.value.unwrap_or_default(), &env);
            env.push(EnvVar {
                name: variable.name,
                value,
            });
        }
        env
    }

    fn port(&mut self, at: &str, port: k8s::ContainerPort) -> Option<ContainerPort> {
        let protocols = [("TCP", Protocol::Tcp), ("UDP", Protocol::Udp), ("SCTP", Protocol::Sctp)];
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let protocol = self.word(&join(at, "protocol"), protocol, &protocols)?;
        let mut number = |field: &str, value: i64| {
            let number = u16::try_from(value).ok().filter(|n| *n > 0);
            if number.is_none() {
                self.at(
                    &join(at, field),
                    At::Value,
                    format!("{value} is not a port (1 to 65535)"),
                );
            }
            number
        };
        Some(ContainerPort {
            container_port: number("containerPort", port.container_port)?,
            host_port: port.host_port.map_or(Some(0), |port| number("hostPort", port))?,
            host_ip: port.host_ip.unwrap_or_default(),
            protocol,
            name: port.name.unwrap_or_default(),
        })
    }
}

/// Replaces `$(NAME)` by that variable; `$$` is a `$`, and what names no variable stays (as Kubernetes does it).
fn expand(text: &str, env: &[EnvVar]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match env.iter().rev().find(|variable| variable.name == name) {
                Some(variable) => out.push_str(&variable.value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::{EnvVar, expand};

    #[test]
    fn references_are_expanded() {
        let env = [EnvVar {
            name: "A".into(),
            value: "1".into(),
        }];
        for (text, wanted) in [
            ("x$(A)y", "x1y"),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$A ${A} $", "$A ${A} $"),
            ("$(A", "$(A"),
            ("$(A)$(A)", "11"),
        ] {
            assert_eq!(expand(text, &env), wanted, "{text}");
        }
    }
}
