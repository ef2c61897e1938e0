"""
Long-IFEval: `python -m data.long_ifeval.prepare`. The rules of sys_ifeval stand in the system prompt, the request at
the very end, and between them filler, until the prompt has 1,000 to 32,000 tokens: do rules fade with distance?
"""

import argparse
import random
from pathlib import Path
from textwrap import wrap

from data.chat import Tokenizer, render
from data.files import run_prepare, write_examples
from data.sys_ifeval.prepare import prepare as prepare_sys_ifeval

HERE = Path(__file__).parent
INTRODUCTION = "Here are notes that you may need later:"  # our choice, as is the whole form of the message

LONGEST_PARAGRAPH = 400  # characters of a user's own filler: only whole paragraphs are put in
# what the filler's sentences are made of: plain prose that asks for nothing
WHEN = ("In March", "Before noon", "After the rain", "Late in autumn", "On the second day", "Some years ago",
        "At the end of the week", "During the holidays", "Around midnight", "Early in the year")  # fmt: skip
WHO = ("the gardener", "a young teacher", "the ferry pilot", "an old clockmaker", "the mayor's sister", "two cousins",
       "the baker", "a visiting painter", "the station master", "the librarian", "a shepherd", "the new doctor")  # fmt: skip
DID = ("repaired", "painted", "sold", "found", "carried home", "described", "borrowed", "measured", "hid", "counted",
       "remembered", "photographed")  # fmt: skip
WHAT = ("a wooden gate", "three baskets of pears", "the church bell", "a letter from the coast", "an empty boat",
        "the old map of the valley", "a box of brass keys", "the tallest ladder", "a grey horse", "seven chairs",
        "the bridge's lamp", "a jar of honey")  # fmt: skip
WHERE = ("near the mill", "behind the school", "at the river", "in the next village", "under the stairs",
         "along the railway", "by the lighthouse", "in the market hall", "on the hill", "beside the well")  # fmt: skip


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl, sys_ifeval's prompts without any filler yet, and returns them. Those that ask to
    repeat the prompt are left out: the filler would be a part of it."""
    examples = prepare_sys_ifeval(folder)
    return write_examples(folder, [e for e in examples if "combination:repeat_prompt" not in e["instructions"]])


def spread(examples: list[dict], args: argparse.Namespace) -> list[dict]:
    """Each example at each of eval.py's --lengths, which --limit then chooses from."""
    return [
        {**e, "base": e["id"], "id": f"{e['id']}/{n}", "group": f"{n} tokens", "length": n}
        for n in dict.fromkeys(args.lengths)
        for e in examples
    ]


def finish(examples: list[dict], args: argparse.Namespace, tok: Tokenizer) -> list[dict]:
    """The chosen examples with their filler: prose that is made here, or eval.py's --filler."""
    filler = read_filler(args.filler)
    return [lengthen(example, tok, filler) for example in examples]


def read_filler(file: Path | None) -> list[str] | None:
    """The paragraphs of a text file, to fill with; None without one. ValueError if there is nothing in it."""
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--filler {file} is not UTF-8 text ({error}): give a file of prose") from None
    paragraphs = [part for line in text.splitlines() for part in wrap(line, LONGEST_PARAGRAPH)]
    if not paragraphs:
        raise ValueError(f"--filler {file} has no text: give a file of prose")
    return paragraphs


def prose(rng: random.Random) -> str:
    """A paragraph that nobody has to remember."""
    return " ".join(f"{' '.join(map(rng.choice, (WHEN, WHO, DID, WHAT, WHERE)))}." for _ in range(5))


def lengthen(example: dict, tok: Tokenizer, filler: list[str] | None = None) -> dict:
    """The example with paragraphs before its request, as many as fit into example["length"] tokens, the headers and the
    system message included; given paragraphs start over when they come to their end."""
    system, request = example["messages"]
    rng, paragraphs = random.Random(str(example["id"])), []

    def messages() -> list[dict]:
        text = "\n\n".join([INTRODUCTION, *paragraphs, request["content"]] if paragraphs else [request["content"]])
        return [system, {**request, "content": text}]

    def size() -> int:
        return len(render(tok, messages(), add_generation_prompt=True)[0])

    room = example["length"] - size()
    while room > 0:
        paragraphs.append(filler[len(paragraphs) % len(filler)] if filler else prose(rng))
        room -= len(tok.encode(f"{paragraphs[-1]}\n\n"))
    while paragraphs and size() > example["length"]:  # where two texts meet, their tokens may be others
        paragraphs.pop()
    return {**example, "messages": messages()}


if __name__ == "__main__":
    run_prepare(prepare, HERE)
