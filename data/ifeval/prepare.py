"""Make IFEval's 541 prompts (Zhou et al. 2023, arXiv 2311.07911): `python -m data.ifeval.prepare`."""

from collections.abc import Callable
from pathlib import Path

from data.download import download
from data.files import read_published, run_prepare, write_examples
from data.ifeval.score import CHECKERS

HERE = Path(__file__).parent
URL = (
    "https://raw.githubusercontent.com/google-research/google-research/master/"
    "instruction_following_eval/data/input_data.jsonl"
)


def make_example(record: dict, messages: list[dict]) -> dict:
    """The example of one published line. KeyError, TypeError or ValueError where the line is not of IFEval's shape."""
    instructions, kwargs = record["instruction_id_list"], record["kwargs"]
    if not instructions or len(instructions) != len(kwargs) or not all(isinstance(entry, dict) for entry in kwargs):
        raise ValueError("every instruction needs its arguments")
    for name in instructions:
        if name.removeprefix("en:") not in CHECKERS:
            raise ValueError(f"{name} is none of the 25 instructions")
    if not all(isinstance(message["content"], str) for message in messages) or messages[-1]["role"] != "user":
        raise ValueError("the messages do not end with the user's")
    example = {"id": record["key"], "messages": messages, "prompt": record["prompt"]}
    return example | {"instructions": instructions, "kwargs": kwargs}


def make_examples(url: str, folder: Path, messages: Callable[[dict], list[dict]]) -> list[dict]:
    """Downloads a file of IFEval's shape to folder/raw, writes folder/examples.jsonl, returns the examples in the
    file's order. messages: what is said to the model, from a line's record. Raises ValueError for a damaged file, and
    what data.download.download raises."""
    raw = download(url, folder / "raw" / url.rsplit("/", 1)[-1])
    examples = read_published(raw, lambda record: make_example(record, messages(record)))
    return write_examples(folder, examples)


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns its examples: the prompt as the user's only message."""
    return make_examples(URL, folder, lambda record: [{"role": "user", "content": record["prompt"]}])


if __name__ == "__main__":
    run_prepare(prepare, HERE)
