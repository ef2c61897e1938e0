"""
Make a corpus of general conversations for plain SFT from public files: `python -m data.sft.prepare`.

50,000 of them go to train.jsonl and, one in a hundred, val.jsonl; sources.json counts where they come from. Left out is
what repeats another conversation, or 13 words of a benchmark's prompts (long_ifeval's are sys_ifeval's, and filler).

--from FILE … takes files that are at hand instead, JSONL or a JSON list, or .gz of these, of records like
    {"messages": [{"role": "user", "content": "…"}, …]}
    {"conversations": [{"from": "human", "value": "…"}, …]}     and, if need be, "system" and "tools"
    {"instruction": "…", "input": "…", "output": "…"}           or "response" for "output"
"""

import argparse
import errno
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import download as net
from data.download import download
from data.files import claim, read_records, write_json
from data.glaive import prepare as glaive
from data.glaive.score import TAG, parse_call
from data.gsm8k.prepare import ANSWER
from data.gsm8k.prepare import URL as GSM8K_TEST
from data.sft.overlap import benchmark_grams, overlaps, words_of

HERE = Path(__file__).parent
TOTAL = 50_000
# our choice: how many of 50,000 a source gives, its licence, and where it is on the Hub, or elsewhere
SOURCES = {
    "SystemChat-1.1": (10_000, "Apache-2.0", "abacusai/SystemChat-1.1/resolve/main/SystemConversations.jsonl"),
    "Dolly-15k": (8_000, "CC-BY-SA-3.0", "databricks/databricks-dolly-15k/resolve/main/databricks-dolly-15k.jsonl"),
    "GSM8K": (5_000, "MIT", GSM8K_TEST.replace("test.jsonl", "train.jsonl")),
    "Glaive-v2": (5_000, "Apache-2.0", glaive.URL.split("/datasets/")[1]),
    # the last one also gives what the others lack; of its 986 MB the beginning is read, since its rows come mixed
    "SlimOrca": (22_000, "MIT", "Open-Orca/SlimOrca/resolve/main/oo-labeled_correct.gpt4.sharegpt.jsonl"),
}
SHA256 = {"GSM8K": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"}

LONGEST = 8_000  # our choice: characters of a conversation
VALIDATION = 0.01
DROPS = ("shape", "empty turn", "length", "duplicate", "overlap")
COLUMNS = ("read", "kept", "with system", *DROPS)

ROLES = {"system": "system", "gpt": "assistant", "assistant": "assistant", "function_call": "assistant"}
# our choice: nobody vouches for what a tool says, so that it counts no more than the user
ROLES |= dict.fromkeys(("user", "human", "function", "observation"), "user")


# --- records ----------------------------------------------------------------------------------------------------------


def read_source(name: str, folder: Path) -> Iterator[tuple[str, object]]:
    """The records of a public source. Raises what download raises."""
    address = SOURCES[name][2]
    url = address if "://" in address else f"{net.HUB}/datasets/{address}"
    # the benchmark of function calls is made from the same file as the training data
    path = (folder.parent / "glaive" if name == "Glaive-v2" else folder) / "raw" / url.rsplit("/", 1)[-1]
    try:
        yield from read_records(download(url, path, SHA256.get(name)))
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        if error.errno:  # not the server's answer: something is wrong on this disk
            raise
        hint = "or take files that are at hand: $NANOCAL_MIRROR, or --from FILE …"
        raise type(error)(f"{error} ({hint})") from None


def read_turns(record: dict) -> list[tuple[str, str | None]]:
    """Who says what in a record of any of the schemas. KeyError, TypeError, … for another one."""
    if "chosen" in record:
        raise ValueError("it compares replies, where this wants one")
    if record.get("train_on", "last") != "last":
        raise ValueError('"train_on" can only be "last"')
    if "messages" in record:
        return [(message["role"], message["content"]) for message in record["messages"]]
    if "conversations" in record:
        turns = [(turn["from"], turn["value"]) for turn in record["conversations"]]
        system = [record.get("system"), turns.pop(0)[1] if turns and turns[0][0] == "system" else None]
        if record.get("tools"):
            system.append(glaive.split({"conversations": [], "tools": record["tools"]})[0])
        return [("system", "\n".join(filter(None, system))), *turns]
    if "chat" in record:
        system, turns = glaive.split(record)
        return [("system", system), *turns]
    if "instruction" in record:
        context = record.get("input") or record.get("context")
        request = "\n\n".join([record["instruction"], context] if context else [record["instruction"]])
        answer = record["output"] if "output" in record else record["response"]
        return [("system", record.get("system")), ("user", request), ("assistant", answer)]
    if not ANSWER.search(record["answer"]):
        raise ValueError("the solution has no #### before its answer")
    # the data set's own notes for a calculator, <<48/2=24>>, and its last line, #### 24
    solution = re.sub(r"<<[^>]*>>", "", ANSWER.sub(lambda match: f"The answer is {match[1]}.", record["answer"]))
    return [("user", record["question"]), ("assistant", solution)]


def make_messages(turns: list[tuple[str, str | None]]) -> tuple[list[dict], str | None]:
    """The conversation up to its last reply, and why it can't stay, if so. TypeError for a text that is none."""
    messages = []
    for speaker, text in turns:
        text = "" if text is None else text
        if not isinstance(text, str):
            raise TypeError("a text is no string")
        if ROLES.get(speaker) == "assistant" and (TAG in text or speaker == "function_call"):
            call = parse_call(text)
            if call is None or not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
                return [], "shape"
            text = f"{TAG} {json.dumps(call, ensure_ascii=False)}"
        elif speaker in ("function", "observation"):
            text = f"FUNCTION RESPONSE: {text}"
        if speaker != "system" or text.strip():  # an empty system message is none
            messages.append({"role": ROLES.get(speaker), "content": text})
    if messages and messages[-1]["role"] == "user":
        messages.pop()
    roles = [message["role"] for i, message in enumerate(messages) if i or message["role"] != "system"]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        return messages, "shape"
    if not all(message["content"].strip() for message in messages):
        return messages, "empty turn"
    return messages, "length" if sum(len(message["content"]) for message in messages) > LONGEST else None


# --- the corpus -------------------------------------------------------------------------------------------------------


def take(records: Iterator[tuple[str, object]], wanted: int, seen: set[str], grams: np.ndarray, name: str,
         file: Path) -> dict[str, int]:  # fmt: skip
    """Writes the first `wanted` conversations that can stay to `file`, adds their texts' hashes to `seen`, and counts."""
    counts = dict.fromkeys(COLUMNS, 0)
    with file.open("w", encoding="utf-8", newline="\n") as out, tqdm(desc=name, total=wanted, leave=False) as bar:
        while counts["kept"] < wanted and (item := next(records, None)):
            place, record = item
            try:
                messages, reason = make_messages(read_turns(record))
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                what = f"{place} is no conversation of a known form ({error!r})"
                raise ValueError(f"{what}: python -m data.sft.prepare --help shows them") from None
            if reason is None:
                words = [words_of(message["content"]) for message in messages]
                key = blake2b(np.concatenate(words).tobytes(), digest_size=8).hexdigest()
                if key in seen:
                    reason = "duplicate"
                elif any(overlaps(own, message["role"], grams) for own, message in zip(words, messages)):
                    reason = "overlap"
            counts["read"] += 1
            counts[reason or "kept"] += 1
            if reason is None:
                seen.add(key)
                counts["with system"] += messages[0]["role"] == "system"
                learned = {"train_on": record["train_on"]} if "train_on" in record else {}  # train.py heeds it
                out.write(json.dumps({"messages": messages, "source": name, **learned}) + "\n")
                bar.update()
    return counts


def deal(kept: list[Path], folder: Path, seed: int) -> None:
    """Shuffles the conversations of the files in `kept` into folder/train.jsonl and folder/val.jsonl."""
    places = []  # (file, offset): the texts stay on the disk
    for file in kept:
        offset = 0
        with file.open("rb") as lines:
            for line in lines:
                places.append((file, offset))
                offset += len(line)
    if len(places) < 2:
        raise ValueError(f"conversations that can stay: {len(places)}, too few for two files: give others with --from")
    random.Random(seed).shuffle(places)
    first = max(1, round(VALIDATION * len(places)))
    with ExitStack() as stack:
        lines = {file: stack.enter_context(file.open("rb")) for file in kept}
        for name, chosen in (("val", places[:first]), ("train", places[first:])):
            with (folder / f"{name}.jsonl.part").open("wb") as out:
                for file, offset in chosen:
                    lines[file].seek(offset)
                    out.write(lines[file].readline())
    for name in ("val", "train"):
        (folder / f"{name}.jsonl.part").replace(folder / f"{name}.jsonl")


def prepare(folder: Path = HERE, files: list[Path] | None = None, n: int = TOTAL, seed: int = 0,
            data: Path | None = None) -> dict:  # fmt: skip
    """Writes train.jsonl, val.jsonl and sources.json to `folder`, from the public sources or from `files`, and returns
    what is in sources.json. Benchmarks are looked for in `data`, else beside `folder`. Raises what download raises, and
    ValueError for a record of an unknown form."""
    if n < 2:
        raise ValueError(f"--n is {n}: it must be at least 2, one for each of the two files")
    if missing := [file for file in files or [] if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is no file: give --from files of conversations")
    try:
        with claim(folder):
            (folder / "raw").mkdir(exist_ok=True)
            return build(folder, list(dict.fromkeys(files or [])), n, seed, data or folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(f"the disk is full: make room for {folder} and run this again") from None
        raise


def build(folder: Path, files: list[Path], n: int, seed: int, data: Path) -> dict:
    """What prepare() does, once its arguments are in order."""
    grams, unchecked = benchmark_grams(data)
    counts: dict[str, dict] = {}
    seen: set[str] = set()
    kept = []
    for number, name in enumerate(map(str, files or SOURCES)):
        wanted = n - sum(source["kept"] for source in counts.values())
        if not files and name != list(SOURCES)[-1]:
            wanted = n * SOURCES[name][0] // TOTAL
        records = read_records(Path(name)) if files else read_source(name, folder)
        kept.append(folder / "raw" / f"kept-{number}.jsonl")
        counts[name] = take(records, wanted, seen, grams, Path(name).name, kept[-1])
    deal(kept, folder, seed)
    licences = {name: "" if files else SOURCES[name][1] for name in counts}
    report = {"seed": seed, "sources": {name: {"licence": licences[name], **counts[name]} for name in counts}}
    report["not checked"] = unchecked
    write_json(folder / "sources.json", report)
    for file in kept:
        file.unlink()
    return report


def table(report: dict) -> str:
    """The report as Markdown."""
    rows = [[name, *source.values()] for name, source in report["sources"].items()]
    sums = [sum(column) for column in zip(*(row[2:] for row in rows))]
    lines = [["source", "licence", *COLUMNS], ["---", "---", *["---:"] * len(COLUMNS)], *rows, ["all", "", *sums]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    instead = "instead of the sources: in this order, until there are --n"
    parser.add_argument("--from", dest="files", type=Path, nargs="+", metavar="FILE", help=instead)
    parser.add_argument("--out", type=Path, help="a folder for the files, which --from needs (data/sft)")
    parser.add_argument("--n", type=int, default=TOTAL, help="conversations in all (default: 50,000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another order and validation set")
    args = parser.parse_args()
    try:
        if args.files and not args.out:
            raise ValueError("--from makes a corpus of your own: give --out, a folder for it, which train.py --data takes")
        report = prepare(args.out or HERE, args.files, args.n, args.seed, HERE.parent)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(table(report))
    for name, reason in report["not checked"].items():
        print(f"not checked: {name} ({reason})")
