// Package critest keeps in go.mod what the conformance suite needs: its command has tests only, which a `tool` line
// cannot name.
package critest

import (
	_ "sigs.k8s.io/cri-tools/pkg/benchmark"
	_ "sigs.k8s.io/cri-tools/pkg/validate"
)
