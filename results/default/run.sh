#!/usr/bin/env bash
# The default run from three seeds, the other methods, and the trials by which placement and learning rate were chosen. What is
# there is kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
train() {  # NAME, then flags of train.py
    [ -f "out/default/$1/results.json" ] || python train.py --out "out/default/$1" --resume "${@:2}"
}
train trial-middle --ask val --steps 300
train trial-middle-2e-3 --ask val --steps 300 --lr 2e-3
train trial-late --ask val --steps 300 --placement late8th
for seed in 0 1 2; do train "cal-s$seed" --seed "$seed"; done
for seed in 0 1; do for method in mlp lora; do train "$method-s$seed" --method "$method" --seed "$seed"; done; done
python eval.py --compare out/default/cal-s* out/default/mlp-s* out/default/lora-s*
