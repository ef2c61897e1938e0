#!/usr/bin/env bash
# Asks the adapters of results/default/run.sh, whose replies are kept here as replies.jsonl.gz.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=out/default
python -m results.rivals.rivals --adapter $runs/cal-s0 $runs/cal-s1 $runs/cal-s2 $runs/mlp-s0 $runs/mlp-s1 $runs/lora-s0
