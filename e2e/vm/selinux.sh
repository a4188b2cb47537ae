#!/bin/bash
# selinux.sh: the daemon in a guest with SELinux (permissive: its policy labels, and forbids nothing): labels of processes,
# root file systems, volumes and the pod's files, levels of pods; with crictl, and with critest's SELinux specs. Prints
# a line a check; exit code 1 if one failed. Needs what systemd.sh needs.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
top=$(readlink -f "$here/../..")
tools=${CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/reconcile-ci}
share=$(mktemp -d "${TMPDIR:-/tmp}/reconcile-selinux.XXXXXX")
trap 'rm -rf "$share"' EXIT
cp "${CARGO_TARGET_DIR:-$top/target}"/release/reconcile{,-shim} "$tools/crictl" "$top/examples/systemd/reconcile.service" \
  "$here"/{selinux-inside,inside}.sh "$share/"
# Without it its specs are a check that fails.
[[ ! -x $tools/critest.test ]] || cp "$tools/critest.test" "$share/"
VM_SECURITY="security=selinux selinux=1 enforcing=0" \
  "$here/vm-run.sh" --timeout 2400 --share "$share" -- bash /mnt/share/selinux-inside.sh
