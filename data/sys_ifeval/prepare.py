"""Make RealGuardrails' IFEval: `python -m data.sys_ifeval.prepare`.

Mu et al. (arXiv 2502.12197) moved the instructions of IFEval's 541 prompts into a system message; ids, arguments and
checkers stay those of data/ifeval.
"""

from pathlib import Path

from data.files import run_prepare
from data.ifeval.prepare import make_examples

HERE = Path(__file__).parent
URL = "https://raw.githubusercontent.com/normster/RealGuardrails/main/evals/ifeval/inputs/sys_ifeval.jsonl"


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns its 541 examples: a system message with the rules, a user's question."""
    return make_examples(URL, folder, lambda record: record["messages"])


if __name__ == "__main__":
    run_prepare(prepare, HERE)
