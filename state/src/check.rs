//! Rules for single fields, shared by the kinds' `validate`. `at` is the field's path.

use std::net::IpAddr;

use crate::container::{Device, EnvVar, Mount, Propagation, Resources};
use crate::error::{Error, Result};
use crate::sandbox::{IdMapping, NamespaceMode, Namespaces, PortMapping, Profile, UserNamespace};

fn refuse(at: impl Into<String>, problem: impl Into<String>) -> Result<()> {
    Err(Error::invalid(at, problem))
}

/// 1 to 63 of `a-z`, `0-9` and `-`, with a letter or digit at both ends (RFC 1123).
pub(crate) fn dns_label(at: &str, name: &str) -> Result<()> {
    let inner = name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    if inner && (1..=63).contains(&name.len()) && !name.starts_with('-') && !name.ends_with('-') {
        return Ok(());
    }
    refuse(
        at,
        format!("{name:?} must be 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends"),
    )
}

/// DNS labels joined by dots, 253 bytes at most.
pub(crate) fn dns_subdomain(at: &str, name: &str) -> Result<()> {
    if name.len() > 253 {
        return refuse(at, "must have 253 bytes at most");
    }
    name.split('.').try_for_each(|label| dns_label(at, label))
}

/// Text that ends up in a file of lines or a path: not empty, bounded, no control characters.
pub(crate) fn text(at: &str, value: &str) -> Result<()> {
    match value {
        "" => refuse(at, "must not be empty"),
        _ if value.len() > 4096 => refuse(at, "must have 4096 bytes at most"),
        _ if value.contains(|c: char| c.is_control()) => refuse(at, "must not hold control characters"),
        _ => Ok(()),
    }
}

/// An absolute path.
pub(crate) fn absolute(at: &str, path: &str) -> Result<()> {
    if !path.starts_with('/') {
        return refuse(at, "must be an absolute path");
    }
    // PATH_MAX counts the final NUL.
    if path.len() > 4095 || path.contains('\0') {
        return refuse(at, "must have 4095 bytes at most and no NUL");
    }
    Ok(())
}

/// A relative path that does not lead out.
pub(crate) fn inside(at: &str, path: &str) -> Result<()> {
    if path.starts_with('/') || path.split('/').any(|part| part == "..") {
        return refuse(at, "must be a relative path without ..");
    }
    if path.len() > 4095 || path.contains('\0') {
        return refuse(at, "must have 4095 bytes at most and no NUL");
    }
    Ok(())
}

/// Strings that become a program's arguments.
pub(crate) fn arguments(at: &str, list: &[String]) -> Result<()> {
    match list.iter().position(|text| text.contains('\0')) {
        Some(i) => refuse(format!("{at}[{i}]"), "must not hold a NUL"),
        None => Ok(()),
    }
}

pub(crate) fn environment(at: &str, env: &[EnvVar]) -> Result<()> {
    for (i, variable) in env.iter().enumerate() {
        if variable.name.is_empty() || variable.name.contains(['=', '\0']) {
            return refuse(format!("{at}[{i}].name"), "must not be empty nor hold = or NUL");
        }
        if variable.value.contains('\0') {
            return refuse(format!("{at}[{i}].value"), "must not hold a NUL");
        }
    }
    Ok(())
}

/// An address, or none.
pub(crate) fn host_ip(at: &str, ip: &str) -> Result<()> {
    if ip.is_empty() || ip.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    refuse(at, format!("{ip:?} is not an IP address"))
}

/// Every port is one, and no host port is asked for twice.
pub(crate) fn ports(at: &str, ports: &[PortMapping]) -> Result<()> {
    let mut taken = std::collections::HashSet::new();
    for (i, port) in ports.iter().enumerate() {
        let at = format!("{at}[{i}]");
        if port.container_port == 0 {
            return refuse(format!("{at}.containerPort"), "must be 1 to 65535");
        }
        host_ip(&format!("{at}.hostIp"), &port.host_ip)?;
        if port.host_port > 0 && !taken.insert((port.protocol, port.host_port, &port.host_ip)) {
            return refuse(
                format!("{at}.hostPort"),
                format!("{} is asked for twice", port.host_port),
            );
        }
    }
    Ok(())
}

/// A kernel list such as `0-3,7`, or nothing.
fn cpuset(at: String, list: &str) -> Result<()> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|n| *n < 65536 && text.len() <= 5);
    let range = |part: &str| match part.split_once('-') {
        Some((low, high)) => number(low).zip(number(high)).is_some_and(|(low, high)| low <= high),
        None => number(part).is_some(),
    };
    if list.is_empty() || (list.len() <= 4096 && list.split(',').all(range)) {
        return Ok(());
    }
    refuse(at, format!("{list:?} is not a list such as 0-3,7"))
}

/// Limits that the kernel would refuse (cgroup-v1/cpusets, sched-bwc, cgroup-v2).
pub(crate) fn resources(at: &str, r: &Resources) -> Result<()> {
    let field = |name: &str| format!("{at}.{name}");
    if r.cpu_period != 0 && !(1_000..=1_000_000).contains(&r.cpu_period) {
        return refuse(field("cpuPeriod"), "must be 1000 to 1000000 µs");
    }
    if r.cpu_quota < -1 || (1..1_000).contains(&r.cpu_quota) {
        return refuse(field("cpuQuota"), "must be 1000 µs at least, or -1 for no limit");
    }
    if r.cpu_shares < 0 {
        return refuse(field("cpuShares"), "must not be negative");
    }
    if r.memory_limit < -1 {
        return refuse(field("memoryLimit"), "must not be below -1 (no limit)");
    }
    if r.memory_swap_limit < -1 || (r.memory_swap_limit > 0 && r.memory_swap_limit < r.memory_limit) {
        return refuse(
            field("memorySwapLimit"),
            "must be -1 or at least the memory limit, which it includes",
        );
    }
    if !(-1000..=1000).contains(&r.oom_score_adj) {
        return refuse(field("oomScoreAdj"), "must be -1000 to 1000");
    }
    cpuset(field("cpusetCpus"), &r.cpuset_cpus)?;
    cpuset(field("cpusetMems"), &r.cpuset_mems)?;
    for size in r.hugepages.keys() {
        let number = ["KB", "MB", "GB"].iter().find_map(|unit| size.strip_suffix(unit));
        if number.and_then(|n| n.parse::<u32>().ok()).is_none_or(|n| n == 0) {
            return refuse(field(&format!("hugepages.{size}")), "must be a page size such as 2MB");
        }
    }
    for (file, value) in &r.unified {
        let name = file.contains('.')
            && file
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
        if !name || file.starts_with('.') || value.contains('\0') {
            return refuse(
                field(&format!("unified.{file}")),
                "must be a cgroup v2 file such as memory.high",
            );
        }
    }
    Ok(())
}

/// The CRI's rules on `NamespaceOption`.
pub(crate) fn namespaces(at: &str, namespaces: &Namespaces, container: bool) -> Result<()> {
    for (field, mode) in [("network", namespaces.network), ("ipc", namespaces.ipc)] {
        if !matches!(mode, NamespaceMode::Pod | NamespaceMode::Node) {
            return refuse(format!("{at}.{field}"), format!("must be Pod or Node, not {mode:?}"));
        }
    }
    if namespaces.pid == NamespaceMode::Target {
        if !container {
            return refuse(format!("{at}.pid"), "Target is for containers only");
        }
        if namespaces.target_id.is_empty() {
            return refuse(
                format!("{at}.targetId"),
                "must name the container whose pid namespace is joined",
            );
        }
    }
    let Some(user) = &namespaces.user else { return Ok(()) };
    user_namespace(&format!("{at}.user"), user)?;
    // Their file systems belong to whoever owns the namespaces: the host's user namespace.
    for (field, mode) in [("pid", namespaces.pid), ("ipc", namespaces.ipc)] {
        if user.mode == NamespaceMode::Pod && mode == NamespaceMode::Node {
            return refuse(
                format!("{at}.{field}"),
                "cannot be the host's in a pod with a user namespace of its own",
            );
        }
    }
    Ok(())
}

fn user_namespace(at: &str, user: &UserNamespace) -> Result<()> {
    match user.mode {
        NamespaceMode::Node if user.uids.is_empty() && user.gids.is_empty() => return Ok(()),
        NamespaceMode::Node => return refuse(format!("{at}.uids"), "the host's user namespace takes no mappings"),
        NamespaceMode::Pod => {}
        mode => return refuse(format!("{at}.mode"), format!("must be Pod or Node, not {mode:?}")),
    }
    for (field, mappings) in [("uids", &user.uids), ("gids", &user.gids)] {
        let at = format!("{at}.{field}");
        let [mapping] = mappings.as_slice() else {
            return refuse(at, "needs exactly one mapping");
        };
        id_mapping(&format!("{at}[0]"), mapping)?;
        if mapping.container_id != 0 {
            return refuse(format!("{at}[0].containerId"), "must be 0: root has to be mapped");
        }
    }
    Ok(())
}

fn id_mapping(at: &str, mapping: &IdMapping) -> Result<()> {
    let end = |start: u32| start.checked_add(mapping.length);
    if mapping.length == 0 || end(mapping.host_id).is_none() || end(mapping.container_id).is_none() {
        return refuse(format!("{at}.length"), "must be at least 1 and end below 2^32");
    }
    Ok(())
}

/// User and group ids.
pub(crate) fn identity(
    at: &str,
    user: Option<i64>,
    named: bool,
    group: Option<i64>,
    supplemental: &[i64],
) -> Result<()> {
    // 2^32 - 1 means "no change" to the kernel.
    let valid = |id: i64| (0..i64::from(u32::MAX)).contains(&id);
    let problem = |id: i64| format!("{id} is not an id (0 to 4294967294)");
    if let Some(user) = user.filter(|id| !valid(*id)) {
        return refuse(format!("{at}.runAsUser"), problem(user));
    }
    if let Some(group) = group {
        if !valid(group) {
            return refuse(format!("{at}.runAsGroup"), problem(group));
        }
        if user.is_none() && !named {
            return refuse(format!("{at}.runAsGroup"), "needs runAsUser");
        }
    }
    match supplemental.iter().position(|id| !valid(*id)) {
        Some(i) => refuse(format!("{at}.supplementalGroups[{i}]"), problem(supplemental[i])),
        None => Ok(()),
    }
}

/// `path`: is the reference a file's absolute path?
pub(crate) fn profile(at: &str, profile: Option<&Profile>, path: bool) -> Result<()> {
    match profile {
        Some(Profile::Localhost { reference }) if path => absolute(&format!("{at}.localhostRef"), reference),
        Some(Profile::Localhost { reference }) => text(&format!("{at}.localhostRef"), reference),
        _ => Ok(()),
    }
}

/// Names such as `NET_ADMIN`, `CAP_NET_ADMIN` or `ALL`.
pub(crate) fn capabilities(at: &str, names: &[String]) -> Result<()> {
    let name = |name: &String| {
        !name.is_empty() && name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphabetic() || b == b'_')
    };
    match names.iter().position(|n| !name(n)) {
        Some(i) => refuse(
            format!("{at}[{i}]"),
            format!("{:?} is not a capability such as NET_ADMIN", names[i]),
        ),
        None => Ok(()),
    }
}

/// A signal's name, or nothing.
pub(crate) fn signal(at: &str, name: &str) -> Result<()> {
    const NAMES: &str = "HUP INT QUIT ILL TRAP ABRT IOT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CLD \
         CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO POLL PWR SYS RTMIN RTMAX";
    let bare = name.strip_prefix("SIG").unwrap_or(name);
    let offset = bare.strip_prefix("RTMIN+").or(bare.strip_prefix("RTMAX-"));
    let real_time = offset.and_then(|n| n.parse::<u8>().ok()).is_some_and(|n| n <= 30);
    if name.is_empty() || real_time || NAMES.split_whitespace().any(|known| known == bare) {
        return Ok(());
    }
    refuse(at, format!("{name:?} is not a signal such as SIGTERM"))
}

pub(crate) fn mounts(at: &str, mounts: &[Mount]) -> Result<()> {
    for (i, mount) in mounts.iter().enumerate() {
        let field = |name: &str| format!("{at}[{i}].{name}");
        absolute(&field("containerPath"), &mount.container_path)?;
        match &mount.image {
            None => absolute(&field("hostPath"), &mount.host_path)?,
            Some(_) if !mount.host_path.is_empty() => return refuse(field("hostPath"), "must be empty for an image"),
            Some(_) if !mount.readonly => return refuse(field("readonly"), "must be true for an image"),
            Some(image) => {
                text(&field("image.requested"), &image.requested)?;
                inside(&field("imageSubPath"), &mount.image_sub_path)?;
            }
        }
        if mount.recursive_read_only && (!mount.readonly || mount.propagation != Propagation::Private) {
            return refuse(field("recursiveReadOnly"), "needs readonly and the propagation Private");
        }
        for (name, mappings) in [
            ("uidMappings", &mount.uid_mappings),
            ("gidMappings", &mount.gid_mappings),
        ] {
            for (j, mapping) in mappings.iter().enumerate() {
                id_mapping(&format!("{}[{j}]", field(name)), mapping)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn devices(at: &str, devices: &[Device]) -> Result<()> {
    for (i, device) in devices.iter().enumerate() {
        absolute(&format!("{at}[{i}].containerPath"), &device.container_path)?;
        absolute(&format!("{at}[{i}].hostPath"), &device.host_path)?;
        if !device.permissions.bytes().all(|b| matches!(b, b'r' | b'w' | b'm')) {
            return refuse(format!("{at}[{i}].permissions"), "must be made of r, w and m");
        }
    }
    Ok(())
}

/// Only what belongs to a namespace of the pod may be set; all else would change the host (CRI `sysctls`).
pub(crate) fn sysctl(at: &str, name: &str, value: &str, host_network: bool, host_ipc: bool) -> Result<()> {
    let at = format!("{at}.{name}");
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'/');
    let dotted = name.replace('/', ".");
    if name.len() > 253 || !name.bytes().all(plain) || dotted.split('.').any(str::is_empty) {
        return refuse(at, "is not the name of a sysctl");
    }
    if value.len() > 4096 || value.contains(|c: char| c.is_control() && c != '\t') {
        return refuse(at, "its value must be one line");
    }
    let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."]
        .iter()
        .any(|prefix| dotted.starts_with(prefix));
    match (dotted.starts_with("net."), ipc || dotted == "kernel.sem") {
        (true, _) if host_network => refuse(at, "cannot be set in the host's network namespace"),
        (_, true) if host_ipc => refuse(at, "cannot be set in the host's ipc namespace"),
        (false, false) => refuse(at, "belongs to no namespace: it would change the host"),
        _ => Ok(()),
    }
}
