//! The security contexts of a pod and its containers, and the kubelet's defaults for them.

use std::collections::BTreeMap;

use super::super::Reader;
use super::super::kubernetes as k8s;
use super::super::locate::At;
use super::join;
use crate::container::ContainerSecurity;
use crate::sandbox::{GroupsPolicy, Namespaces, Profile, SeLinux};

/// The kubelet's `defaultMaskedPaths`.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// The kubelet's `defaultReadonlyPaths`.
const READONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

impl Reader<'_> {
    pub(super) fn pod_security(&mut self, security: &k8s::PodSecurityContext) -> BTreeMap<String, String> {
        self.unsupported(
            "spec.securityContext",
            &[
                ("fsGroup", security.fs_group.is_some()),
                ("fsGroupChangePolicy", security.fs_group_change_policy.is_some()),
                ("seLinuxChangePolicy", security.se_linux_change_policy.is_some()),
                ("windowsOptions", security.windows_options.is_some()),
            ],
        );
        let mut sysctls = BTreeMap::new();
        for (i, sysctl) in security.sysctls.iter().flatten().enumerate() {
            if sysctls.insert(sysctl.name.clone(), sysctl.value.clone()).is_some() {
                let path = format!("spec.securityContext.sysctls[{i}].name");
                self.at(&path, At::Value, format!("{:?} is given twice", sysctl.name));
            }
        }
        sysctls
    }

    /// What the container says, else what the pod says, else the kubelet's defaults.
    pub(super) fn security(
        &mut self,
        at: &str,
        own: k8s::SecurityContext,
        pod: Option<&k8s::PodSecurityContext>,
        namespaces: &Namespaces,
    ) -> ContainerSecurity {
        self.unsupported(at, &[("windowsOptions", own.windows_options.is_some())]);
        let privileged = own.privileged.unwrap_or(false);
        let run_as_user = own.run_as_user.or(pod.and_then(|pod| pod.run_as_user));
        self.check_identity(at, &own, pod, run_as_user);
        let proc_mount = own.proc_mount.as_deref().unwrap_or("Default");
        let mounts = [("Default", true), ("Unmasked", false)];
        let masked = !privileged && self.word(&join(at, "procMount"), proc_mount, &mounts).unwrap_or(true);
        let paths = |list: &[&str]| list.iter().filter(|_| masked).map(|path| (*path).to_owned()).collect();
        let policies = [("Merge", GroupsPolicy::Merge), ("Strict", GroupsPolicy::Strict)];
        let policy = pod
            .and_then(|pod| pod.supplemental_groups_policy.as_deref())
            .unwrap_or("Merge");
        let policy = self.word("spec.securityContext.supplementalGroupsPolicy", policy, &policies);
        let seccomp = match (&own.seccomp_profile, pod.and_then(|pod| pod.seccomp_profile.as_ref())) {
            (Some(profile), _) => self.profile(&join(at, "seccompProfile"), profile),
            (None, Some(profile)) => self.profile("spec.securityContext.seccompProfile", profile),
            (None, None) => Some(Profile::RuntimeDefault),
        };
        let apparmor = match (
            &own.app_armor_profile,
            pod.and_then(|pod| pod.app_armor_profile.as_ref()),
        ) {
            (Some(profile), _) => self.profile(&join(at, "appArmorProfile"), profile),
            (None, Some(profile)) => self.profile("spec.securityContext.appArmorProfile", profile),
            (None, None) => None,
        };
        let capabilities = own.capabilities.unwrap_or_default();
        ContainerSecurity {
            privileged,
            readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
            no_new_privs: own.allow_privilege_escalation == Some(false),
            namespaces: namespaces.clone(),
            run_as_user,
            run_as_group: own.run_as_group.or(pod.and_then(|pod| pod.run_as_group)),
            run_as_username: String::new(),
            supplemental_groups: pod.and_then(|pod| pod.supplemental_groups.clone()).unwrap_or_default(),
            groups_policy: policy.unwrap_or_default(),
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            add_ambient_capabilities: Vec::new(),
            masked_paths: paths(&MASKED),
            readonly_paths: paths(&READONLY),
            selinux: own
                .se_linux_options
                .as_ref()
                .or(pod.and_then(|pod| pod.se_linux_options.as_ref()))
                .map(|options| SeLinux {
                    user: options.user.clone().unwrap_or_default(),
                    role: options.role.clone().unwrap_or_default(),
                    kind: options.kind.clone().unwrap_or_default(),
                    level: options.level.clone().unwrap_or_default(),
                }),
            seccomp: seccomp.filter(|_| !privileged),
            apparmor,
        }
    }

    fn check_identity(
        &mut self,
        at: &str,
        own: &k8s::SecurityContext,
        pod: Option<&k8s::PodSecurityContext>,
        run_as_user: Option<i64>,
    ) {
        if own.run_as_non_root.or(pod.and_then(|pod| pod.run_as_non_root)) == Some(true) {
            let path = if own.run_as_non_root.is_some() {
                at
            } else {
                "spec.securityContext"
            };
            let path = join(path, "runAsNonRoot");
            match run_as_user {
                Some(0) => self.at(&path, At::Value, "contradicts runAsUser: 0".into()),
                Some(_) => {}
                None => self.at(
                    &path,
                    At::Value,
                    "needs runAsUser; to look into the image is not supported yet".into(),
                ),
            }
        }
        if own.allow_privilege_escalation == Some(false) {
            let path = join(at, "allowPrivilegeEscalation");
            let added = own.capabilities.iter().flat_map(|c| c.add.iter().flatten());
            if own.privileged == Some(true) {
                self.at(&path, At::Value, "contradicts privileged: true".into());
            } else if added
                .into_iter()
                .any(|cap| cap.trim_start_matches("CAP_") == "SYS_ADMIN")
            {
                self.at(&path, At::Value, "contradicts the capability SYS_ADMIN".into());
            }
        }
    }

    fn profile(&mut self, at: &str, profile: &k8s::SeccompProfile) -> Option<Profile> {
        let kinds = [("RuntimeDefault", 0), ("Unconfined", 1), ("Localhost", 2)];
        match (
            self.word(&join(at, "type"), &profile.kind, &kinds)?,
            &profile.localhost_profile,
        ) {
            (2, Some(reference)) if !reference.is_empty() => Some(Profile::Localhost {
                reference: reference.clone(),
            }),
            (2, _) => {
                self.at(at, At::Key, "Localhost needs localhostProfile".into());
                None
            }
            (_, Some(_)) => {
                self.at(
                    &join(at, "localhostProfile"),
                    At::Key,
                    "belongs to type: Localhost only".into(),
                );
                None
            }
            (0, None) => Some(Profile::RuntimeDefault),
            (_, None) => Some(Profile::Unconfined),
        }
    }
}
