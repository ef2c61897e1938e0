#!/usr/bin/env bash
# Traces the base, an adapter in the middle and one in the last eighth, from results/default/run.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p out/traced  # the directories' names are the curves'
ln -sfn "$PWD/out/default/cal-s0" out/traced/middle8th
ln -sfn "$PWD/out/default/trial-late" out/traced/late8th
python -m results.trace.trace --adapter out/traced/middle8th out/traced/late8th --limit 4
