"""Make the examples of function calling: `python -m data.glaive.prepare`.

Glaive function calling v2 (glaiveai/glaive-function-calling-v2 on the Hub, Apache-2.0) holds 112,960 conversations in
271 MB. An example is a conversation up to its first call, and the model's task is this call.

With --from FILE the examples come from a file that is at hand: the published one, or a converted one, a JSON list (or
.gz of it) of {"conversations": [{"from": "human", "value": "…"}, …], "tools": "[…]"}.
"""

import json
import re
import sys
from itertools import takewhile
from pathlib import Path

from data.download import HUB, download
from data.files import read_records, run_prepare, write_examples
from data.glaive.score import TAG, parse_call

HERE = Path(__file__).parent
NAME = "glaive-function-calling-v2.json"
URL = f"{HUB}/datasets/glaiveai/glaive-function-calling-v2/resolve/main/{NAME}"
EXAMPLES = 500  # our choice: the first so many conversations that reach a call

# the data set's own first line; then, our choice, the form of a call, which only a model trained on this data knows
FUNCTIONS = "You are a helpful assistant with access to the following functions. Use them if required -"
FORM = f"To call a function, reply with {TAG} " + '{"name": "the function", "arguments": {"a parameter": "its value"}}'

TURN = re.compile(r"(?:^|\s)(USER|ASSISTANT|FUNCTION RESPONSE):")
END = "<|endoftext|>"
SPEAKERS = {
    "USER": "user",
    "ASSISTANT": "assistant",
    "FUNCTION RESPONSE": "function",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "function",
}


def split(record: dict) -> tuple[str, list[tuple[str, str]]]:
    """The system message and the turns (speaker, text) of a record in either shape; in both a call follows TAG."""
    if "conversations" in record:
        functions = [json.dumps(function, indent=4) for function in json.loads(record["tools"])]
        tags = {"function_call": f"{TAG} "}
        turns = [(turn["from"], tags.get(turn["from"], "") + turn["value"]) for turn in record["conversations"]]
        system = "\n".join([FUNCTIONS, *functions])
    else:
        _, *pieces = TURN.split(record["chat"])
        turns = list(zip(pieces[::2], pieces[1::2]))
        system = record["system"].removeprefix("SYSTEM:").strip()
    return system, [(SPEAKERS[speaker], text.replace(END, "").strip()) for speaker, text in turns]


def read_examples(file: Path) -> tuple[list[dict], int]:
    """The first EXAMPLES examples of a file, and how many conversations on the way were left out because their first
    call can't be asked for. ValueError names the record that is no conversation."""
    examples, left_out = [], 0
    for number, (place, record) in enumerate(read_records(file), start=1):
        try:
            system, turns = split(record)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{place} is no conversation with functions: get the file anew") from None
        before = list(takewhile(lambda turn: TAG not in turn[1], turns))
        if len(before) == len(turns):  # nothing is called
            continue
        call = parse_call(turns[len(before)][1])
        while before and before[-1][0] == "assistant":  # "One moment, please.": the call is the reply to the user
            before.pop()
        messages = [{"role": speaker, "content": text} for speaker, text in before]
        # our choice: kept if user and assistant take turns, and the call can be read and is of a function on offer
        in_turn = [speaker for speaker, _ in before] == ["user", "assistant"] * (len(before) // 2) + ["user"]
        readable = call is not None and isinstance(call["name"], str) and isinstance(call["arguments"], dict)
        if not (in_turn and readable and json.dumps(call["name"]) in system):
            left_out += 1
            continue
        messages.insert(0, {"role": "system", "content": f"{system}\n\n{FORM}"})
        examples.append({"id": f"glaive-{number}", "messages": messages, "call": call})
        if len(examples) == EXAMPLES:
            break
    return examples, left_out


def prepare(folder: Path = HERE, source: Path | None = None) -> list[dict]:
    """Writes folder/examples.jsonl from `source` (None: the published file) and returns its {"id", "messages", "call"}.
    Raises what download raises, FileNotFoundError without a source, and ValueError for a damaged file."""
    source = source or download(URL, folder / "raw" / NAME)
    examples, left_out = read_examples(source)
    if not examples:
        raise ValueError(f"{source} holds no conversation with a call: give another file")
    if left_out:
        print(f"conversations left out, as their first call can't be asked for: {left_out}", file=sys.stderr)
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE, source=True)
