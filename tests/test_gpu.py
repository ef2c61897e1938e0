"""gpu.py: the program for a GPU runs from start to end on a CPU, where its shapes are tiny."""

import subprocess
import sys

import pytest

from data.chat import Tokenizer, render
from data.files import read_json
from model import Transformer
from tests import gpu
from tests.small import ROOT


@pytest.mark.slow
def test_the_program_for_a_gpu_runs_on_a_cpu_and_finds_no_fault(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--steps", "6", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = read_json(tmp_path / "gpu.json")
    assert [found[part]["faults"] for part in ("gradient", "replies", "kernels", "scripts", "training")] == [[]] * 5
    assert len(found["training"]["table"]) == 6 and all(row["mfu"] is None for row in found["training"]["table"])


def test_a_part_that_fails_is_said_and_ends_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "bf16_error", lambda device: 1 / 0)
    flags = ["gpu", "--device", "cpu", "--steps", "2", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", flags)
    with pytest.raises(SystemExit, match="gradient failed: ZeroDivisionError"), monkeypatch.context() as patch:
        patch.setattr(gpu, "scripts", lambda device, steps: {"faults": []})
        patch.setattr(gpu, "training", lambda device, steps: {"faults": []})
        gpu.scripts.__name__, gpu.training.__name__ = "scripts", "training"
        gpu.main()
    assert read_json(tmp_path / "gpu.json")["replies"]["different"] == 0


def test_the_random_checkpoint_can_be_read_and_asked(tmp_path):
    folder = gpu.random_checkpoint(tmp_path / "random", layers=30)
    tok, model = Tokenizer.from_pretrained(folder), Transformer.from_pretrained(folder)
    ids, _ = render(tok, [{"role": "user", "content": "Héllo!"}])
    assert tok.vocab_size == model.config.vocab_size and "Héllo!" in tok.decode(ids)
