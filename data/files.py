"""The one place that reads and writes files: JSON, JSONL, what tells a file from a changed one, a run's directory."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"


# --- reading ----------------------------------------------------------------------------------------------------------


def read_json(file: Path) -> dict:
    """The object in a JSON file. ValueError if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): get that file again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object: get that file again")
    return content


def json_lines(file: Path, lines: Iterable[bytes] | None = None) -> Iterator[tuple[str, object]]:
    """The place, for an error, and the content of every line of a file that is not blank; lines: the file's, where it
    is not just to be opened. ValueError names a damaged one."""
    with nullcontext(lines) if lines is not None else file.open("rb") as source:
        for number, line in enumerate(source, start=1):
            place = f"{file} line {number}"
            try:
                record = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place} is not valid JSON ({error}): mend or delete it") from None
            if line.strip():
                yield place, record


def read_jsonl(file: Path) -> list[dict]:
    """The records of a JSONL file. ValueError names the line that is damaged."""
    return [record for _, record in json_lines(file)]


def read_published(file: Path, make: Callable[[dict], object]) -> list:
    """What make makes of every record of a downloaded JSONL file. ValueError names a record of which it can't."""
    made = []
    for place, record in json_lines(file):
        try:
            made.append(make(record))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is not of the published form ({error!r}): delete the file and run this again") from None
    if not made:
        raise ValueError(f"{file} is empty: delete it and run this again")
    return made


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What tells files from others and from changed ones, without reading them: path, size in bytes, time in ns."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def file_hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# --- writing ----------------------------------------------------------------------------------------------------------


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes beside and renames, so that the file is never half there. OSError says which file, and why not."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{file} can't be written ({error.strerror}): mend that, and run this again") from None


def write_json(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=1, default=str) + "\n")


def write_jsonl(file: Path, records: Iterable[dict]) -> None:
    write_whole(file, "".join(json.dumps(record) + "\n" for record in records))


def write_examples(folder: Path, examples: list[dict]) -> list[dict]:
    """Writes folder/examples.jsonl, a line an example; returns the examples."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "examples.jsonl", examples)
    return examples


def end_with_a_line(file: Path) -> None:
    """Takes a last line off that was being written when a run was killed."""
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def keep_lines(file: Path, n: int) -> TextIO:
    """The file, opened to write more behind its first n lines; the rest is dropped."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:n] if file.exists() else []
    if len(lines) < n:
        raise ValueError(f"{file} has {len(lines)} lines of {n}: delete {file.parent} and start again")
    write_whole(file, "".join(lines))
    return file.open("a", encoding="utf-8")


def run_prepare(prepare: Callable[[], list[dict]], folder: Path) -> None:
    """What `python -m data.TASK.prepare` does."""
    try:
        print(f"{len(prepare()):,} examples in {folder / 'examples.jsonl'}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))


# --- a run's directory ------------------------------------------------------------------------------------------------


def check_directory(out: Path, flags: dict, go_on: bool) -> dict:
    """Whether a run with these flags may use the directory out, where runs keep flags.json, and a complete training
    results.json; go_on: it may go on with a run of the same flags that is there. Returns the flags of that run, or
    these again if there is none. ValueError says what is in the way."""
    there = {file.name for file in out.iterdir() if file.suffix != ".part"} if out.is_dir() else set()
    if out.is_file() or (there and "flags.json" not in there):
        raise ValueError(f"{out} already holds {min(there, default='a file')}, which is of no run: give another --out")
    if "results.json" in there:
        raise ValueError(f"{out} already holds a run, a complete one: give another --out, or delete it")
    if not there:
        return flags
    if not go_on:
        raise ValueError(f"{out} already holds a run: go on with --resume, give another --out, or delete it")
    started = read_json(out / "flags.json")
    if different := [name for name in flags if flags[name] != started.get(name)]:
        names = ", ".join(f"--{name}" if name != "weights" else name for name in different)
        raise ValueError(f"the run in {out} was started with another {names}: give the same, or another --out")
    return started
