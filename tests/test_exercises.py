"""The exercises for a class: the solutions pass their checks, and a stub fails with a sentence."""

import os
import re
import subprocess
import sys

import pytest

from tests.exercises import solutions, test_checks
from tests.small import ROOT


def checks(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_solutions_pass_their_checks():
    done = checks("tests/exercises", NANOCAL_SOLUTIONS="1")
    assert done.returncode == 0, done.stdout
    assert "....." in done.stdout


def test_an_unwritten_exercise_says_where_to_write_it():
    done = checks("tests/exercises", "-k", "1")
    assert done.returncode == 1 and "write exercise_1 in tests/exercises/stubs.py" in done.stdout


def test_the_projects_own_tests_do_not_run_the_exercises():
    done = checks("--collect-only", "-q", "tests", "--ignore-glob", "tests/test_*.py")  # what else tests/ holds
    assert "exercise" not in done.stdout


@pytest.mark.parametrize(
    ("exercise", "wrong", "says"),
    [
        ("1", "places[None, :] < places[:, None]", "a token of the system prompt sees itself"),
        ("1", "places[None, :] >= places[:, None]", "nobody may see what is still to come|must see nothing"),
        ("2", "block.o_proj.weight) if 0 else (block.v_proj.weight", "the block still changes what it reads"),
        ("2", "block.o_proj.weight); torch.nn.init.zeros_(block.v_proj.weight", "the attention part gets no gradient"),
        ("2", "block.v_proj.weight", "but the paper has W_O and W_D zero"),
        ("3", "(W + scale * B @ A).T", "must have the shape of W"),
        ("3", "W + B @ A", "where is the scale"),
        ("4", "model.requires_grad_(True)", "the backbone still learns"),
        ("5", "No list, please: one sentence.", "the message must hold the question"),
        ("5", "{question}", "the rule held"),
    ],
)
def test_a_usual_mistake_is_told_in_words(exercise, wrong, says, monkeypatch):
    source = (ROOT / "tests/exercises/solutions.py").read_text()
    rights = {"1": "places[None, :] <= places[:, None]", "2": "block.o_proj.weight", "3": "W + scale * B @ A"}
    rights |= {"4": "model.requires_grad_(False)", "5": "No list, please: one sentence. {question}"}
    right = rights[exercise]
    assert source.count(right) == 1
    names: dict = {}
    exec(source.replace(right, wrong), names)  # noqa: S102, our own file with one mistake in it
    monkeypatch.setattr(test_checks, "written", solutions)
    monkeypatch.setattr(solutions, f"exercise_{exercise}", names[f"exercise_{exercise}"])
    check = next(getattr(test_checks, name) for name in dir(test_checks) if name.startswith(f"test_exercise_{exercise}"))
    with pytest.raises(pytest.fail.Exception) as error:
        check()
    assert re.search(says, str(error.value))
