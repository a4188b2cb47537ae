#!/bin/bash
# systemd-v1.sh [LAYOUT…]: the systemd cgroup driver in a guest with cgroup v1: scopes in every hierarchy, limits, devices,
# daemon-reload, restart, what is left. LAYOUT is hybrid (v2 beside v1, without controllers: systemd follows units by it)
# or legacy (v1 alone); both by default. Prints a line a check; exit code 1 if one failed. Needs what systemd.sh needs.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
share_daemon systemd-v1-inside.sh inside.sh
[[ $# -gt 0 ]] || set -- hybrid legacy
v1="systemd.unified_cgroup_hierarchy=0 SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"
code=0
for layout in "$@"; do
  echo "== cgroup v1, $layout"
  case $layout in
    hybrid) cgroups=$v1 ;;
    legacy) cgroups="$v1 systemd.legacy_systemd_cgroup_controller=1" ;;
    *) usage ;;
  esac
  VM_CGROUPS=$cgroups "$here/vm-run.sh" --timeout 1200 --share "$share" -- \
    bash /mnt/share/systemd-v1-inside.sh "$layout" || code=1
done
exit "$code"
