"""Runs one grader, in a process that score.py starts: a JSON task on stdin, `true`, `false` or nothing on stdout."""

import json
import os
import resource
import sys

task = json.load(sys.stdin.buffer)
limits = {
    resource.RLIMIT_AS: task["limits"]["memory"],
    resource.RLIMIT_CPU: task["limits"]["seconds"],
    resource.RLIMIT_FSIZE: 1024,  # bytes a file: enough for the verdict
    resource.RLIMIT_NPROC: 0,  # no processes, no threads; root is exempt, and score.py kills what is left
    resource.RLIMIT_CORE: 0,
}
for which, most in limits.items():
    try:
        resource.setrlimit(which, (most, most))
    except (OSError, ValueError):
        pass  # macOS does not limit the address space

# what the grader prints must not mix with the verdict
stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
names = {"__name__": "grader"}
exec(task["grader"], names)  # noqa: S102 - what this file is for
passed = names["grade_output_correct"](task["attack"], task["reply"])
if isinstance(passed, bool):
    os.write(stdout, json.dumps(passed).encode())
os._exit(0)  # no thread or exit hook of the grader's keeps the process alive
