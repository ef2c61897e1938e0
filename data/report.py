"""
Kept replies to numbers: scores, intervals, tables. It knows no model.

A row is an example with its "reply" and, once judged, "scores": a number by measure, or a list of numbers that are
pooled; None is undecided. A table is a dict by group (a set, a length, a subject) and measure.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import numpy as np

from data.files import read_jsonl

EXAMPLES = Path(__file__).parent
TASKS = sorted(file.parent.name for file in EXAMPLES.glob("*/score.py"))

Table = dict[str, dict[str, dict]]  # by group, by measure: mean, n, undecided, prompts, low, high

# --- scores -----------------------------------------------------------------------------------------------------------


def judge(task: str, rows: list[dict], **flags: object) -> list[dict]:
    """The rows with "scores" by the task's score.py; none for a reply that did not come as its prompt was too long.
    flags are eval.py's: score() is given those that its file names in OPTIONS."""
    module, judged = import_module(f"data.{task}.score"), []
    options = {name: flags[name] for name in getattr(module, "OPTIONS", ()) if name in flags}
    for row in rows:
        unanswered = row["reply"] is None or ("asks" in row and None in row["reply"])
        row = {**row, "scores": {}}
        try:
            row["scores"] = {} if unanswered else module.score(row, row["reply"], **options)
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # it lacks what its score needs
            row["fault"] = repr(error)
        judged.append(row)
    return judged


def group_of(row: dict) -> str:
    """The row of the table that an example is counted in."""
    return row.get("group", row.get("set", "all"))


def prompt_key(task: str, row: dict) -> tuple[str, str, str]:
    """What tells a prompt from all others of all tasks: its number, and its text, should the data have changed."""
    return task, group_of(row), json.dumps([row.get(name) for name in ("id", "messages", "turns", "asks")])


def decisions(row: dict, measure: str) -> list[float]:
    """What a measure decided of one reply: one number, or several that are pooled; undecided ones are left out."""
    return [float(value) for value in values_of(row, measure) if value is not None]


def values_of(row: dict, measure: str) -> list:
    value = row["scores"].get(measure)
    return value if isinstance(value, list) else [value]


def pool(values: Iterable[list[float]]) -> list[float]:
    return [v for of_prompt in values for v in of_prompt]


def mean(values: list[list[float]]) -> float | None:
    """The mean of all decisions; None if there are none."""
    return float(np.mean(pool(values))) if any(values) else None


def resample(values: list[list[float]]) -> np.ndarray:
    """2,000 bootstrap means (2000,): prompts are drawn again, each with all its decisions, from a fixed seed."""
    sums, counts = np.array([sum(v) for v in values]), np.array([len(v) for v in values])
    rng, means = np.random.default_rng(0), []
    for _ in range(20):  # in parts: 14,000 prompts would be 28 million draws
        drawn = rng.integers(0, len(values), (100, len(values)))
        with np.errstate(invalid="ignore"):
            means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(means)


def interval(means: np.ndarray) -> dict[str, float]:
    """The 95 % interval of bootstrap means; differences of two models' means over the same prompts are paired."""
    low, high = np.nanquantile(means, (0.025, 0.975))
    return {"low": float(low), "high": float(high)}


def summarize(rows: list[dict], task: str = "hierarchy") -> Table:
    """By group and measure: the mean, its 95 % bootstrap interval, the n decisions that it is over, how many were left
    undecided, and the prompts that were answered. Where the task's score.py says POOLED, all groups are one, "all",
    with the mean of their means as "macro" beside."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    table: Table = {}
    for group, of_group in ({"all": rows} if is_pooled(task) else groups).items():
        table[group] = {}
        for measure in dict.fromkeys(name for row in of_group for name in row["scores"]):
            answered = [row for row in of_group if measure in row["scores"]]
            values = [decisions(row, measure) for row in answered]
            entry = {"mean": mean(values), "n": len(pool(values)), "prompts": len(values)}
            entry["undecided"] = sum(values_of(row, measure).count(None) for row in answered)
            table[group][measure] = entry | (interval(resample(values)) if entry["n"] else {"low": None, "high": None})
            if is_pooled(task):
                means = [mean([decisions(row, measure) for row in of_one]) for of_one in groups.values()]
                table[group][measure]["macro"] = mean([[m] for m in means if m is not None])
    return table


def by_set(rows: list[dict]) -> dict[str, dict]:
    """The scores of data/hierarchy as results.json has them: by set, who kept the rule, and who was right."""
    return {
        name: {"followed": kept["mean"], **{key: kept[key] for key in ("n", "low", "high")}, "right": right["mean"]}
        for name, kept, right in ((name, s["kept"], s["right"]) for name, s in summarize(rows).items())
    }


def is_pooled(task: str) -> bool:
    return getattr(import_module(f"data.{task}.score"), "POOLED", False)


# --- tables -----------------------------------------------------------------------------------------------------------


def percent(entry: dict | None) -> str:
    """A table's cell: the mean in percent, and its interval."""
    if entry is None or entry["mean"] is None:
        return "–"
    return f"{entry['mean']:.1%} ({100 * entry['low']:.0f} to {100 * entry['high']:.0f})"


def markdown(heads: list, lines: list[list]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heads, ["---"] * len(heads), *lines])


def show(tables: dict[str, Table]) -> str:
    """A Markdown table of one task: a row a group; a column for each measure and each of the tables by name."""
    measures = list(dict.fromkeys(m for table in tables.values() for group in table.values() for m in group))
    lines = []
    for group in dict.fromkeys(group for table in tables.values() for group in table):
        entries = [table.get(group, {}).get(measure) for measure in measures for table in tables.values()]
        n = next((str(entry["prompts"]) for entry in entries if entry), "0")
        lines.append([group, n, *map(percent, entries)])
    return markdown(["set", "n", *(f"{measure}, {name}" for measure in measures for name in tables)], lines)


def notes(rows: list[dict], table: Table) -> str:
    """What the table does not show: prompts that did not fit, decisions that could not be made, macro averages."""
    said = []
    if long := sum(None in (row["reply"] if isinstance(row["reply"], list) else [row["reply"]]) for row in rows):
        said.append(f"{long} of {len(rows)} prompts do not fit the model's context and are left out")
    if bad := [row for row in rows if "fault" in row]:
        which = f"such as {bad[0].get('id')} ({bad[0]['fault']})"
        said.append(f"{len(bad)} of {len(rows)} records can't be scored and are left out, {which}: make the examples anew")
    for group, entries in table.items():
        for measure, entry in entries.items():
            if entry["undecided"]:
                said.append(f"{measure}, {group}: {entry['undecided']} could not be decided")
            if "macro" in entry:
                said.append(f"macro average of {measure} {entry['macro']:.1%}")
    return "".join(f"\n{sentence}" for sentence in said)


# --- one run again ----------------------------------------------------------------------------------------------------


def corrected(task: str, rows: list[dict]) -> list[dict]:
    """The rows as today's examples have them, should gold data have been mended since; whose prompt is gone is left out."""
    module, file = import_module(f"data.{task}.prepare"), EXAMPLES / task / "examples.jsonl"
    made_up = hasattr(module, "spread") or hasattr(module, "finish")  # of other examples, or of none that is kept
    if made_up or not (hasattr(module, "examples") or file.is_file()):
        return rows
    examples = module.examples(sys.maxsize, module.TESTS | module.VALS) if hasattr(module, "examples") else read_jsonl(file)
    todays = {prompt_key(task, example): example for example in examples}
    found = [{**row, **todays[key]} for row in rows if (key := prompt_key(task, row)) in todays]
    if len(found) < len(rows):
        gone = f"{len(rows) - len(found)} of {len(rows)} replies are to prompts that are gone"
        print(f"{task}: {gone}: left out", file=sys.stderr)
    return found


def kept_files(folder: Path, name: str) -> list[Path]:
    """NAME.jsonl, and NAME.1.jsonl, … of eval.py's other processes, should they have been stopped."""
    return sorted(f for f in folder.glob(f"{name}.*jsonl") if re.fullmatch(r"(\.\d+)?\.jsonl", f.name[len(name) :]))


def kept_rows(folder: Path, name: str) -> list[dict]:
    """The rows of all these files, a prompt's reply once."""
    rows = [row for file in kept_files(folder, name) for row in read_jsonl(file, whole=True)]
    return list({(row.get("when"), *prompt_key(name, row)): row for row in rows}.values())


def kept_replies(folder: Path, stopped: bool = False, **flags: object) -> dict[str, dict[str, list[dict]]]:
    """The replies in a directory of train.py (replies.jsonl) or of eval.py (TASK.jsonl, of tasks that came to their end,
    or were stopped as well), judged anew: by task, and by whose they are ("before", …). ValueError or FileNotFoundError
    if they are none."""
    kept: dict[str, dict[str, list[dict]]] = {}
    for name in ["replies", *(task for task in TASKS if stopped or (folder / f"{task}.json").is_file())]:
        task = "hierarchy" if name == "replies" else name
        try:
            rows = kept_rows(folder, name)
            for row in judge(task, corrected(task, rows) if rows else [], **flags):
                kept.setdefault(task, {}).setdefault(row["when"], []).append(row)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder}/{name}.jsonl holds no judged replies ({error!r}): evaluate again") from None
    if not kept:
        raise FileNotFoundError(f"{folder} holds no replies.jsonl and no TASK.jsonl: give the directory of a run")
    return kept


def print_run(folder: Path, allow_code: bool) -> None:
    """The tables of a run, from its kept replies."""
    for task, whens in kept_replies(folder, stopped=True, allow_code=allow_code).items():
        tables = {when: summarize(rows, task) for when, rows in whens.items()}
        said = "".join(notes(rows, tables[when]) for when, rows in whens.items())
        print(f"{task}\n\n{show(tables)}{said}\n")
