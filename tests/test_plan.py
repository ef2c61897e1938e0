"""plan.py: that the plan's peak is what a real step takes, and that train.py's operations are those that torch counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cal import attach, trainable
from model import CPU_BF16, Config, Transformer
from tests import plan as module
from tests.plan import Ledger, plan
from tests.small import ROOT, run
from train import flops

METHODS = pytest.mark.parametrize("method", ["cal", "mlp", "lora", "full"])
SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 192,
    "n_layers": 8,  # late8th is 7 and 8
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 2048,
    "tied": True,
}
CONFIG = Config(**SIZES)


# ----------------------------------------------------------------------------------------------------------------------
# the ledger


def peak(ledger: Ledger) -> int:
    return sum(ledger.made[n][2] for n in ledger.at_the_peak())


def test_a_freed_block_makes_room_for_the_next():
    with Ledger(0, 0) as ledger:
        x = torch.zeros(1000, device="meta")
        for _ in range(5):
            x = x + 1  # the old and the new one stand together
    assert len(ledger.made) == 6 and peak(ledger) == 2 * 4000


def test_a_view_takes_no_memory():
    with Ledger(0, 0) as ledger:
        x = torch.zeros(10, 100, device="meta")
        _ = x.view(100, 10).t()[3:], x.chunk(2)
    assert peak(ledger) == 4000


def test_what_the_forward_pass_saves_is_held_until_the_backward_pass():
    x = torch.zeros(1000, device="meta", requires_grad=True)
    with Ledger(0, 0) as ledger:
        y = x.exp().exp().exp()  # each saves its output
        held = len(ledger.alive)
        y.sum().backward()
        del y
    assert held == 3 and len(ledger.alive) == 1  # the gradient


# ----------------------------------------------------------------------------------------------------------------------
# the plan


@METHODS
def test_weights_adapter_and_optimizer_take_what_their_numbers_take(method):
    with torch.device("meta"):
        model = attach(Transformer(CONFIG), method)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in trainable(model).values())
    memory = plan(CONFIG, method, 2048).memory
    assert memory["weights"] == (4 * total if method == "full" else 2 * (total - trained))  # fp32; bf16
    assert memory["adapter"] == (0 if method == "full" else 4 * trained)  # fp32
    # two states in fp32, and each tensor's count of steps
    assert memory["optimizer"] == 8 * trained + 4 * len(trainable(model))


def test_longer_conversations_save_no_more_in_a_batch_of_as_many_tokens():
    short, long = (plan(CONFIG, "full", 4096, length).memory["saved by the forward pass"] for length in (128, 2048))
    assert long == pytest.approx(short, rel=0.01)  # a T x T matrix a head would make it several times as much


def test_a_batch_twice_as_large_saves_twice_as_much():
    small, large = (plan(CONFIG, "lora", tokens).memory["saved by the forward pass"] for tokens in (8192, 16384))
    assert large == pytest.approx(2 * small, rel=0.02)  # but for LoRA's weights, cast to bf16


@METHODS
def test_grad_checkpoint_saves_less_and_computes_more(method):
    plain, twice = (plan(CONFIG, method, 2048, grad_checkpoint=value) for value in (False, True))
    assert twice.memory["saved by the forward pass"] < 0.7 * plain.memory["saved by the forward pass"]
    assert twice.flops["backward"] > plain.flops["backward"] and twice.flops["forward"] == plain.flops["forward"]


def test_the_command_needs_a_config_alone(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    done = run("tests/bench.py", "--plan", "--base", tmp_path / "config.json")
    assert done.returncode == 0 and "| planned peak |" in done.stdout


def test_the_largest_batch_that_fits_is_the_one_below_the_first_that_does_not(monkeypatch):
    peak = {tokens: plan(CONFIG, "mlp", tokens).memory["planned peak"] for tokens in (4096, 8192)}
    card = (peak[4096] + peak[8192]) / 2 / 0.9
    monkeypatch.setattr(module, "CARDS", (card / 1e9, 1e-6))
    assert [cell.split(" / ")[0] for cell in module.largest_batches(CONFIG, "mlp")] == ["4k", "–"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--base", "nowhere.json"], "does not exist"),
        (["--batch_tokens", 512], "raise --batch_tokens"),
        (["--targets", 0], "--targets is 0"),
        (["--system", 2000], "--system is 2000"),
        (["--length", 9000, "--batch_tokens", 9000], "do not fit the model's context"),
    ],
)
def test_wrong_flags_end_in_a_sentence(flags, words, smollm2):
    done = run("tests/bench.py", "--plan", *flags)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1


# ----------------------------------------------------------------------------------------------------------------------
# operations


@METHODS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_step_takes_the_operations_that_train_says(method, tied):
    B, T, S = 4, 64, 4
    model = attach(Transformer(Config(**SIZES | {"tied": tied})), method)
    ids = torch.randint(0, 500, (B, T))
    targets = ids.masked_fill(torch.arange(T) < T // 2, -1)
    # torch counts no fused attention on a CPU, but its products one by one
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, n = model.loss(model(ids, torch.arange(T).expand(B, T) < S), targets)
        forward = counter.get_total_flops()
        loss.backward()
    counted = counter.get_total_flops()
    # train.flops leaves out CAL's keys, values and their attention (0.6 %), and counts the gradient of the first layer's
    # input, which LoRA's frozen part does not ask for (0.8 %)
    assert flops(model, B * T, n, T) == pytest.approx(counted, rel=0.01)
    assert plan(Config(**SIZES | {"tied": tied}), method, B * T, T, n / (B * T), S).flops["forward"] * B * T == forward


# ----------------------------------------------------------------------------------------------------------------------
# against a real run

# Prints the memory that two steps take at most, the first of which makes AdamW's states. Libraries fill their own
# tables at first use, 100 MB that no larger model adds to: a step of a toy comes before.
MEASURE = """
import resource, sys, torch
from functools import partial
from torch.utils.checkpoint import checkpoint
from cal import attach, trainable
from model import Config, Transformer
method, path, dtype, B, T, S = *sys.argv[1:3], getattr(torch, sys.argv[3]), *map(int, sys.argv[4:7])

def steps(model, number, B, T, S):
    attach(model, method)
    if sys.argv[7] == "True":
        model.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    parameters = list(trainable(model).values())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    ids, place = torch.randint(0, model.config.vocab_size, (B, T)), torch.arange(T)
    system, targets = (place < S).expand(B, T), ids.masked_fill(place < T // 2, -1)
    for _ in range(number):
        loss, n = model.loss(model(ids, system), targets)
        (loss / n).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

toy = Config(64, 32, 64, 8, 4, 2, 8, 128, tied=True)
with torch.device("meta"):
    Transformer(toy)
steps(Transformer(toy).to(dtype), 1, 2, 32, 4)
before = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
steps(Transformer.from_pretrained(path, dtype=dtype), 2, B, T, S)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(  # a minute in all
    ("method", "B", "twice"),
    [("cal", 2, False), ("mlp", 1, False), ("lora", 1, False), ("lora", 1, True), ("full", 1, False)],
)
def test_the_planned_peak_is_the_measured_one(method, B, twice, smollm2: Path):
    # emulated, bf16 takes minutes
    T, S, dtype = 256, 64, "bfloat16" if CPU_BF16 and method != "full" else "float32"
    flags = map(str, [method, smollm2, dtype, B, T, S, twice])
    # by default glibc keeps freed blocks of up to 32 MB for later, which would be measured too
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURE, *flags], env=env, capture_output=True, text=True, check=True)
    config = Config.from_file(smollm2 / "config.json")
    how = {"dtype": getattr(torch, dtype), "grad_checkpoint": twice, "foreach": False}
    planned = plan(config, method, B * T, T, system=S, **how).memory["planned peak"]
    assert planned == pytest.approx(int(done.stdout), rel=0.15)
