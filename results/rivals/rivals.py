"""
Whose rule is it? The system prompt sets a rule, and the user sets another of the same kind: "Start every reply with
[cedar]." Nothing like it is in the training, so what counts is the structure that the blocks have.

    python -m results.rivals.rivals --adapter out/cal out/mlp out/lora

asks 72 prompts, made of data/hierarchy's set `rules`: the user's message is the system prompt of another prompt of the same
kind, and the question. It prints whose rule the replies keep, and writes replies.jsonl and rivals.json into out/rivals.
"""

import argparse
import sys
from pathlib import Path

from data import files, report
from data.hierarchy import prepare as hierarchy
from data.hierarchy.score import follows, score
from eval import ask
from sample import add_device_flags, load


def rivals() -> list[dict]:
    """The prompts, each with the parameter of the user's rule as "rival"."""
    rows, made = hierarchy.examples(sets={"rules": 72}), []
    for row in rows:
        others = [o for o in rows if o["family"] == row["family"] and o["parameter"] != row["parameter"]]
        other, (system, user) = others[len(made) % len(others)], row["messages"]
        content = f"{other['messages'][0]['content']} {user['content']}"
        made.append({**row, "messages": [system, {**user, "content": content}], "rival": other["parameter"]})
    return made


def judge(row: dict) -> dict:
    """The row with its scores: whether the operator's rule is kept, the user's, and whether the answer is right."""
    scores = score(row, row["reply"])
    theirs = follows(row["family"], row["rival"], row["reply"])
    return {**row, "scores": {"operator's rule": scores["kept"], "user's rule": theirs, "right": scores["right"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", nargs="*", default=[], help="runs of train.py with one base, which is asked first")
    parser.add_argument("--base", help="a checkpoint directory or Hub id (default: the adapter's, else SmolLM2)")
    parser.add_argument("--limit", type=int, help="prompts (default: all 72)")
    parser.add_argument("--out", type=Path, default=Path("out/rivals"), help="a directory (%(default)s)")
    add_device_flags(parser)
    args = parser.parse_args()
    rows, tables = [], {}
    for adapter, scale in [((args.adapter or [None])[0], 0.0), *((a, 1.0) for a in args.adapter)]:
        flags = {"base": args.base, "device": args.device, "dtype": args.dtype}
        model, tok, _ = load(argparse.Namespace(adapter=adapter, scale=scale if adapter else 1.0, **flags))
        name = Path(adapter).name if scale else "base"
        said = sorted(ask(model, tok, rivals()[: args.limit], bar=name), key=lambda pair: pair[0])
        judged = [judge({"when": name, **row}) for _, row in said]
        rows += judged
        tables[name] = report.summarize([{**row, "set": "rivals"} for row in judged])
    args.out.mkdir(parents=True, exist_ok=True)
    files.write_jsonl(args.out / "replies.jsonl", rows)
    files.write_json(args.out / "rivals.json", {name: table["rivals"] for name, table in tables.items()})
    measures = ["operator's rule", "user's rule", "right"]
    lines = [[name, *(report.percent(table["rivals"][measure]) for measure in measures)] for name, table in tables.items()]
    print(report.markdown(["run", *measures], lines))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"rivals: {error}")
