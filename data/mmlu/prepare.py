"""Make the examples of MMLU (arXiv 2009.03300): `python -m data.mmlu.prepare`.

57 subjects and 14,042 test questions with four choices; before each stand the subject's five dev questions, answered.
"""

import csv
import io
import re
import tarfile
from pathlib import Path

from data.download import download
from data.files import run_prepare, write_examples

HERE = Path(__file__).parent
URL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
SUBJECTS = 57
SHOTS = 5
LETTERS = "ABCD"
# our choice: in a chat the last line of the prompt is the beginning of the assistant's reply, which a letter follows
OPENING = "Answer:"

Tables = dict[str, dict[str, list[list[str]]]]  # "dev" or "test" -> subject -> rows of question, four choices, letter


def read_table(content: bytes, name: str) -> list[list[str]]:
    """The rows of one CSV file of the archive, which has no header. ValueError names the row that is damaged."""
    rows = []
    try:
        for row in csv.reader(io.StringIO(content.decode("utf-8"), newline="")):
            if len(row) != 6 or row[5] not in tuple(LETTERS):
                raise ValueError("it is not a question, four choices and a letter")
            rows.append(row)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{name} is damaged in row {len(rows) + 1} ({error})") from None
    return rows


def read_archive(file: Path) -> Tables:
    """The dev and test tables of data.tar, read in place: no name in the archive ever becomes a path on this disk."""
    tables: Tables = {"dev": {}, "test": {}}
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                name = re.fullmatch(r"data/(dev|test)/(\w+)_\1\.csv", member.name)
                if name and member.isfile():
                    tables[name[1]][name[2]] = read_table(archive.extractfile(member).read(), member.name)
    except (tarfile.TarError, ValueError) as error:
        raise ValueError(f"{file}: {error}: delete the file and run this again") from None
    whole = [s for s, rows in tables["test"].items() if rows and len(tables["dev"].get(s, [])) >= SHOTS]
    if not len(whole) == len(tables["test"]) == SUBJECTS:
        raise ValueError(f"{file} has {len(whole)} whole subjects of {SUBJECTS}: delete it and run this again")
    return tables


def format_question(row: list[str], answered: bool) -> str:
    """A question as the authors' evaluation code writes it (github.com/hendrycks/test, evaluate.py)."""
    question, *choices, answer = row
    lines = [question, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)), "Answer:"]
    return "\n".join(lines) + (f" {answer}\n\n" if answered else "")


def format_prompt(subject: str, dev: list[list[str]], row: list[str]) -> str:
    """The whole 5-shot prompt, ending in "Answer:", as in the authors' code."""
    words = "".join(f" {word}" for word in subject.split("_"))  # a space before the first too: two stand after "about"
    heading = f"The following are multiple choice questions (with answers) about {words}.\n\n"
    shots = "".join(format_question(shot, answered=True) for shot in dev[:SHOTS])
    return heading + shots + format_question(row, answered=False)


def make_examples(tables: Tables) -> list[dict]:
    """One example a test question, by subject in the order of the alphabet, as in the authors' code."""
    examples = []
    for subject in sorted(tables["test"]):
        for number, row in enumerate(tables["test"][subject]):
            prompt = format_prompt(subject, tables["dev"][subject], row).removesuffix(f"\n{OPENING}")
            examples.append({
                "id": f"{subject}/{number}",  # numbers count from 0
                "group": subject,
                "messages": [{"role": "user", "content": prompt}],
                "opening": OPENING,
                "choices": [f" {letter}" for letter in LETTERS],
                "answer": row[5],
            })
    return examples


def prepare(folder: Path = HERE) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples. ValueError and OSError are one sentence."""
    examples = make_examples(read_archive(download(URL, folder / "raw" / "data.tar")))
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
