#!/bin/bash
# systemd.sh [DRIVER…]: the daemon as a service of systemd, in a guest with cgroup v2 and AppArmor: limits, raw keys, OOM, PSI,
# freeze and kill, daemon-reload, restart, profiles; with crictl, and with critest's AppArmor specs. Once with each
# cgroup driver (default: cgroupfs and systemd). Prints a line a check; exit code 1 if one failed. Needs `cargo build --release`, the guest's image ($VM_CACHE, see README.md), and
# crictl and critest.test where the tests of e2e build them ($CI_CACHE, ~/.cache/reconcile-ci).
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
share_daemon systemd-inside.sh inside.sh
[[ $# -gt 0 ]] || set -- cgroupfs systemd
code=0
for driver in "$@"; do
  echo "== cgroup.driver: $driver"
  "$here/vm-run.sh" --snapshot --timeout 2400 --share "$share" -- bash /mnt/share/systemd-inside.sh "$driver" || code=1
done
exit "$code"
