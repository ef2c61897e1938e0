"""gpu.py: the script for a GPU runs from start to end on a CPU, where its shapes are tiny."""

import subprocess
import sys

import pytest

from tests.small import ROOT


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu_and_finds_no_fault():
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--steps", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| small |")]
    assert len(rows) == 4 and all("| unknown device |" in row for row in rows)
