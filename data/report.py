"""
Kept replies to numbers: scores, intervals, tables, comparisons of runs, plots. It knows no model.

A row is an example with its "reply" and, once judged, "scores": a number by measure, or a list of numbers that are
pooled; None is undecided. A table is a dict by group (a set, a length, a subject) and measure.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np

from data.files import read_json, read_jsonl

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


def kept_replies(folder: Path, stopped: bool = False, **flags: object) -> dict[str, dict[str, list[dict]]]:
    """The replies in a directory of train.py (replies.jsonl) or of eval.py (TASK.jsonl, of tasks that came to their end,
    or were stopped as well), judged anew: by task, and by whose they are ("before", …). ValueError or FileNotFoundError
    if they are none."""
    files = [(task, folder / f"{task}.jsonl") for task in TASKS if stopped or (folder / f"{task}.json").is_file()]
    kept: dict[str, dict[str, list[dict]]] = {}
    for task, file in [("hierarchy", folder / "replies.jsonl"), *files]:
        try:
            rows = corrected(task, read_jsonl(file, whole=True)) if file.is_file() else []
            for row in judge(task, rows, **flags):
                kept.setdefault(task, {}).setdefault(row["when"], []).append(row)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} holds something else than judged replies ({error!r}): evaluate again") from None
    if not kept:
        raise FileNotFoundError(f"{folder} holds no replies.jsonl and no TASK.jsonl: give the directory of a run")
    return kept


# --- runs side by side ------------------------------------------------------------------------------------------------


def load_runs(folders: list[Path], **flags: object) -> dict[str, list[dict]]:
    """The complete runs among folders, by name; those whose flags differ in the seed alone share one. Each is its
    results.json with its replies by prompt under "rows", those of the untrained base under "base"."""
    groups: dict[str, list[dict]] = {}
    names = [folder.name for folder in folders]
    for folder in folders:
        if folder.is_file():  # out/* may bring other files along
            continue
        about = next((folder / f for f in ("results.json", "flags.json") if (folder / f).is_file()), folder)
        kept: dict = {}
        with suppress(FileNotFoundError):
            kept = kept_replies(folder, **flags)
        if not any(when != "before" for whens in kept.values() for when in whens):
            print(f"{folder} is left out: it holds no complete run with replies", file=sys.stderr)
            continue
        run = read_json(about)
        run = run if isinstance(run.get("flags"), dict) else {"flags": run}
        run |= {"name": folder.name if names.count(folder.name) == 1 else str(folder), "rows": {}, "base": {}}
        for task, whens in kept.items():
            for when, rows in whens.items():
                by_prompt = {prompt_key(task, row): row for row in rows}
                run["base" if when == "before" else "rows"] |= by_prompt
        # what eval.py ran was trained elsewhere: the training's flags tell runs apart, not the adapter's directory
        own = run["flags"].pop("trained", None) or run["flags"]
        run["seed"] = own.get("seed")
        key = [{k: v for k, v in f.items() if k not in ("seed", "adapter", "weights")} for f in (own, run["flags"])]
        key = json.dumps(key, sort_keys=True, default=str)
        if any(other["seed"] == run["seed"] for other in groups.get(key, [])):  # the same once more is no other seed
            key = str(folder)
        groups.setdefault(key, []).append(run)
    if not groups:
        raise ValueError(f"none of {', '.join(map(str, folders))} holds a complete run: give directories of train.py")
    named = {}
    for runs in groups.values():
        names = [run["name"] for run in runs]  # cal-s0 and cal-s1 are cal
        common = re.sub(r"[-_.]?(s|seed)?\d*$", "", os.path.commonprefix(names)) if len(runs) > 1 else names[0]
        named[common if common and common not in named else ", ".join(names)] = runs
    return named


def compare(groups: dict[str, list[dict]]) -> dict[tuple[str, str, str], dict]:
    """By (task, group, measure): n, the prompts that all runs share; the base's mean; and by group of runs the mean
    over them, theirs each, and the difference to the first group with its paired 95 % interval: the prompts are drawn
    again, each with all its runs."""
    everyone = [run["rows"] for runs in groups.values() for run in runs]
    bases = [run["base"] for runs in groups.values() for run in runs if run["base"]]
    shared = [key for key in everyone[0] if all(key in rows for rows in everyone)]
    cells: dict[tuple[str, str, str], list] = {}
    for key in shared:
        task, group, _ = key
        for measure in everyone[0][key]["scores"]:
            if all(decisions(rows[key], measure) for rows in everyone):  # else it would not be paired
                cells.setdefault((task, "all" if is_pooled(task) else group, measure), []).append(key)
    if not cells:
        tasks = {name: sorted({key[0] for run in runs for key in run["rows"]}) for name, runs in groups.items()}
        has = "; ".join(f"{name} has {', '.join(of_run)}" for name, of_run in tasks.items())
        what = f"these runs share no prompt that all of them answered ({has})"
        raise ValueError(f"{what}: compare runs of the same tasks, made from the same lists")
    table, first = {}, next(iter(groups))
    for (task, group, measure), keys in cells.items():
        drawn, row = {}, {"n": len(keys), "base": None, "groups": {}}
        for name, runs in groups.items():
            by_run = [[decisions(run["rows"][key], measure) for key in keys] for run in runs]
            together = [pool(of_runs) for of_runs in zip(*by_run)]  # a prompt's decisions in all runs
            drawn[name] = resample(together)
            entry = {"mean": mean(together), "runs": [mean(values) for values in by_run]}
            entry["difference"] = entry["mean"] - row["groups"].get(first, entry)["mean"]
            row["groups"][name] = entry | interval(drawn[name] - drawn[first])
        # runs of several bases have no base in common
        said = [[base[key]["reply"] for key in keys if key in base] for base in bases]
        if bases and len(said[0]) == len(keys) and all(replies == said[0] for replies in said):
            row["base"] = mean([decisions(bases[0][key], measure) for key in keys])
        table[task, group, measure] = row
    return table


def show_comparison(groups: dict[str, list[dict]], table: dict[tuple[str, str, str], dict]) -> str:
    """compare's table in Markdown, and one of what the runs cost. Differences are in percentage points."""
    first, *others = groups
    lines = []
    for (task, group, measure), row in table.items():
        cells = [task, group, measure, str(row["n"]), "–" if row["base"] is None else f"{row['base']:.0%}"]
        for entry in row["groups"].values():
            spread = f" ({100 * min(entry['runs']):.0f} to {100 * max(entry['runs']):.0f})" if len(entry["runs"]) > 1 else ""
            cells.append(f"{entry['mean']:.0%}{spread}")
        for group in others:
            entry = row["groups"][group]
            points = [100 * entry[key] for key in ("difference", "low", "high")]
            cells.append("{:+.0f} ({:+.0f} to {:+.0f})".format(*points))
        lines.append(cells)
    heads = ["task", "set", "measure", "n", "base", *groups, *(f"{group} - {first}" for group in others)]
    costs = []
    for group, runs in groups.items():
        cells = [group, ", ".join(str(run["seed"]) for run in runs)]
        cells.append(f"{runs[0]['parameters']:,}" if runs[0].get("parameters") else "–")
        for name, digits in (("val_loss", 4), ("train_seconds", 0), ("peak_memory_gb", 1)):
            values = [run[name] for run in runs if run.get(name) is not None]
            cells.append(f"{np.mean(values):.{digits}f}" if values else "–")
        costs.append(cells)
    cost_heads = ["run", "seeds", "parameters", "validation loss", "training, s", "peak memory, GB"]
    return f"{markdown(heads, lines)}\n\n{markdown(cost_heads, costs)}"


def plot(groups: dict[str, list[dict]], table: dict[tuple[str, str, str], dict], file: Path) -> None:
    """Draws, for each task whose score.py names an AXIS (tokens, turn, shots), every run's scores over it."""
    import matplotlib.pyplot as plt  # not above: only this needs it

    curves: dict[tuple[str, str, str], list] = {}
    for (task, group, measure), row in table.items():
        axis = getattr(import_module(f"data.{task}.score"), "AXIS", None)
        place = axis and re.search(rf"\b{axis} (\d+)|(\d+) {axis}\b", f"{measure} {group}")
        if place:
            kind = measure if place[2] else "kept"  # erosion's measures are its turns
            curves.setdefault((task, axis, kind), []).append((int(place[1] or place[2]), row))
    if not curves:
        raise ValueError("none of these runs has a task with an axis, such as long_ifeval, erosion or msj: nothing to plot")
    figure, axes = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for ax, ((task, axis, kind), points) in zip(axes[0], curves.items()):
        points.sort(key=lambda point: point[0])
        places = [x for x, _ in points]
        for group in groups:
            ax.plot(places, [row["groups"][group]["mean"] for _, row in points], "o-", label=group)
        ax.set(title=task, xlabel=axis, ylabel=kind, ylim=(0, 1))
        if places[-1] > 10 * places[0]:
            ax.set_xscale("log", base=2)
        ax.legend()
    figure.tight_layout()
    figure.savefig(file)
