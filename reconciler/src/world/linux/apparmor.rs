//! The AppArmor profile of containers that ask for none of their own (CRI contract, "RuntimeDefault profiles"), loaded
//! when the first of them comes. Only AppArmor's own compiler can make a policy, so this runs apparmor_parser(8), once.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Its name.
pub const DEFAULT: &str = "reconcile-default";

/// What the parser's rules are used from, where they are installed.
const BASE: &str = "/etc/apparmor.d/abstractions/base";

/// Compiles and loads the profile, the first time it is called; later it answers what came of that. Blocks for some
/// 100 ms.
pub fn load_default() -> Result<(), String> {
    static DONE: OnceLock<Result<(), String>> = OnceLock::new();
    DONE.get_or_init(|| {
        let loaded = load(&profile(Path::new(BASE).exists()));
        match &loaded {
            Ok(()) => tracing::info!(profile = DEFAULT, "AppArmor profile loaded"),
            Err(why) => tracing::warn!("AppArmor is on, but {why}"),
        }
        loaded
    })
    .clone()
}

fn load(profile: &str) -> Result<(), String> {
    let parser = ["/usr/sbin/apparmor_parser", "/sbin/apparmor_parser"];
    let parser = parser.into_iter().find(|path| Path::new(path).exists());
    let parser = parser.ok_or("the profile cannot be compiled: apparmor_parser is not installed")?;
    let told = |error: std::io::Error| format!("{parser}: {error}");
    // From standard input; neither read nor written to its cache.
    let mut child = Command::new(parser)
        .args(["--replace", "--skip-cache"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(told)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(profile.as_bytes()).map_err(told)?;
    }
    let out = child.wait_with_output().map_err(told)?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{parser}: {}: {}",
            out.status,
            String::from_utf8_lossy(&out.stderr).trim()
        )),
    }
}

/// Everything but what would change the node: no mounts, no writes to kernel settings outside of what is namespaced.
fn profile(has_base: bool) -> String {
    let (tunables, base) = if has_base {
        ("#include <tunables/global>\n", "  #include <abstractions/base>\n")
    } else {
        ("", "")
    };
    format!(
        r#"{tunables}
profile {DEFAULT} flags=(attach_disconnected,mediate_deleted) {{
{base}
  network,
  capability,
  file,
  umount,

  signal (receive) peer=unconfined,
  signal (send,receive) peer={DEFAULT},
  ptrace (trace,read,tracedby,readby) peer={DEFAULT},

  deny mount,

  # Files right in /proc; what is in none of its processes and not in sys; of sys/kernel all but shm*.
  deny /proc/* w,
  deny /proc/{{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}}/** w,
  deny /proc/sys/[^k]** w,
  deny /proc/sys/kernel/{{?,??,[^s][^h][^m]**}} w,
  deny /proc/sysrq-trigger rwklx,
  deny /proc/kcore rwklx,

  # /sys but for the control groups.
  deny /sys/[^f]*/** wklx,
  deny /sys/f[^s]*/** wklx,
  deny /sys/fs/[^c]*/** wklx,
  deny /sys/fs/c[^g]*/** wklx,
  deny /sys/fs/cg[^r]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
  deny /sys/kernel/security/** rwklx,
}}
"#
    )
}
