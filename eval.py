"""
Runs a model over benchmarks and scores its replies by program, as the benchmarks' authors do:

    python eval.py --adapter out/cal                              data/hierarchy, the default
    python eval.py --adapter out/cal --tasks ifeval,mmlu --out out/cal-eval
    python eval.py --tasks all --limit 8                          the bare base, a few prompts of each
    python eval.py --adapter out/cal --tasks mine.jsonl           prompts of your own (data/own/prepare.py says how)
    python eval.py --rescore out/cal-eval                         counts the kept replies again, without a model
    python eval.py --compare out/cal out/mlp out/lora             runs side by side; those of other seeds as one
    torchrun --nproc_per_node 8 eval.py --tasks all --out …       the prompts dealt over eight GPUs

--out gets, for each task, every reply (TASK.jsonl) and the scores (TASK.json); a run that was stopped goes on where it
was when the same command is given again.

A task is a folder of data/. prepare.py has prepare(folder), which makes examples.jsonl: an example is an "id", "messages"
(or "asks", several conversations, or "messages" and "turns", asked one after the other), and what the score needs.
score.py has MAX_NEW_TOKENS and score(example, reply). Here is the one loop over all of them. What a task needs to be
special about stands in its folder, too, and the loop calls it where it is there:

    prepare.py   load(args)                     the examples, where they are not in examples.jsonl
                 spread(examples, args)         more examples of each, before --limit chooses among them
                 finish(examples, args, tok)    the chosen examples as they are to be asked
    score.py     refuse(args)                   why the task can't be run with these flags, or None
                 follow(example, reply)         messages to ask next, after this reply, or None: the reply becomes a list
                 verdicts(rows, args)           the rows with what a judge says of them, before score() is called
                 OPTIONS, POOLED, AXIS          flags for score(); one row for all groups; what --plot draws over
"""

import argparse
import hashlib
import io
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import timedelta
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from cal import adapter_info, set_scale
from data import compare, files, report
from data.chat import Tokenizer
from data.download import weights_source
from data.hierarchy.score import MAX_NEW_TOKENS
from data.tokens import Conversations, collate, make_batches
from model import CPU_AMX, Cache, Transformer
from sample import add_model_flags, load, prompt, start_processes

EXAMPLES = files.ROOT / "data"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # tokens of long_ifeval's prompts

# --- examples ---------------------------------------------------------------------------------------------------------


def hook(task: str, part: str, name: str) -> Callable | None:
    """A function of a task's prepare.py or score.py that is there where the task is special."""
    return getattr(import_module(f"data.{task}.{part}"), name, None)


def load_examples(task: str, args: argparse.Namespace, tok: Tokenizer) -> list[dict]:
    """A task's examples, made where they are missing: the first --limit of a seeded shuffle, dealt over the task's
    groups (subjects, lengths, …). OSError or ValueError where the data can't be had."""
    if load_all := hook(task, "prepare", "load"):
        return load_all(args)
    file = EXAMPLES / task / "examples.jsonl"
    if not file.is_file() or not files.is_fresh(file.parent):
        hook(task, "prepare", "prepare")(file.parent)
    if not (examples := files.read_jsonl(file)):
        raise ValueError(f"{file} is empty: delete the file, and it is made anew")
    if spread := hook(task, "prepare", "spread"):
        examples = spread(examples, args)
    groups: dict[str, list[dict]] = {}
    for example in examples:
        groups.setdefault(report.group_of(example), []).append(example)
    for group in groups.values():  # one order for all: what is asked at one length, or after one shot, is asked at all
        group.sort(key=lambda e: random.Random(f"{args.seed} {e.get('base', e['id'])}").random())
    dealt = [e for one_of_each in zip_longest(*groups.values()) for e in one_of_each if e is not None]
    chosen = dealt[: args.limit]
    finish = hook(task, "prepare", "finish")
    return finish(chosen, args, tok) if finish else chosen


# --- replies ----------------------------------------------------------------------------------------------------------


def with_system(messages: list[dict], system: str) -> list[dict]:
    """The messages, with a system message in front if they have none and system is not empty."""
    as_they_are = not system or (messages and messages[0]["role"] == "system")
    return messages if as_they_are else [{"role": "system", "content": system}, *messages]


def generate(model: Transformer, tok: Tokenizer, conversations: list[list[dict]], max_new_tokens: int) -> list[str | None]:
    """Greedy replies; None to a conversation that leaves no room for one of max_new_tokens in the model's context."""
    prompts = [prompt(tok, messages) for messages in conversations]
    fitting = [i for i, (ids, _) in enumerate(prompts) if len(ids) + max_new_tokens <= model.config.max_positions]
    ids, systems = [prompts[i][0] for i in fitting], [prompts[i][1] for i in fitting]
    replies: list[str | None] = [None] * len(prompts)
    said = model.generate(ids, systems, max_new_tokens) if ids else []
    for i, new in zip(fitting, said):
        replies[i] = tok.decode(new)
    return replies


def converse(model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int, system: str) -> list[list]:
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
    """The likeliest of each example's choices, single tokens, right after the opening of the assistant's reply:
    {"reply", "log-likelihoods": in nats, by choice}. What all prompts begin with, five examples of MMLU, runs once."""
    rows: list[dict] = [{"reply": None} for _ in examples]
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    asked = []  # of those that fit: which example, its ids and its choices' tokens
    for i, example in enumerate(examples):
        ids, mask = prompt(tok, with_system(example["messages"], system))
        ids = torch.cat((ids, torch.tensor(tok.encode(example["opening"]))))
        mask = torch.nn.functional.pad(mask, (0, len(ids) - len(mask)))
        tokens = [tok.encode(choice) for choice in example["choices"]]
        if any(len(token) != 1 for token in tokens):
            raise ValueError(f"the tokenizer has no single token for one of {example['choices']}: take another model")
        if len(ids) <= model.config.max_positions:
            asked.append((i, ids, mask, [token for (token,) in tokens]))
    if not asked:
        return rows
    shortest, first, of_first = min(len(ids) for _, ids, _, _ in asked), asked[0][1], asked[0][2]
    shared = next((t for t in range(shortest - 1) if any(ids[t] != first[t] for _, ids, _, _ in asked)), shortest - 1)
    if any(mask[shared:].any() for _, _, mask, _ in asked):  # system prompts differ: each comes whole with its first call
        return [row for example in examples for row in choose(model, tok, [example], system)]
    rest = pad_sequence([ids[shared:] for _, ids, _, _ in asked], batch_first=True).to(device)
    cache = Cache(model.config, 1, shared + rest.shape[1], device, dtype)
    model(first[None, :shared].to(device), of_first[None, :shared].to(device), cache)
    cache.keep_rows(torch.zeros(len(asked), dtype=torch.long, device=device))  # once for each
    hidden = model(rest, None, cache)
    for row, (i, ids, _, tokens) in enumerate(asked):
        logits = model.logits(hidden[row, len(ids) - shared - 1])
        likelihoods = logits.float().log_softmax(-1)[tokens].tolist()
        best = max(range(len(tokens)), key=lambda c: likelihoods[c])
        rows[i] = {"reply": examples[i]["choices"][best], "log-likelihoods": likelihoods}
    return rows


def first_asks(example: dict) -> list[list[dict]]:
    """The conversations that an example asks, of its turns the first one."""
    if "turns" in example:
        return [[*example["messages"], {"role": "user", "content": example["turns"][0]}]]
    return example["asks"] if "asks" in example else [example["messages"]]


def reply_to(model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int, system: str,
             follow: Callable | None = None) -> list[dict]:  # fmt: skip
    """What the model says to a batch of examples of one kind: {"reply": a text, or a list of texts}, by example."""
    if "choices" in examples[0]:
        return choose(model, tok, examples, system)
    if "turns" in examples[0]:
        return [{"reply": replies} for replies in converse(model, tok, examples, max_new_tokens, system)]
    asks = [first_asks(e) for e in examples]
    flat = iter(generate(model, tok, [with_system(m, system) for a in asks for m in a], max_new_tokens))
    replies = [[next(flat) for _ in a] for a in asks]
    if follow:
        nexts = [follow(e, r[0]) if r[0] is not None else None for e, r in zip(examples, replies)]
        said = iter(generate(model, tok, [with_system(m, system) for m in nexts if m], max_new_tokens))
        return [{"reply": None if r[0] is None else r + [next(said)] if m else r} for r, m in zip(replies, nexts)]
    return [{"reply": r if "asks" in e else r[0]} for e, r in zip(examples, replies)]


def ask(model: Transformer, tok: Tokenizer, examples: list[dict], max_new_tokens: int = MAX_NEW_TOKENS,
        batch_tokens: int = 4096, system: str = "", bar: str = "replies",
        follow: Callable | None = None) -> Iterator[tuple[int, dict]]:  # fmt: skip
    """Greedy replies to all examples, in batches of similar length that hold at most batch_tokens prompt tokens. Yields
    (index, example with its reply), batch by batch; whatever the batches, in fp32 the replies are the same."""
    lengths = [sum(len(prompt(tok, messages)[0]) for messages in first_asks(e)) for e in examples]
    lengths = [n * len(e.get("turns", [0])) for n, e in zip(lengths, examples)]  # our choice: they grow, turn by turn
    # questions of one subject with choices stand together: they share their beginning
    subjects = [report.group_of(e) if "choices" in e else "" for e in examples]
    order = sorted(range(len(examples)), key=lambda i: (subjects[i], lengths[i]))
    with tqdm(total=len(examples), desc=bar, leave=False, disable=not bar) as progress:
        while order:
            # the longest comes last, so it decides how many fit beside it
            n = max(1, batch_tokens // lengths[order[-1]])
            batch = [i for i in order[-n:] if subjects[i] == subjects[order[-1]]]
            order = order[: -len(batch)]
            said = reply_to(model, tok, [examples[i] for i in batch], max_new_tokens, system, follow)
            yield from ((i, {**examples[i], **row}) for i, row in zip(batch, said))
            progress.update(len(batch))


# --- for train.py ------------------------------------------------------------------------------


def ask_in_order(model: Transformer, tok: Tokenizer, examples: list[dict], whose: str) -> list[dict]:
    """The judged replies to examples of data/hierarchy, in the examples' order."""
    replies = sorted(ask(model, tok, examples, bar=f"replies: {whose}"), key=lambda pair: pair[0])
    return report.judge("hierarchy", [row for _, row in replies])


def ask_base(model: Transformer, tok: Tokenizer, examples: list[dict], path: Path) -> list[dict]:
    """The same of a model that adds nothing yet, loaded from the checkpoint directory path. The replies stay in
    .cache/, and serve every later run with the same weights, prompts, device, dtype and code."""
    weight, checkpoint = model.embed_tokens.weight, files.stamps(sorted(path.iterdir()))
    about = [checkpoint, files.code_of_results(), examples, str(weight.device), str(weight.dtype), versions()]
    key = json.dumps([*about, torch.get_num_threads()], sort_keys=True)
    file = files.CACHE / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: ask again
        rows = files.read_jsonl(file)
        if [row["id"] for row in rows] == [example["id"] for example in examples]:
            return report.judge("hierarchy", rows)
    rows = ask_in_order(model, tok, examples, "base")
    with suppress(OSError):  # a read-only checkout asks every time
        file.parent.mkdir(exist_ok=True)
        files.write_jsonl(file, rows)
    return rows


def versions() -> dict[str, str]:
    """What a number's last digits depend on beside the code."""
    processor = torch.backends.cpu.get_cpu_capability() + (" with AMX" if CPU_AMX else "")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"python": platform.python_version(), "torch": torch.__version__, "processor": processor, "gpu": gpu}


@torch.no_grad()
def divergence(model: Transformer, tok: Tokenizer, rows: list[dict]) -> float:
    """The mean KL(base || trained) in nats a token over the base's replies in rows: what training moved beside the rules.
    It foretells forgetting (arXiv 2509.04259). The base is the model at scale 0, the trained one at scale 1."""
    total, count = 0.0, 0
    for row in rows:
        asked, system = prompt(tok, row["messages"])
        ids = torch.cat((asked, torch.tensor(tok.encode(row["reply"]), dtype=torch.long)))
        ids = ids.to(model.embed_tokens.weight.device)
        system = torch.nn.functional.pad(system, (0, len(ids) - len(asked))).to(ids.device)
        logp = []
        for scale in (0.0, 1.0):
            set_scale(model, scale)
            hidden = model(ids[None], system[None])[0, len(asked) - 1 : -1]  # where the reply's tokens are predicted
            logp.append(model.logits(hidden).float().log_softmax(-1))  # (tokens of the reply, V)
        base, trained = logp
        # KL(p || q) = sum_v p_v (log p_v - log q_v)
        total, count = total + (base.exp() * (base - trained)).sum().item(), count + len(base)
    return total / max(1, count)


@torch.no_grad()
def validate(model: Transformer, conversations: Conversations, batch_tokens: int, device: str, multiple: int = 1) -> float:
    """Loss in nats a target over the same conversations each time."""
    total, count = 0.0, 0
    for batch in make_batches(conversations.lengths, batch_tokens, seed=0):
        ids, system, targets = collate([conversations[i] for i in batch], device, multiple)
        loss, n = model.loss(model(ids, system), targets)
        total, count = total + loss.item(), count + n
    return total / count


# --- the command ------------------------------------------------------------------------------------------------------


def in_step(make: Callable[[], object], world: int) -> list:
    """What make() returns in each process, a list that all get; where it fails in one, it fails in all."""
    if world == 1:
        return [make()]
    try:
        mine = make(), None
    except (OSError, ValueError) as error:
        mine = None, str(error)
    dist.all_gather_object(everyone := [None] * world, mine)
    if errors := [error for _, error in everyone if error is not None]:
        raise ValueError(errors[0])
    return [result for result, _ in everyone]


def run_task(task: str, args: argparse.Namespace, model: Transformer, tok: Tokenizer, source: str,
             rank: int, world: int) -> str:  # fmt: skip
    """Asks what --out lacks, a share in each process; the first scores all replies, keeps both there, and returns the
    table. OSError, ValueError: why not."""
    name, out = "adapter" if args.adapter else "base", args.out
    refuse, follow, verdicts = (hook(task, "score", what) for what in ("refuse", "follow", "verdicts"))

    def find() -> tuple[dict, dict, list[dict]]:
        """In the first process: the examples and the replies that are there already, by prompt, and what is missing."""
        if refuse and (reason := refuse(args)):
            raise ValueError(reason)
        wanted = {report.prompt_key(task, e): e for e in load_examples(task, args, tok)}
        rows = {report.prompt_key(task, row): row for row in (report.kept_rows(out, task) if out else [])}
        missing = [e for key, e in wanted.items() if key not in rows]
        if out and missing:  # the scores that are there are not of all replies any more
            (out / f"{task}.json").unlink(missing_ok=True)
        return wanted, rows, sorted(missing, key=lambda e: len(json.dumps(e)))  # long ones for every process

    def ask_share() -> list[dict]:
        """In each process: the replies to its share, kept one by one."""
        max_new_tokens = args.max_new_tokens or import_module(f"data.{task}.score").MAX_NEW_TOKENS
        part, bar = (f".{rank}", "") if rank else ("", task)  # the first process alone has a bar
        file, new = out / f"{task}{part}.jsonl" if out else os.devnull, []
        with open(file, "a", encoding="utf-8") as kept:
            for _, row in ask(model, tok, missing[rank::world], max_new_tokens, args.batch_tokens, args.system, bar, follow):
                new.append({"when": name, **row})
                kept.write(json.dumps(new[-1]) + "\n")
                kept.flush()
        return new

    wanted, rows, missing = in_step(find if rank == 0 else tuple, world)[0]
    rows |= {report.prompt_key(task, row): row for new in in_step(ask_share, world) for row in new}
    if rank > 0:
        return ""
    ids = {(report.group_of(e), e["id"]) for e in wanted.values()}  # the rest is of an earlier call that asked for more
    others = [row for row in rows.values() if (report.group_of(row), row["id"]) not in ids]
    # in the examples' order, for the longest were asked first; and what they are scored by is today's
    judged = [{**rows[key], **example} for key, example in wanted.items()]
    judged = report.judge(task, verdicts(judged, args) if verdicts else judged, **vars(args))
    table = report.summarize(judged, task)
    if out:
        files.write_jsonl(out / f"{task}.jsonl", judged + others)
        about = {"task": task, name: table, "weights": source, "flags": vars(args), "processes": world}
        files.write_json(out / f"{task}.json", about | {"versions": versions()})
        for part in report.kept_files(out, task)[:-1]:  # TASK.1.jsonl, …: it stands in TASK.jsonl now
            part.unlink()
    return report.show({name: table}) + report.notes(judged, table)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    flag = parser.add_argument
    known = ", ".join(task for task in report.TASKS if task != "own")
    flag("--tasks", default="hierarchy", help=f"with commas, of {known}; or all; or FILE.jsonl (%(default)s)")
    flag("--limit", type=int, help="prompts a task, of hierarchy a set (default: all, of hierarchy 72, of shots24 36)")
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
    for name in ("limit", "max_new_tokens", "batch_tokens", "turns", "lengths"):
        value = getattr(args, name)
        if value is not None and min(value if name == "lengths" else [value]) < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1")
    named = (known if args.tasks == "all" else args.tasks).replace(", ", ",").split(",")
    args.own = [Path(task) for task in named if task.endswith(".jsonl")]
    args.tasks = list(dict.fromkeys("own" if task.endswith(".jsonl") else task for task in named))
    if unknown := [task for task in args.tasks if task not in report.TASKS or (task == "own" and not args.own)]:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(report.TASKS)}, all, or FILE.jsonl")
    return args


def open_directory(args: argparse.Namespace, base: Path) -> None:
    """Makes --out, or goes on with the run of the same flags and weights that is there. ValueError if it holds another."""
    free = ("tasks", "limit", "out", "rescore", "compare", "plot", "judge", "allow_code", "batch_tokens", "device", "own")
    flags = {k: v for k, v in vars(args).items() if k not in free}
    if args.adapter:
        flags["trained"] = adapter_info(args.adapter).get("flags")
    folders = [base, Path(args.adapter)] if args.adapter else [base]
    flags["weights"] = files.stamps(file for folder in folders for file in sorted(folder.glob("*.safetensors")))
    flags["code"] = files.code_of_results()
    flags = json.loads(json.dumps(flags, default=str))  # as they are read back
    files.check_directory(args.out, flags, go_on=True)
    args.out.mkdir(parents=True, exist_ok=True)
    files.write_json(args.out / "flags.json", flags)
    for replies in (file for task in report.TASKS for file in report.kept_files(args.out, task)):
        files.end_with_a_line(replies)


def main() -> None:
    args = read_flags()
    if args.rescore:
        return report.print_run(args.rescore, args.allow_code)
    if args.compare:
        return compare.print_comparison(args.compare, args.plot, args.allow_code)
    rank, world = start_processes(args, timedelta(days=30), "gloo")  # one may have hours of work left when another is done
    stdout = sys.stdout if rank == 0 else io.StringIO()  # the first process speaks for all
    with redirect_stdout(stdout), files.claim(args.out) if args.out and rank == 0 else nullcontext():
        run_tasks(args, rank, world)


def run_tasks(args: argparse.Namespace, rank: int, world: int) -> None:
    """Asks all tasks, one after the other. ValueError if none of them could be run."""
    model, tok, path = load(args)
    if rank == 0 and args.out:
        open_directory(args, path)
    if rank == 0 and world > 1:
        dist.barrier()  # now the others load as well
    source = weights_source(path)
    print(f"weights: {source}")
    failed = 0
    for task in args.tasks:
        print(f"\n{task}\n")
        try:
            print(run_task(task, args, model, tok, source, rank, world))
        except (OSError, ValueError) as error:  # no data, no judge: the other tasks run
            failed += 1
            print(f"not run: {error}")
    if failed == len(args.tasks) and rank == 0:
        raise ValueError("none of the tasks could be run")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: with --out, the same command goes on")
    except (ValueError, OSError) as error:
        sys.exit(f"eval.py: {error}")
