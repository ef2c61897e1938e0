"""Make the examples of SQuAD v1.1 (arXiv 1606.05250), its dev set: `python -m data.squad.prepare`.

Where that can't be had, of XQuAD's English part (arXiv 1910.11856): 1,190 questions of the dev set, in the same shape.
"""

import json
from pathlib import Path

from data.download import download
from data.files import run_prepare, write_examples

HERE = Path(__file__).parent
SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json"
XQUAD = "https://raw.githubusercontent.com/google-deepmind/xquad/master/xquad.en.json"
# our choice: SQuAD was made for models that mark a span, and its authors have no prompt
PROMPT = """{context}

Question: {question}

Answer with a few words copied from the text above, and write nothing else."""


def get_raw(folder: Path) -> tuple[str, Path]:
    """The source's name and its file. OSError if neither source can be had."""
    try:
        return "SQuAD v1.1 dev", download(SQUAD, folder / "dev-v1.1.json")
    except (ConnectionError, FileNotFoundError, PermissionError):
        return "XQuAD-en", download(XQUAD, folder / "xquad.en.json")


def make_examples(source: str, file: Path) -> list[dict]:
    """One example a question, with the texts of all its gold answers. ValueError names the record that is damaged."""
    examples, place = [], "the file"
    try:
        for a, article in enumerate(json.loads(file.read_bytes())["data"], start=1):
            for p, paragraph in enumerate(article["paragraphs"], start=1):
                for q, qa in enumerate(paragraph["qas"], start=1):
                    place = f"article {a}, paragraph {p}, question {q}"
                    context, question = paragraph["context"], qa["question"]
                    answers = [answer["text"] for answer in qa["answers"]]
                    if not answers or not all(isinstance(text, str) for text in (context, question, *answers)):
                        raise ValueError("a text is missing")
                    prompt = PROMPT.format(context=context, question=question)
                    messages = [{"role": "user", "content": prompt}]
                    examples.append({"id": qa["id"], "source": source, "messages": messages, "answers": answers})
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        what = f"{file} is not in the shape of SQuAD at or after {place} ({error!r})"
        raise ValueError(f"{what}: delete the file and run this again") from None
    if not examples:
        raise ValueError(f"{file} has no question: delete it and run this again")
    return examples


def prepare(folder: Path = HERE) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples. ValueError and OSError are one sentence."""
    examples = make_examples(*get_raw(folder / "raw"))
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
