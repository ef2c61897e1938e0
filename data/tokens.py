"""A JSONL file of conversations as token ids and roles, computed once, kept beside it, and read where they lie on the disk.

x.jsonl gets a folder x.KEY.tokens, one for each tokenizer and chat format: ids.bin (uint32) and roles.bin (uint8) of all
conversations one after the other, offsets.bin (int64: where each begins, and the end), and about.json.
"""

import hashlib
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from tqdm import tqdm

from data import chat
from data.chat import ASSISTANT, SYSTEM, TEMPLATE, Tokenizer, render
from data.files import file_hash, json_lines, read_json, write_json, write_whole

ARRAYS = {"ids": np.uint32, "roles": np.uint8, "offsets": np.int64}

Conversation = tuple[Tensor, Tensor, Tensor]  # ids, system, targets: (T,) each


def split(tok: Tokenizer, record: object) -> list[object]:
    """The records that a record is learned from: itself, but for Qwen3 one for each reply that is learned, ending
    there, since a reply must be learned behind what it will be generated behind, and only the last has its empty think
    block."""
    whole = isinstance(record, dict) and isinstance(record.get("messages"), list)
    if not tok.thinks or not whole or "train_on" in record:
        return [record]
    ends = [n for n, m in enumerate(record["messages"], 1) if isinstance(m, dict) and m.get("role") == "assistant"]
    return [{"messages": record["messages"][:n], "train_on": "last"} for n in ends] or [record]


def tokenize(tok: Tokenizer, record: object) -> tuple[list[int], list[int]]:
    """A conversation's ids and roles as training sees them: ASSISTANT on what is learned alone, so that with
    "train_on": "last" the replies before the last one are nobody's. ValueError: what is no conversation."""
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise ValueError('it has no list of messages: write {"messages": [{"role": …}]}')
    ids, roles = render(tok, record["messages"])
    if record.get("train_on", "last") != "last":
        raise ValueError(f'"train_on" is {record["train_on"]!r}: it can only be "last", or left out')
    if "train_on" in record and ASSISTANT in roles:
        end = len(roles) - roles[::-1].index(ASSISTANT)
        start = max((t for t in range(end) if roles[t] != ASSISTANT), default=-1) + 1
        roles = [TEMPLATE if t < start and role == ASSISTANT else role for t, role in enumerate(roles)]
    return ids, roles


class Conversations:
    """The conversations of a JSONL file, [i] giving ids, system and targets, (T,) each: those of at most max_tokens
    with something to learn. `dropped` counts the others, `silent` says that no conversation of the file has a reply,
    `lengths` and `learned` have the tokens and targets of each, and `with_system` counts those that have a system
    prompt. ValueError names a bad line."""

    def __init__(self, file: Path, tok: Tokenizer, max_tokens: int):
        self.folder, (self.ids, self.roles, self.offsets) = tokenized(file, tok)
        self.about = (self.folder / "about.json").read_text(encoding="utf-8")  # hashes of the text and of the arrays
        lengths = np.diff(self.offsets)

        def count(role: int) -> np.ndarray:
            """How many tokens of a role each conversation has."""
            if not len(lengths):  # reduceat can't sum nothing
                return lengths
            return np.add.reduceat(self.roles == role, self.offsets[:-1], dtype=np.int64)

        learned = count(ASSISTANT)
        self.chosen = np.nonzero((lengths <= max_tokens) & (learned > 0))[0]
        self.with_system = int((count(SYSTEM)[self.chosen] > 0).sum())
        self.lengths, self.learned = lengths[self.chosen].tolist(), learned[self.chosen].tolist()
        self.dropped, self.silent = len(lengths) - len(self.chosen), bool((learned == 0).all())

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> Conversation:
        start, end = self.offsets[self.chosen[i]], self.offsets[self.chosen[i] + 1]
        ids = torch.from_numpy(self.ids[start:end].astype(np.int64))
        roles = torch.from_numpy(self.roles[start:end].copy())
        # position t predicts token t + 1; -1 is no target
        targets = torch.full_like(ids, -1)
        targets[:-1] = ids[1:].where(roles[1:] == ASSISTANT, -1)
        return ids, roles == SYSTEM, targets


def tokenized(file: Path, tok: Tokenizer) -> tuple[Path, list[np.ndarray]]:
    """A JSONL file's folder and its three arrays; it is made where there is none, or one that is not of this text."""
    state = (tok.vocabulary, tok.order, tok.pattern, tok.nfc, tok.special, tok.default_system, tok.dates, tok.thinks)
    code = Path(chat.__file__).read_bytes() + Path(__file__).read_bytes()
    key = hashlib.sha256(code + repr(state).encode()).hexdigest()[:12]
    folder = file.with_name(f"{file.stem}.{key}.tokens")
    about = {"text": file_hash(file)}
    if not (arrays := read(folder, about)):
        if folder.exists():
            print(f"{folder} is not whole, or {file.name} has changed: it is tokenized again", file=sys.stderr)
        write(folder, file, tok, about)
        arrays = read(folder, about)
    if not arrays:
        raise OSError(f"{folder} changes while it is read: wait until no other run makes it, and run this again")
    return folder, arrays


def read(folder: Path, about: dict) -> list[np.ndarray] | None:
    """The arrays of a folder that is whole and of the text that `about` says; None otherwise."""
    try:
        if read_json(folder / "about.json") != {**about, "arrays": digest(folder)}:
            return None
        # an empty file can't be mapped
        arrays = [
            np.memmap(folder / f"{name}.bin", kind, "r") if (folder / f"{name}.bin").stat().st_size else np.zeros(0, kind)
            for name, kind in ARRAYS.items()
        ]
        return arrays
    except (OSError, ValueError):
        return None


def digest(folder: Path) -> str:
    """The hash of a folder's arrays: a damaged one is not to be learned from."""
    hashed = hashlib.sha256()
    for name in ARRAYS:
        hashed.update(bytes.fromhex(file_hash(folder / f"{name}.bin")))
    return hashed.hexdigest()


def write(folder: Path, file: Path, tok: Tokenizer, about: dict) -> None:
    """Tokenizes the file, conversation by conversation, into a folder that gets its name when it is whole."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")  # two runs may start together
    offsets = [0]
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        bar = tqdm(desc=f"tokenize {file.name}", leave=False, unit=" conversations", unit_scale=True)
        with bar, open(part / "ids.bin", "wb") as ids_file, open(part / "roles.bin", "wb") as roles_file:
            for place, record in json_lines(file):
                for learned in split(tok, record):
                    try:
                        ids, roles = tokenize(tok, learned)
                    except ValueError as error:
                        raise ValueError(f"{place}: {error}") from None
                    ids_file.write(np.array(ids, np.uint32).tobytes())
                    roles_file.write(bytes(roles))
                    offsets.append(offsets[-1] + len(ids))
                bar.update()
        np.array(offsets, np.int64).tofile(part / "offsets.bin")
        write_json(part / "about.json", {**about, "arrays": digest(part)})
        if not read(folder, about):  # another run may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
    except OSError as error:
        raise OSError(f"{folder} can't be written ({error.strerror or error}): mend that, and run this again") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- batches ----------------------------------------------------------------------------------------------------------


def make_batches(lengths: list[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices in batches of similar length, so that little is padding: the longest times their number is at most
    batch_tokens, unless a single conversation has more."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)  # which of the same length come together is chance
    order.sort(key=lambda i: lengths[i])
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and lengths[i] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def batches_of_step(step: int, n: int, accumulate: int, seed: int) -> list[int]:
    """Which of n batches a step takes; every epoch is a new shuffle. To resume, the step's number is enough."""
    chosen = []
    for position in range(step * accumulate, (step + 1) * accumulate):
        epoch, place = divmod(position, n)
        order = list(range(n))
        random.Random(f"{seed} {epoch}").shuffle(order)
        chosen.append(order[place])
    return chosen


def collate(conversations: list[Conversation], device: str, multiple: int = 1) -> Conversation:
    """ids, system and targets, (B, T) each, padded on the right, where causal attention sees no padding, to a T that is
    a multiple of `multiple`."""
    T = -(-max(len(ids) for ids, _, _ in conversations) // multiple) * multiple
    columns = []
    for column, fill in zip(zip(*conversations), (0, False, -1)):
        padded = torch.full((len(column), T), fill, dtype=column[0].dtype)
        for row, values in zip(padded, column):
            row[: len(values)] = values
        # pinned memory goes to the GPU while the CPU goes on
        columns.append((padded.pin_memory() if device.startswith("cuda") else padded).to(device, non_blocking=True))
    return tuple(columns)


# --- hidden states on the disk ----------------------------------------------------------------------------------------


@torch.no_grad()
def remembered(compute: Callable[[Tensor], Tensor], ids: Tensor, folder: Path, key: str) -> Tensor:
    """compute(ids), ids (B, T), read from the folder where it was computed before: one file for a whole batch, since last
    bits depend on its shape. key says what else the result depends on. OSError: there is no room."""
    name = hashlib.sha256(f"{key} {tuple(ids.shape)}".encode() + ids.cpu().numpy().tobytes()).hexdigest()
    file = folder / f"{name[:24]}.states"
    with suppress(OSError, SafetensorError, KeyError):  # not there, or damaged
        return load(file.read_bytes())["hidden"].to(ids.device)
    hidden = compute(ids)
    write_whole(file, save({"hidden": hidden.cpu()}))
    return hidden
