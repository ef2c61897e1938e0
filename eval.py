"""
Runs a model over the test sets of data/hierarchy and scores its replies by program:

    python eval.py --adapter out/cal --out out/cal-again     an adapter
    python eval.py --out out/base                            the bare base
    python eval.py --rescore out/cal                         counts the kept replies again, without a model
    python eval.py --compare out/cal out/mlp out/lora        runs side by side; those that differ in --seed alone as one
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from cal import write_whole
from data.chat import Tokenizer
from data.download import weights_source
from data.hierarchy.prepare import prepare_if_needed
from data.hierarchy.score import follows, plain, right
from model import Transformer, read_json
from sample import add_model_flags, load, prompt

ROOT = Path(__file__).parent
HIERARCHY = ROOT / "data" / "hierarchy"
CACHE = ROOT / ".cache"
# set: how many of its prompts are asked by default; 24 earlier turns are long
SETS = {"rules": 72, "attacks": 72, "shots2": 72, "shots8": 72, "shots24": 36, "families": 72, "plain": 72}


def read_jsonl(file: Path) -> list[dict]:
    """The records of a JSONL file. ValueError names the line that is damaged."""
    records = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file} line {number} is not valid JSON ({error}): mend or delete it") from None
    return records


def write_jsonl(file: Path, records: list[dict]) -> None:
    write_whole(file, "".join(json.dumps(record) + "\n" for record in records))


def write_json(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=1, default=str) + "\n")


def load_sets(limit: int | None = None) -> list[dict]:
    """The test prompts, the first `limit` of each set: {"set", "messages", "family", "parameter", …}."""
    if limit is not None and limit < 1:
        raise ValueError(f"the limit of prompts a set is {limit}: it must be at least 1")
    prepare_if_needed()
    return [
        {"set": name, **example}
        for name, n in SETS.items()
        for example in read_jsonl(HIERARCHY / f"{name}.jsonl")[: n if limit is None else limit]
    ]


def judge(example: dict, reply: str) -> dict:
    """
    The example with its reply; "followed": whether it keeps the rule, or, where there is none, is plain; and "right":
    whether the answer stands in it, whatever its form (None where the rule is not to answer).
    """
    family, parameter = example["family"], example["parameter"]
    followed = plain(reply) if family == "plain" else follows(family, parameter, reply)
    answered = None if family == "away" else right(example["answer"], reply)
    return {**example, "reply": reply, "followed": followed, "right": answered}


def ask(
    model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int = 32, batch_tokens: int = 4096
) -> list[dict]:
    """
    Greedy replies to all examples, in batches of similar length that hold at most batch_tokens prompt tokens.
    Returns the examples in their order, each judged.
    """
    prompts = [prompt(tok, e["messages"]) for e in examples]
    order = sorted(range(len(examples)), key=lambda i: len(prompts[i][0]))
    done: list[dict] = [{}] * len(examples)
    with tqdm(total=len(examples), desc="replies", leave=False) as bar:
        while order:
            # the longest comes last, so it decides how many fit beside it
            n = max(1, batch_tokens // len(prompts[order[-1]][0]))
            batch, order = order[-n:], order[:-n]
            ids, systems = zip(*(prompts[i] for i in batch))
            for i, new in zip(batch, model.generate(list(ids), list(systems), max_new_tokens, stop_ids=tok.stop_ids)):
                done[i] = judge(examples[i], tok.decode(new))
            bar.update(len(batch))
    return done


def ask_base(model: Transformer, tok: Tokenizer, examples: list[dict], path: Path) -> list[dict]:
    """
    ask, of a model that adds nothing yet, loaded from the checkpoint directory path. Its replies stay in .cache/, and
    serve every later run with the same weights, prompts, device, dtype and code.
    """
    weight, code = model.embed_tokens.weight, [ROOT / "model.py", ROOT / "eval.py", ROOT / "data" / "chat.py"]
    files = {str(f.resolve()): (f.stat().st_size, f.stat().st_mtime_ns) for f in [*path.iterdir(), *code]}
    key = json.dumps([files, examples, str(weight.device), str(weight.dtype), torch.__version__], sort_keys=True)
    file = CACHE / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_jsonl(file, ask(model, tok, examples))
    return read_jsonl(file)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of values (n,): 2,000 resamples, from a fixed seed."""
    resamples = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.quantile(resamples, (0.025, 0.975))
    return float(low), float(high)


def summarize(rows: list[dict]) -> dict[str, dict]:
    """
    By set: the share that followed, n, the share's 95 % interval, and the share of right answers among the rows that
    have one (None if there are none).
    """
    table = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == name]
        followed = np.array([row["followed"] for row in of_set], dtype=float)
        answers = [row["right"] for row in of_set if row["right"] is not None]
        low, high = interval(followed)
        table[name] = {"followed": followed.mean(), "n": len(followed), "low": low, "high": high}
        table[name]["right"] = sum(answers) / len(answers) if answers else None
    return table


def show(tables: dict[str, dict[str, dict]]) -> str:
    """
    A Markdown table: a row a test set; for each entry of tables (summarize's results by name) a column of what kept
    the rule and one of what was right.
    """
    sets = list(dict.fromkeys(name for table in tables.values() for name in table))
    columns = [f"{what}, {when}" for what in ("kept", "right") for when in tables]
    lines = ["| set | n | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for name in sets:
        rows = [table[name] for table in tables.values()]
        cells = [f"{row['followed']:.0%} ({100 * row['low']:.0f} to {100 * row['high']:.0f})" for row in rows]
        cells += ["–" if row["right"] is None else f"{row['right']:.0%}" for row in rows]
        lines.append(f"| {name} | {rows[0]['n']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kept_replies(folder: Path) -> list[dict]:
    """The rows of a run's replies.jsonl, judged anew. ValueError or FileNotFoundError if they are no replies."""
    file = folder / "replies.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no replies.jsonl: give the directory of a run")
    try:
        return [{"when": row["when"], **judge(row, row["reply"])} for row in read_jsonl(file)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} holds something else than judged replies ({error!r}): evaluate again") from None


def rescore(folder: Path) -> dict[str, dict[str, dict]]:
    """Recounts the replies kept in folder: summarize's tables by what the replies are of ("before", "after", …)."""
    rows = kept_replies(folder)
    return {when: summarize([r for r in rows if r["when"] == when]) for when in dict.fromkeys(r["when"] for r in rows)}


# ----------------------------------------------------------------------------------------------------------------------
# several runs, side by side

Verdicts = dict[str, dict]  # by prompt: its row


def by_prompt(rows: list[dict], when: str) -> Verdicts:
    return {json.dumps([row["set"], row["messages"]]): row for row in rows if row["when"] == when}


def load_runs(folders: list[Path]) -> dict[str, list[dict]]:
    """
    The complete runs among folders, by name; those whose flags differ in the seed alone share one. Each is its
    results.json and, under "verdicts" and "base", its judged replies after and before the training.
    """
    groups: dict[str, list[dict]] = {}
    for folder in folders:
        if not (folder / "results.json").is_file():
            if folder.is_dir():  # out/* may bring other files along
                print(f"{folder} is left out: it has no results.json, so its run is not complete", file=sys.stderr)
            continue
        run, rows = read_json(folder / "results.json"), kept_replies(folder)
        last = rows[-1]["when"] if rows else ""
        run |= {"name": folder.name, "verdicts": by_prompt(rows, last), "base": by_prompt(rows, "before")}
        key = {name: value for name, value in run.get("flags", {}).items() if name != "seed"}
        groups.setdefault(json.dumps(key or folder.name, sort_keys=True), []).append(run)
    if not groups:
        raise ValueError(f"none of {', '.join(map(str, folders))} holds a complete run: give directories of train.py")
    named = {}
    for runs in groups.values():
        names = [run["name"] for run in runs]  # cal-s0 and cal-s1 are cal
        common = re.sub(r"[-_.]?(s|seed)?\d*$", "", os.path.commonprefix(names)) if len(runs) > 1 else names[0]
        named[common if common and common not in named else ", ".join(names)] = runs
    return named


def compare(groups: dict[str, list[dict]]) -> dict[str, dict]:
    """
    For "kept" (the rule) and "right" (the answer), by test set: n, the prompts that all runs share; the base's share;
    and by group the mean share over its runs, theirs each, and the difference to the first group with its paired 95 %
    interval: the prompts are resampled, each with its mean over the runs of a group.
    """
    everyone = [run["verdicts"] for runs in groups.values() for run in runs]
    base = next((run["base"] for runs in groups.values() for run in runs if run["base"]), None)
    everyone += [base] if base else []
    shared = [key for key in everyone[0] if all(key in verdicts for verdicts in everyone)]
    tables: dict[str, dict] = {}
    for measure, field in (("kept", "followed"), ("right", "right")):
        tables[measure] = {}
        for name in dict.fromkeys(everyone[0][key]["set"] for key in shared):
            keys = [k for k in shared if everyone[0][k]["set"] == name and everyone[0][k][field] is not None]
            if not keys:
                continue
            row = tables[measure][name] = {"n": len(keys), "base": None, "groups": {}}
            if base:
                row["base"] = float(np.mean([base[key][field] for key in keys]))
            first = None
            for group, runs in groups.items():
                scores = np.array([[run["verdicts"][key][field] for key in keys] for run in runs], dtype=float)
                prompts = scores.mean(axis=0)  # (n,)
                first = prompts if first is None else first
                low, high = interval(prompts - first)
                row["groups"][group] = {"mean": prompts.mean(), "runs": scores.mean(axis=1).tolist()}
                row["groups"][group] |= {"difference": (prompts - first).mean(), "low": low, "high": high}
    return tables


def show_comparison(groups: dict[str, list[dict]], tables: dict[str, dict]) -> str:
    """compare's tables in Markdown, and one of what the runs cost. Differences are in percentage points."""
    first, *others = groups
    titles = {"kept": "Replies that kept the rule", "right": "Replies with the right answer, whatever their form"}
    lines = []
    for measure, table in tables.items():
        heads = ["set", "n", "base", *groups, *(f"{group} - {first}" for group in others)]
        lines += [f"{titles[measure]}:", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for name, row in table.items():
            cells = [name, str(row["n"]), "–" if row["base"] is None else f"{row['base']:.0%}"]
            for entry in row["groups"].values():
                spread = f" ({100 * min(entry['runs']):.0f} to {100 * max(entry['runs']):.0f})"
                cells.append(f"{entry['mean']:.0%}" + (spread if len(entry["runs"]) > 1 else ""))
            for group in others:
                entry = row["groups"][group]
                points = [100 * entry[key] for key in ("difference", "low", "high")]
                cells.append("{:+.0f} ({:+.0f} to {:+.0f})".format(*points))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    heads = ["run", "seeds", "parameters", "validation loss", "training, s", "peak memory, GB"]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for group, runs in groups.items():
        cells = [group, ", ".join(str(run.get("seed", "–")) for run in runs)]
        cells.append(f"{runs[0]['parameters']:,}" if "parameters" in runs[0] else "–")
        for name, digits in (("val_loss", 4), ("train_seconds", 0), ("peak_memory_gb", 1)):
            values = [run[name] for run in runs if run.get(name) is not None]
            cells.append(f"{np.mean(values):.{digits}f}" if values else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument(
        "--limit", type=int, help=f"prompts a set (default: {', '.join(f'{k} {v}' for k, v in SETS.items())})"
    )
    parser.add_argument("--max_new_tokens", type=int, default=32, help="tokens a reply may have")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="prompt tokens that are answered at once")
    parser.add_argument("--out", type=Path, help="a new directory for replies.jsonl and results.json")
    parser.add_argument("--rescore", type=Path, metavar="DIR", help="count the replies kept in DIR again, and stop")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="DIR", help="print the runs in these directories side by side"
    )
    args = parser.parse_args()
    if args.compare:
        groups = load_runs(args.compare)
        tables, file = compare(groups), args.compare[0].parent / "compare.json"
        print(
            "Means over the runs of a column, the lowest and the highest run in brackets; differences in points, with "
            f"paired 95 % intervals\nover the prompts, which do not hold what another seed would change.\n\n"
            f"{show_comparison(groups, tables)}\n\nThe same numbers, not rounded: {file}"
        )
        of_run = ("name", "flags", "parameters", "loss", "val_loss", "train_seconds", "peak_memory_gb")
        runs = {group: [{k: run.get(k) for k in of_run} for run in runs] for group, runs in groups.items()}
        write_json(file, {"runs": runs, **tables})
        return
    if args.rescore:
        print(show(rescore(args.rescore)))
        return
    for name in ("limit", "max_new_tokens", "batch_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be at least 1")
    if args.out:
        if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
            raise ValueError(f"{args.out} already holds something: give another --out, or delete it")
        args.out.mkdir(parents=True, exist_ok=True)

    model, tok, path = load(args)
    name = "adapter" if args.adapter else "base"
    rows = ask(model, tok, load_sets(args.limit), args.max_new_tokens, args.batch_tokens)
    table = summarize(rows)
    print(f"weights: {weights_source(path)}\n\n{show({name: table})}")
    if args.out:
        write_jsonl(args.out / "replies.jsonl", [{"when": name, **row} for row in rows])
        write_json(args.out / "results.json", {name: table, "weights": weights_source(path), "flags": vars(args)})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (ValueError, OSError) as error:
        sys.exit(f"eval.py: {error}")
