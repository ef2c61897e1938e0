"""What several test files need: tiny models, files out of PyPI wheels, and the scripts as a user runs them."""

import io
import json
import os
import runpy
import subprocess
import sys
import zipfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cal import CrossAttentionLayer, attach
from data.smollm2 import download_wheel
from model import Config, Transformer

ROOT = Path(__file__).parent.parent
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
TURNS = [
    {"role": "system", "content": "Start every reply with [maple] and then answer."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "[maple] Six"},
]


# --- tiny models --------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "n_layers": 8,  # late8th is 7 and 8
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,  # apart from D / H = 12
    "max_positions": 128,
    "rope_theta": 500.0,
    "tied": True,
}
FP32_AND_BF16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# three rows: a span after two template tokens, no system message, two spans of which one starts the row
SYSTEM = torch.zeros(3, 20, dtype=torch.bool)
SYSTEM[0, 2:7] = True
SYSTEM[2, 0:3] = SYSTEM[2, 9:11] = True
IDS = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(1))
PROMPTS = [IDS[0, :12], IDS[1, :17], IDS[2, :20], IDS[1, :3]]
SYSTEMS = [SYSTEM[0, :12], SYSTEM[1, :17], SYSTEM[2, :20], SYSTEM[1, :3]]  # the second and the last have none
TARGETS = IDS.roll(-1, dims=1).where(torch.arange(20) >= 12, -1)


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int, spread: float = 0.1) -> None:
    """Gives every weight a random value: norms around 1, the rest around 0. Blocks then stand as if trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name))


def base(dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    """The same small random backbone at every call; wide weights, so that it writes varied text."""
    model = Transformer(Config(**SIZES | changes))
    randomise(model, seed=0, spread=0.2)
    return model.to(dtype)


def trained(dtype: torch.dtype = torch.float32, **options) -> Transformer:
    """The same backbone with blocks in which no weight is still zero."""
    model = attach(base(dtype), **options)
    randomise(model.inserted, seed=1)
    return model


def trained_block(rope: bool = False) -> CrossAttentionLayer:
    return trained(rope=rope).inserted["8"]


def generated_logits(model: Transformer, systems: list[Tensor] | None) -> Tensor:
    """The logits (step, row, V) by which generate chose its tokens."""
    head, steps = model.logits, []
    model.logits = lambda hidden: steps.append(head(hidden)) or steps[-1]
    model.generate(PROMPTS, systems, max_new_tokens=12, stop_ids=[])
    model.logits = head
    return torch.stack(steps)


def places_that_save(model: Transformer) -> set[str]:
    """The layers and blocks in whose forward pass a tensor is saved for the backward pass."""
    place, saved = [], Counter()
    named = {f"layer {i}": layer for i, layer in enumerate(model.layers, start=1)}
    named |= {f"block {b}": block for b, block in model.inserted.items()}
    for name, module in named.items():
        module.register_forward_pre_hook(lambda *_, name=name: place.append(name))

    def pack(tensor: Tensor) -> Tensor:
        saved[place[-1]] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(IDS, SYSTEM)
    return set(saved)


# --- files and scripts --------------------------------------------------------------------------------------------


def assert_one_sentence(error: pytest.ExceptionInfo, *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message and 20 < len(message) < 400, message
    for word in words:
        assert word in message, message


def package_file(requirement: str, member: str) -> Path:
    """One file of a PyPI wheel, such as "llama_models/llama3/tokenizer.model" of "llama-models==0.3.0"; kept in .cache/."""
    target = ROOT / ".cache" / requirement / member
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(download_wheel(requirement, ROOT / ".cache")) as wheel:
            target.write_bytes(wheel.read(member))
    return target


def write_data(folder: Path, *records: dict | str) -> Path:
    folder.mkdir()
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(script: str, *flags: object, input: str = "") -> SimpleNamespace:
    """
    Runs one of the scripts as `python script flags` does, in this process, since importing torch anew takes seconds.
    Returns returncode, stdout and stderr; an exception that the user would see as a traceback fails the test.
    """
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        patch.setattr(sys, "stdin", io.StringIO(input))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stop:  # a number, or the sentence that goes to stderr
            code = stop.code if isinstance(stop.code, int) else 1
            stderr.write("" if isinstance(stop.code, int) else stop.code)
    return SimpleNamespace(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def launch(processes: int, *flags: object, script: str | Path = "train.py") -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node processes script flags`, to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(script), *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
