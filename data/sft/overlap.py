"""Whether a text shares 13 words in a row with the prompts of a benchmark, which no training data should."""

import re
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import is_fresh, json_lines

DATA = Path(__file__).parent.parent
GRAM = 13  # words that, in a row, tell where a text comes from (arXiv 2005.14165, appendix C)
FREQUENT = 10  # our choice: what more prompts of a benchmark have in common is its scaffolding
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # no spaces part these words
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that makes one number of a gram; any large odd number will do


@lru_cache(maxsize=1 << 17)
def word_number(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")


def words_of(text: str) -> np.ndarray:
    """A text's words in lower case as 64-bit numbers, the same on any machine."""
    return np.array([word_number(word) for word in WORD.findall(text.lower())], np.uint64)


def grams_of(words: np.ndarray) -> np.ndarray:
    """A number for each GRAM words in a row, modulo 2^64; a shorter text is one gram, as a whole."""
    width = min(GRAM, len(words))
    grams = np.zeros(len(words) - width + 1 if width else 0, np.uint64)
    for i in range(width):
        grams = grams * BASE + words[i : i + len(grams)]
    return grams


def read_prompts(name: str, folder: Path) -> Iterator[list[str]]:
    """The system's and the user's texts of each of a benchmark's prompts. Prepares it where it is missing."""
    module = import_module(f"data.{name}.prepare")
    files = [folder / "examples.jsonl"]
    if name == "hierarchy":
        module.prepare_if_needed(folder)
        files = [folder / f"{part}.jsonl" for part in module.SETS if part in module.TESTS]
    elif not files[0].is_file() or not is_fresh(folder):
        module.prepare(folder)
    for file in files:
        for _, example in json_lines(file):
            conversations = [example.get("messages", []), *example.get("asks", [])]
            said = [m["content"] for messages in conversations for m in messages if m["role"] != "assistant"]
            yield said + example.get("turns", [])


def benchmark_grams(data: Path) -> tuple[np.ndarray, dict[str, str]]:
    """The sorted grams of all benchmarks, in the folders of `data`, and why some could not be read."""
    # long_ifeval's prompts are sys_ifeval's, and filler; own's are nobody else's
    names = sorted({file.parent.name for file in DATA.glob("*/score.py")} - {"long_ifeval", "own"})
    none = np.zeros(0, np.uint64)
    found, unchecked = [none], {}
    for name in tqdm(names, desc="benchmarks", leave=False):
        prompts = [none]
        try:
            for texts in read_prompts(name, data / name):
                words = [words_of(text) for text in texts]
                found += [grams_of(text) for text in words if len(text) < GRAM]
                long = [grams_of(text) for text in words if len(text) >= GRAM]
                prompts.append(np.unique(np.concatenate([none, *long])))
        except (ConnectionError, FileNotFoundError, PermissionError, ValueError) as error:
            unchecked[name] = str(error)
            continue
        grams = np.concatenate(prompts)
        grams.sort()
        frequent = grams[FREQUENT:][grams[FREQUENT:] == grams[:-FREQUENT]]  # the same FREQUENT places on
        found.append(np.setdiff1d(grams, frequent))
    # the largest number comes last, so that searchsorted never points behind it
    return np.unique(np.concatenate([*found, np.array([2**64 - 1], np.uint64)])), unchecked


def overlaps(words: np.ndarray, role: str, grams: np.ndarray) -> bool:
    """Whether a message has a gram of the benchmarks. A short reply may equal a short prompt: "2", or "apple"."""
    own = grams_of(words)
    return (role != "assistant" or len(words) >= GRAM) and bool((grams[np.searchsorted(grams, own)] == own).any())
