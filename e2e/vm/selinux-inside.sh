#!/bin/bash
# selinux-inside.sh: runs in the guest, started by selinux.sh.
set -uo pipefail
work=/root/selinux
mkdir -p "$work" && cd "$work" || exit 1
driver=cgroupfs parent=/pods
. /mnt/share/inside.sh

check "image and unit" install_all
check "SELinux has a policy" test -e /sys/fs/selinux/enforce
check "with types for containers" bash -c 'printf "system_u:system_r:container_t:s0\0" >/sys/fs/selinux/context'
systemctl daemon-reload
check "the daemon starts" systemctl start reconcile
check "import" reconcile images import image.tar

label() { tr -d '\0' <"/proc/$(pid "$1")/attr/current"; }
file_label() { getfattr --only-values -h -n security.selinux "$1" | tr -d '\0'; }
matches() { [[ $1 =~ $2 ]] || { echo "${1@Q} is not $2"; return 1; }; }
pairs='s0:c[0-9]+,c[0-9]+'
run='while true; do sleep 1; done'

# --- Each pod a level
one=$(pod one) two=$(pod two)
first=$(start "$one" one first "$run" '{}')
level=$(label "$first" | cut -d: -f4-)
check "a process: container_t and a pair" matches "$(label "$first")" "^system_u:system_r:container_t:$pairs$"
second=$(start "$one" one second "$run" '{}')
check "the same in one pod" same "$(label "$second")" "$(label "$first")"
other=$(start "$two" two other "$run" '{}')
check "a process of the other pod" matches "$(label "$other")" "^system_u:system_r:container_t:$pairs$"
check "has another pair" bash -c "[[ '$(label "$other")' != '$(label "$first")' ]]"
pause=$(crictl inspectp "$one" | jq -r .info.pid)
check "the pause: the same" same "$(tr -d '\0' <"/proc/$pause/attr/current")" "$(label "$first")"
exec_label=$(crictl exec "$first" cat /proc/self/attr/current | tr -d '\0')
check "an exec: the container's" same "$exec_label" "$(label "$first")"

# --- Files
mounted() { grep -F " $2 " "/proc/$(pid "$1")/mountinfo" | grep -F "context=\"system_u:object_r:container_file_t:$3\"" ||
  { cat "/proc/$(pid "$1")/mountinfo"; return 1; }; }
for path in / /dev /dev/pts /dev/shm; do
  check "files in $path" mounted "$first" "$path" "$level"
done
for file in hosts hostname resolv.conf; do
  check "/etc/$file" same "$(file_label "/var/lib/reconcile/pods/$one/$file")" "system_u:object_r:container_file_t:$level"
done
mkdir -p volume/a plain && touch volume/a/b && ln -s /etc volume/out
etc=$(file_label /etc)
mounts="[{\"host_path\": \"$work/volume\", \"container_path\": \"/v\", \"selinux_relabel\": true},
  {\"host_path\": \"$work/plain\", \"container_path\": \"/p\"}]"
before=$(file_label plain)
volumes=$(start "$one" one volumes "$run" '{}' "$mounts")
check "a container with volumes" test -n "$volumes"
for path in volume volume/a volume/a/b volume/out; do
  check "relabelled: $path" same "$(file_label "$path")" "system_u:object_r:container_file_t:$level"
done
check "not where its link leads" same "$(file_label /etc)" "$etc"
check "not what did not ask" same "$(file_label plain)" "$before"
hosts="[{\"host_path\": \"/etc\", \"container_path\": \"/e\", \"selinux_relabel\": true}]"
refused() { ! start "$one" one refused "$run" "$@"; }
check "the host's own trees are refused" refused '{}' "$hosts"

# --- Wishes
asked='{"security_context": {"selinux_options": {"level": "s0:c7,c9"}}}'
wish=$(start "$one" one wish "$run" "$asked")
check "a level that is asked for" same "$(label "$wish")" "system_u:system_r:container_t:s0:c7,c9"
check "its files have it too" mounted "$wish" / s0:c7,c9
check "a type that the policy lacks is refused" refused '{"security_context": {"selinux_options": {"type": "no_such_t"}}}'
# A privileged one's process has its own label, or none where the policy has no such type; its files have what it asks for.
jq '.metadata.name = "trusted" | .metadata.uid = "trusted" | .linux.security_context.privileged = true' one.pod >trusted.pod
trusted=$(crictl runp trusted.pod)
free=$(start "$trusted" trusted free "$run" '{"security_context": {"privileged": true, "selinux_options": {"level": "s0:c7,c9"}}}')
check "a privileged one with a level runs" same "$(state "$free")" CONTAINER_RUNNING
check "its files have the level" mounted "$free" / s0:c7,c9
kept=$(label "$first")
systemctl kill -s KILL reconcile
served() { crictl version >/dev/null 2>&1; }
check "the daemon is started again" soon served
check "a process keeps its label" same "$(label "$first")" "$kept"
third=$(start "$one" one third "$run" '{}')
check "and the pod its level" same "$(label "$third")" "$kept"

check "critest, SELinux" critest SELinux 3>&1

remove() { crictl rmp -f "$one" "$two" "$trusted"; }
check "the pods are removed" remove
check "no shim is left" soon bash -c '! pgrep -x reconcile-shim'
systemctl stop reconcile
check "nothing is left to do" reconcile --once --dry-run
((failed == 0)) || journalctl -u reconcile --no-pager | tail -n 40
echo "$checks checks, $failed failed"
((failed == 0))
