"""
Runs a model over the test sets of data/hierarchy and scores its replies by program:

    python eval.py --adapter out/cal --out out/cal-again     an adapter
    python eval.py --out out/base                            the bare base
    python eval.py --rescore out/cal                         counts the kept replies again, without a model
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cal import write_whole
from data.chat import Tokenizer
from data.download import weights_source
from data.hierarchy.prepare import prepare_if_needed
from data.hierarchy.score import follows, plain, right
from model import Transformer
from sample import add_model_flags, load, prompt

HIERARCHY = Path(__file__).parent / "data" / "hierarchy"
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


def summarize(rows: list[dict]) -> dict[str, dict]:
    """
    By set: the share that followed, n, the share's 95 % bootstrap interval (2,000 resamples, a fixed seed), and the
    share of right answers among the rows that have one.
    """
    table = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == name]
        followed = np.array([row["followed"] for row in of_set], dtype=float)
        right_share = np.mean([row["right"] for row in of_set if row["right"] is not None])
        resamples = np.random.default_rng(0).choice(followed, (2000, len(followed))).mean(axis=1)
        low, high = np.quantile(resamples, (0.025, 0.975))
        table[name] = {"followed": followed.mean(), "n": len(followed), "low": low, "high": high, "right": right_share}
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
        cells += [f"{row['right']:.0%}" for row in rows]
        lines.append(f"| {name} | {rows[0]['n']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rescore(folder: Path) -> dict[str, dict[str, dict]]:
    """Recounts the replies kept in folder: summarize's tables by what the replies are of ("before", "after", …)."""
    file = folder / "replies.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no replies.jsonl: give the directory of a run")
    try:
        rows = [judge(row, row["reply"]) for row in read_jsonl(file)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} holds something else than judged replies ({error!r}): evaluate again") from None
    return {when: summarize([r for r in rows if r["when"] == when]) for when in dict.fromkeys(r["when"] for r in rows)}


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
    args = parser.parse_args()
    if args.rescore:
        print(show(rescore(args.rescore)))
        return
    if args.batch_tokens < 1:
        raise ValueError(f"--batch_tokens is {args.batch_tokens}: it must be at least 1")
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
