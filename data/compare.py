"""Runs side by side: kept replies of several runs to paired differences, with intervals, as a table and as plots."""

import json
import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from data.files import read_json, write_json
from data.report import decisions, interval, is_pooled, kept_replies, markdown, mean, pool, prompt_key, resample


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
            what = "holds no complete run with replies" if folder.is_dir() else "does not exist"
            print(f"{folder} is left out: it {what}", file=sys.stderr)
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


def print_comparison(folders: list[Path], picture: Path | None, allow_code: bool) -> None:
    """The runs in these directories side by side; the same numbers, and a plot, are written beside them."""
    if picture and not find_spec("matplotlib"):
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    groups = load_runs(folders, allow_code=allow_code)
    table, file = compare(groups), folders[0].parent / "compare.json"
    print(
        "Means over the runs of a column, the lowest and the highest run in brackets; differences in points, with "
        f"paired 95 % intervals\nover the prompts, which do not hold what another seed would change.\n\n"
        f"{show_comparison(groups, table)}\n\nThe same numbers, not rounded: {file}"
    )
    of_run = ("name", "flags", "parameters", "loss", "val_loss", "train_seconds", "peak_memory_gb")
    runs = {group: [{k: run.get(k) for k in of_run} for run in runs] for group, runs in groups.items()}
    rows = [{"task": task, "set": group, "measure": name, **row} for (task, group, name), row in table.items()]
    write_json(file, {"runs": runs, "table": rows})
    if picture:
        plot(groups, table, picture)
