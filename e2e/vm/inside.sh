# shellcheck shell=bash
# Sourced in the guest, in an empty folder: checks, and a daemon with an image and pods for them. $driver is the cgroup
# driver, $parent the cgroup of the pods.
checks=0 failed=0

# check NAME COMMAND…: a check is a command that succeeds.
check() {
  local name=$1 out
  shift
  checks=$((checks + 1))
  if out=$("$@" 2>&1); then
    echo "ok      $name"
  else
    failed=$((failed + 1))
    echo "FAILED  $name: ${*@Q}"
    sed 's/^/        | /' <<<"$out" | tail -n 20
  fi
}
same() { [[ $1 = "$2" ]] || { echo "is ${1@Q}, not ${2@Q}"; return 1; }; }
# soon COMMAND…: within 30 s.
soon() {
  local end=$((SECONDS + 30))
  until "$@"; do ((SECONDS < end)) || return 1; sleep 0.1; done
}

# --- An image, a unit, a pod
install_all() {
  install -m 755 /mnt/share/reconcile /mnt/share/reconcile-shim /usr/local/bin/
  install -m 644 /mnt/share/reconcile.service /etc/systemd/system/
  mkdir -p /etc/reconcile
  printf 'apiVersion: reconcile/v1\nkind: Config\nnetwork: {mode: builtin}\ncgroup: {driver: %s}\n' "$driver" \
    >/etc/reconcile/config.yaml
  echo 'runtime-endpoint: unix:///run/reconcile/reconcile.sock' >/etc/crictl.yaml
  mkdir -p image/{bin,tmp,etc,proc,sys,dev}
  cp /bin/busybox image/bin/
  for name in $(/bin/busybox --list); do [[ $name = busybox ]] || ln -sf busybox "image/bin/$name"; done
  tar -C image -cf layer.tar .
  echo '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"]},
    "rootfs":{"type":"layers","diff_ids":["sha256:'"$(sha256sum <layer.tar | cut -d' ' -f1)"'"]}}' >config.json
  echo '[{"Config":"config.json","RepoTags":["localhost/busybox:1"],"Layers":["layer.tar"]}]' >manifest.json
  tar -cf image.tar manifest.json config.json layer.tar
}
crictl() { /mnt/share/crictl --timeout 60s "$@"; }

# pod NAME [HANDLER]: a sandbox's id; its parent is a slice as a kubelet would name it.
pod() {
  jq -n --arg name "$1" --arg parent "$parent" '{metadata: {name: $name, namespace: "vm", uid: $name, attempt: 0},
    log_directory: "/var/log/vm", linux: {cgroup_parent: $parent, security_context: {namespace_options: {network: 2}}}}' \
    >"$1.pod"
  crictl runp ${2:+--runtime="$2"} "$1.pod"
}
# start SANDBOX POD NAME SCRIPT LINUX [MOUNTS]: a container's id; LINUX is its `linux`, MOUNTS its `mounts` in JSON.
start() {
  local id
  jq -n --arg name "$3" --arg script "$4" --argjson linux "$5" --argjson mounts "${6:-[]}" '{$mounts, metadata: {name: $name}, log_path: "\($name).log",
    image: {image: "localhost/busybox:1"}, command: ["sh", "-c", $script], linux: $linux}' >"$3.container"
  id=$(crictl create --no-pull "$1" "$3.container" "$2.pod") && crictl start "$id" >/dev/null && echo "$id"
}
pid() { crictl inspect "$1" | jq -r .info.pid; }
state() { crictl inspect "$1" | jq -r .status.state; }
exited() { [[ $(state "$1") = CONTAINER_EXITED ]]; }
said() { soon grep -q "$2" "/var/log/vm/$1.log" || { cat "/var/log/vm/$1.log"; return 1; }; }

# critest FOCUS: its specs of that name; what it counted goes to descriptor 3.
critest() {
  [[ -x /mnt/share/critest.test ]] || { echo "critest.test is not there"; return 1; }
  echo 'defaultTestContainerImage: localhost/busybox:1' >images.yaml
  /mnt/share/critest.test -runtime-endpoint unix:///run/reconcile/reconcile.sock -test-images-file "$PWD/images.yaml" \
    -ginkgo.focus "$1" -ginkgo.no-color -ginkgo.silence-skips >critest.log 2>&1
  local code=$?
  grep -E '^Ran [0-9]+ of|Passed \|' critest.log | sed 's/^/        /' >&3
  ((code == 0)) && grep -qE '[1-9][0-9]* Passed' critest.log || { tail -n 60 critest.log; return 1; }
}
