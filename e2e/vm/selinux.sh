#!/bin/bash
# selinux.sh: the daemon in a guest with SELinux (permissive: its policy labels, and forbids nothing): labels of
# processes, root file systems, volumes and the pod's files, levels of pods; with crictl, and with critest's SELinux
# specs. Prints a line a check; exit code 1 if one failed. Needs what systemd.sh needs.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
share_daemon selinux-inside.sh inside.sh
VM_SECURITY="security=selinux selinux=1 enforcing=0" \
  "$here/vm-run.sh" --timeout 2400 --share "$share" -- bash /mnt/share/selinux-inside.sh
