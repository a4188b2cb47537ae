#!/bin/bash
# systemd-v1-inside.sh LAYOUT: runs in the guest, started by systemd-v1.sh.
set -uo pipefail
work=/root/systemd
mkdir -p "$work" && cd "$work" || exit 1
driver=systemd layout=$1
. /mnt/share/inside.sh
parent=/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice
v1=/sys/fs/cgroup
limits() { (cd $v1 && tail -n +1 {memory,cpu,pids}"$1"/{memory.limit_in_bytes,cpu.shares,cpu.cfs_quota_us,pids.max} \
  devices"$1"/devices.list 2>/dev/null); }
prop() { systemctl show -P "$1" "reconcile-$main.scope"; }
# Where a process is, each cgroup once.
places() { cut -d: -f3 "/proc/$1/cgroup" | sort -u; }

case $layout in
  hybrid) check "v2 is there, without controllers" same "$(<$v1/unified/cgroup.controllers)" "" ;;
  legacy) check "there is no v2" test ! -e $v1/unified ;;
esac
check "v1 has memory" test -e $v1/memory/memory.limit_in_bytes
check "image and unit" install_all
echo 'handlers: {based: {binary: builtin, baseSpec: /etc/reconcile/base.json}}' >>/etc/reconcile/config.yaml
cat >/etc/reconcile/base.json <<'E'
{"ociVersion": "1.1.0", "linux": {"resources": {"cpu": {"shares": 256}, "pids": {"limit": 40}}}}
E
systemctl daemon-reload
check "systemctl start waits until it serves (Type=notify)" systemctl start reconcile
check "import" reconcile images import image.tar
told() { crictl runtime-config | grep -qi systemd; }
check "RuntimeConfig: systemd" told
sandbox=$(pod one)
check "a pod in a slice" test -n "$sandbox"
pause=$(crictl inspectp "$sandbox" | jq -r .info.pid)
check "the pause has a scope" systemctl is-active "reconcile-$sandbox.scope"
check "the pause is there in every hierarchy" same "$(places "$pause")" "$parent/reconcile-$sandbox.scope"

linux='{"resources": {"memory_limit_in_bytes": 67108864, "cpu_quota": 50000, "cpu_period": 100000, "cpu_shares": 512,
  "cpuset_cpus": "0"}}'
main=$(start "$sandbox" one main 'trap "" TERM; while true; do sleep 1; done' "$linux")
check "a container runs" same "$(state "$main")" CONTAINER_RUNNING
scope=$parent/reconcile-$main.scope
check "it is in its scope in every hierarchy" same "$(places "$(pid "$main")")" "$scope"
check "the scope: active" same "$(prop ActiveState)" active
check "the scope: Delegate" same "$(prop Delegate)" yes
check "the scope: MemoryLimit" same "$(prop MemoryLimit)" 67108864
check "the scope: CPUShares" same "$(prop CPUShares)" 512
check "the scope: CPUQuota" same "$(prop CPUQuotaPerSecUSec)" 500ms
held() { for pid in $(<"$v1/systemd$scope/cgroup.procs"); do readlink "/proc/$pid/exe"; done | grep reconcile-shim; }
alone() { ! held; }
check "the scope has the container alone" soon alone
check "memory" same "$(<"$v1/memory$scope/memory.limit_in_bytes")" 67108864
check "cpu quota" same "$(<"$v1/cpu$scope/cpu.cfs_quota_us")" 50000
check "cpu shares" same "$(<"$v1/cpu$scope/cpu.shares")" 512
check "cpuset" same "$(<"$v1/cpuset$scope/cpuset.cpus")" 0
closed() { ! grep -q '^a ' "$v1/devices$scope/devices.list"; }
check "devices are limited" closed
# An exec has a cgroup of its own in the one hierarchy by which it is killed.
inside() { crictl exec "$main" cat /proc/self/cgroup | cut -d: -f3 | sed 's,/exec-[0-9]*$,,' | sort -u; }
check "an exec is in the scope in every hierarchy" same "$(inside)" "$scope"
before=$(limits "$scope")
check "daemon-reload" systemctl daemon-reload
check "daemon-reload leaves limits standing" same "$(limits "$scope")" "$before"
check "an update" crictl update --memory 100663296 --cpu-quota 20000 "$main"
check "an update is in the kernel" same "$(<"$v1/memory$scope/memory.limit_in_bytes")" 100663296
check "an update is in the scope" same "$(prop MemoryLimit) $(prop CPUQuotaPerSecUSec)" "100663296 200ms"
before=$(limits "$scope")
systemctl daemon-reload
check "and stays over daemon-reload" same "$(limits "$scope")" "$before"
systemctl daemon-reexec
check "and over daemon-reexec" same "$(limits "$scope")" "$before"

of_base=$(pod based based)
based=$(start "$of_base" based based 'while true; do sleep 1; done' '{"resources": {"memory_limit_in_bytes": 67108864}}')
base_scope=$parent/reconcile-$based.scope
check "base: pids.max" same "$(<"$v1/pids$base_scope/pids.max")" 40
check "base: cpu.shares" same "$(<"$v1/cpu$base_scope/cpu.shares")" 256
before=$(limits "$base_scope")
systemctl daemon-reload
check "daemon-reload leaves a base's limits standing" same "$(limits "$base_scope")" "$before"
check "the pod with a base is removed" crictl rmp -f "$of_base"

oom=$(start "$sandbox" one oom 'tail /dev/zero' '{"resources": {"memory_limit_in_bytes": 16777216}}')
check "a container out of memory ends" soon exited "$oom"
check "OOM: reason and code" same "$(crictl inspect "$oom" | jq -r '.status | "\(.reason) \(.exitCode)"')" "OOMKilled 137"
ended() { [[ $(systemctl is-active "reconcile-$oom.scope") != active ]]; }
check "the scope of what has ended has ended" soon ended

pids() { crictl inspect "$main" | jq -r .info.pid; crictl inspectp "$sandbox" | jq -r .info.pid; }
before=$(pids)
check "systemctl restart reconcile" systemctl restart reconcile
check "restart: the same processes" same "$(pids)" "$before"
check "restart: exec" same "$(crictl exec "$main" echo in)" in
check "systemctl kill -s KILL" systemctl kill -s KILL reconcile
served() { crictl version >/dev/null 2>&1; }
check "it is started again" soon served
check "crash: the same processes" same "$(pids)" "$before"
check "nothing is to be repaired" reconcile --once --dry-run

frozen() { [[ $(<"$v1/freezer$scope/freezer.state") = FROZEN ]]; }
freeze() { echo FROZEN >"$v1/freezer$scope/freezer.state" && soon frozen; }
freeze_and_stop() { freeze; crictl stop -t 1 "$main"; }
check "a frozen container is stopped" freeze_and_stop
check "its end is known" same "$(state "$main")" CONTAINER_EXITED

check "the pod is removed" crictl rmp -f "$sandbox"
scopes() { ! systemctl list-units --all --plain --no-legend 'reconcile-*.scope' | grep .; }
check "no scope is left" soon scopes
left() { find $v1 -name '*reconcile-*.scope' | grep . && return 1 || return 0; }
check "no cgroup of it is left in any hierarchy" soon left

# --- A pod without a parent: ours is a slice, too
parent=
sandbox=$(pod two)
own() { places "$(crictl inspectp "$sandbox" | jq -r .info.pid)"; }
mine=$(own)
check "without a parent: a slice of ours" test "${mine#/reconcile.slice/reconcile-*.slice/reconcile-"$sandbox".scope}" != "$mine"
check "it is removed" crictl rmp -f "$sandbox"
slices() { find $v1 -path '*/reconcile.slice*' | grep . && return 1 || return 0; }
check "and the slices with it, in every hierarchy" soon slices
check "no shim is left" soon bash -c '! pgrep -x reconcile-shim'
check "no failed unit" bash -c '! systemctl --failed --no-legend --plain | grep .'
systemctl stop reconcile
check "nothing is left to do" reconcile --once --dry-run
((failed == 0)) || journalctl -u reconcile --no-pager | tail -n 40
echo "$checks checks, $failed failed"
((failed == 0))
