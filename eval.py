"""
Runs a model over benchmarks and scores its replies by program, as the benchmarks' authors do:

    python eval.py --adapter out/cal                              data/hierarchy, the default
    python eval.py --adapter out/cal --tasks ifeval,mmlu --out out/cal-eval
    python eval.py --tasks all --limit 8                          the bare base, a few prompts of each
    python eval.py --rescore out/cal-eval                         counts the kept replies again, without a model
    python eval.py --compare out/cal out/mlp out/lora             runs side by side; those of other seeds as one

A task is a folder of data/: prepare.py makes its examples.jsonl (messages, and what the score needs), score.py judges a
reply. Here is the one loop over all of them. --out gets, for each task, every reply (TASK.jsonl) and the scores
(TASK.json); a run that was stopped goes on where it was when the same command is given again.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from cal import adapter_info, write_whole
from data.chat import Tokenizer
from data.download import json_lines, stamps, weights_source
from data.hierarchy.prepare import prepare_if_needed
from data.sysbench.judge import judge as ask_judge
from model import Transformer, read_json
from sample import add_model_flags, load, prompt

ROOT = Path(__file__).parent
EXAMPLES = ROOT / "data"
HIERARCHY = EXAMPLES / "hierarchy"
CACHE = ROOT / ".cache"
# set: how many of its prompts are asked by default; 24 earlier turns are long
SETS = {"rules": 72, "attacks": 72, "shots2": 72, "shots8": 72, "shots24": 36, "families": 72, "plain": 72}
TASKS = ("hierarchy", "ifeval", "sys_ifeval", "long_ifeval", "erosion", "sysbench", "msj", "tensortrust",
         "ih_challenge", "sep", "mmlu", "gsm8k", "squad", "glaive")  # fmt: skip
POOLED = ("mmlu",)  # tasks whose groups are too many for a row each
VERDICTS = "verdicts.jsonl"  # what sysbench's judge said
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # tokens of long_ifeval's prompts

# ----------------------------------------------------------------------------------------------------------------------
# files


def read_jsonl(file: Path) -> list[dict]:
    """The records of a JSONL file. ValueError names the line that is damaged."""
    return [record for _, record in json_lines(file)]


def write_jsonl(file: Path, records: list[dict]) -> None:
    write_whole(file, "".join(json.dumps(record) + "\n" for record in records))


def write_json(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=1, default=str) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# examples


def load_sets(limit: int | None = None) -> list[dict]:
    """The test prompts of data/hierarchy, the first `limit` of each set: {"set", "messages", "family", …}."""
    if limit is not None and limit < 1:
        raise ValueError(f"the limit of prompts a set is {limit}: it must be at least 1")
    prepare_if_needed()
    return [
        {"set": name, "id": f"{name}/{i}", **example}
        for name, n in SETS.items()
        for i, example in enumerate(read_jsonl(HIERARCHY / f"{name}.jsonl")[: n if limit is None else limit])
    ]


def load_examples(task: str, args: argparse.Namespace, tok: Tokenizer) -> list[dict]:
    """
    A task's examples, made where they are missing: the first --limit of a seeded shuffle, dealt over the task's groups
    (subjects, lengths, …). OSError or ValueError where the data can't be had.
    """
    if task == "hierarchy":
        return load_sets(args.limit)
    module = import_module(f"data.{task}.prepare")
    file = EXAMPLES / task / "examples.jsonl"
    if not file.is_file():
        module.prepare(file.parent)
    examples = read_jsonl(file)
    for number, example in enumerate(examples, start=1):
        if not is_example(example):
            raise ValueError(f"{file} line {number} is no example: delete the file, and it is made anew")
    if not examples:
        raise ValueError(f"{file} is empty: delete the file, and it is made anew")
    if task == "long_ifeval":
        examples = [
            {**e, "base": e["id"], "id": f"{e['id']}/{n}", "group": f"{n} tokens", "length": n}
            for n in dict.fromkeys(args.lengths)
            for e in examples
        ]
    groups: dict[str, list[dict]] = {}
    for example in examples:
        groups.setdefault(group_of(example), []).append(example)
    for group in groups.values():  # one order for all: what is asked at one length, or after one shot, is asked at all
        group.sort(key=lambda e: random.Random(f"{args.seed} {e.get('base', e['id'])}").random())
    dealt = [e for one_of_each in zip_longest(*groups.values()) for e in one_of_each if e is not None]
    chosen = dealt[: args.limit]
    if task == "long_ifeval":
        filler = module.read_filler(args.filler)
        chosen = [module.lengthen(e, tok, filler) for e in chosen]
    if task == "erosion":
        if args.turns > module.MOST_TURNS:
            raise ValueError(f"--turns is {args.turns}: its conversations have {module.MOST_TURNS}")
        chosen = [{**e, "turns": e["turns"][: args.turns]} for e in chosen]
    return chosen


def is_example(example: object) -> bool:
    """Whether a record of examples.jsonl has what the loop needs: an id, and messages, asks or turns."""
    if not isinstance(example, dict) or not isinstance(example.get("id"), int | str):
        return False
    asks = example.get("asks", [example.get("messages")])
    lists = [asks, *asks, example.get("turns", [""])] if isinstance(asks, list) else [None]
    return bool(asks) and all(isinstance(part, list) for part in lists) and example.get("turns") != []


def group_of(example: dict) -> str:
    """The row of the table that an example is counted in."""
    return example.get("group", example.get("set", "all"))


# ----------------------------------------------------------------------------------------------------------------------
# replies


def with_system(messages: list[dict], system: str) -> list[dict]:
    """The messages, with a system message in front if they have none and system is not empty."""
    has_one = not system or (messages and messages[0]["role"] == "system")
    return messages if has_one else [{"role": "system", "content": system}, *messages]


def generate(
    model: Transformer, tok: Tokenizer, conversations: list[list[dict]], max_new_tokens: int
) -> list[str | None]:
    """Greedy replies; None to a conversation that leaves no room for one of max_new_tokens in the model's context."""
    prompts = [prompt(tok, messages) for messages in conversations]
    fitting = [i for i, (ids, _) in enumerate(prompts) if len(ids) + max_new_tokens <= model.config.max_positions]
    ids, systems = [prompts[i][0] for i in fitting], [prompts[i][1] for i in fitting]
    replies: list[str | None] = [None] * len(prompts)
    for i, new in zip(fitting, model.generate(ids, systems, max_new_tokens, stop_ids=tok.stop_ids)):
        replies[i] = tok.decode(new)
    return replies


def converse(
    model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int, system: str
) -> list[list[str | None]]:
    """The replies to each example's turns, asked one after the other with the model's own replies in between."""
    histories = [with_system(list(e["messages"]), system) for e in examples]
    replies: list[list[str | None]] = [[] for _ in examples]
    for turn in range(max(len(e["turns"]) for e in examples)):
        going = [i for i, e in enumerate(examples) if turn < len(e["turns"])]
        for i in going:
            histories[i] = [*histories[i], {"role": "user", "content": examples[i]["turns"][turn]}]
        for i, reply in zip(going, generate(model, tok, [histories[i] for i in going], max_new_tokens)):
            replies[i].append(reply)  # None once the conversation is too long, and then for its other turns as well
            histories[i] = [*histories[i], {"role": "assistant", "content": reply or ""}]
    return replies


@torch.no_grad()
def choose(model: Transformer, tok: Tokenizer, examples: list[dict], system: str) -> list[dict]:
    """
    The likeliest of each example's choices, single tokens, right after the opening of the assistant's reply:
    {"reply", "log-likelihoods": in nats, by choice}.
    """
    rows: list[dict] = [{"reply": None}] * len(examples)
    for i, example in enumerate(examples):
        ids, mask = prompt(tok, with_system(example["messages"], system))
        ids = torch.cat((ids, torch.tensor(tok.encode(example["opening"]))))
        mask = torch.nn.functional.pad(mask, (0, len(ids) - len(mask)))
        tokens = [tok.encode(choice) for choice in example["choices"]]
        if any(len(token) != 1 for token in tokens):
            raise ValueError(f"the tokenizer has no single token for one of {example['choices']}: take another model")
        if len(ids) > model.config.max_positions:
            continue
        device = model.embed_tokens.weight.device
        hidden = model(ids[None].to(device), mask[None].to(device))[0, -1]
        likelihoods = model.logits(hidden).float().log_softmax(-1)[[token[0] for token in tokens]].tolist()
        best = max(range(len(tokens)), key=lambda c: likelihoods[c])
        rows[i] = {"reply": example["choices"][best], "log-likelihoods": likelihoods}
    return rows


def first_asks(example: dict) -> list[list[dict]]:
    """The conversations that an example asks, of its turns the first one."""
    if "turns" in example:
        return [[*example["messages"], {"role": "user", "content": example["turns"][0]}]]
    return example["asks"] if "asks" in example else [example["messages"]]


def reply_to(model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int, system: str) -> list[dict]:
    """What the model says to a batch of examples of one kind: {"reply": a text, or a list of texts}, by example."""
    if "choices" in examples[0]:
        return choose(model, tok, examples, system)
    if "turns" in examples[0]:
        return [{"reply": replies} for replies in converse(model, tok, examples, max_new_tokens, system)]
    asks = [first_asks(e) for e in examples]
    flat = iter(generate(model, tok, [with_system(m, system) for a in asks for m in a], max_new_tokens))
    replies = [[next(flat) for _ in a] for a in asks]
    return [{"reply": r if "asks" in e else r[0]} for e, r in zip(examples, replies)]


def ask(
    model: Transformer,
    tok: Tokenizer,
    examples: list[dict],
    max_new_tokens: int = 32,
    batch_tokens: int = 4096,
    system: str = "",
    bar: str = "replies",
) -> Iterator[tuple[int, dict]]:
    """
    Greedy replies to all examples, in batches of similar length that hold at most batch_tokens prompt tokens. Yields
    (index, example with its reply), batch by batch; whatever the batches, in fp32 the replies are the same.
    """
    lengths = [sum(len(prompt(tok, messages)[0]) for messages in first_asks(e)) for e in examples]
    lengths = [n * len(e.get("turns", [0])) for n, e in zip(lengths, examples)]  # our choice: they grow, turn by turn
    order = sorted(range(len(examples)), key=lambda i: lengths[i])
    with tqdm(total=len(examples), desc=bar, leave=False) as progress:
        while order:
            # the longest comes last, so it decides how many fit beside it
            n = max(1, batch_tokens // lengths[order[-1]])
            batch, order = order[-n:], order[:-n]
            said = reply_to(model, tok, [examples[i] for i in batch], max_new_tokens, system)
            yield from ((i, {**examples[i], **row}) for i, row in zip(batch, said))
            progress.update(len(batch))


def ask_base(model: Transformer, tok: Tokenizer, examples: list[dict], path: Path) -> list[dict]:
    """
    The judged replies to data/hierarchy of a model that adds nothing yet, loaded from the checkpoint directory path.
    The replies stay in .cache/, and serve every later run with the same weights, prompts, device, dtype and code.
    """
    weight, code = model.embed_tokens.weight, [ROOT / "model.py", ROOT / "eval.py", ROOT / "data" / "chat.py"]
    files = stamps([*sorted(path.iterdir()), *code])
    key = json.dumps([files, examples, str(weight.device), str(weight.dtype), torch.__version__], sort_keys=True)
    file = CACHE / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: ask again
        rows = read_jsonl(file)
        if [row["id"] for row in rows] == [example["id"] for example in examples]:
            return judge("hierarchy", rows)
    rows = ask_in_order(model, tok, examples)
    with suppress(OSError):  # a read-only checkout asks every time
        file.parent.mkdir(exist_ok=True)
        write_jsonl(file, rows)
    return rows


def ask_in_order(model: Transformer, tok: Tokenizer, examples: list[dict]) -> list[dict]:
    """The judged replies to examples of data/hierarchy, in the examples' order."""
    return judge("hierarchy", [row for _, row in sorted(ask(model, tok, examples), key=lambda pair: pair[0])])


# ----------------------------------------------------------------------------------------------------------------------
# scores

Table = dict[str, dict[str, dict]]  # by group, by measure: mean, n, undecided, low, high


def judge(task: str, rows: list[dict], allow_code: bool = False) -> list[dict]:
    """The rows with "scores" by the task's score.py; none for a reply that did not come as its prompt was too long."""
    score, judged = import_module(f"data.{task}.score").score, []
    for row in rows:
        options = {"allow_code": allow_code} if task == "ih_challenge" else {}
        options |= {"verdicts": row["verdicts"]} if task == "sysbench" else {}
        unanswered = row["reply"] is None or ("asks" in row and None in row["reply"])
        judged.append({**row, "scores": {} if unanswered else score(row, row["reply"], **options)})
    return judged


def decisions(row: dict, measure: str) -> list[float]:
    """What a measure decided of one reply: one number, or several that are pooled; undecided ones are left out."""
    return [float(value) for value in values_of(row, measure) if value is not None]


def values_of(row: dict, measure: str) -> list:
    value = row["scores"].get(measure)
    return value if isinstance(value, list) else [value]


def pool(values: Iterable[list[float]]) -> list[float]:
    """All prompts' decisions in one list."""
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


def summarize(rows: list[dict], pooled: bool = False) -> Table:
    """
    By group and measure: the mean, its 95 % bootstrap interval, the n decisions that it is over, how many were left
    undecided, and the prompts that were answered. Pooled, all groups are one, "all", with the mean of their means as
    "macro" beside.
    """
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    macro: dict[str, list[float]] = {}
    if pooled:
        for of_group in groups.values():
            for measure in dict.fromkeys(name for row in of_group for name in row["scores"]):
                if values := pool(decisions(row, measure) for row in of_group):
                    macro.setdefault(measure, []).append(sum(values) / len(values))
        groups = {"all": rows}
    table: Table = {}
    for group, of_group in groups.items():
        table[group] = {}
        for measure in dict.fromkeys(name for row in of_group for name in row["scores"]):
            answered = [row for row in of_group if row["scores"]]
            values = [decisions(row, measure) for row in answered]
            entry = {"mean": mean(values), "n": len(pool(values)), "prompts": len(values)}
            entry["undecided"] = sum(values_of(row, measure).count(None) for row in answered)
            table[group][measure] = entry | (interval(resample(values)) if entry["n"] else {"low": None, "high": None})
            if measure in macro:
                table[group][measure]["macro"] = sum(macro[measure]) / len(macro[measure])
    return table


def percent(entry: dict | None) -> str:
    """A table's cell: the mean in percent, and its interval."""
    if entry is None or entry["mean"] is None:
        return "–"
    return f"{entry['mean']:.1%} ({100 * entry['low']:.0f} to {100 * entry['high']:.0f})"


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])


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
    for group, entries in table.items():
        for measure, entry in entries.items():
            if entry["undecided"]:
                said.append(f"{measure}, {group}: {entry['undecided']} could not be decided")
            if "macro" in entry:
                said.append(f"macro average of {measure} {entry['macro']:.1%}")
    return "".join(f"\n{sentence}" for sentence in said)


# ----------------------------------------------------------------------------------------------------------------------
# kept replies: one run again, or several side by side


def kept_replies(folder: Path, allow_code: bool = False) -> dict[str, dict[str, list[dict]]]:
    """
    The replies in a directory of train.py (replies.jsonl) or of eval.py (TASK.jsonl, of tasks that came to their end),
    judged anew: by task, and by whose they are ("before", …). ValueError or FileNotFoundError if they are none.
    """
    files = [(task, folder / f"{task}.jsonl") for task in TASKS if (folder / f"{task}.json").is_file()]
    kept: dict[str, dict[str, list[dict]]] = {}
    for task, file in [("hierarchy", folder / "replies.jsonl"), *files]:
        try:
            for row in judge(task, read_jsonl(file), allow_code) if file.is_file() else []:
                kept.setdefault(task, {}).setdefault(row["when"], []).append(row)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file} holds something else than judged replies ({error!r}): evaluate again") from None
    if not kept:
        raise FileNotFoundError(f"{folder} holds no replies.jsonl and no TASK.jsonl: give the directory of a run")
    return kept


def load_runs(folders: list[Path], allow_code: bool = False) -> dict[str, list[dict]]:
    """
    The complete runs among folders, by name; those whose flags differ in the seed alone share one. Each is its
    results.json with its replies by prompt under "rows", those of the untrained base under "base".
    """
    groups: dict[str, list[dict]] = {}
    names = [folder.name for folder in folders]
    for folder in folders:
        if folder.is_file():  # out/* may bring other files along
            continue
        about = next((folder / f for f in ("results.json", "flags.json") if (folder / f).is_file()), folder)
        kept: dict = {}
        with suppress(FileNotFoundError):
            kept = kept_replies(folder, allow_code)
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
        flags = run["flags"].pop("trained", None) or run["flags"]
        run["seed"] = flags.get("seed")
        key = [{k: v for k, v in f.items() if k not in ("seed", "adapter", "files")} for f in (flags, run["flags"])]
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    if not groups:
        raise ValueError(f"none of {', '.join(map(str, folders))} holds a complete run: give directories of train.py")
    named = {}
    for runs in groups.values():
        names = [run["name"] for run in runs]  # cal-s0 and cal-s1 are cal
        common = re.sub(r"[-_.]?(s|seed)?\d*$", "", os.path.commonprefix(names)) if len(runs) > 1 else names[0]
        named[common if common and common not in named else ", ".join(names)] = runs
    return named


def prompt_key(task: str, row: dict) -> tuple[str, str, str]:
    """What tells a prompt from all others of all tasks: its number, and its text, should the data have changed."""
    return task, group_of(row), json.dumps([row.get(name) for name in ("id", "messages", "turns", "asks")])


def compare(groups: dict[str, list[dict]]) -> dict[tuple[str, str, str], dict]:
    """
    By (task, group, measure): n, the prompts that all runs share; the base's mean; and by group of runs the mean over
    them, theirs each, and the difference to the first group with its paired 95 % interval: the prompts are drawn again,
    each with all its runs.
    """
    everyone = [run["rows"] for runs in groups.values() for run in runs]
    bases = [run["base"] for runs in groups.values() for run in runs if run["base"]]
    shared = [key for key in everyone[0] if all(key in rows for rows in everyone)]
    cells: dict[tuple[str, str, str], list] = {}
    for key in shared:
        task, group, _ = key
        for measure in everyone[0][key]["scores"]:
            if all(decisions(rows[key], measure) for rows in everyone):  # else it would not be paired
                cells.setdefault((task, "all" if task in POOLED else group, measure), []).append(key)
    if not cells:
        raise ValueError("these runs share no prompt that all of them answered: compare runs of the same tasks")
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
            several = len(entry["runs"]) > 1
            spread = f" ({100 * min(entry['runs']):.0f} to {100 * max(entry['runs']):.0f})" if several else ""
            cells.append(f"{entry['mean']:.0%}{spread}")
        for group in others:
            entry = row["groups"][group]
            points = [100 * entry[key] for key in ("difference", "low", "high")]
            cells.append("{:+.0f} ({:+.0f} to {:+.0f})".format(*points))
        lines.append(cells)
    heads = ["task", "set", "measure", "n", "base", *groups, *(f"{group} - {first}" for group in others)]
    costs = []
    for group, runs in groups.items():
        parameters = runs[0].get("parameters")
        cells = [group, ", ".join(str(run["seed"]) for run in runs)]
        cells.append("–" if parameters is None else f"{parameters:,}")
        for name, digits in (("val_loss", 4), ("train_seconds", 0), ("peak_memory_gb", 1)):
            values = [run[name] for run in runs if run.get(name) is not None]
            cells.append(f"{np.mean(values):.{digits}f}" if values else "–")
        costs.append(cells)
    cost_heads = ["run", "seeds", "parameters", "validation loss", "training, s", "peak memory, GB"]
    return f"{markdown(heads, lines)}\n\n{markdown(cost_heads, costs)}"


def plot(groups: dict[str, list[dict]], table: dict[tuple[str, str, str], dict], file: Path) -> None:
    """Draws, for each task whose groups are numbers (tokens, turns, shots), every run's scores over them."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    curves: dict[tuple[str, str], list] = {}
    for (task, group, measure), row in table.items():
        place = re.search(r"\d+", f"{measure} {group}" if task == "erosion" else group)
        if task in ("long_ifeval", "erosion", "msj") and place:
            kind = "rules kept" if task == "erosion" else measure
            curves.setdefault((task, kind), []).append((int(place[0]), row))
    if not curves:
        raise ValueError("none of these runs has long_ifeval, erosion or msj: nothing to plot")
    figure, axes = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for ax, ((task, kind), points) in zip(axes[0], curves.items()):
        points.sort(key=lambda point: point[0])
        for group in groups:
            ax.plot([x for x, _ in points], [row["groups"][group]["mean"] for _, row in points], "o-", label=group)
        ax.set(title=task, xlabel={"long_ifeval": "tokens", "erosion": "turn", "msj": "shots"}[task], ylabel=kind)
        ax.set_ylim(0, 1)
        if task != "erosion":
            ax.set_xscale("log", base=2)
        ax.legend()
    figure.tight_layout()
    figure.savefig(file)


# ----------------------------------------------------------------------------------------------------------------------


def run_task(task: str, args: argparse.Namespace, model: Transformer, tok: Tokenizer, source: str) -> str:
    """Asks what --out lacks, scores all replies, keeps both there, returns the table. OSError, ValueError: why not."""
    if task == "sysbench" and not args.judge:
        raise ValueError("--judge names the model that judges it, at $OPENAI_BASE_URL")
    if task == "ih_challenge" and not args.allow_code:
        raise ValueError("its graders are downloaded code: --allow_code runs them")
    examples = load_examples(task, args, tok)
    file, name = args.out / f"{task}.jsonl" if args.out else None, "adapter" if args.adapter else "base"
    rows = {prompt_key(task, row): row for row in (read_jsonl(file) if file and file.is_file() else [])}
    wanted = {prompt_key(task, e): e for e in examples}
    missing = [e for key, e in wanted.items() if key not in rows]
    rows = [row for key, row in rows.items() if key in wanted]
    max_new_tokens = args.max_new_tokens or import_module(f"data.{task}.score").MAX_NEW_TOKENS
    with open(file or os.devnull, "a", encoding="utf-8") as kept:
        for _, row in ask(model, tok, missing, max_new_tokens, args.batch_tokens, args.system, task):
            rows.append({"when": name, **row})
            kept.write(json.dumps(rows[-1]) + "\n")
            kept.flush()
    if task == "sysbench":
        whole = [row for row in rows if None not in row["reply"]]
        verdicts = dict(zip((row["id"] for row in whole), ask_judge(whole, args.judge, (args.out or CACHE) / VERDICTS)))
        rows = [{**row, "verdicts": verdicts.get(row["id"], [None] * len(row["turns"]))} for row in rows]
    answered = {prompt_key(task, row): row for row in rows}
    rows = [answered[key] for key in wanted]  # the longest were asked first
    try:
        rows = judge(task, rows, args.allow_code)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        damaged = EXAMPLES / task / "examples.jsonl"
        raise ValueError(f"an example can't be scored ({error!r}): delete {damaged}, and it is made anew") from None
    table = summarize(rows, task in POOLED)
    if file:
        about = {"task": task, name: table, "weights": source, "flags": vars(args)}
        about |= {"versions": {"python": platform.python_version(), "torch": torch.__version__}}
        write_jsonl(file, rows)
        write_json(args.out / f"{task}.json", about)
    return show({name: table}) + notes(rows, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    flag = parser.add_argument
    flag("--tasks", default="hierarchy", help=f"with commas, or all: {', '.join(TASKS)} (%(default)s)")
    sets = ", ".join(f"{name} {n}" for name, n in SETS.items())
    flag("--limit", type=int, help=f"prompts a task, of hierarchy a set (default: all, of hierarchy {sets})")
    flag("--system", default="You are a helpful assistant.", help="for tasks without a system prompt (%(default)s)")
    flag("--max_new_tokens", type=int, help="tokens a reply may have (default: the benchmark's own)")
    flag("--batch_tokens", type=int, default=4096, help="prompt tokens that are answered at once (%(default)s)")
    flag("--seed", type=int, default=0, help="of the shuffle that --limit takes the first of (%(default)s)")
    flag("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of long_ifeval's prompts (%(default)s)")
    flag("--filler", type=Path, help="a text file for long_ifeval's filler (default: prose that the task makes)")
    flag("--turns", type=int, default=5, help="user turns of erosion (%(default)s)")
    flag("--judge", metavar="MODEL", help="judges sysbench, over $OPENAI_BASE_URL with $OPENAI_API_KEY")
    flag("--allow_code", action="store_true", help="run ih_challenge's downloaded graders, in a process of their own")
    flag("--out", type=Path, help="a directory for TASK.jsonl, every reply, and TASK.json, the scores")
    flag("--rescore", type=Path, metavar="DIR", help="count the replies kept in DIR again, and stop")
    flag("--compare", type=Path, nargs="+", metavar="DIR", help="print the runs in these directories side by side")
    flag("--plot", type=Path, metavar="FILE", help="with --compare: draw scores by length, turn and shots (matplotlib)")
    args = parser.parse_args()

    if args.plot and not args.compare:
        raise ValueError("--plot draws what --compare DIR… has compared: give both")
    if args.rescore:
        for task, whens in kept_replies(args.rescore, args.allow_code).items():
            tables = {when: summarize(rows, task in POOLED) for when, rows in whens.items()}
            said = "".join(notes(rows, tables[when]) for when, rows in whens.items())
            print(f"{task}\n\n{show(tables)}{said}\n")
        return
    if args.compare:
        groups = load_runs(args.compare, args.allow_code)
        table, file = compare(groups), args.compare[0].parent / "compare.json"
        print(
            "Means over the runs of a column, the lowest and the highest run in brackets; differences in points, with "
            f"paired 95 % intervals\nover the prompts, which do not hold what another seed would change.\n\n"
            f"{show_comparison(groups, table)}\n\nThe same numbers, not rounded: {file}"
        )
        of_run = ("name", "flags", "parameters", "loss", "val_loss", "train_seconds", "peak_memory_gb")
        runs = {group: [{k: run.get(k) for k in of_run} for run in runs] for group, runs in groups.items()}
        rows = [{"task": task, "set": group, "measure": name, **row} for (task, group, name), row in table.items()]
        write_json(file, {"runs": runs, "table": rows})
        if args.plot:
            plot(groups, table, args.plot)
        return

    tasks = list(TASKS) if args.tasks == "all" else args.tasks.replace(" ", "").split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(TASKS)}, or all")
    for name in ("limit", "max_new_tokens", "batch_tokens", "turns", "lengths"):
        value = getattr(args, name)
        if value is not None and min(value if name == "lengths" else [value]) < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1")
    model, tok, path = load(args)
    if args.out:
        start_or_go_on(args, path)
    source = weights_source(path)
    print(f"weights: {source}")
    failed = 0
    for task in tasks:
        print(f"\n{task}\n")
        try:
            print(run_task(task, args, model, tok, source))
        except (OSError, ValueError) as error:  # no data, no judge: the other tasks run
            failed += 1
            print(f"not run: {error}")
    if failed == len(tasks):
        raise ValueError("none of the tasks could be run")


def start_or_go_on(args: argparse.Namespace, base: Path) -> None:
    """
    Makes --out, or checks that it holds a run of the same flags and weights, which then goes on. A line that was being
    written when the run was killed is cut off. ValueError if the directory holds something else.
    """
    free = ("tasks", "limit", "out", "rescore", "compare", "plot", "judge", "allow_code", "batch_tokens", "device")
    flags = {k: v for k, v in vars(args).items() if k not in free}
    if args.adapter:
        flags["trained"] = adapter_info(args.adapter).get("flags")
    folders = [base, Path(args.adapter)] if args.adapter else [base]
    weights = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    flags["files"] = {str(f.resolve()): [f.stat().st_size, f.stat().st_mtime_ns] for f in weights}
    flags = json.loads(json.dumps(flags, default=str))
    file = args.out / "flags.json"
    there = {f.name for f in args.out.iterdir()} - {"flags.json.part"} if args.out.is_dir() else set()
    if (there and not file.is_file()) or args.out.is_file():
        raise ValueError(f"{args.out} already holds something: give another --out, or delete it")
    args.out.mkdir(parents=True, exist_ok=True)
    started = read_json(file) if file.is_file() else flags
    if different := [f"--{k}" for k in flags if flags[k] != started.get(k)]:
        names = ", ".join(different).replace("--files", "weights")
        raise ValueError(f"the run in {args.out} was started with another {names}: give another --out")
    write_json(file, flags)
    for task in TASKS:
        if (replies := args.out / f"{task}.jsonl").is_file():
            text = replies.read_bytes()
            write_whole(replies, text[: text.rfind(b"\n") + 1])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: with --out, the same command goes on")
    except (ValueError, OSError) as error:
        sys.exit(f"eval.py: {error}")
