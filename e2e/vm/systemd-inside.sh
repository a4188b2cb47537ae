#!/bin/bash
# systemd-inside.sh DRIVER: runs in the guest, started by systemd.sh.
set -uo pipefail
work=/root/systemd
mkdir -p "$work" && cd "$work" || exit 1
driver=$1
. /mnt/share/inside.sh
cgroup() { sed 's|^0::|/sys/fs/cgroup|' "/proc/$(pid "$1")/cgroup"; }
limits() { (cd "$1" && tail -n +1 memory.max memory.swap.max cpu.max cpu.weight pids.max memory.high memory.low 2>&1); }

check "image and unit" install_all
echo 'handlers: {based: {binary: builtin, baseSpec: /etc/reconcile/base.json}}' >>/etc/reconcile/config.yaml
cat >/etc/reconcile/base.json <<'E'
{"ociVersion": "1.1.0", "linux": {"resources": {"cpu": {"shares": 512, "quota": 30000, "period": 100000},
  "memory": {"reservation": 8388608}, "pids": {"limit": 40}, "unified": {"memory.high": "41943040"}}}}
E
# What the unit says must hold from the very start.
systemctl daemon-reload
check "systemctl start waits until it serves (Type=notify)" systemctl start reconcile
check "import" reconcile images import image.tar
# The CRI's SYSTEMD is 0, CGROUPFS is 1.
told() { crictl runtime-config | grep -qi "$driver"; }
check "RuntimeConfig: $driver" told
parent=/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice
sandbox=$(pod one)
check "a pod in a slice" test -n "$sandbox"

# --- Limits, raw keys
linux='{"resources": {"memory_limit_in_bytes": 67108864, "cpu_quota": 50000, "cpu_period": 100000, "cpu_shares": 512,
  "unified": {"memory.high": "50331648", "pids.max": "50"}}}'
main=$(start "$sandbox" one main 'trap "" TERM; while true; do sleep 1; done' "$linux")
check "a container runs" same "$(state "$main")" CONTAINER_RUNNING
dir=$(cgroup "$main")
echo "        cgroup: $dir"
if [[ $driver = systemd ]]; then
  check "it is a scope of the pod's slice" same "${dir#/sys/fs/cgroup}" "$parent/reconcile-$main.scope"
  prop() { systemctl show -P "$1" "reconcile-$main.scope"; }
  check "the scope: active" same "$(prop ActiveState)" active
  check "the scope: Delegate" same "$(prop Delegate)" yes
  check "the scope: MemoryMax" same "$(prop MemoryMax)" 67108864
  check "the scope: TasksMax" same "$(prop TasksMax)" 50
  check "the scope: CPUQuota" same "$(prop CPUQuotaPerSecUSec)" 500ms
  held() { for pid in $(<"$dir/cgroup.procs"); do readlink "/proc/$pid/exe"; done | grep reconcile-shim; }
  alone() { ! held; }
  check "the scope has the container alone" soon alone
  check "the pause has a scope" systemctl is-active "reconcile-$sandbox.scope"
fi
check "it is below the pod's slice" test "${dir#/sys/fs/cgroup"$parent"/}" != "$dir"
check "memory.max" same "$(<"$dir/memory.max")" 67108864
check "cpu.max" same "$(<"$dir/cpu.max")" "50000 100000"
check "unified: memory.high" same "$(<"$dir/memory.high")" 50331648
check "unified: pids.max" same "$(<"$dir/pids.max")" 50
before=$(limits "$dir")
check "daemon-reload" systemctl daemon-reload
check "daemon-reload leaves limits standing" same "$(limits "$dir")" "$before"
check "an update" crictl update --memory 100663296 "$main"
check "an update is in the kernel" same "$(<"$dir/memory.max")" 100663296
before=$(limits "$dir")
systemctl daemon-reload
[[ $driver != systemd ]] || check "an update is in the scope" same "$(prop MemoryMax)" 100663296
check "and stays over daemon-reload" same "$(limits "$dir")" "$before"
systemctl daemon-reexec
check "and over daemon-reexec" same "$(limits "$dir")" "$before"

# --- Limits that only the handler's base names
of_base=$(pod based based)
based=$(start "$of_base" based based 'while true; do sleep 1; done' '{"resources": {"memory_limit_in_bytes": 67108864}}')
check "a container with a base" same "$(state "$based")" CONTAINER_RUNNING
base_dir=$(cgroup "$based")
check "base: pids.max" same "$(<"$base_dir/pids.max")" 40
check "base: memory.high" same "$(<"$base_dir/memory.high")" 41943040
check "base: memory.low" same "$(<"$base_dir/memory.low")" 8388608
check "base: cpu.max" same "$(<"$base_dir/cpu.max")" "30000 100000"
check "base: the request's memory.max" same "$(<"$base_dir/memory.max")" 67108864
before=$(limits "$base_dir")
systemctl daemon-reload
check "daemon-reload leaves a base's limits standing" same "$(limits "$base_dir")" "$before"
check "an update beside a base" crictl update --memory 100663296 "$based"
before=$(limits "$base_dir")
systemctl daemon-reload
check "and both stand after a daemon-reload" same "$(limits "$base_dir")" "$before"
check "updated: memory.max" same "$(<"$base_dir/memory.max")" 100663296
check "the pod with a base is removed" crictl rmp -f "$of_base"

# --- OOM, PSI
oom=$(start "$sandbox" one oom 'tail /dev/zero' '{"resources": {"memory_limit_in_bytes": 16777216}}')
check "a container out of memory ends" soon exited "$oom"
check "OOM: reason and code" same "$(crictl inspect "$oom" | jq -r '.status | "\(.reason) \(.exitCode)"')" "OOMKilled 137"
if [[ $driver = systemd ]]; then
  ended() { [[ $(systemctl is-active "reconcile-$oom.scope") != active ]]; }
  check "the scope of what has ended has ended" soon ended
fi
if [[ -e /proc/pressure/cpu ]]; then
  psi() { crictl stats -o json "$main" | jq -c '.stats[0]' | tee psi && jq -e '[.cpu, .memory, .io] | map(.psi.Full != null) | all' psi; }
  check "PSI in the stats" soon psi
else
  echo "        no PSI in this kernel"
fi

# --- Daemon away and back
pids() { crictl inspect "$main" | jq -r .info.pid; crictl inspectp "$sandbox" | jq -r .info.pid; }
before=$(pids)
check "systemctl restart reconcile" systemctl restart reconcile
check "restart: the same processes" same "$(pids)" "$before"
check "restart: exec" same "$(crictl exec "$main" echo in)" in
check "restart: limits" same "$(limits "$dir")" "$(limits "$(cgroup "$main")")"
check "systemctl kill -s KILL" systemctl kill -s KILL reconcile
served() { crictl version >/dev/null 2>&1; }
check "it is started again" soon served
check "crash: the same processes" same "$(pids)" "$before"
check "systemctl reload" systemctl reload reconcile
systemctl stop reconcile
check "stopped: the pod's processes live" test -d "/proc/$(head -n1 <<<"$before")"
systemctl start reconcile
check "started: the same processes" same "$(pids)" "$before"

# --- Freeze and kill
frozen() { grep -q 'frozen 1' "$dir/cgroup.events"; }
freeze() { echo 1 >"$dir/cgroup.freeze" && soon frozen; }
freeze_and_stop() { freeze; crictl stop -t 1 "$main"; }
check "a frozen container is stopped" freeze_and_stop
check "its end is known" same "$(state "$main")" CONTAINER_EXITED
gone() { [[ ! -d $dir ]] || [[ ! $(<"$dir/cgroup.procs") ]]; }
check "nobody is left in its cgroup" soon gone
many=$(start "$sandbox" one many 'for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; wait' '{}')
dir=$(cgroup "$many")
check "a container of ten processes" soon test "$(wc -l <"$dir/cgroup.procs")" -ge 2
kill_all() { echo 1 >"$dir/cgroup.kill"; soon exited "$many"; }
check "cgroup.kill: it has ended" kill_all
check "cgroup.kill: code" same "$(crictl inspect "$many" | jq -r .status.exitCode)" 137

# --- AppArmor
cat >vm-deny <<'PROFILE'
profile vm-deny flags=(attach_disconnected) {
  file,
  capability,
  network,
  signal,
  deny /tmp/** w,
}
PROFILE
check "AppArmor is on" grep -q Y /sys/module/apparmor/parameters/enabled
check "a profile is loaded" apparmor_parser -r -K vm-deny
caps='"capabilities": {"add_capabilities": ["SYS_ADMIN"]}'
try='cat /proc/self/attr/current; mount -t tmpfs x /tmp || echo no mount; touch /tmp/foo || echo no file; echo done'
default=$(start "$sandbox" one default "$try" "{\"security_context\": {$caps}}")
check "RuntimeDefault: ends" soon exited "$default"
check "RuntimeDefault: enforced" said default 'reconcile-default (enforce)'
check "RuntimeDefault: no mount" said default 'no mount'
localhost=$(start "$sandbox" one localhost "$try" \
  "{\"security_context\": {$caps, \"apparmor\": {\"profile_type\": 2, \"localhost_ref\": \"vm-deny\"}}}")
check "Localhost: ends" soon exited "$localhost"
check "Localhost: enforced" said localhost 'vm-deny (enforce)'
check "Localhost: no file" said localhost 'no file'
unconfined=$(start "$sandbox" one unconfined "$try" "{\"security_context\": {$caps, \"apparmor\": {\"profile_type\": 1}}}")
check "Unconfined: ends" soon exited "$unconfined"
check "Unconfined: it is" said unconfined 'unconfined'
refused() { ! start "$sandbox" one refused true '{"security_context": {"apparmor": {"profile_type": 2, "localhost_ref": "absent"}}}'; }
check "a profile that is not loaded is refused" refused

# --- critest's own specs. It asks for sudo, which root does not need.
printf '#!/bin/sh\nexec "$@"\n' >/usr/local/bin/sudo && chmod +x /usr/local/bin/sudo
check "critest, AppArmor" critest AppArmor 3>&1

# --- And nothing is left
remove() { crictl rmp -f "$sandbox"; }
check "the pod is removed" remove
scopes() { ! systemctl list-units --all --plain --no-legend 'reconcile-*.scope' | grep .; }
check "no scope is left" soon scopes
left() { find /sys/fs/cgroup/kubepods.slice -name '*reconcile*' -o -name "*$sandbox*" | grep . && return 1 || return 0; }
check "no cgroup of it is left" left

# --- A pod without a parent: ours is a slice, too
parent=
sandbox=$(pod two)
check "a pod without a parent" test -n "$sandbox"
if [[ $driver = systemd ]]; then
  mine=$(sed 's|^0::||' "/proc/$(crictl inspectp "$sandbox" | jq -r .info.pid)/cgroup")
  check "it is in a slice of ours" test "${mine#/reconcile.slice/reconcile-*.slice/reconcile-"$sandbox".scope}" != "$mine"
fi
check "it is removed" crictl rmp -f "$sandbox"
check "no shim is left" soon bash -c '! pgrep -x reconcile-shim'
check "no failed unit" bash -c '! systemctl --failed --no-legend --plain | grep .'
systemctl stop reconcile
slices() { find /sys/fs/cgroup -path '*/reconcile.slice*' | grep . && return 1 || return 0; }
check "the slices have gone with the pods, or else the daemon" soon slices
check "nothing is left to do" reconcile --once --dry-run
((failed == 0)) || journalctl -u reconcile --no-pager | tail -n 40
echo "$checks checks, $failed failed"
((failed == 0))
