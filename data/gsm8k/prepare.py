"""Make the examples of GSM8K (arXiv 2110.14168): `python -m data.gsm8k.prepare`.

1,319 test questions, each after the same eight exemplars with a chain of thought (exemplars.txt).
"""

import argparse
import json
import re
import sys
from pathlib import Path

from data.download import download, write_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
# the prompt for math word problems of Wei et al. 2022 (arXiv 2201.11903, appendix), to the character as in
# lm_eval/tasks/gsm8k/gsm8k-cot.yaml of github.com/EleutherAI/lm-evaluation-harness
EXEMPLARS = HERE / "exemplars.txt"
ANSWER = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)\s*$")  # how every solution of the data set ends


def read_questions(file: Path) -> list[tuple[str, str]]:
    """The questions and the numbers that answer them, without thousands separators. ValueError names a damaged line."""
    questions = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                answer = ANSWER.search(record["answer"])
                if not answer or not isinstance(record["question"], str):
                    raise ValueError
                questions.append((record["question"], answer[1].replace(",", "")))
            except (ValueError, RecursionError, TypeError, KeyError):
                what = 'no question with a solution that ends in "#### number"'
                raise ValueError(f"{file} line {number} is {what}: delete the file and run this again") from None
    if not questions:
        raise ValueError(f"{file} is empty: delete it and run this again")
    return questions


def prepare(folder: Path = HERE) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples. ValueError and OSError are one sentence."""
    exemplars = EXEMPLARS.read_text(encoding="utf-8")
    examples = []
    for number, (question, answer) in enumerate(read_questions(download(URL, folder / "raw" / "test.jsonl"))):
        prompt = f"{exemplars}\nQ: {question}\nA:"
        messages = [{"role": "user", "content": prompt}]
        examples.append({"id": str(number), "messages": messages, "answer": answer})  # numbers count from 0
    return write_examples(folder, examples)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(f"{len(prepare())} examples: {HERE / 'examples.jsonl'}")
    except (ValueError, OSError) as error:
        sys.exit(str(error))
