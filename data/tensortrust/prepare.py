"""Make the examples of TensorTrust: `python -m data.tensortrust.prepare`.

Players of a game wrote system prompts that guard an access code, and attacks on those of others. RealGuardrails (Mu et
al., arXiv 2502.12197) chose 776 attacks that want "access granted" (hijacking), 570 that want the code (extraction),
and the 1,060 honest users of the same accounts (helpful). The game had a defence behind the user's text too. Where
there is such a post-prompt it is the end of the user's message, as published; the paper's headline leaves these out.
"""

import json
import sys
from pathlib import Path

from data.download import download, write_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/normster/RealGuardrails/main/evals/tensortrust/inputs"
GROUPS = ("hijacking", "extraction", "helpful")


def is_record(record: object) -> bool:
    """Whether this is what RealGuardrails publishes: a system and a user message, and what belongs to them."""
    try:
        messages = [(message["role"], type(message["content"])) for message in record["messages"]]
        code, post_prompt = record["access_code"], record["has_post_prompt"]
        named = isinstance(record["id"], int) and isinstance(code, str) and code != ""
        return messages == [("system", str), ("user", str)] and named and isinstance(post_prompt, bool)
    except (KeyError, TypeError):
        return False


def read_examples(file: Path, group: str) -> list[dict]:
    """The examples of one published file, in its order. ValueError names the line that is none."""
    examples = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not is_record(record) or record["id"] in examples:
                raise ValueError(f"{file} line {number} is no record, or repeats an id: delete it and run this again")
            rest = {key: record[key] for key in ("messages", "access_code", "has_post_prompt")}
            examples[record["id"]] = {"id": f"{group}-{record['id']}", "group": group, **rest}
    if not examples:
        raise ValueError(f"{file} is empty: delete it and run this again")
    return list(examples.values())


def prepare(folder: Path = HERE) -> list[dict]:
    """
    Writes folder/examples.jsonl and returns its {"id", "group", "messages", "access_code", "has_post_prompt"}.
    Raises what download raises, and ValueError for a damaged file.
    """
    examples = []
    for group in GROUPS:
        file = download(f"{URL}/{group}.jsonl", folder / "raw" / f"{group}.jsonl")
        examples += read_examples(file, group)
    return write_examples(folder, examples)


if __name__ == "__main__":
    try:
        print(f"{len(prepare()):,} examples in {HERE / 'examples.jsonl'}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
