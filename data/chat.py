"""Text to token ids and back, and conversations to ids with a role beside every id.

The roles say who speaks: the loss is where ASSISTANT is, the anchor is where SYSTEM is. Nobody may forge them: ids are
built piece by piece from `messages`, content is encoded as plain text whatever it spells, nothing is parsed back.

    python -m data.chat --system "Start every reply with [maple]." --user "Hi"      what the model is told, and who sees whom
"""

import base64
import itertools
import json
import math
import re
import unicodedata
from pathlib import Path

import regex  # comes with tiktoken
import tiktoken

from data.files import read_json

TEMPLATE, SYSTEM, USER, ASSISTANT = 0, 1, 2, 3
SPEAKERS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}

# the control tokens that end a reply, of all families
STOPS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

# where a checkpoint has no template: what its family's says, by the first of these tokens that the vocabulary has
KNOWN_TEMPLATES = {
    "<think>": "<think>",  # Qwen3: no default system text, but an empty think block
    "<repo_name>": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>",
    # our choice: Qwen2.5's text for Qwen2 as well
    "<|im_start|>": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."
    " You are a helpful assistant.<|im_end|>",
    "<|eom_id|>": "Cutting Knowledge Date: December 2023",  # Llama-3.1 and later; Llama-3 has neither
}

# how text is cut into pieces; no token reaches from one piece into the next
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Byte-level BPE on tiktoken; `Tokenizer.from_pretrained(directory)` makes one.

    special: every control or added token and its id; vocab_size: the highest id + 1; stop_ids: what ends a reply."""

    def __init__(self, vocabulary: dict[int, bytes], order: list[int], special: dict[str, int], pattern: str, nfc: bool,
                 template: str | None):  # fmt: skip
        """vocabulary: what every id spells; order: the ids that text can become, in the order of their merges; pattern
        cuts text into pieces; nfc: text is normalised first; template: the chat template, None for the family's known."""
        self.vocabulary = vocabulary | {i: token.encode() for token, i in special.items()}
        self.order, self.special, self.pattern, self.nfc = order, special, pattern, nfc
        # tiktoken wants ids in merge order: it gets places in `order`, and encode() turns them into ids
        ranks = {vocabulary[i]: rank for rank, i in enumerate(order)}
        self.bpe = tiktoken.Encoding("nanocal", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.missing = bytes(b for b in range(256) if bytes([b]) not in ranks)
        self.vocab_size = max(self.vocabulary) + 1
        self.stop_ids = [special[token] for token in STOPS if token in special]
        if template is None:
            template = next((known for token, known in KNOWN_TEMPLATES.items() if token in special), "")
        self.read_template(template)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, else Llama-3's tokenizer.model, and the chat template of a checkpoint directory."""
        path = Path(path)
        try:
            template = find_template(path)
            if (path / "tokenizer.json").is_file():
                return cls(*read_tokenizer_json(path / "tokenizer.json"), template)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"the tokenizer files in {path} are damaged ({error!r}): download them again") from None
        if (path / "tokenizer.model").is_file():
            # our choice: Llama-3 and 3.1 share this file; where no template tells which it is, no dates are written
            return cls(*read_tokenizer_model(path / "tokenizer.model"), template or "")
        raise FileNotFoundError(f"{path} has no tokenizer.json or tokenizer.model: give a checkpoint's directory")

    def read_template(self, template: str) -> None:
        """Finds in a chat template what it adds to the messages; the template itself is never run."""
        # a literal text alone counts: no braces of jinja, no closing quote with a + or ~ behind it
        text = re.search(r"""<\|im_start\|>system(?:\\n|\n)((?:(?!['"]\s*[+~])[^{}])+?)<\|im_end\|>""", template)
        self.default_system = text[1].replace("\\n", "\n").replace("\\'", "'") if text else ""
        knowledge = re.search(r"Cutting Knowledge Date: ([\w ]+)", template)
        today = re.search(r'date_string = "(\d[\w ]+)"', template)
        # our choice: 3.2's template asks for today's date and falls back on this one; we always do, so that runs repeat
        today = today[1] if today else "26 Jul 2024"
        self.dates = f"Cutting Knowledge Date: {knowledge[1]}\nToday Date: {today}\n\n" if knowledge else ""
        self.thinks = "<think>" in template and "<think>" in self.special

    def encode(self, text: str) -> list[int]:
        """Plain text to ids. Bytes that the vocabulary has no token for are left out, as `tokenizers` does."""
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            where = f"{text[error.start]!r} at position {error.start}"
            raise ValueError(f"the text has a lone surrogate, {where}, which is no character: remove it") from None
        if len(data.translate(None, self.missing)) == len(data):
            return [self.order[rank] for rank in self.bpe.encode_ordinary(text)]
        # tiktoken panics at such bytes: cut the pieces here, and give it each without them
        pieces = [match[0].encode().translate(None, self.missing) for match in regex.finditer(self.pattern, text)]
        return [self.order[rank] for piece in pieces if piece for rank in self.bpe._encode_single_piece(piece)]

    def decode(self, ids: list[int]) -> str:
        """Ids to text: control tokens as they are spelled, bytes that are no UTF-8 as U+FFFD."""
        try:
            return b"".join(self.vocabulary[int(i)] for i in ids).decode(errors="replace")
        except KeyError as error:
            raise ValueError(f"token id {error} is not in the vocabulary of {self.vocab_size} ids") from None


def unsupported(file: Path, what: str) -> ValueError:
    """The error for what a tokenizer file asks for and we don't have."""
    return ValueError(f"{file}: {what} is not supported: use a Llama-3, Qwen or SmolLM2 checkpoint")


def find_template(path: Path) -> str | None:
    """The chat template of a checkpoint directory, or None where it has none."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if not (path / "tokenizer_config.json").is_file():
        return None
    template = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def read_tokenizer_json(file: Path) -> tuple[dict[int, bytes], list[int], dict[str, int], str, bool]:
    """What Tokenizer() takes, out of Hugging Face's tokenizer.json; what we don't know in it is refused by name."""
    spec = read_json(file)
    model, normalizer = spec.get("model") or {}, spec.get("normalizer") or {}
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or not spec.get("pre_tokenizer"):
        raise unsupported(file, "what is no byte-level BPE (Llama 2's SentencePiece, for one)")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise ValueError(f"{file} has no vocabulary or no merges: download it again")
    for name, value in model.items():
        if value and name not in ("type", "vocab", "merges", "ignore_merges", "unk_token", "fuse_unk"):
            raise unsupported(file, f"the model's option {name} = {value!r}")
    if normalizer.get("type", "NFC") != "NFC":
        raise unsupported(file, f"the normalizer {normalizer['type']}")

    # a token is spelled in GPT-2's alphabet: printable bytes as they are, the other 68 from U+0100 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}

    def to_bytes(token: str) -> bytes:
        return bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode()

    data = {token: to_bytes(token) for token in model["vocab"]}
    special = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    ids = {data[token]: i for token, i in model["vocab"].items() if token not in special}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    try:
        merges = {(data[left], data[right]): rank for rank, (left, right) in enumerate(pairs)}
    except KeyError as error:
        raise ValueError(f"{file}: a merge names {error}, which is not in the vocabulary") from None
    if model.get("unk_token") and not all(bytes([b]) in ids for b in range(256)):
        raise unsupported(file, f"unk_token = {model['unk_token']!r} where bytes have no token")
    order = merge_order(ids, merges, model.get("ignore_merges", False), file)
    vocabulary = {i: data[token] for token, i in model["vocab"].items()}
    return vocabulary, order, special, split_pattern(spec["pre_tokenizer"], file), bool(normalizer)


def merge_order(
    ids: dict[bytes, int], merges: dict[tuple[bytes, bytes], int], ignore_merges: bool, file: Path
) -> list[int]:
    """The ids that text can become, in the order in which tiktoken must rank them.

    `tokenizers` joins the listed pairs alone, and takes a piece that is a token at once only with ignore_merges;
    tiktoken always takes it, and joins any neighbours whose bytes are a token. The two agree on the tokens that their
    own bytes merge into: no text joins those by another merge than their last. The rest no merge reaches: they are
    left out, or, with ignore_merges, kept for the pieces that they spell, unless tiktoken would join them elsewhere."""
    order = {}  # id -> rank of the merge that makes it
    for token, i in ids.items():
        parts, rank = [token[k : k + 1] for k in range(len(token))], -1
        while len(parts) > 1:
            ranks = [merges.get(pair, math.inf) for pair in itertools.pairwise(parts)]
            if min(ranks) == math.inf:
                break
            rank = min(ranks)
            at = ranks.index(rank)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 1:
            order[i] = rank
        elif ignore_merges and len(parts) == 2:
            raise unsupported(file, f"ignore_merges with the token {token!r}, which no merge makes,")
        elif ignore_merges:
            order[i] = math.inf
    return sorted(order, key=order.get)


def split_pattern(pre_tokenizer: dict, file: Path) -> str:
    """One pattern for the steps that cut text: ByteLevel (GPT-2), Digits + ByteLevel (SmolLM2), Split + ByteLevel."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    first, last = steps[0], steps[-1]
    match [step["type"] for step in steps], last.get("use_regex", True), last.get("add_prefix_space", False):
        case ["ByteLevel"], True, False:
            return GPT2_PATTERN
        case ["Digits", "ByteLevel"], True, False:
            # digits are cut out first, so white space before a digit ends its piece, and stays together there
            digits = r"\p{N}" if first.get("individual_digits") else r"\p{N}+"
            return GPT2_PATTERN.replace(r" ?\p{N}+", digits).replace(r"(?!\S)", r"(?![^\s\p{N}])")
        case ["Split", "ByteLevel"], False, False if first["behavior"] == "Isolated" and not first.get("invert"):
            if "Regex" in first["pattern"]:
                split = first["pattern"]["Regex"]
                return rf"{split}|(?:(?!{split})[\s\S])+"  # what lies between two matches is a piece, too
    raise unsupported(file, f"the pre-tokenizer {json.dumps(pre_tokenizer)}")


def read_tokenizer_model(file: Path) -> tuple[dict[int, bytes], list[int], dict[str, int], str, bool]:
    """What Tokenizer() takes, out of Llama-3's tokenizer.model: lines of base64 bytes and a rank, which is the id."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines()]
        vocabulary = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except ValueError:
        raise unsupported(file, "what is not in tiktoken's format (Llama 2's SentencePiece, for one)") from None
    if sorted(vocabulary) != list(range(128000)):
        raise ValueError(f"{file} has {len(vocabulary)} tokens where Llama-3 has 128000: download it again")
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id"}
    named |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = (f"reserved_special_token_{n}" for n in itertools.count())
    special = {f"<|{named.get(n) or next(reserved)}|>": 128000 + n for n in range(256)}
    return vocabulary, sorted(vocabulary), special, LLAMA3_PATTERN, False


def render(tok: Tokenizer, messages: list[dict], add_generation_prompt: bool = False) -> tuple[list[int], list[int]]:
    """A conversation as ids, and the role of every id; at the end, on request, the header of a reply to be written.

    Content carries its speaker, and the token that ends an assistant's turn is ASSISTANT, since a model must learn to
    write it. All else is TEMPLATE: headers, the default system text, dates, empty think blocks."""
    check_messages(messages)
    if "<|im_start|>" in tok.special:
        pieces = chatml_pieces(tok, messages, add_generation_prompt)
    elif "<|start_header_id|>" in tok.special:
        pieces = llama3_pieces(tok, messages, add_generation_prompt)
    else:
        raise ValueError("the vocabulary has the control tokens of neither ChatML nor Llama-3: use another checkpoint")
    ids = [i for piece, _ in pieces for i in piece]
    roles = [role for piece, role in pieces for _ in piece]
    return ids, roles


def check_messages(messages: list[dict]) -> None:
    if not messages:
        raise ValueError("the conversation is empty: give at least one message")
    for n, message in enumerate(messages, 1):
        has_text = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not has_text:
            raise ValueError(f"message {n} has no text: a message is {{'role': …, 'content': …}}, both strings")
        if message.get("role") not in list(SPEAKERS):
            raise ValueError(f"message {n} has the unknown role {message.get('role')!r}: use system, user or assistant")
        if message["role"] == "system" and n > 1:
            raise ValueError(f"message {n} is a system message: only the first message can be one")


def chatml_pieces(tok: Tokenizer, messages: list[dict], add_generation_prompt: bool) -> list[tuple[list[int], int]]:
    """Qwen, SmolLM2: <|im_start|>, the role, a newline, the content, <|im_end|>, a newline."""
    start, end, newline = tok.special["<|im_start|>"], tok.special["<|im_end|>"], tok.encode("\n")
    think = []
    if tok.thinks:  # Qwen3 answers at once where it finds its thoughts closed
        blank = tok.encode("\n\n")
        think = [tok.special["<think>"], *blank, tok.special["</think>"], *blank]

    def header(role: str) -> list[int]:
        return [start, *tok.encode(role), *newline]

    pieces = []
    # our choice: the template's default words are not the operator's, so that they are no SYSTEM
    if messages[0]["role"] != "system" and tok.default_system:
        pieces.append((header("system") + tok.encode(tok.default_system) + [end] + newline, TEMPLATE))
    for n, message in enumerate(messages, 1):
        speaker, content = SPEAKERS[message["role"]], message["content"]
        pieces.append((header(message["role"]), TEMPLATE))
        if tok.thinks and speaker == ASSISTANT:  # a reply's thoughts are shown in the last one alone
            (thoughts, _, answer), last = content.rpartition("</think>"), n == len(messages)
            if last and thoughts:
                raise ValueError(f"message {n} has thoughts, <think>…</think>: leave them out, here replies have none")
            if last:
                pieces.append((think, TEMPLATE))
            if last or thoughts:
                content = answer.lstrip("\n")
        pieces.append((tok.encode(content), speaker))
        pieces.append(([end], ASSISTANT if speaker == ASSISTANT else TEMPLATE))
        pieces.append((newline, TEMPLATE))
    if add_generation_prompt:
        pieces.append((header("assistant") + think, TEMPLATE))
    return pieces


def llama3_pieces(tok: Tokenizer, messages: list[dict], add_generation_prompt: bool) -> list[tuple[list[int], int]]:
    """Llama-3: <|begin_of_text|> once, then a header with the role, a blank line, the content, <|eot_id|>."""
    start, end, eot = (tok.special[token] for token in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))

    def header(role: str) -> list[int]:
        return [start, *tok.encode(role), end, *tok.encode("\n\n")]

    if messages[0]["role"] != "system" and tok.dates:
        messages = [{"role": "system", "content": ""}, *messages]  # 3.1 writes its dates in any case
    pieces = [([tok.special["<|begin_of_text|>"]], TEMPLATE)]
    for message in messages:
        speaker = SPEAKERS[message["role"]]
        pieces.append((header(message["role"]), TEMPLATE))
        if speaker == SYSTEM:
            pieces.append((tok.encode(tok.dates), TEMPLATE))
        pieces.append((tok.encode(message["content"].strip()), speaker))
        pieces.append(([eot], ASSISTANT if speaker == ASSISTANT else TEMPLATE))
    if add_generation_prompt:
        pieces.append((header("assistant"), TEMPLATE))
    return pieces


# --- to look at it ----------------------------------------------------------------------------------------------------

NAMES = {TEMPLATE: "template", SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}
COLORS = {TEMPLATE: 90, SYSTEM: 35, USER: 36, ASSISTANT: 32}  # of a terminal: gray, magenta, cyan, green


def picture(tok: Tokenizer, ids: list[int], roles: list[int], color: bool) -> str:
    """A line for each run of tokens of one role: whose it is, and its text."""
    lines = []
    for role, run in itertools.groupby(zip(ids, roles), key=lambda pair: pair[1]):
        line = f"{NAMES[role]:<11}{tok.decode([i for i, _ in run])!r}"
        lines.append(f"\x1b[{COLORS[role]}m{line}\x1b[0m" if color else line)
    return "\n".join(lines)


if __name__ == "__main__":
    import argparse
    import sys

    import torch

    from cal import attention_mask  # data/ knows no model; this program shows what one is told
    from data.download import SMOLLM2, checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=SMOLLM2, help="whose tokenizer and chat format (%(default)s)")
    parser.add_argument("--system", help="the system prompt")
    parser.add_argument("--user", default="Hi", help="the user's message (%(default)s)")
    parser.add_argument("--messages", type=Path, help='instead: a JSON file, {"messages": [{"role": …, "content": …}, …]}')
    args = parser.parse_args()
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": args.user}]
    try:
        messages = read_json(args.messages)["messages"] if args.messages else messages
        tok = Tokenizer.from_pretrained(checkpoint(args.base))
        ids, roles = render(tok, messages, add_generation_prompt=messages[-1]["role"] == "user")
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"data.chat: {error}")
    print(picture(tok, ids, roles, sys.stdout.isatty()))
    positions, mask = attention_mask(torch.tensor([roles]) == SYSTEM)  # (1, S), (1, T, S)
    print(f"\nwho sees whom: a row for each of {len(ids)} tokens, a column for each of {positions.shape[1]} of the system's\n")
    for i, row in zip(ids, mask[0].int().tolist()):
        print("".join(map(str, row)), repr(tok.decode([i])))
