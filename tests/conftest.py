"""What several test files need: the real checkpoint, a tiny one, and the folder ../shared."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data import files
from data.download import checkpoint
from model import Config, Transformer
from tests.small import ROOT, SMOLLM2


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
        patch.setattr(files, "CACHE", tmp_path_factory.mktemp("cache"))
        yield


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
