"""SysBench's judge question, the judge's verdict, and the three rates of arXiv 2408.10943.

CSR  constraint satisfaction rate: the share of all criteria that hold
ISR  instruction satisfaction rate: the share of turns in which every criterion holds
SSR  session stability rate: how many turns from the first on hold without a break, as a share of the turns, averaged
     over conversations

A turn's verdict is a dict: criterion number -> whether it holds. None: the judge gave no verdict.
"""

import argparse
import re
from pathlib import Path

from data.files import CACHE

MAX_NEW_TOKENS = 2048  # of the benchmark's models/qwen2_7b.py

# the published question, to the character: get_eval_pattern() of utils.py, github.com/PKU-Baichuan-MLSystemLab/SysBench
# at 176ecb4dd8334c258f3006ef637b4a4ca62a314a, split where the conversation is put in
QUESTION = Path(__file__).with_name("question.txt").read_text(encoding="utf-8")
SYSTEM, ROUND, CURRENT, ANSWER = QUESTION.split("=====\n")

# the verdict's part of the judge's reply, and one criterion in it; the question shows the numbers without quotes
RESULT = re.compile(r"""["']评判结果["']\s*:\s*\{([^{}]*)\}""")
CRITERION = re.compile(r"""\s*["']?(\d+)["']?\s*:\s*["'](是|否)["']\s*""")


def judge_messages(example: dict, turn: int, replies: list[str]) -> list[dict]:
    """The messages that ask the judge about the reply to user turn `turn` (from 0), with all turns before as history."""
    users, criteria = example["turns"], example["criteria"][turn]
    question = SYSTEM.format(system=example["messages"][0]["content"])
    for i in range(turn):
        question += ROUND.format(number=i + 1, user=users[i], assistant=replies[i])
    checklist = "\n".join(f"{number}. {text}" for number, text in criteria.items())
    question += CURRENT.format(user=users[turn], assistant=replies[turn], criteria=checklist) + ANSWER
    return [{"role": "user", "content": question}]


def parse_verdict(text: str) -> dict[str, bool] | None:
    """The judge's verdict by criterion number; None where the text holds none, or anything but 是 (yes) and 否 (no).

    our choice: only the verdict has to be well formed. The reason before it may hold quotes that no parser accepts."""
    results = RESULT.findall(text)
    if not results:
        return None
    criteria = [CRITERION.fullmatch(entry) for entry in results[-1].rstrip().rstrip(",").split(",")]
    if not all(criteria):
        return None
    return {criterion[1]: criterion[2] == "是" for criterion in criteria}


def refuse(args: argparse.Namespace) -> str | None:
    """Why the task can't be run with these flags of eval.py."""
    return None if args.judge else "--judge names the model that judges it, at $OPENAI_BASE_URL"


def verdicts(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    """The rows with the judge's "verdicts", one a turn; None for each turn of a conversation that did not fit."""
    from data.sysbench.judge import judge  # not above: it imports this file

    whole = [row for row in rows if None not in row["reply"]]
    said = dict(zip((row["id"] for row in whole), judge(whole, args.judge, (args.out or CACHE) / "verdicts.jsonl")))
    return [{**row, "verdicts": said.get(row["id"], [None] * len(row["turns"]))} for row in rows]


def score(example: dict, replies: list[str]) -> dict:
    """The three rates of one conversation, from example["verdicts"], one a turn; the replies are the judge's to read.

    "CSR": a bool for each criterion of all turns; "ISR": a bool for each turn; "SSR": float in 0..1 (tab4_turn.py of
    the benchmark). None stands wherever a missing verdict leaves it open."""
    csr = [
        None if verdict is None else verdict[number]
        for criteria, verdict in zip(example["criteria"], example["verdicts"])
        for number in criteria
    ]
    isr = [None if verdict is None else all(verdict.values()) for verdict in example["verdicts"]]
    held = next((turn for turn, holds in enumerate(isr) if not holds), len(isr))  # turns before the first break
    undecided = held < len(isr) and isr[held] is None
    return {"CSR": csr, "ISR": isr, "SSR": None if undecided else held / len(isr)}
