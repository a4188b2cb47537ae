#!/bin/bash
# power-cut.sh [ROUNDS]: pods are made and removed through CRI in a guest whose power is cut at a random moment; it boots
# cold on the same disk, and the daemon is held to what it had answered: records there, containers Exited (their code,
# or 255 Unknown), layers whole, and nothing left once all is removed. Needs `cargo build --release` with `-p e2e` and
# the guest's image ($VM_CACHE, see README.md). Default: 10 rounds, about a minute and a half each.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
rounds=${1:-10}
target=${CARGO_TARGET_DIR:-$here/../../target}/release

vm_prepare
share=$VM_TMP/share
cp "$target"/reconcile{,-shim} "$target/powercut" "$share/"
cat >"$share/daemon.sh" <<'SH'
mkdir -p /var/lib/cut /run/cut /var/log/cut
daemon=(/mnt/share/reconcile --root /var/lib/cut --state /run/cut --socket unix:///run/cut/sock --network builtin)
"${daemon[@]}" serve >>/var/log/cut/daemon.log 2>&1 &
SH
cat >"$share/load.sh" <<'SH'
. /mnt/share/daemon.sh
exec /mnt/share/powercut load /run/cut/sock /var/log/cut
SH
cat >"$share/check.sh" <<'SH'
set -e
. /mnt/share/daemon.sh
served=$!
fail() { echo "FAILED: $1"; tail -n 20 /var/log/cut/daemon.log; exit 1; }
/mnt/share/powercut check /run/cut/sock /mnt/share/facts || fail "the daemon forgot"
"${daemon[@]}" images check || fail "a layer is damaged"
kill "$served"
wait "$served" || fail "the daemon did not end well"
"${daemon[@]}" --once --dry-run || fail "something is left to do"
[[ ! $(ls -A /var/lib/cut/pods) ]] || fail "directories of pods are left"
[[ ! $(ls -A /run/netns 2>/dev/null) ]] || fail "network namespaces are left"
! pgrep -x reconcile-shim || fail "shims are left"
rebuilt=$(grep -c 'rebuilt from the copies' /var/log/cut/daemon.log || true)
echo "database rebuilt: $rebuilt"
SH

failed=0
for ((round = 1; round <= rounds; round++)); do
  after=$((RANDOM % 15)).$((RANDOM % 1000))
  vm_boot yes "$share" >&2
  vm_send bash /mnt/share/load.sh
  deadline=$((SECONDS + 300))
  until grep -qa ready "$VM_TMP/out"; do
    ((SECONDS < deadline)) || die_late "no pods in 300 s"
    sleep 0.1
  done
  sleep "$after"
  vm_kill
  cp "$VM_TMP/out" "$share/facts"
  vm_start "$VM_TMP/disk.qcow2" "$share"
  vm_send bash /mnt/share/check.sh
  code=0
  (vm_result $((SECONDS + 600))) || code=$?
  ((code == 0)) || failed=$((failed + 1))
  echo "round $round: cut $after s after the first pod could be made, $(wc -l <"$share/facts") facts, exit $code"
  vm_kill
done
echo "$rounds power cuts, $failed failed"
((failed == 0))
