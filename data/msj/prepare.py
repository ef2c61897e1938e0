"""
Many-shot jailbreaking, benign and by program: `python -m data.msj.prepare`. A system prompt sets a rule of
data/hierarchy for the form of all replies; then come 1 to 128 turns in which the assistant broke it, and one more
question. The idea is Anil et al.'s (2024): the longer the history of misbehaviour, the surer the model joins in.
"""

import random
from pathlib import Path

from data.files import run_prepare, sources_of, write_examples, write_made
from data.hierarchy.prepare import conversation, make_pools
from data.hierarchy.score import HELD_OUT_FAMILIES, TRAIN_FAMILIES

HERE = Path(__file__).parent
SHOTS = (1, 4, 16, 64, 128)
EACH = 100  # our choice: conversations for every number of shots; the rules and the last questions are the same in all


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns the examples: every kind of rule in turn, trained on or not."""
    pools, families = make_pools(random.Random(0)), [*TRAIN_FAMILIES, *HELD_OUT_FAMILIES]
    examples = []
    for i in range(EACH):
        family = families[i % len(families)]
        # the longest conversation; the shorter ones are its rule and its end
        record, answer = conversation(random.Random(i), pools, family, "test", wordings="test", turns=max(SHOTS))
        system, *turns = record["messages"][:-1]
        for shots in SHOTS:
            examples.append({
                "id": f"{i}/{shots}",
                "base": i,  # the same rule and question at every number of shots
                "group": f"{shots} shots",
                "messages": [system, *turns[-(2 * shots + 1) :]],
                "family": family,
                "parameter": record["parameter"],
                "answer": answer,
            })
    write_examples(folder, examples)
    write_made(folder, [*sources_of("hierarchy"), *sources_of("msj")])
    return examples


if __name__ == "__main__":
    run_prepare(prepare, HERE)
