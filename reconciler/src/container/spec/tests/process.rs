//! The process; `tests/golden` has the plain one and whole ones.

use serde_json::{Value, json};
use state::container::EnvVar;
use state::sandbox::{Profile, SeLinux};

use super::*;

#[test]
fn arguments() {
    for (command, args, entrypoint, cmd, want) in [
        (&["c"][..], &["a"][..], &["e"][..], &["m"][..], &["c", "a"][..]),
        (&["c"], &[], &["e"], &["m"], &["c"]),
        (&[], &["a"], &["e"], &["m"], &["e", "a"]),
        (&[], &[], &["e"], &["m"], &["e", "m"]),
        (&[], &[], &[""], &["m"], &["m"]),
        (&[], &["a"], &[], &["m"], &["a"]),
    ] {
        let case = Case::with(|case| {
            (case.container.command, case.container.args) = (strings(command), strings(args));
            (case.image.entrypoint, case.image.cmd) = (strings(entrypoint), strings(cmd));
        });
        case.gives(&[("/process/args", json!(want))]);
    }
    Case::with(|case| case.image.cmd.clear()).fails("spec.command: no command");
    Case::with(|case| case.container.args = strings(&["a\0b"])).fails("spec.command: contains a NUL");
}

#[test]
fn environment_cwd_and_user() {
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let env = |name: &str, value: &str| EnvVar {
        name: name.into(),
        value: value.into(),
    };
    Case::with(|case| {
        case.sandbox.hostname.clear();
        case.container.tty = true;
        case.image.env = strings(&["PATH=/bin", "A=image", "B=image"]);
        case.container.env = vec![env("B", "own"), env("C", "x=y"), env("C", "")];
        case.user = ResolvedUser {
            uid: 7,
            gid: 8,
            groups: vec![8, 9],
            home: "/home/u".into(),
        };
        case.image.working_dir = "/srv".into();
    })
    .gives(&[
        (
            "/process/env",
            json!([
                "PATH=/bin",
                "TERM=xterm",
                "HOSTNAME=node",
                "A=image",
                "B=own",
                "C=",
                "HOME=/home/u"
            ]),
        ),
        ("/process/terminal", json!(true)),
        ("/process/user", json!({"uid": 7, "gid": 8, "additionalGids": [8, 9]})),
        ("/process/cwd", json!("/srv")),
    ]);
    Case::with(|case| {
        case.image.working_dir = "/srv".into();
        case.container.working_dir = "/own".into();
        case.container.env = vec![env("HOME", "/h")];
    })
    .gives(&[
        ("/process/cwd", json!("/own")),
        ("/process/env", json!([path, "HOSTNAME=web", "HOME=/h"])),
    ]);
    Case::with(|case| case.container.working_dir = "own".into()).fails("spec.workingDir: must be an absolute path");
    Case::with(|case| case.container.env = vec![env("A=", "")]).fails("spec.env[0].name: ");
    Case::with(|case| case.container.security.run_as_group = Some(1)).fails("spec.security.runAsGroup: needs");
    Case::with(|case| case.container.resources.oom_score_adj = 1001).fails("spec.resources.oomScoreAdj: ");
}

#[test]
fn every_rlimit_reaches_the_process() {
    let limit = crate::config::values::Rlimit {
        soft: 10,
        hard: u64::MAX,
    };
    for name in crate::config::values::RLIMITS {
        let kind = format!("RLIMIT_{}", name.to_uppercase());
        Case::with(|case| case.rlimits.extend([(name.to_owned(), limit)])).gives(&[(
            "/process/rlimits",
            json!([{"type": kind, "hard": u64::MAX, "soft": 10}]),
        )]);
    }
}

#[test]
fn security_modules() {
    let localhost = |name: &str| Some(Profile::Localhost { reference: name.into() });
    let default = Some(Profile::RuntimeDefault);
    let loaded = Some(strings(&["reconcile-default", "mine"]));
    // loaded, wish, privileged: profile or the error's text
    for (host, wish, privileged, want) in [
        (&None, None, false, Ok(Value::Null)),
        (&None, Some(Profile::Unconfined), false, Ok(Value::Null)),
        (&None, default.clone(), false, Err("AppArmor is off")),
        (&None, localhost("mine"), false, Err("AppArmor is off")),
        (&loaded, None, false, Ok(json!("reconcile-default"))),
        (&loaded, default.clone(), false, Ok(json!("reconcile-default"))),
        (&loaded, None, true, Ok(Value::Null)),
        (&loaded, default.clone(), true, Ok(Value::Null)),
        (&loaded, localhost("mine"), true, Ok(json!("mine"))),
        (&loaded, localhost("other"), false, Err("`other` is not loaded")),
        (&loaded, Some(Profile::Unconfined), false, Ok(Value::Null)),
        (&Some(Vec::new()), None, false, Ok(Value::Null)),
        (
            &Some(Vec::new()),
            default.clone(),
            false,
            Err("reconcile-default is not loaded"),
        ),
    ] {
        let case = Case::with(|case| {
            case.host.apparmor = host.clone();
            case.container.security.apparmor = wish;
            (case.container.security.privileged, case.sandbox.security.privileged) = (privileged, privileged);
        });
        match want {
            Ok(profile) => case.gives(&[("/process/apparmorProfile", profile)]),
            Err(text) => case.fails(text),
        }
    }
    let selinux = |level: &str| {
        Some(SeLinux {
            level: level.into(),
            ..Default::default()
        })
    };
    let case = |on: bool, privileged: bool, level: &str| {
        Case::with(|case| {
            case.level = on.then_some("s0:c3,c4");
            case.container.security.selinux = selinux(level);
            (case.container.security.privileged, case.sandbox.security.privileged) = (privileged, privileged);
        })
    };
    let label = json!("system_u:system_r:container_t:s0:c1,c2");
    case(true, false, "s0:c1,c2").gives(&[("/process/selinuxLabel", label.clone())]);
    case(true, true, "s0:c1,c2").gives(&[("/process/selinuxLabel", json!("system_u:system_r:spc_t:s0"))]);
    case(true, false, "").gives(&[
        ("/process/selinuxLabel", json!("system_u:system_r:container_t:s0:c3,c4")),
        (
            "/linux/mountLabel",
            json!("system_u:object_r:container_file_t:s0:c3,c4"),
        ),
    ]);
    case(false, false, "s0:c1,c2").gives(&[("/process/selinuxLabel", Value::Null)]);
    case(false, false, "high").fails("spec.security.selinux.level: `high`");
    let inherited = Case::with(|case| {
        case.level = Some("s0:c3,c4");
        case.sandbox.security.selinux = selinux("s0:c1,c2");
    });
    inherited.gives(&[
        ("/process/selinuxLabel", label),
        (
            "/linux/mountLabel",
            json!("system_u:object_r:container_file_t:s0:c1,c2"),
        ),
    ]);
}
