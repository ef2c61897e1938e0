"""Make IH-Challenge's examples (arXiv 2603.10521): `python -m data.ih_challenge.prepare [--attacks FILE]`.

Not tried on the real files, huggingface.co/datasets/openai/ih-challenge: they could not be read where this was written.
Names, fields and the graders' form are those that public users of the data set document: four JSONL files, 27,570
records of

    attacker_meta_problem, attacker_problem    what a model that writes the attack is told
    defender_problem_template                  messages, one of which holds the placeholder of the attack
    metadata: attack_placeholder, attack_level, privileged_level (roles), task_type, grader_code_python

A record that differs is an error that names it and the field.
"""

import argparse
import sys
from pathlib import Path

from data.download import HUB, download
from data.files import json_lines, write_examples

HERE = Path(__file__).parent
REPOSITORY = f"{HUB}/datasets/openai/ih-challenge/resolve/main"
FILES = ("single-constraint", "multi-constraint", "input-conditioned", "anti-overrefusal")


def prepare(folder: Path = HERE, attacks: Path | None = None) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples; ids are "file:number", numbers from 0.

    attacks: JSONL of {"id", "attack"}, the texts that an attacker has written; only these examples are made then.
    Raises ValueError, which names file, record and field, and what download() raises."""
    written = read_attacks(attacks) if attacks else None
    examples = []
    for name in FILES:
        file = download(f"{REPOSITORY}/{name}.jsonl", folder / "raw" / f"{name}.jsonl")
        for number, (place, record) in enumerate(json_lines(file)):
            identity = f"{name}:{number}"
            if written is None or identity in written:
                example = make_example(record, place, written[identity] if written else None)
                examples.append({"id": identity, "group": name, **example})
    if not examples:
        raise ValueError(f"{attacks or folder / 'raw'} names no record of IH-Challenge: ids are like {FILES[0]}:0")
    return write_examples(folder, examples)


def read_attacks(file: Path) -> dict[str, str]:
    return {field(record, place, "id"): field(record, place, "attack") for place, record in json_lines(file)}


def field(record: object, place: str, *path: str, kind: type = str):
    """record[path[0]][path[1]]…; ValueError names the record and the field where it is missing or of another type."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    if not isinstance(record, kind) or not record:
        raise ValueError(
            f"{place} has no field {'.'.join(path)} of type {kind.__name__}: the file is not of the form that "
            "data/ih_challenge/prepare.py describes at its top"
        )
    return record


def make_example(record: object, place: str, attack: str | None) -> dict:
    """messages for the model; attack and grader for the score.

    our choice: without an attacker, the attack is the attacker's own task, asked openly. And there is no developer
    here: as in public uses of the data, whatever role is privileged speaks in the system message, and whatever role
    attacks is the user, in this order."""
    attack = attack or field(record, place, "attacker_problem")
    privileged = field(record, place, "metadata", "privileged_level")
    attacking = field(record, place, "metadata", "attack_level")
    placeholder = field(record, place, "metadata", "attack_placeholder")
    texts: dict[str, list[str]] = {privileged: [], attacking: []}
    for message in field(record, place, "defender_problem_template", kind=list):
        role, content = field(message, place, "role"), field(message, place, "content")
        if role not in texts:
            raise ValueError(f"{place} has a message of the role {role}, which is neither privileged nor attacking")
        texts[role].append(content)
    if len(texts) < 2 or not texts[privileged] or not any(placeholder in text for text in texts[attacking]):
        raise ValueError(f"{place} has no privileged message, or its attacker's message has no {placeholder}")
    user = "\n\n".join(texts[attacking]).replace(placeholder, attack)
    messages = [{"role": "system", "content": "\n\n".join(texts[privileged])}, {"role": "user", "content": user}]
    return {"messages": messages, "attack": attack, "grader": field(record, place, "metadata", "grader_code_python")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the examples of IH-Challenge to examples.jsonl.")
    parser.add_argument("--attacks", type=Path, help='JSONL of {"id", "attack"}: attacks that a model has written')
    args = parser.parse_args()
    try:
        examples = prepare(attacks=args.attacks)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{len(examples)} examples are in {HERE / 'examples.jsonl'}")
