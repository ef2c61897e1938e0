"""Make SysBench's examples (arXiv 2408.10943): `python -m data.sysbench.prepare [--from FILE]`.

500 system messages, each with five user turns in one conversation and a checklist of criteria for every turn. The
published file also holds reference replies: they are left out, since the model's own replies are the history.
"""

from pathlib import Path

from data.download import download
from data.files import read_records, run_prepare, write_examples

HERE = Path(__file__).parent
REPOSITORY = "https://raw.githubusercontent.com/PKU-Baichuan-MLSystemLab/SysBench/main"
URL = f"{REPOSITORY}/datas/system_benchmark_eval_datas.json"


def prepare(folder: Path = HERE, source: Path | None = None) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples.

    source: a local file instead of the published one: its JSON array, or JSONL of the shape that from_results() reads;
    either may be gzipped. Raises ValueError, which names file and record, and what download() raises."""
    file = source or download(URL, folder / "raw" / "system_benchmark_eval_datas.json")
    examples = []
    for place, record in read_records(file):
        try:
            example = from_published(record) if "prompt_infos" in record else from_results(record)
            check(example)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{place} is damaged ({reason}): mend it, or delete the file") from None
        examples.append(example)
    if not examples or len({example["id"] for example in examples}) < len(examples):
        raise ValueError(f"{file} has no records, or two with the same system_id: delete it and run this again")
    return write_examples(folder, examples)


def from_published(record: dict) -> dict:
    """An example of a record as published: messages with reference replies, and prompt_infos by the user's text."""
    turns = [message["content"] for message in record["messages"] if message["role"] == "user"]
    checklists = [record["prompt_infos"][turn]["criteria"].values() for turn in turns]
    criteria = [
        {str(c["criteria_id"]): f"{c['criteria_content']} | {c['criteria_type']}" for c in checklist}
        for checklist in checklists
    ]
    return make_example(record, turns, criteria, record["rounds_related"])


def from_results(record: dict) -> dict:
    """An example of {"system_id", "system_prompt", "turns": [{"user", "criteria"}, …], "multi_rounds_related"}.

    The criteria are lines "1. content | type", as the benchmark's tables of results have them."""
    turns = [turn["user"] for turn in record["turns"]]
    criteria = [dict(line.split(". ", 1) for line in turn["criteria"].split("\n")) for turn in record["turns"]]
    return make_example(record, turns, criteria, record["multi_rounds_related"])


def make_example(record: dict, turns: list[str], criteria: list[dict[str, str]], dependent: bool) -> dict:
    """The two groups are those of the paper's table 4: do later turns build on earlier ones?"""
    return {
        "id": str(record["system_id"]),
        "messages": [{"role": "system", "content": record["system_prompt"]}],
        "turns": turns,
        "criteria": criteria,
        "group": "dependent turns" if dependent else "parallel turns",
    }


def check(example: dict) -> None:
    """Raises ValueError for an example that can't be asked or scored."""
    texts = [example["messages"][0]["content"], *example["turns"]]
    if not all(isinstance(text, str) and text.strip() for text in texts) or not example["turns"]:
        raise ValueError("a message is no text, or there is no user turn")
    if not all(example["criteria"]):
        raise ValueError("a turn has no criteria")
    if not all(key.isdecimal() for checklist in example["criteria"] for key in checklist):
        raise ValueError("a criterion has no number")


if __name__ == "__main__":
    run_prepare(prepare, HERE, source=True)
