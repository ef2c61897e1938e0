"""eval.py over several processes: the prompts are dealt, and what comes out is what one process gives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.files import read_json, read_jsonl
from tests.small import ROOT, launch, run

SHORT = ("--dtype", "fp32", "--max_new_tokens", 4, "--limit", 6)


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple, Path, str]:
    """The flags of an evaluation, what one process keeps of it, and what it prints."""
    folder = tmp_path_factory.mktemp("processes")
    mine = [{"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "expect": "1"} for n in range(7)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in mine))
    flags = ("--base", tiny, "--tasks", f"hierarchy,sysbench,{folder / 'mine.jsonl'}", *SHORT)
    done = launch(1, *flags, "--out", folder / "one", script="eval.py")  # sysbench has no judge here: it is not run
    assert done.returncode == 0, done.stderr
    return flags, folder / "one", done.stdout


def same(ours: Path, theirs: Path) -> bool:
    """Whether two directories hold the same files, with the same replies and scores."""
    assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}
    replies = [[read_jsonl(folder / f"{task}.jsonl") for task in ("hierarchy", "own")] for folder in (ours, theirs)]
    scores = [[read_json(folder / f"{task}.json")["base"] for task in ("hierarchy", "own")] for folder in (ours, theirs)]
    return replies[0] == replies[1] and scores[0] == scores[1]


def test_two_processes_print_and_keep_what_one_does(one, tmp_path):
    flags, alone, printed = one
    done = launch(2, *flags, "--out", tmp_path / "two", script="eval.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed and "not run: " in printed
    assert same(tmp_path / "two", alone)


@pytest.mark.slow
def test_of_two_processes_one_is_killed_while_both_write_and_nothing_is_lost_or_doubled(one, tmp_path):
    flags, alone, _ = one
    out = tmp_path / "cut"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "eval.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [*command, *map(str, flags), "--batch_tokens", "1", "--out", str(out)],  # a reply a batch: they are kept one by one
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    files, deadline = [out / "hierarchy.jsonl", out / "hierarchy.1.jsonl"], time.monotonic() + 300
    try:
        while not all(file.is_file() and file.read_bytes().count(b"\n") > 1 for file in files):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process_of_rank(1, launcher.pid), signal.SIGKILL)
        assert launcher.wait() != 0
    finally:
        launcher.kill()
    kept = [read_jsonl(file, whole=True) for file in files]
    assert 4 <= len(kept[0] + kept[1]) < len(read_jsonl(alone / "hierarchy.jsonl"))
    for file, rows in zip(files, kept):  # marked: a reply that was asked again would be seen
        file.write_text("".join(json.dumps(row | {"mark": True}) + "\n" for row in rows) + '{"cut off in its mid')
    done = launch(2, *flags, "--out", out, script="eval.py")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out / "hierarchy.jsonl")
    assert sum(row.pop("mark", False) for row in rows) == len(kept[0] + kept[1])
    (out / "hierarchy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert same(out, alone)


FAILING = """
import os, sys
import eval

def ask(*args):
    if os.environ["RANK"] == "1" and any(e["id"].startswith("rules") for e in args[2]):
        raise OSError("the disk of rank 1 is full")
    yield from whole(*args)

whole, eval.ask = eval.ask, ask
sys.argv[0] = "eval.py"
eval.main()
"""


def test_what_fails_in_one_process_alone_is_said_and_the_next_task_runs(one, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    done = launch(2, *one[0], script=tmp_path / "failing.py")
    assert done.returncode == 0, done.stderr
    assert "not run: the disk of rank 1 is full" in done.stdout and "| mine | 6 |" in done.stdout


def test_parts_of_more_processes_than_there_are_now_are_taken_over_and_a_prompt_counts_once(one, tmp_path):
    flags, alone, printed = one
    out = shutil.copytree(alone, tmp_path / "cut")
    rows = (out / "hierarchy.jsonl").read_text().splitlines(keepends=True)
    (out / "hierarchy.jsonl").write_text("".join(rows[:9]))
    (out / "hierarchy.3.jsonl").write_text("".join(rows[7:]))  # two stand in both
    (out / "hierarchy.old.jsonl").write_text(rows[0])  # of somebody else
    rescored = run("eval.py", "--rescore", out).stdout
    assert sorted(run("eval.py", "--rescore", alone).stdout.splitlines()) == sorted(rescored.splitlines())
    done = launch(2, *flags, "--out", out, script="eval.py")
    assert done.returncode == 0 and done.stdout == printed, done.stderr
    (out / "hierarchy.old.jsonl").unlink()
    assert same(out, alone)


def process_of_rank(rank: int, launcher: int) -> int:
    """The id of the process that torchrun started as the rank-th."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}\0" in (folder / "environ").read_text():
                return int(folder.name)
        except (OSError, IndexError):
            continue
    raise ProcessLookupError(f"torchrun has no process of rank {rank}")
