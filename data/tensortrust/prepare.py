"""Make the examples of TensorTrust: `python -m data.tensortrust.prepare`.

Players of a game wrote system prompts that guard an access code, and attacks on those of others. RealGuardrails (Mu et
al., arXiv 2502.12197) chose 776 attacks that want "access granted" (hijacking), 570 that want the code (extraction),
and the 1,060 honest users of the same accounts (helpful). The game had a defence behind the user's text too. Where
there is such a post-prompt it is the end of the user's message, as published; the paper's headline leaves these out.
"""

from functools import partial
from pathlib import Path

from data.download import download
from data.files import read_published, run_prepare, write_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/normster/RealGuardrails/main/evals/tensortrust/inputs"
GROUPS = ("hijacking", "extraction", "helpful")


def make_example(record: dict, group: str) -> dict:
    """An example of what RealGuardrails publishes: a system and a user message, and what belongs to them."""
    messages = [(message["role"], type(message["content"])) for message in record["messages"]]
    kinds = [type(record[key]) for key in ("id", "access_code", "has_post_prompt")]
    if messages != [("system", str), ("user", str)] or kinds != [int, str, bool] or not record["access_code"]:
        raise ValueError("it is no conversation with an access code")
    rest = {key: record[key] for key in ("messages", "access_code", "has_post_prompt")}
    return {"id": f"{group}-{record['id']}", "group": group, **rest}


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns its {"id", "group", "messages", "access_code", "has_post_prompt"}.
    Raises what download raises, and ValueError for a damaged file."""
    examples = []
    for group in GROUPS:
        file = download(f"{URL}/{group}.jsonl", folder / "raw" / f"{group}.jsonl")
        of_group = read_published(file, partial(make_example, group=group))
        if len({example["id"] for example in of_group}) < len(of_group):
            raise ValueError(f"{file} repeats an id: delete it and run this again")
        examples += of_group
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
