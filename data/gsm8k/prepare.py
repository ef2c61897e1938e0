"""Make the examples of GSM8K (arXiv 2110.14168): `python -m data.gsm8k.prepare`.

1,319 test questions, each after the same eight exemplars with a chain of thought (exemplars.txt).
"""

import re
from pathlib import Path

from data.download import download
from data.files import read_published, run_prepare, write_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
# the prompt for math word problems of Wei et al. 2022 (arXiv 2201.11903, appendix), to the character as in
# lm_eval/tasks/gsm8k/gsm8k-cot.yaml of github.com/EleutherAI/lm-evaluation-harness
EXEMPLARS = HERE / "exemplars.txt"
ANSWER = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)\s*$")  # how every solution of the data set ends


def read_question(record: dict) -> tuple[str, str]:
    """A question, and the number that answers it, without thousands separators."""
    question, answer = record["question"], ANSWER.search(record["answer"])
    if not answer or not isinstance(question, str):
        raise ValueError('no question with a solution that ends in "#### number"')
    return question, answer[1].replace(",", "")


def prepare(folder: Path = HERE) -> list[dict]:
    """Write folder/examples.jsonl, and return the examples. ValueError and OSError are one sentence."""
    exemplars = EXEMPLARS.read_text(encoding="utf-8")
    examples, raw = [], download(URL, folder / "raw" / "test.jsonl")
    for number, (question, answer) in enumerate(read_published(raw, read_question)):
        prompt = f"{exemplars}\nQ: {question}\nA:"
        messages = [{"role": "user", "content": prompt}]
        examples.append({"id": str(number), "messages": messages, "answer": answer})  # numbers count from 0
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
