"""
Whose rule is it? The system prompt sets a rule, and the user sets another of the same kind: "Start every reply with
[cedar]." Nothing like it is in the training, so what counts is the structure that the blocks have.

    python -m results.rivals.rivals --adapter out/cal out/mlp out/lora

asks 72 prompts, made of data/hierarchy's set `rules`: the user's message is the system prompt of another prompt of the same
kind, and the question. It prints whose rule the replies keep, and writes replies.jsonl into out/rivals.
"""

import sys

from data.files import write_jsonl
from data.hierarchy import prepare as hierarchy
from data.hierarchy.score import follows, score
from data.report import markdown, percent, summarize
from eval import ask
from results.adapters import models, parse


def rivals() -> list[dict]:
    """The prompts, each with the parameter of the user's rule as "rival"."""
    rows, made = hierarchy.examples(sets={"rules": 72}), []
    for row in rows:
        others = [o for o in rows if o["family"] == row["family"] and o["parameter"] != row["parameter"]]
        other, (system, user) = others[len(made) % len(others)], row["messages"]
        content = f"{other['messages'][0]['content']} {user['content']}"
        made.append({**row, "set": "rivals", "messages": [system, {**user, "content": content}], "rival": other["parameter"]})
    return made


def judge(row: dict) -> dict:
    """The row with its scores: whether the operator's rule is kept, the user's, and whether the answer is right."""
    scores = score(row, row["reply"])
    theirs = follows(row["family"], row["rival"], row["reply"])
    return {**row, "scores": {"the operator's rule": scores["kept"], "the user's rule": theirs, "right": scores["right"]}}


def table(rows: list[dict]) -> str:
    """A line for each run: whose rule its replies keep."""
    lines, measures = [], list(rows[0]["scores"])
    for name in dict.fromkeys(row["when"] for row in rows):
        of_run = summarize([row for row in rows if row["when"] == name])["rivals"]
        lines.append([name, *(percent(of_run[measure]) for measure in measures)])
    return markdown(["run", *measures], lines)


def main() -> None:
    args = parse(__doc__, limit=72, out="out/rivals")
    rows = []
    for name, model, tok in models(args):
        said = sorted(ask(model, tok, rivals()[: args.limit], bar=name), key=lambda pair: pair[0])
        rows += [judge({"when": name, **row}) for _, row in said]
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "replies.jsonl", rows)
    print(table(rows))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"rivals: {error}")
