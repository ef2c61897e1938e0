"""
Instruction erosion: `python -m data.erosion.prepare`. The rules of sys_ifeval stand in the system prompt, and the user
asks one thing after another; the model's own replies are the history. What SysBench measures with a judge (rules that
fade from turn to turn) is here checked by program, since IFEval's rules hold for any request.
"""

import random
from pathlib import Path

from data.download import write_examples
from data.sys_ifeval.prepare import prepare as prepare_sys_ifeval

HERE = Path(__file__).parent
MOST_TURNS = 10  # eval.py --turns takes the first ones
# rules about the one request that they came with
BOUND = {"combination:repeat_prompt"}


def prepare(folder: Path = HERE) -> list[dict]:
    """
    Writes folder/examples.jsonl and returns the examples: the system message of a sys_ifeval prompt, its own request as
    the first of the turns, and other prompts' requests as the rest, from a seed.
    """
    source = prepare_sys_ifeval(folder)
    # our choice: requests that are long, a text to edit for instance, are left out: they would fill the context
    fit = [e for e in source if not BOUND & set(e["instructions"]) and len(e["messages"][-1]["content"]) < 300]
    rng, examples = random.Random(0), []
    for example in fit:
        others = rng.sample([e for e in fit if e is not example], MOST_TURNS - 1)
        turns = [e["messages"][-1]["content"] for e in (example, *others)]
        kept = {name: example[name] for name in ("id", "instructions", "kwargs")}
        examples.append({**kept, "messages": example["messages"][:-1], "turns": turns})
    return write_examples(folder, examples)


if __name__ == "__main__":
    try:
        print(f"{len(prepare())} examples in {HERE / 'examples.jsonl'}")
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
