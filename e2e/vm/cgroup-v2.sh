#!/bin/bash
# cgroup-v2.sh [TEST…]: runs test files of e2e/tests (default: those of sandboxes and containers) in a guest with
# cgroup v2 and systemd. Needs `cargo build --release` and the guest's image ($VM_CACHE, see README.md).
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
top=$(readlink -f "$here/../..")
[[ $# -gt 0 ]] || set -- sandbox container exec spec mounts userns limits security logs crash checkpoint

share=$(mktemp -d "${TMPDIR:-/tmp}/reconcile-v2.XXXXXX")
trap 'rm -rf "$share"' EXIT
cp "${CARGO_TARGET_DIR:-$top/target}"/release/reconcile{,-shim} "$share/"
cd "$top"
for test in "$@"; do
  built=$(cargo test --release -p e2e --test "$test" --no-run 2>&1 | tee /dev/stderr | sed -n 's/.*Executable .*(\(.*\)).*/\1/p')
  cp "$built" "$share/test-$test"
done
cat >"$share/inside.sh" <<'SH'
export RECONCILE_BIN_DIR=/mnt/share
failed=
for test in "$@"; do
  echo "== $test"
  "/mnt/share/test-$test" --test-threads 1 || failed+=" $test"
done
[[ ! $failed ]] || { echo "failed on cgroup v2:$failed"; exit 1; }
echo "all passed on cgroup v2"
SH
"$here/vm-run.sh" --snapshot --timeout 3600 --share "$share" -- bash /mnt/share/inside.sh "$@"
