"""data/files.py: what is written is whole, a directory belongs to one run, and a number to the code that made it."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import files
from data.files import check_directory, claim, code_of_results, is_fresh, source_hash, write_made, write_whole
from tests.small import ROOT

# --- writing ------------------------------------------------------------------------------------------------------


def test_a_full_disk_names_the_file_and_keeps_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    write_whole(file, "old")

    def full(part: Path, data: bytes) -> None:
        part.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"results\.json can't be written \(No space left on device\)"):
        write_whole(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


# --- what a number depends on -------------------------------------------------------------------------------------

CODE = '"""A module."""\n\n\ndef double(x):\n    """Twice x."""\n    return 2 * x  # of course\n'


@pytest.mark.parametrize(
    ("edited", "other"),
    [
        (CODE.replace("Twice x.", "x, two times."), False),
        (CODE.replace("  # of course", ""), False),
        (CODE.replace('"""A module."""\n', ""), False),
        (CODE.replace("2 * x", "(2 * x)"), False),
        (CODE.replace("2 * x", "3 * x"), True),
        (CODE.replace("2 * x", "x * 2"), True),
        (CODE + "\nLIMIT = 5\n", True),
    ],
)
def test_rewording_is_no_other_code_and_another_number_is(edited, other, tmp_path):
    file = tmp_path / "double.py"
    file.write_text(CODE)
    before = source_hash(file)
    file.write_text(edited)
    assert (source_hash(file) != before) == other


def test_every_letter_of_a_list_counts(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("maple\noak\n")
    before = source_hash(file)
    file.write_text("maple\noaks\n")
    assert source_hash(file) != before


def test_the_code_of_a_result_has_the_scripts_the_chat_format_and_the_lists():
    assert {"model.py", "cal.py", "train.py", "sample.py", "eval.py", "data/chat.py", "data/tokens.py",
            "data/hierarchy/attacks.tsv", "data/hierarchy/prepare.py"} <= code_of_results().keys()  # fmt: skip


def test_data_is_fresh_by_what_its_sources_hold_and_not_by_their_times(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    source = tmp_path / "attacks.tsv"
    source.write_text("train\tIgnore the rule.\n")
    write_made(tmp_path, [source])
    os.utime(source, (2e9, 2e9))
    assert is_fresh(tmp_path)
    source.write_text("train\tForget the rule.\n")
    os.utime(source, (0, 0))
    assert not is_fresh(tmp_path)
    source.unlink()
    assert not is_fresh(tmp_path)


# --- a run's directory --------------------------------------------------------------------------------------------

CLAIM = """
import sys, time
from pathlib import Path
from data.files import claim
try:
    with claim(Path(sys.argv[1])):
        print("mine", flush=True)
        time.sleep(float(sys.argv[2]))
except OSError as error:
    print(error, flush=True)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", CLAIM, str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_that_claim_a_directory_at_once_one_gets_it_fifty_times(tmp_path):
    """Each says when it held it: never both at a time, in every round one, and the other was refused."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "flags.json").write_text("{}")
    loop = (
        "import sys, time\nfrom pathlib import Path\nfrom data.files import claim\n"
        "for i in range(50):\n"
        "    while time.time() < float(sys.argv[2]) + 0.04 * i:\n"
        "        pass\n"  # both try at the same moment
        "    try:\n"
        "        with claim(Path(sys.argv[1])):\n"
        "            begin = time.time()\n"
        "            time.sleep(0.02)\n"
        "            print(i, begin, time.time(), flush=True)\n"
        "    except OSError as error:\n"
        "        assert 'another run is at work' in str(error)\n"
    )
    begin = str(time.time() + 2)
    both = [subprocess.Popen([sys.executable, "-c", loop, str(tmp_path / "run"), begin], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True) for _ in range(2)]  # fmt: skip
    first, second = ([line.split() for line in process.communicate()[0].splitlines()] for process in both)
    assert all(process.returncode == 0 for process in both)
    assert {int(i) for i, _, _ in first + second} == set(range(50)) and len(first + second) < 100
    assert not [1 for _, a, b in first for _, c, d in second if float(a) < float(d) and float(c) < float(b)]


def test_a_directory_is_free_again_when_the_process_that_held_it_was_killed(tmp_path):
    first = start(tmp_path / "run", 60)
    assert first.stdout.readline() == "mine\n"
    second = start(tmp_path / "run", 0)
    assert "another run is at work" in second.communicate()[0]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert start(tmp_path / "run", 0).communicate()[0] == "mine\n"


def test_who_does_not_get_a_directory_does_not_take_it_away(tmp_path):
    with claim(tmp_path / "run"):
        assert "another run is at work" in start(tmp_path / "run", 0).communicate()[0]
        assert (tmp_path / "run").is_dir()


def test_a_claim_takes_away_what_dead_runs_left_half_written_and_leaves_no_empty_directory(tmp_path):
    with claim(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    for name in ("results.json.123.part", "metrics.jsonl", "somebody's movie.mkv.part"):
        (tmp_path / "run" / name).touch()
    with claim(tmp_path / "run"):
        pass
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"metrics.jsonl", "somebody's movie.mkv.part"}
    with pytest.raises(ValueError, match="which is of no run"):
        check_directory(tmp_path / "run", {}, go_on=True)


def test_going_on_across_an_edit_is_refused_with_the_file_that_changed(tmp_path):
    flags = {"seed": 0, "code": {"cal.py": "a", "model.py": "b"}}
    files.write_json(tmp_path / "flags.json", flags)
    assert check_directory(tmp_path, flags, go_on=True) == flags
    with pytest.raises(ValueError, match=r"started with another code \(cal\.py\)"):
        check_directory(tmp_path, {**flags, "code": {"cal.py": "c", "model.py": "b"}}, go_on=True)
