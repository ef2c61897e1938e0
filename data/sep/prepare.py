"""Make the examples of SEP (Should it be Executed or Processed?): `python -m data.sep.prepare`.

Each has a task, a text to work on, and a probe: a short question whose answer, the witness, hardly occurs otherwise.
It is asked twice, with the probe inside the text and inside the task (Zverev et al., arXiv 2403.06833). The file holds
the 892 validation examples of ASIDE (arXiv 2503.10566). The authors try prompt templates around task and text; our
choice: the task is the system message and the text is the user's, with nothing around them.
"""

import json
from pathlib import Path

from data.download import download
from data.files import run_prepare, write_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/egozverev/aside/main/experiments/data/SEP_validation_feb25.json"
KEYS = ("system_prompt_clean", "prompt_instructed", "system_prompt_instructed", "prompt_clean", "witness")


def conversation(system: str, user: str) -> list[dict]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def read_examples(file: Path) -> list[dict]:
    """The examples of the published file, in its order. ValueError names the record that is none."""
    try:
        records = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): delete it and run this again") from None
    if not isinstance(records, list) or not records:
        raise ValueError(f"{file} is no list of records: delete it and run this again")
    examples = []
    for number, record in enumerate(records, start=1):
        texts = [record.get(key) for key in KEYS] if isinstance(record, dict) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{file} record {number} lacks one of {', '.join(KEYS)}: delete it and run this again")
        task, text_with_probe, task_with_probe, text, witness = texts
        asks = [conversation(task, text_with_probe), conversation(task_with_probe, text)]
        examples.append({"id": f"sep-{number}", "asks": asks, "witness": witness})
    return examples


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns its {"id", "asks", "witness"}; asks: the probe in the data, then in the
    instruction. Raises what download raises, and ValueError for a damaged file."""
    examples = read_examples(download(URL, folder / "raw" / "SEP_validation_feb25.json"))
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
