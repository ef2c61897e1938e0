"""README.md: its tables are counted from kept replies, its line counts are true, its links lead somewhere, its commands run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.hierarchy.prepare import prepare_if_needed
from results import tables
from tests.small import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if re.match(r"([A-Z_]+=\S+ )?python |pip |torchrun |for |grep ", line)]


@pytest.mark.parametrize(
    ("table", "page"),
    [(tables.default, "README.md"), (tables.methods, "README.md"), (tables.costs, "results/default/README.md"),
     (tables.words, "results/default/README.md"),
     (tables.trials, "results/default/README.md"), (tables.rivals, "results/rivals/README.md")],
)  # fmt: skip
def test_a_table_is_what_the_kept_replies_give(table, page):
    assert table() in (ROOT / page).read_text(encoding="utf-8")


def test_the_line_counts_are_those_of_the_files():
    rows = re.findall(r"^\| (\[.*?) \| ([\d +]+) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for names, counts in rows:
        files = []
        for name in re.findall(r"\]\((.*?)\)", names):
            path = ROOT / name
            files += path.glob("*.py") if path.is_dir() else [path]
        lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in files if file.stat().st_size]
        assert sorted(map(int, counts.split(" + "))) == sorted(lines), names


def test_every_link_into_the_repository_leads_somewhere():
    links = re.findall(r"\]\((?!https?://)(.*?)\)", README)
    assert len(links) > 10 and all((ROOT / link).exists() for link in links)


def test_the_commands_are_found():
    assert len(COMMANDS) > 20


def test_it_can_be_read_in_a_quarter_of_an_hour():
    prose = re.sub(r"^```\n.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(README.splitlines()) <= 260 and sum(bool(re.search(r"\w", word)) for word in prose.split()) <= 2_800


# ----------------------------------------------------------------------------------------------------------------------
# the commands, as they stand there, in a copy of the checkout; what is called python adds what makes them short

PYTHON = """#!{python}
import os, sys
script = sys.argv[2] if sys.argv[1] == "-m" else sys.argv[1]
train = ["--base", "{tiny}", "--steps", "2", "--eval_limit", "1", "--batch_tokens", "640", "--dtype", "fp32"]
short = dict.fromkeys(["data.sft.prepare", "tests.bench", "tests.gpu"], ["--help"]) | {{"train.py": train}}
short |= {{"sample.py": ["--max_new_tokens", "2"], "eval.py": ["--limit", "1", "--max_new_tokens", "2"], "pytest": ["--collect-only"]}}
short |= {{"tests.plan": ["--base", "{tiny}"]}}
if script in ("sample.py", "eval.py") and "--adapter" not in sys.argv:
    short[script] += ["--base", "{tiny}"]
tasks = ["--tasks", "hierarchy"] if set(sys.argv) & {{"all", "ifeval,mmlu"}} else []  # what others need is tested elsewhere
os.execv("{python}", ["{python}", *sys.argv[1:], *short.get(script, []), *tasks])
"""
TORCHRUN = """#!/bin/bash
shift 2
exec {python} -m torch.distributed.run --standalone --nproc_per_node 2 --no-python python "$@"
"""


@pytest.fixture(scope="module")
def checkout(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare_if_needed()
    folder = tmp_path_factory.mktemp("readme") / "nanocal"
    rest = shutil.ignore_patterns(".*", "checkpoints", "out", "__pycache__", "*.tokens", "*.states")
    shutil.copytree(ROOT, folder, ignore=rest)
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    for data in ("sft", "my_folder"):
        (folder / "data" / data).mkdir(exist_ok=True)
        for name in ("train.jsonl", "val.jsonl"):
            shutil.copy(folder / "data" / "hierarchy" / "val.jsonl", folder / "data" / data / name)
    shutil.move(folder / "data" / "my_folder", folder)
    (folder / "bin").mkdir()
    for name, text in (("python", PYTHON), ("torchrun", TORCHRUN), ("pip", "#!/bin/bash\n")):
        (folder / "bin" / name).write_text(text.format(python=sys.executable, tiny=tiny))
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)  # in the README's order: a later one reads what an earlier one wrote
def test_a_command_runs_as_it_is_printed(command, checkout):
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-e", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
