"""Make the data set of rules that no user may change: `python -m data.hierarchy.prepare`.

In every conversation the system message sets a rule for the form of all replies, earlier turns keep it or break it, the
last user may attack it, and the last reply keeps it. Replies are the base's own words (data/hierarchy/ask.py) within the
rule's form. The lists stand beside this file; the rest comes from one seed.
"""

import argparse
import os
import random
import re
from collections import defaultdict
from pathlib import Path

from data.files import is_fresh, read_json, read_jsonl, sources_of, write_jsonl, write_made
from data.hierarchy.score import FAMILIES, HELD_OUT_FAMILIES, TRAIN_FAMILIES, VAL_FAMILIES, obey

HERE = Path(__file__).parent
# test set: how many of its prompts are asked by default; 24 earlier turns are long
TESTS = {"rules": 72, "attacks": 72, "shots2": 72, "shots8": 72, "shots24": 36, "families": 72, "plain": 72}
# validation set: what to choose placements, rates and steps by, so that the test sets are asked once
VALS = {"val_rules": 72, "val_shots8": 72, "val_families": 72}
SETS = ("train", "single", "val", *VALS, *TESTS)
MOST_TURNS = 24  # earlier turns of a test conversation, each with a question of its own
PLAIN_SHARE = 0.11  # training conversations without a rule: what is plain has to stay plain
COMPOSED_SHARE = 0.6  # our choice: of those with one, how many have a rule that is put together by chance

# Composed rules: a mark {m} = {o}{p}{c} in a place beside the answer, or {o} and {c} around it or around both. The two
# dozen forms of TRAIN_FAMILIES alone are learned by heart; with thousands, so is copying what the system prompt shows.
PLACES = {
    "before": ("{m} {a}",),
    "after": ("{a} {m}",),
    "around": ("{m} {a} {m}",),
    "above": ("{m}\n{a}",),
    "below": ("{a}\n{m}",),
    "inside": ("{o}{p}: {a}{c}", "{o}{p} = {a}{c}", "{o}{o2}{p}{c2}: {o2}{a}{c2}{c}"),
    "wrap": ("{o}{a}{c}",),
}
PARTS = ("train", "val", "test")
# the lists: what may stand in their first columns, how many columns of text follow, and what is filled in there
LISTS = {
    "questions.tsv": ((), 3, set()),
    "candidates.tsv": ((), 3, set()),
    "words.txt": ((), 1, set()),
    "names.txt": ((), 1, set()),
    "attacks.tsv": ((PARTS,), 1, set()),
    "neutral.tsv": ((PARTS,), 1, set()),
    "frames.tsv": ((PARTS,), 1, {"{rule}"}),
    "rules.tsv": ((("*", *FAMILIES), PARTS), 1, {"{form}", "{p}"}),
    "composed.tsv": ((tuple(PLACES),), 1, {"{m}", "{form}", "{name}"}),
    "marks.tsv": ((), 3, set()),
}

Pools = dict[str, dict[str, list]]  # what may be drawn: kind of thing -> "train", "val" or "test" -> values


def rows(name: str) -> list[list[str]]:
    """The tab-separated lines of a list beside this file. ValueError names a line that is none."""
    lines, (known, texts, holes) = [], LISTS[name]
    try:
        text = (HERE / name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{HERE / name} is not UTF-8 text ({error}): save it as that") from None
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split("\t")
        if not line.strip():
            continue
        if len(cells) != len(known) + texts or not all(cell.strip() for cell in cells):
            raise ValueError(f"{HERE / name} line {number} has not {len(known) + texts} texts with tabs between: mend it")
        if wrong := [cell for cell, names in zip(cells, known) if cell not in names]:
            names = ", ".join(known[cells.index(wrong[0])])
            raise ValueError(f"{HERE / name} line {number}: {wrong[0]!r} is none of {names}")
        # a rule or a frame has something to fill in, unless its family has no parameter; other texts have nothing
        filled = set(re.findall(r"\{\w*\}", cells[-1]))
        if filled - holes or (holes and not filled and FAMILIES.get(cells[0], ("", "word"))[1]):
            raise ValueError(f"{HERE / name} line {number} must have {' or '.join(sorted(holes)) or 'no {…}'}: mend it")
        lines.append(cells)
    return lines


def split(values: list, rng: random.Random) -> dict[str, list]:
    """Deal values out: 18 % for the tests, 6 % for validation, the rest for training."""
    values = rng.sample(values, len(values))
    test, val = round(0.18 * len(values)), round(0.06 * len(values))
    return {"test": values[:test], "val": values[test : test + val], "train": values[test + val :]}


def make_pools(rng: random.Random) -> Pools:
    """Everything that a conversation is made of."""
    parameters = {
        "word": [word for (word,) in rows("words.txt")],
        "name": [name for (name,) in rows("names.txt")],
        "number": [str(n) for n in range(101, 1000)],
        "time": [f"{hour:02}:{minute:02}" for hour in range(24) for minute in range(60)],
        "version": [f"{major}.{minor}" for major in range(1, 60) for minor in range(10)],
        "code": [f"{letter}{n}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for n in range(10, 100)],
    }
    pools: Pools = defaultdict(lambda: defaultdict(list))
    pools["question"] = split(rows("questions.tsv"), rng)
    for kind, values in parameters.items():
        pools[kind] = split(values, rng)
    pools[""] = {"test": [""], "val": [""]}  # the families without a parameter are held out
    for name in ("attacks", "frames", "neutral"):
        for part, text in rows(f"{name}.tsv"):
            pools[name][part].append(text)
    for name, part, text in rows("rules.tsv"):
        for family in TRAIN_FAMILIES if name == "*" else [name]:
            pools[f"{family} rule"][part].append(text)
    for name in ("composed", "marks"):
        pools[name] = dict.fromkeys(("train", "val"), rows(f"{name}.tsv"))
    for name in ("frames", "neutral", "attacks"):  # our choice: what is validated is the rules
        pools[name]["val"] = pools[name]["val"] or pools[name]["train"]
    needed = dict.fromkeys(["composed", "marks"], ("train",))
    needed |= dict.fromkeys(["attacks", "frames", "neutral", *parameters], PARTS)
    for families, parts in ((TRAIN_FAMILIES, PARTS), (HELD_OUT_FAMILIES, ("test",)), (VAL_FAMILIES, ("val",))):
        needed |= {f"{family} rule": parts for family in families}
    for name, parts in needed.items():
        least = 2 if name in ("marks", "word") else 1  # a composed rule takes two
        if empty := [part for part in parts if len(pools[name][part]) < least]:
            raise ValueError(f"the lists in {HERE} have too few of {name!r} for {empty[0]}: add some")
    if len(pools["question"]["test"]) <= MOST_TURNS or len(pools["question"]["val"]) <= 8:
        raise ValueError(f"{HERE / 'questions.tsv'} has too few questions for {MOST_TURNS} turns of the test sets: add some")
    return pools


def compose(rng: random.Random, pools: Pools, part: str) -> tuple[str, str, str]:
    """A composed rule: its form, which is its family too, its parameter, and the rule in words."""
    place, words = rng.choice(pools["composed"][part])
    (name, before, behind), (_, before2, behind2) = rng.sample(pools["marks"][part], 2)
    kind = rng.choice(("word", "word", "words", "name", "number", "code")) if place != "wrap" else ""
    drawn = rng.sample(pools["word"][part], 2) if kind == "words" else [rng.choice(pools[kind][part])] if kind else []
    parameter = " ".join(drawn)
    mark = before + "{p}" + behind
    if before == behind and rng.random() < 0.5:  # on one side alone
        mark = rng.choice((before + "{p}", "{p}" + behind))
    form = rng.choice(PLACES[place]).replace("{m}", mark).replace("{o}", before).replace("{c}", behind)
    form = form.replace("{o2}", before2).replace("{c2}", behind2)
    words = words.replace("{name}", name).replace("{m}", mark.replace("{p}", parameter))
    return form, parameter, words.replace("{form}", obey(form, parameter, "..."))


def draw_rule(rng: random.Random, pools: Pools, family: str, part: str, wordings: str) -> tuple[str, str, str]:
    """The family, its parameter, and a system message with the rule in one of its wordings and frames; for "composed" the
    family is drawn, for "plain" the message sets no rule."""
    if family == "plain":
        return family, "", rng.choice(pools["neutral"][wordings])
    if family == "composed":
        family, parameter, rule = compose(rng, pools, part)
    else:
        parameter = rng.choice(pools[FAMILIES[family].kind][part])
        rule = rng.choice(pools[f"{family} rule"][wordings])
        rule = rule.replace("{form}", obey(family, parameter, "...")).replace("{p}", parameter)
    return family, parameter, rng.choice(pools["frames"][wordings]).replace("{rule}", rule)


def conversation(rng: random.Random, pools: Pools, family: str, part: str, wordings: str = "train",
                 attacks: str | None = None, turns: int = 0, broken: bool = True) -> tuple[dict, str]:  # fmt: skip
    """A record whose last reply keeps the rule, and the short answer to its last question.

    part: where questions and parameter come from; wordings, attacks: where those come from (None: no attack);
    turns: how many earlier turns; broken: whether the assistant broke the rule in them."""
    family, parameter, system = draw_rule(rng, pools, family, part, wordings)
    messages = [{"role": "system", "content": system}]
    questions = rng.sample(pools["question"][part], turns + 1)
    for turn, (question, answer, sentence) in enumerate(questions):
        last = turn == turns
        if last and attacks:
            sentences = [question, rng.choice(pools["attacks"][attacks])]
            question = " ".join(rng.sample(sentences, 2))  # the attack stands before the question or after it
        keeps = family != "plain" and (last or not broken)
        reply = obey(family, parameter, sentence) if keeps else sentence
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": messages, "family": family, "parameter": parameter}, answer


def make_training(rng: random.Random, pools: Pools, part: str, n: int) -> list[dict]:
    """n conversations of 0 to 3 earlier turns, in half of which the assistant broke the rule."""
    records = []
    for _ in range(n):
        family = "composed" if rng.random() < COMPOSED_SHARE else rng.choice(list(TRAIN_FAMILIES))
        family = "plain" if rng.random() < PLAIN_SHARE else family
        attacks = "train" if rng.random() < 0.5 else None
        turns, broken = rng.randrange(4), rng.random() < 0.5
        record, _ = conversation(rng, pools, family, part, attacks=attacks, turns=turns, broken=broken)
        # our choice: every reply that keeps the rule is learned; those that break it are shown alone
        records.append(record | {"train_on": "last"} if broken and family != "plain" else record)
    return records


def make_test(rng: random.Random, pools: Pools, families: list[str], n: int, part: str = "test", **factors) -> list[dict]:
    """n conversations that end with the user; any first few hold each family about equally often."""
    records = []
    while len(records) < n:
        for family in rng.sample(families, len(families)):
            record, answer = conversation(rng, pools, family, part, **factors)
            records.append({**record, "messages": record["messages"][:-1], "answer": answer})
    return records[:n]


def make_sets(seed: int) -> dict[str, list[dict]]:
    """All sets by name. The same seed gives the same sets on any machine."""
    rng = random.Random(seed)
    pools = make_pools(rng)
    known, unknown, others = list(TRAIN_FAMILIES), list(HELD_OUT_FAMILIES), list(VAL_FAMILIES)
    sets = {"train": make_training(rng, pools, "train", 4000)}
    sets["single"] = [{**r, "messages": r["messages"][:1] + r["messages"][-2:]} for r in sets["train"]]
    sets["val"] = make_training(rng, pools, "val", 64)
    sets["val_rules"] = make_test(rng, pools, known, 72, "val", wordings="val")
    sets["val_shots8"] = make_test(rng, pools, known, 72, "val", turns=8)
    sets["val_families"] = make_test(rng, pools, others, 72, "val", wordings="val")
    sets["rules"] = make_test(rng, pools, known, 144, wordings="test")
    sets["attacks"] = make_test(rng, pools, known, 144, attacks="test")
    sets["families"] = make_test(rng, pools, unknown, 144, wordings="test")
    for turns, n in ((2, 144), (8, 144), (MOST_TURNS, 72)):
        sets[f"shots{turns}"] = make_test(rng, pools, known, n, turns=turns)
    sets["plain"] = make_test(rng, pools, ["plain"], 144, wordings="test")
    return sets


def prepare(folder: Path, seed: int = 0) -> dict[str, list[dict]]:
    """Write every set to folder/<name>.jsonl, and return them all."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = make_sets(seed)
    for name, records in sets.items():
        write_jsonl(folder / f"{name}.jsonl.{os.getpid()}.part", records)
    for name in sets:  # all are there: sets of two runs never mix
        (folder / f"{name}.jsonl.{os.getpid()}.part").replace(folder / f"{name}.jsonl")
    write_made(folder, sources_of("hierarchy"), seed)
    return sets


def prepare_if_needed(folder: Path = HERE) -> None:
    """Writes the sets if one is missing, or if a list or code that they are made from has changed: from their own seed."""
    made = folder / "made.json"
    if not (made.is_file() and is_fresh(folder) and all((folder / f"{name}.jsonl").is_file() for name in SETS)):
        prepare(folder, read_json(made).get("seed", 0) if made.is_file() else 0)


def examples(limit: int | None = None, sets: dict[str, int] = TESTS) -> list[dict]:
    """What is asked: the first prompts of each of the sets, {"set", "id", "messages", "family", …}."""
    prepare_if_needed()
    return [
        {"set": name, "id": f"{name}/{i}", **example}
        for name, n in sets.items()
        for i, example in enumerate(read_jsonl(HERE / f"{name}.jsonl")[: limit or n])
    ]


def load(args: argparse.Namespace) -> list[dict]:
    """What eval.py asks."""
    return examples(args.limit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the data sets of data/hierarchy.")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other conversations and held-out parts")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder that the .jsonl files go to")
    args = parser.parse_args()
    print("set       conversations  mean characters")
    try:
        sets = prepare(args.out, args.seed)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    for name, records in sets.items():
        characters = sum(len(message["content"]) for record in records for message in record["messages"])
        print(f"{name:<10}{len(records):>13}{characters / len(records):>17.0f}")
