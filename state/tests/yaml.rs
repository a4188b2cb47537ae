//! YAML: what is read, and how what is wrong is told.

use state::container::{ContainerSecurity, Resources};
use state::pod::{PodSpec, RestartPolicy, VolumeSource};
use state::sandbox::{NamespaceMode, Profile};
use state::yaml::{Document, Record, parse, to_yaml};

fn pod(text: &str) -> PodSpec {
    match one(text).record {
        Record::Pod(new) => new.spec,
        other => panic!("{other:?}"),
    }
}

fn one(text: &str) -> Document {
    let mut documents = parse(text, "pod.yaml").unwrap_or_else(|problems| {
        let texts: Vec<_> = problems.iter().map(ToString::to_string).collect();
        panic!("{}", texts.join("\n"))
    });
    assert_eq!(documents.len(), 1);
    documents.remove(0)
}

fn problems(text: &str) -> String {
    let problems = parse(text, "pod.yaml").map(drop).unwrap_err();
    problems.iter().map(|p| p.to_string() + "\n").collect()
}

const POD: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: {app: web}
spec:
  containers:
  - name: main
    image: localhost/hello
";

#[test]
fn a_small_pod_gets_the_defaults() {
    let document = one(POD);
    assert_eq!((document.line, document.warnings.len()), (1, 0));
    assert_eq!(
        (document.record.kind(), document.record.meta().namespace.as_str()),
        ("Pod", "default")
    );
    assert_eq!(document.record.meta().labels["app"], "web");
    let spec = pod(POD);
    assert_eq!(
        (spec.restart_policy, spec.termination_grace_period_seconds),
        (RestartPolicy::Always, 30)
    );
    let security = &spec.containers[0].security;
    assert_eq!(security.seccomp, Some(Profile::RuntimeDefault));
    assert_eq!(security.namespaces.pid, NamespaceMode::Container);
    assert!(security.masked_paths.contains(&"/proc/kcore".to_owned()));
    assert!(security.readonly_paths.contains(&"/proc/sys".to_owned()));
    assert_eq!(spec.containers[0].resources.cpu_shares, 2);
}

#[test]
fn a_rich_pod_is_read() {
    let text = "\
apiVersion: v1
kind: Pod
metadata: {name: rich, namespace: prod}
spec:
  restartPolicy: Never
  hostNetwork: true
  shareProcessNamespace: true
  terminationGracePeriodSeconds: 5
  dnsPolicy: None
  dnsConfig:
    nameservers: [10.0.0.10]
    searches: [a.b]
    options: [{name: ndots, value: \"2\"}, {name: rotate}]
  securityContext:
    runAsUser: 1000
    runAsNonRoot: true
    supplementalGroups: [7]
    sysctls: [{name: kernel.shmmax, value: \"1\"}]
  initContainers:
  - {name: setup, image: a, command: [\"true\"]}
  - {name: proxy, image: a, restartPolicy: Always}
  containers:
  - name: main
    image: a
    command: [sh, -c, 'echo $(GREETING)']
    env:
    - {name: NAME, value: you}
    - {name: GREETING, value: hello $(NAME)}
    ports: [{containerPort: 80, hostPort: 80, hostIP: 127.0.0.1, name: http}, {containerPort: 53, protocol: UDP}]
    resources: {limits: {cpu: 250m, memory: 64Mi, hugepages-2Mi: 4Mi}, requests: {cpu: 100m}}
    securityContext:
      runAsUser: 0
      runAsNonRoot: false
      capabilities: {add: [NET_ADMIN], drop: [ALL]}
      readOnlyRootFilesystem: true
      allowPrivilegeEscalation: false
      seccompProfile: {type: Unconfined}
    volumeMounts: [{name: data, mountPath: /data, readOnly: true, subPath: x}, {name: host, mountPath: /host}]
  volumes:
  - {name: data, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
  - {name: host, hostPath: {path: /srv, type: Directory}}
";
    let spec = pod(text);
    assert_eq!(
        (
            spec.restart_policy,
            spec.host_network,
            spec.termination_grace_period_seconds
        ),
        (RestartPolicy::Never, true, 5)
    );
    let dns = spec.dns.unwrap();
    assert_eq!(
        (dns.servers, dns.searches),
        (vec!["10.0.0.10".to_owned()], vec!["a.b".to_owned()])
    );
    assert_eq!(dns.options, ["ndots:2", "rotate"]);
    assert_eq!(spec.sysctls["kernel.shmmax"], "1");
    assert_eq!(spec.init_containers[1].restart_policy, Some(RestartPolicy::Always));
    assert_eq!(spec.init_containers[0].security.run_as_user, Some(1000));
    let main = &spec.containers[0];
    assert_eq!(main.command, ["sh", "-c", "echo hello you"]);
    assert_eq!((main.ports[0].container_port, main.ports[0].host_port), (80, 80));
    let wanted = Resources {
        cpu_period: 100_000,
        cpu_quota: 25_000,
        cpu_shares: 102,
        memory_limit: 64 << 20,
        hugepages: [("2MB".to_owned(), 4 << 20)].into(),
        ..Resources::default()
    };
    assert_eq!(main.resources, wanted);
    let ContainerSecurity {
        run_as_user,
        supplemental_groups,
        no_new_privs,
        readonly_rootfs,
        seccomp,
        add_capabilities,
        drop_capabilities,
        namespaces,
        ..
    } = &main.security;
    assert_eq!(
        (*run_as_user, supplemental_groups.as_slice()),
        (Some(0), [7].as_slice())
    );
    assert!(*no_new_privs && *readonly_rootfs);
    assert_eq!(*seccomp, Some(Profile::Unconfined));
    assert_eq!(
        (add_capabilities[0].as_str(), drop_capabilities[0].as_str()),
        ("NET_ADMIN", "ALL")
    );
    assert_eq!(
        (namespaces.network, namespaces.pid),
        (NamespaceMode::Node, NamespaceMode::Pod)
    );
    assert_eq!(
        spec.volumes[0].source,
        VolumeSource::EmptyDir {
            memory: true,
            size_limit: 1 << 20
        }
    );
}

#[test]
fn our_own_kinds_are_read_from_one_file() {
    let text = "\
---
# nothing
---
apiVersion: reconcile/v1
kind: PodSandbox
metadata: {name: a, annotations: {k: v}}
spec:
  pod: {name: a, namespace: default, uid: u1}
  ports: [{containerPort: 80, hostPort: 8080}]
---
apiVersion: reconcile/v1
kind: Container
metadata: {name: c}
spec: {sandbox: s, name: c, image: {requested: x}, security: {seccomp: {type: RuntimeDefault}}}
---
apiVersion: reconcile/v1
kind: Image
metadata: {name: localhost/hello}
spec: {source: builtIn}
---
apiVersion: reconcile/v1
kind: Pod
metadata: {name: p}
spec:
  containers: [{name: c, image: x, volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, emptyDir: {}}]
";
    let documents = parse(text, "all.yaml").unwrap();
    let kinds: Vec<_> = documents.iter().map(|d| (d.record.kind(), d.line)).collect();
    assert_eq!(
        kinds,
        [("PodSandbox", 4), ("Container", 11), ("Image", 16), ("Pod", 21)]
    );
    assert_eq!(documents[2].record.meta().namespace, "");
    // What is sent to a daemon reads back the same.
    for document in &documents {
        let json = document.record.to_json().unwrap();
        let back = Record::from_json(&json).unwrap();
        assert_eq!(back.to_json().unwrap(), json);
    }
    let Record::Image(new) = documents[2].record.clone() else {
        panic!()
    };
    let yaml = to_yaml(&state::Image::new(new.meta, new.spec, Default::default())).unwrap();
    assert!(
        yaml.starts_with("apiVersion: reconcile/v1\nkind: Image\nmetadata:\n  name: localhost/hello\n"),
        "{yaml}"
    );
    assert!(
        yaml.contains("source: builtIn\n") && yaml.contains("status:\n"),
        "{yaml}"
    );
}

#[test]
fn a_problem_is_shown_in_its_place() {
    let text = POD.replace("image:", "imagee:");
    assert_eq!(
        problems(&text),
        "pod.yaml:9:5: spec.containers[0].imagee: unknown field, did you mean \"image\"?
        imagee: localhost/hello
        ^
"
    );
    let text = format!("{POD}    image: again\n");
    assert_eq!(
        problems(&text),
        "pod.yaml:10:5: spec.containers[0].image: is given twice
        image: again
        ^
"
    );
}

/// Text to append to a good container (or, after `!`, a whole document), and where and how it is refused.
const BAD: &[(&str, &str)] = &[
    (
        "    command: sh\n",
        ":10:14: spec.containers[0].command: invalid type: string \"sh\", expected a sequence",
    ),
    (
        "    env: [{name: A, value: 1}]\n",
        ":10:28: spec.containers[0].env[0].value: invalid type: integer `1`, expected a string",
    ),
    ("    env: [{name: A=B}]\n", ":10:18: spec.containers[0].env[0].name: "),
    (
        "    env: [{name: A, valueFrom: {fieldRef: {fieldPath: x}}}]\n",
        ":10:21: spec.containers[0].env[0].valueFrom: not supported yet",
    ),
    (
        "    envFrom: [{secretRef: {name: x}}]\n",
        ":10:5: spec.containers[0].envFrom: not supported yet",
    ),
    (
        "    livenessProbe: {exec: {command: [x]}}\n",
        ":10:5: spec.containers[0].livenessProbe: not supported yet",
    ),
    (
        "    lifecycle: {preStop: {exec: {command: [x]}}}\n",
        ":10:5: spec.containers[0].lifecycle: not supported yet",
    ),
    (
        "    ports: [{containerPort: 70000}]\n",
        ":10:29: spec.containers[0].ports[0].containerPort: 70000 is not a port (1 to 65535)",
    ),
    (
        "    ports: [{containerPort: 0}]\n",
        ":10:29: spec.containers[0].ports[0].containerPort: 0 is not a port",
    ),
    (
        "    ports: [{containerPort: 1, protocol: tcp}]\n",
        ":10:42: spec.containers[0].ports[0].protocol: \"tcp\" is none of TCP, UDP, SCTP",
    ),
    (
        "    ports: [{containerPort: 1, hostPort: 5}, {containerPort: 2, hostPort: 5}]\n",
        ":10:75: spec.containers[0].ports[1].hostPort: ",
    ),
    (
        "    ports: [{containerPort: 1, hostIP: here}]\n",
        ":10:40: spec.containers[0].ports[0].hostIP: ",
    ),
    (
        "    volumeMounts: [{name: v, mountPath: /v}]\n",
        ":10:27: spec.containers[0].volumeMounts[0].name: no volume is named \"v\"",
    ),
    (
        "    workingDir: relative\n",
        ":10:17: spec.containers[0].workingDir: must be an absolute path",
    ),
    (
        "    imagePullPolicy: Sometimes\n",
        ":10:22: spec.containers[0].imagePullPolicy: \"Sometimes\" is none of",
    ),
    (
        "    resources: {limits: {cpu: fast}}\n",
        ":10:31: spec.containers[0].resources.limits.cpu: \"fast\" is not a quantity",
    ),
    (
        "    resources: {limits: {cpu: -1}}\n",
        ":10:31: spec.containers[0].resources.limits.cpu: ",
    ),
    (
        "    resources: {limits: {nvidia.com/gpu: 1}}\n",
        ":10:26: spec.containers[0].resources.limits.nvidia.com/gpu: not supported yet",
    ),
    (
        "    resources: {limits: {memory: 1Mi}, requests: {memory: 2Mi}}\n",
        ":10:59: spec.containers[0].resources.requests.memory: is more than the limit",
    ),
    (
        "    securityContext: {runAsNonRoot: true}\n",
        ":10:37: spec.containers[0].securityContext.runAsNonRoot: needs runAsUser",
    ),
    (
        "    securityContext: {runAsNonRoot: true, runAsUser: 0}\n",
        ":10:37: spec.containers[0].securityContext.runAsNonRoot: contradicts",
    ),
    (
        "    securityContext: {privileged: true, allowPrivilegeEscalation: false}\n",
        ":10:67: spec.containers[0].securityContext.allowPrivilegeEscalation: contradicts",
    ),
    (
        "    securityContext: {seccompProfile: {type: Mine}}\n",
        ":10:46: spec.containers[0].securityContext.seccompProfile.type: \"Mine\" is none of",
    ),
    (
        "    securityContext: {runAsUser: -5}\n",
        ":10:34: spec.containers[0].securityContext.runAsUser: ",
    ),
    (
        "    securityContext: {capabilities: {add: [net admin]}}\n",
        ":10:44: spec.containers[0].securityContext.capabilities.add[0]: ",
    ),
    (
        "  - {name: main, image: x}\n",
        ":10:12: spec.containers[1].name: \"main\" is the name of another container",
    ),
    ("  - {name: Main, image: x}\n", ":10:12: spec.containers[1].name: "),
    ("  - {name: other}\n", ":10:5: spec.containers[1].image: is missing"),
    ("  volumes: [{name: v}]\n", ":10:13: spec.volumes[0]: has no source"),
    (
        "  volumes: [{name: v, configMap: {name: x, defaultMode: 0644}}]\n",
        ":10:23: spec.volumes[0].configMap: not supported yet",
    ),
    (
        "  volumes: [{name: v, persistentVolumeClaim: {claimName: x}}]\n",
        ":10:23: spec.volumes[0].persistentVolumeClaim: not supported yet",
    ),
    (
        "  volumes: [{name: v, hostPath: {path: srv}}]\n",
        ":10:40: spec.volumes[0].hostPath.path: must be an absolute path",
    ),
    (
        "  volumes: [{name: v, emptyDir: {}}, {name: v, emptyDir: {}}]\n",
        ":10:45: spec.volumes[1].name: ",
    ),
    (
        "  restartPolicy: Sometimes\n",
        ":10:18: spec.restartPolicy: \"Sometimes\" is none of Always, OnFailure, Never",
    ),
    (
        "  securityContext: {fsGroup: 5}\n",
        ":10:21: spec.securityContext.fsGroup: not supported yet",
    ),
    ("  hostname: a.b\n", ":10:13: spec.hostname: "),
    (
        "  terminationGracePeriodSeconds: -1\n",
        ":10:34: spec.terminationGracePeriodSeconds: ",
    ),
    ("  dnsPolicy: None\n", ":10:14: spec.dnsPolicy: None needs a dnsConfig"),
    ("  securityContext: {sysctls: [{name: \"a/../b\", value: x}]}\n", ":10:"),
    ("  unknown: 1\n", ":10:3: spec.unknown: unknown field"),
    ("   bad: indent\n", ":10:4: "),
    (
        "!apiVersion: v1\nkind: Service\n",
        ":2:7: kind: unknown kind \"Service\"",
    ),
    (
        "!apiVersion: v2\nkind: Pod\n",
        ":1:13: apiVersion: unknown version \"v2\"",
    ),
    ("!kind: Pod\n", ":1:1: apiVersion: is missing"),
    ("!- 1\n", ":1:1: a document must be a map"),
    ("!apiVersion: v1\nkind: Pod\n", ": metadata: is missing"),
    (
        "!apiVersion: v1\nkind: Pod\nspec: {containers: []}\n",
        ": metadata: is missing",
    ),
    (
        "!apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: []}\n",
        ":4:20: spec.containers: at least one container is required",
    ),
    (
        "!apiVersion: v1\nkind: Pod\nmetadata: {name: A_b}\nspec: {containers: []}\n",
        ":3:18: metadata.name: ",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: Image\nmetadata: {name: a, uid: b}\nspec: {source: builtIn}\n",
        ":3:21: metadata.uid: unknown field",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: Image\nmetadata: {name: a}\n",
        ": spec: is missing",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: Image\nmetadata: {name: a}\nspec: {source: Built}\n",
        ":4:16: spec.source: unknown variant",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: PodSandbox\nmetadata: {name: a}\n\
         spec: {pod: {name: a, namespace: b, uid: c}, sysctls: {a: [1]}}\n",
        ":4:59: spec.sysctls.a: invalid type: sequence",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: PodSandbox\nmetadata: {name: a}\n\
         spec: {pod: {name: a, namespace: b, uid: c}, hostnamee: x}\n",
        ":4:46: spec.hostnamee: unknown field, did you mean \"hostname\"?",
    ),
    (
        "!apiVersion: reconcile/v1\nkind: PodSandbox\nmetadata: {name: a}\n\
         spec: {pod: {name: a, namespace: b, uid: c}, ports: [{containerPort: 99999}]}\n",
        ":4:70: spec.ports[0].containerPort: ",
    ),
    ("!a: &a [1]\nb: [*a, *b]\n", ": unknown anchor"),
    ("!a: &a [*a]\n", ": recursion"),
];

#[test]
fn what_is_wrong_is_named_with_its_place() {
    for (text, wanted) in BAD {
        let text = text
            .strip_prefix('!')
            .map_or_else(|| format!("{POD}{text}"), str::to_owned);
        let problems = problems(&text);
        let first = problems.lines().next().unwrap();
        println!("{first}");
        assert!(
            first.starts_with("pod.yaml") && first.contains(wanted),
            "wanted {wanted:?}, got:\n{problems}"
        );
    }
}

#[test]
fn every_problem_of_a_file_is_told() {
    let text = format!(
        "{POD}    livenessProbe: {{}}\n    env: [{{name: A, valueFrom: {{}}}}]\n  nope: 1\n---\n{POD}    imagee: x\n"
    );
    let all = problems(&text);
    assert_eq!(
        all.lines().filter(|line| line.starts_with("pod.yaml:")).count(),
        4,
        "{all}"
    );
    assert!(all.contains("pod.yaml:23:5: spec.containers[0].imagee"), "{all}");
}

#[test]
fn scheduling_is_warned_of() {
    let text = format!(
        "{POD}    terminationMessagePath: /x\n  nodeSelector: {{a: b}}\n  priority: 5\n  serviceAccountName: x\n"
    );
    let document = one(&text);
    let warned: Vec<_> = document.warnings.iter().map(|w| (w.path.as_str(), w.line)).collect();
    let wanted = [
        ("spec.nodeSelector", 11),
        ("spec.priority", 12),
        ("spec.serviceAccountName", 13),
        ("spec.containers[0].terminationMessagePath", 10),
    ];
    assert_eq!(warned, wanted);
}

const SECRET: &str = "\
apiVersion: v1
kind: Secret
metadata: {name: regcred, annotations: {kubectl.kubernetes.io/last-applied-configuration: hunter2}}
type: kubernetes.io/dockerconfigjson
";

#[test]
fn secrets_of_registries_are_read() {
    // {"auths":{"r.example":{"auth":"dTpodW50ZXIy"}}}
    let encoded = "eyJhdXRocyI6eyJyLmV4YW1wbGUiOnsiYXV0aCI6ImRUcG9kVzUwWlhJeSJ9fX0=";
    let older = SECRET.replace("dockerconfigjson", "dockercfg");
    for (text, config) in [
        (
            format!("{SECRET}data: {{.dockerconfigjson: {encoded}}}\n"),
            r#"{"auths":{"r.example":{"auth":"dTpodW50ZXIy"}}}"#,
        ),
        (
            format!(
                "{SECRET}stringData:\n  .dockerconfigjson: |\n    {{\"auths\": {{\"r\": {{}}}}}}\ndata: {{other: eA==}}\n"
            ),
            "{\"auths\": {\"r\": {}}}\n",
        ),
        (
            format!("{older}stringData: {{.dockercfg: '{{\"r\":{{}}}}'}}\n"),
            r#"{"r":{}}"#,
        ),
    ] {
        let document = one(&text);
        let json = document.record.to_json().unwrap();
        let Record::Secret(new) = document.record else {
            panic!("{text}")
        };
        assert_eq!(new.spec.config.reveal(), config);
        assert_eq!(
            (new.meta.name.as_str(), new.meta.namespace.as_str()),
            ("regcred", "default")
        );
        assert!(
            new.meta.annotations.is_empty(),
            "kubectl's copy of the secret is left out"
        );
        let back = Record::from_json(&json).unwrap();
        assert_eq!(back.to_json().unwrap(), json);
        let shown = to_yaml(&state::Secret::new(new.meta, new.spec, ())).unwrap();
        assert!(shown.contains("regcred") && !shown.contains("auths"), "{shown}");
    }
    let spec = pod(&POD.replace("spec:\n", "spec:\n  imagePullSecrets: [{name: regcred}]\n"));
    assert_eq!(spec.image_pull_secrets[0].name, "regcred");
    let wrong = problems(&POD.replace("spec:\n", "spec:\n  imagePullSecrets: [{name: Reg_Cred}]\n"));
    assert!(wrong.contains(":7:29: spec.imagePullSecrets[0].name: "), "{wrong}");
}

#[test]
fn what_is_wrong_with_a_secret_is_told_without_it() {
    let opaque = SECRET.replace("kubernetes.io/dockerconfigjson", "Opaque");
    for (text, told) in [
        (
            format!("{opaque}stringData: {{password: hunter2}}\n"),
            ":4:7: type: only kubernetes.io/docker",
        ),
        (
            format!("{SECRET}stringData: {{.dockerconfigjson: hunter2}}\n"),
            "is not JSON (line 1, column 1 of it)",
        ),
        (
            format!("{SECRET}data: {{.dockerconfigjson: hunter2}}\n"),
            "data: .dockerconfigjson is not base64 of text",
        ),
        (
            format!("{SECRET}data: {{.dockercfg: hunter2}}\n"),
            "data: .dockerconfigjson is missing",
        ),
        (
            format!("{SECRET}data: {{.dockerconfigjson: [hunter2]}}\n"),
            "data..dockerconfigjson: must be a string",
        ),
        (format!("{SECRET}data: hunter2\n"), "data: must be a map"),
        (format!("{SECRET}password: hunter2\n"), "password: unknown field"),
        (format!("{SECRET}data: {{.dockerconfigjson: hunter2\n"), "pod.yaml:"),
        (
            format!("{SECRET}data: {{a: hunter2, a: hunter2}}\n"),
            "data.a: is given twice",
        ),
        (
            "{apiVersion: v1, kind: secret, data: {a: hunter2}}\n".to_owned(),
            "kind: unknown kind",
        ),
    ] {
        let problems = problems(&text);
        assert!(problems.contains(told), "no {told:?} in {problems}");
        assert!(!problems.contains("hunter2"), "{problems}");
    }
}

#[test]
fn hostile_text_ends_soon() {
    let mut bombs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for i in 1..12 {
        let refs = format!("*a{},", i - 1).repeat(9);
        bombs.push_str(&format!("a{i}: &a{i} [{refs}]\n"));
    }
    for text in [
        bombs,
        "[".repeat(100_000),
        "a: ".repeat(5000),
        "x".repeat(5 << 20),
        "\u{0}".into(),
        "--- ".repeat(1000),
    ] {
        assert!(!parse(&text, "f").map(drop).unwrap_err().is_empty());
    }
    assert!(parse("", "f").unwrap().is_empty());
    assert!(parse("---\n---\n...\n", "f").unwrap().is_empty());
}

#[test]
fn merge_keys_are_applied() {
    let text = "\
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers:
  - &base {name: main, image: x, workingDir: /a}
  - {<<: *base, name: other}
";
    let spec = pod(text);
    assert_eq!(
        (
            spec.containers[1].name.as_str(),
            spec.containers[1].working_dir.as_str()
        ),
        ("other", "/a")
    );
}
