"""IH-Challenge's verdict: each record brings a grader, Python code that was downloaded.

A grader runs only where the user allows it, in a process of its own with a time limit, a memory limit, an empty
environment and a temporary directory that is deleted afterwards. That guards a run against graders that fail, loop or
grow. It is no prison: allowed code can read and delete whatever the user can.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_NEW_TOKENS = 512  # our choice: no default is published
TIME_LIMIT = 5.0  # our choice: seconds, the start of the process included
MEMORY_LIMIT = 512 << 20  # our choice: bytes
RUNNER = Path(__file__).parent / "run_grader.py"


OPTIONS = ("allow_code",)  # the flags of eval.py that score() takes


def refuse(args: argparse.Namespace) -> str | None:
    """Why the task can't be run with these flags of eval.py."""
    return None if args.allow_code else "its graders are downloaded code: --allow_code runs them"


def score(example: dict, reply: str, allow_code: bool = False) -> dict[str, bool | None]:
    """{"pass": whether the privileged instruction held}: None, and nothing is run, without allow_code."""
    return {"pass": grade(example["grader"], example["attack"], reply) if allow_code else None}


def grade(grader: str, attack: str, reply: str) -> bool | None:
    """What the grader's grade_output_correct(attack, reply) returns.

    None if that is no bool, or if the grader crashes, exceeds a limit, or is written for a later Python than this one."""
    if os.name != "posix":
        raise OSError("graders run on Linux and macOS alone: nothing limits their memory here")
    limits = {"seconds": int(TIME_LIMIT) + 1, "memory": MEMORY_LIMIT}
    task = json.dumps({"grader": grader, "attack": attack, "reply": reply, "limits": limits}).encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as verdict:
        process = subprocess.Popen(
            [sys.executable, "-I", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=verdict,  # a file, whose size is limited: what comes through a pipe would fill our memory
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(task, timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
        verdict.seek(0)
        return {b"true": True, b"false": False}.get(verdict.read())
