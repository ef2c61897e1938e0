"""The one place that reads and writes files: JSON, JSONL, what tells a file from a changed one, a run's directory."""

import argparse
import ast
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows: nothing is held there
    fcntl = None

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"
LONGEST = 1 << 20  # characters that no record of a JSON list exceeds
GAP = re.compile(r"[\s,]*")  # what stands between two of its records


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


def read_jsonl(file: Path, whole: bool = False) -> list[dict]:
    """The records of a JSONL file; whole: without a last line that is still being written. ValueError names a bad line."""
    with file.open("rb") as lines:
        return [record for _, record in json_lines(file, (line for line in lines if not whole or line.endswith(b"\n")))]


def read_records(file: Path) -> Iterator[tuple[str, object]]:
    """The place, for an error, and the content of each record of a JSON list, which is read piece by piece, or of JSONL;
    either may be gzipped. ValueError names a damaged one."""
    decoder, place, number = json.JSONDecoder(), "its beginning", 0
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no file: give one with conversations")
    with file.open("rb") as content:
        opener = gzip.open if content.read(2) == b"\x1f\x8b" else open
    try:
        with opener(file, "rb") as lines:
            if b"[" not in lines.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]:
                lines.seek(0)
                for place, record in json_lines(file, lines):
                    yield place, record
                return
        with opener(file, "rt", encoding="utf-8-sig") as source:
            text = source.read(LONGEST)
            start = text.index("[") + 1
            while True:
                if len(text) - start < LONGEST:  # there may be less than a record left
                    text, start = text[start:] + source.read(LONGEST), 0
                start = GAP.match(text, start).end()
                if text.startswith("]", start):
                    return
                place = f"{file} record {(number := number + 1)}"
                record, start = decoder.raw_decode(text, start)
                yield place, record
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error):  # somewhere in the piece that was read last
        raise ValueError(f"{file} can't be read beyond {place}: get it anew") from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{place} is damaged: get the file anew") from None


def read_published(file: Path, make: Callable[[dict], object]) -> list:
    """What make makes of every record of a downloaded JSONL file. ValueError names a record of which it can't."""
    made = []
    for place, record in json_lines(file):
        try:
            made.append(make(record))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{place} is not of the published form ({error!r})"
            raise ValueError(f"{reason}: delete the file and run this again") from None
    if not made:
        raise ValueError(f"{file} is empty: delete it and run this again")
    return made


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What tells files from others and from changed ones, without reading them: path, size in bytes, time in ns."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def file_hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# --- what a number depends on -----------------------------------------------------------------------------------------


def source_hash(file: Path) -> str:
    """A hash of a list or of code. Of code its syntax tree counts, without docstrings: rewording changes no number."""
    if file.suffix != ".py":
        return file_hash(file)
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def code_of_results() -> dict[str, str]:
    """By name, the hashes of all code and lists that can change what a run of train.py or eval.py says."""
    code = ("model.py", "cal.py", "train.py", "sample.py", "eval.py", "data/chat.py", "data/tokens.py")
    sources = [*(ROOT / name for name in code), *sources_of("hierarchy")]
    return {str(file.relative_to(ROOT)): source_hash(file)[:16] for file in sources}


def sources_of(task: str) -> list[Path]:
    """The lists and the code in a task's folder."""
    return sorted(file for file in (ROOT / "data" / task).iterdir() if file.suffix in (".tsv", ".txt", ".py"))


def write_made(folder: Path, sources: list[Path], seed: int = 0) -> None:
    """Notes in folder/made.json from which lists and code, and from which seed, the data in the folder was made."""
    hashes = {str(file.relative_to(ROOT)): source_hash(file) for file in sources}
    write_json(folder / "made.json", {"seed": seed, "sources": hashes})


def is_fresh(folder: Path) -> bool:
    """Whether the data in the folder was made from the lists and the code of today, as far as it is made from any."""
    if not (folder / "made.json").is_file():
        return True
    with suppress(OSError, ValueError, LookupError, AttributeError):  # a source is gone, or the note is damaged
        return all(source_hash(ROOT / name) == h for name, h in read_json(folder / "made.json")["sources"].items())
    return False


# --- writing ----------------------------------------------------------------------------------------------------------


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes beside and renames, so that the file is never half there. OSError says which file, and why not."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        failure = OSError(f"{file} can't be written ({error.strerror}): mend that, and run this again")
        failure.errno = error.errno
        raise failure from None


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


def run_prepare(prepare: Callable[..., list[dict]], folder: Path, source: bool = False) -> None:
    """What `python -m data.TASK.prepare` does; source: its --from FILE takes the place of the download."""
    about = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if source:
        parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="instead of the download")
    try:
        print(f"{len(prepare(**vars(parser.parse_args()))):,} examples in {folder / 'examples.jsonl'}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))


# --- a run's directory ------------------------------------------------------------------------------------------------


def is_part(file: Path) -> bool:
    """Whether a run of ours was writing this (NAME.PID.part); nobody else's file is touched."""
    return re.search(r"\.\d+\.part$", file.name) is not None


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Holds a directory for this process alone, and takes away what dead ones have left half written. The system lets go
    of it when the process ends, however it does. OSError: another process holds it."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a directory")
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder if fcntl else os.devnull, os.O_RDONLY)
    try:
        try:
            if fcntl:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another run is at work in {folder}: wait until it is done, or give another --out") from None
        for part in filter(is_part, folder.iterdir()):
            part.unlink() if part.is_file() else shutil.rmtree(part)
        try:
            yield
        finally:
            with suppress(OSError):  # it stays if anything was written
                folder.rmdir()
    finally:
        os.close(handle)


def check_directory(out: Path, flags: dict, go_on: bool) -> dict:
    """Whether a run with these flags may use the directory out, where runs keep flags.json, and a complete training
    results.json; go_on: it may go on with a run of the same flags that is there. Returns the flags of that run, or
    these again if there is none. ValueError says what is in the way."""
    there = {file.name for file in out.iterdir() if not is_part(file)} if out.is_dir() else set()
    if there and "flags.json" not in there:
        raise ValueError(f"{out} already holds {min(there)}, which is of no run: give another --out")
    if "results.json" in there:
        raise ValueError(f"{out} already holds a run, a complete one: give another --out, or delete it")
    if not there:
        return flags
    if not go_on:
        raise ValueError(f"{out} already holds a run: go on with --resume, give another --out, or delete it")
    started = read_json(out / "flags.json")
    if different := [name for name in flags if flags[name] != started.get(name)]:
        names = ", ".join(f"--{name}" if name not in ("weights", "code") else name for name in different)
        if "code" in different:
            ours, theirs = flags["code"].items(), started.get("code", {}).items()
            names += f" ({', '.join(sorted({name for name, _ in ours ^ theirs}))})"
        raise ValueError(f"the run in {out} was started with another {names}: give the same, or another --out")
    return started
