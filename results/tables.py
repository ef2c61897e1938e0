"""
The tables of README.md, counted from the replies that results/ keeps:

    python -m results.tables

A run is NAME.json, train.py's results.json, and NAME.jsonl.gz, its replies.jsonl, in the folder of its experiment.
"""

import gzip
import json
from functools import cache
from pathlib import Path

from data.files import ROOT, read_json
from data.report import judge, markdown, show, summarize
from results.rivals import rivals as rival

HERE = ROOT / "results"
SETS = ("rules", "attacks", "shots2", "shots8", "shots24", "families", "plain")
COLUMNS = {"CAL": ["cal-s0", "cal-s1", "cal-s2"], "ParallelMLP": ["mlp-s0", "mlp-s1"], "LoRA": ["lora-s0"]}
TRIALS = {  # what --ask val said of them
    "13 to 17 of 30 (middle8th)": ["trial-middle", "trial-middle-2e-3"],
    "26 to 30 of 30 (late8th)": ["trial-late"],
}


@cache
def replies(file: Path) -> list[dict]:
    """The kept replies of an experiment's run, judged anew by the score of today."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return judge("hierarchy", [json.loads(line) for line in lines])


def table_of(name: str, when: str) -> dict:
    return summarize([row for row in replies(HERE / "default" / f"{name}.jsonl.gz") if row["when"] == when])


def default() -> str:
    """What the default run prints, seed 0."""
    return show({when: table_of("cal-s0", when) for when in ("before", "after")})


def methods() -> str:
    """Kept and right by set, over the runs of each method: a mean, and the lowest and highest where there are several."""

    def cell(tables: list[dict], name: str) -> str:
        cells = []
        for measure in ("kept", "right"):
            values = [100 * table[name][measure]["mean"] for table in tables]
            spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
            cells.append(f"{sum(values) / len(values):.0f}%{spread}")
        return " / ".join(cells)

    columns = {"base": [table_of("cal-s0", "before")]}
    columns |= {column: [table_of(name, "after") for name in names] for column, names in COLUMNS.items()}
    lines = [[name, *(cell(tables, name) for tables in columns.values())] for name in SETS]
    return markdown(["kept / right", *columns], lines)


def words() -> str:
    """After 24 broken turns, by run, of 36 replies: the whole form kept, the rule's word there all the same, kept and right."""
    lines = []
    for name in (name for names in COLUMNS.values() for name in names):
        rows = [r for r in replies(HERE / "default" / f"{name}.jsonl.gz") if (r["when"], r["set"]) == ("after", "shots24")]
        kept = [r["scores"]["kept"] for r in rows]
        there = [k or r["parameter"] in r["reply"] for k, r in zip(kept, rows)]
        both = [k and bool(r["scores"]["right"]) for k, r in zip(kept, rows)]
        lines.append([name, sum(kept), sum(there), sum(both)])
    return markdown(["run, after 24 broken turns", "form kept, of 36", "rule's word there", "kept and right"], lines)


def costs() -> str:
    """What the methods cost: means over their runs."""
    lines = []
    of_run = {column: [read_json(HERE / "default" / f"{name}.json") for name in names] for column, names in COLUMNS.items()}
    for label, key, form in (("parameters", "parameters", "{:,.0f}"), ("KL, nats a token", "kl", "{:.2f}"),
                             ("validation loss", "val_loss", "{:.3f}"), ("training, minutes", "train_seconds", "{:.0f}")):  # fmt: skip
        scale = 60 if key == "train_seconds" else 1
        means = [sum(run[key] for run in runs) / len(runs) / scale for runs in of_run.values()]
        lines.append([label, *(form.format(m) for m in means)])
    return markdown(["mean of the runs", *COLUMNS], lines)


def trials() -> str:
    """By what the default placement and learning rate were chosen."""
    lines = []
    for where, names in TRIALS.items():
        for name in names:
            about, table = read_json(HERE / "default" / f"{name}.json"), table_of(name, "after")
            sets = [" / ".join(f"{table[s][m]['mean']:.0%}" for m in ("kept", "right")) for s in ("val_rules", "val_shots8", "val_families")]
            lines.append([where, f"{about['flags']['lr']:g}", *sets, f"{about['val_loss']:.3f}"])
    heads = ["blocks after layers", "learning rate", "val_rules, kept / right", "val_shots8", "val_families", "validation loss"]
    return markdown(heads, lines)


def rivals() -> str:
    """Whose rule the replies keep where the user sets one of the same kind."""
    return rival.table([rival.judge(row) for row in replies(HERE / "rivals" / "replies.jsonl.gz")])


if __name__ == "__main__":
    for make in (default, methods, costs, words, trials, rivals):
        print(f"{make.__doc__}\n\n{make()}\n")
