"""
Instruction erosion: `python -m data.erosion.prepare`. The rules of sys_ifeval stand in the system prompt, and the user
asks one thing after another; the model's own replies are the history. What SysBench measures with a judge (rules that
fade from turn to turn) is here checked by program, since IFEval's rules hold for any request.
"""

import argparse
import random
import re
from pathlib import Path

from data.chat import Tokenizer
from data.files import run_prepare, write_examples
from data.sys_ifeval.prepare import prepare as prepare_sys_ifeval

HERE = Path(__file__).parent
MOST_TURNS = 10  # eval.py --turns takes the first ones
# our choice: rules that hold for any request alone. Not those that are about the one that they came with, or that
# other requests keep by themselves (words that are forbidden for one topic hardly occur in another) …
BOUND = {"combination:repeat_prompt", "keywords:forbidden_words", "detectable_format:constrained_response"}
# … not those that name what was to be written …
GENRE = re.compile(
    r"\b(poem|song|lyrics|rap|haiku|limerick|stanza|verse|refrain|riddle|joke|story|stories|novel|essay|blog|post|"
    r"tweet|article|email|resume|cv|cover letter|letter to|pitch|proposal|rubric|template|advertisement|ad|itinerary|"
    r"summary|description|dialogue|conversation|lecture|speech|biography|code|java|python|notation|step|option)s?\b",
    re.IGNORECASE,
)
LONGEST = {"num_words": 150, "num_sentences": 10}  # … and not more than fits into a reply of MAX_NEW_TOKENS


def holds_for_any_request(example: dict) -> bool:
    """Whether the rules of a sys_ifeval example make sense with other requests than its own."""
    sizes = [(kwargs.get(name) or 0, most) for kwargs in example["kwargs"] for name, most in LONGEST.items()]
    text = example["messages"][0]["content"]
    return not BOUND & set(example["instructions"]) and not GENRE.search(text) and all(n <= m for n, m in sizes)


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns the examples: the system message of a sys_ifeval prompt, and other
    prompts' requests as the turns, from a seed; none is the rules' own, so that turns differ in their place alone."""
    source = prepare_sys_ifeval(folder)
    # our choice: requests that are long, a text to edit for instance, are left out: they would fill the context
    requests = [e["messages"][-1]["content"] for e in source if len(e["messages"][-1]["content"]) < 300]
    rng, examples = random.Random(0), []
    for example in filter(holds_for_any_request, source):
        own = example["messages"][-1]["content"]
        turns = rng.sample([request for request in requests if request != own], MOST_TURNS)
        kept = {name: example[name] for name in ("id", "instructions", "kwargs")}
        examples.append({**kept, "messages": example["messages"][:-1], "turns": turns})
    return write_examples(folder, examples)


def finish(examples: list[dict], args: argparse.Namespace, tok: Tokenizer) -> list[dict]:
    """The chosen examples with the first of their turns, as many as eval.py's --turns says."""
    if args.turns > MOST_TURNS:
        raise ValueError(f"--turns is {args.turns}: its conversations have {MOST_TURNS}")
    return [{**example, "turns": example["turns"][: args.turns]} for example in examples]


if __name__ == "__main__":
    run_prepare(prepare, HERE)
