"""
Trains CAL blocks between the frozen layers of a pretrained model, or a baseline, by plain supervised fine-tuning:

    python train.py                                      SmolLM2-135M-Instruct on data/hierarchy, into out/cal
    python train.py --method lora                        the baselines: lora, mlp (ParallelMLP), full; into out/lora
    python train.py --base Qwen/Qwen2.5-1.5B-Instruct    another base
    python train.py --resume                             go on with a run that was stopped
    torchrun --nproc_per_node 8 train.py --accumulate 8  a step's batches, shared among eight GPUs

The run's directory gets metrics.jsonl (a line a step), replies.jsonl (every reply of the evaluations before and after),
results.json (their scores), and adapter.safetensors with adapter.json, which sample.py and eval.py load.
"""

import argparse
import io
import json
import math
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from cal import METHODS, PLACEMENTS, attach, load_trainable, save_adapter, sizes, trainable
from data import files
from data.chat import Tokenizer
from data.download import weights_source
from data.hierarchy import prepare as hierarchy
from data.hierarchy.score import first_sentence
from data.report import by_set, show, summarize
from data.tokens import Conversations, batches_of_step, collate, make_batches, remembered
from eval import ask_base, ask_in_order, divergence, validate, versions
from model import Transformer, pick_device, pick_dtype
from sample import BASE, add_device_flags, load_base, ready_to_ask, start_processes

# --- flags ------------------------------------------------------------------------------------------------------------


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--base", default=BASE, help="a checkpoint directory or Hub id (%(default)s)")
    flag("--data", default="hierarchy", help="a folder, of data/ or any, with JSONL files of messages (%(default)s)")
    flag("--split", default="train", help="which of its files to learn from; hierarchy has train, single (%(default)s)")
    flag("--method", default="cal", choices=METHODS, help="what is trained; none is the bare base (%(default)s)")
    # our choice: what does best on the validation sets of data/hierarchy at 135M; the paper's is late8th
    flag("--placement", default="middle8th", choices=PLACEMENTS, help="where the blocks go (%(default)s)")
    flag("--rank", type=int, help="LoRA's (as many parameters as CAL has at the placement)")
    flag("--width", type=int, help="ParallelMLP's (as many parameters as CAL has at the placement)")
    flag("--cal_rope", action="store_true", help="rotary in CAL, for the ablation")
    flag("--cal_ffn", type=float, default=1.0, help="width of CAL's feed-forward part, in the backbone's (%(default)s)")
    flag("--steps", type=int, default=400, help="optimizer steps (%(default)s)")
    flag("--batch_tokens", type=int, default=640, help="tokens in a batch, padding included (%(default)s)")
    flag("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    flag("--max_tokens", type=int, default=2048, help="longer conversations are left out (%(default)s)")
    flag("--cache_prefix", action="store_true", help="keep what the layers below the first block give on the disk")
    flag("--grad_checkpoint", action="store_true", help="less memory, more time: compute twice instead of saving")
    flag("--compile", action="store_true", help="torch.compile the layers: for long runs on a GPU")
    flag("--lr", type=float, help="peak learning rate (1e-3; full 1e-4)")
    flag("--clip", type=float, default=1.0, help="largest gradient norm (%(default)s)")
    flag("--seed", type=int, default=0, help="of the new blocks and of the data's order (%(default)s)")
    add_device_flags(parser)
    flag("--out", type=Path, help="the run's directory (out/METHOD)")
    flag("--val_every", type=int, default=100, help="steps between validations (%(default)s)")
    flag("--save_every", type=int, default=100, help="steps between checkpoints (%(default)s)")
    flag("--resume", action="store_true", help="go on with the run in --out; repeat its other flags")
    flag("--ask", default="test", choices=("test", "val", "none"), help="which sets, before and after: choose by val")
    flag("--eval_limit", type=int, help="prompts of each set (72, of shots24 36)")
    args = parser.parse_args()
    counts = ("steps", "batch_tokens", "accumulate", "max_tokens", "val_every", "save_every", "eval_limit", "rank", "width")
    for name in counts:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be at least 1")
    for name, methods in (("rank", ("lora",)), ("width", ("mlp",)), ("cache_prefix", ("cal", "mlp"))):
        if getattr(args, name) and args.method not in methods:
            raise ValueError(f"--{name} is of --method {' and '.join(methods)}, and this is {args.method}: leave it out")
    if args.accumulate % (world := int(os.environ.get("WORLD_SIZE", "1"))):
        raise ValueError(f"--accumulate is {args.accumulate}: it must be a multiple of the {world} processes")
    if args.lr is None:  # our choice: one for all that are compared; a whole backbone bears less
        args.lr = 1e-4 if args.method == "full" else 1e-3
    for name in ("lr", "clip", "cal_ffn"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be a number above 0")
    args.device, args.out = pick_device(args.device), args.out or Path("out") / args.method
    if args.method == "full":  # its weights are trained themselves, and bf16 would swallow small updates
        args.dtype = args.dtype or "fp32"
    args.dtype = "bf16" if pick_dtype(args.dtype, args.device) == torch.bfloat16 else "fp32"
    return args


# --- the machine ------------------------------------------------------------------------------------------------------

# Products of bf16 matrices, in TFLOP/s without sparsity: the makers' data sheets, by torch.cuda.get_device_name's name.
# A device that is not here has no MFU: none is better than a wrong one.
PEAK_TFLOPS = {
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
}


def flops(model: Transformer, tokens: int, targets: int, length: float) -> float:
    """The floating-point operations that a training step needs in its matrix products, two a multiply-add: `tokens` in
    conversations of `length` each, `targets` to predict. As in PaLM (arXiv 2204.02311, appendix B) attention counts all
    pairs, and nothing counts twice that is computed again to save memory. CAL's keys and values, few, are left out."""
    c = model.config
    forward, backward, learning = 0.0, 0.0, False  # a token; learning: from the first trained layer on
    for b, layer in enumerate(model.layers, start=1):
        for block in [layer, *([model.inserted[str(b)]] if str(b) in model.inserted else [])]:
            # a layer's own keys and values are called self_attn.k_proj…: what begins with k_ or v_ is CAL's
            matrices = [p for name, p in block.named_parameters() if p.dim() == 2 and name[:2] not in ("k_", "v_")]
            trained = sum(p.numel() for p in matrices if p.requires_grad)
            learning |= trained > 0
            linear = 2 * sum(p.numel() for p in matrices)  # x W
            attention = 4 * length * c.n_heads * c.head_dim if block is layer else 0.0  # softmax(Q K^T) V
            forward += linear + attention
            backward += 2 * trained  # the weights' gradients
            if learning:
                backward += linear + 2 * attention  # the activations' gradients
    head = model.head.weight
    return tokens * (forward + backward) + 2 * targets * head.numel() * (1 + learning + head.requires_grad)


def mfu(model: Transformer, device: str, tokens: int, targets: int, length: float, seconds: float) -> float | None:
    """The share of the device's peak that a step of one process reached; None where the peak is not known."""
    known = device.startswith("cuda") and model.embed_tokens.weight.dtype == torch.bfloat16
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name(device)) if known else None
    return peak and flops(model, tokens, targets, length) / (seconds * peak * 1e12)


def compile_layers(model: Transformer) -> None:
    """torch.compile, layer by layer, so that one compilation serves all; with sizes left open, it is a handful of times."""
    for module in model.modules():
        vars(module).pop("forward", None)  # the layers' own: what is put in its place differs from layer to layer
    for module in [*model.layers, *model.inserted.values()]:
        module.compile(dynamic=True)


def reset_peak_memory(device: str) -> None:
    """Forgets the peak so far, which an evaluation may have made; macOS and Windows can't."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # proc(5): of Linux, and not in every sandbox
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> float:
    """The most memory that this process has held, in GB: on the GPU if it runs there, else resident; 0 where unknown."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e9
    with suppress(OSError, TypeError):
        return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9
    return 0.0


# --- set-up -----------------------------------------------------------------------------------------------------------


def read_data(args: argparse.Namespace, tok: Tokenizer, context: int) -> tuple[Conversations, Conversations | None, str]:
    """What is learned from, what the validation loss is of, and a line about them."""
    ours = files.ROOT / "data" / args.data
    folder = ours if ours.is_dir() and Path(args.data).name == args.data else Path(args.data)  # ./sft is no data/sft
    file, max_tokens = folder / f"{args.split}.jsonl", min(args.max_tokens, context)
    if folder.resolve() == hierarchy.HERE:
        hierarchy.prepare_if_needed()
    if not file.is_file():
        hint = "--data is a folder, --split one of its JSONL files"
        if (folder / "prepare.py").exists():
            hint += f", which python -m data.{folder.name}.prepare may make"
        raise FileNotFoundError(f"{file} does not exist: {hint}")
    conversations, val = Conversations(file, tok, max_tokens), folder / "val.jsonl"
    validation = Conversations(val, tok, max_tokens) if val.exists() else None
    if not len(conversations):
        why = "no reply of the assistant" if conversations.silent else f"no conversation of at most {max_tokens} tokens"
        raise ValueError(f"{file} has {why}: there is nothing to learn from")
    line = (
        f"data {folder.name}/{args.split}: {len(conversations):,} conversations, "
        f"{sum(conversations.lengths) / len(conversations):.0f} tokens each on average "
        f"({conversations.dropped:,} left out: over {max_tokens} tokens, or without a reply), "
        f"{conversations.with_system:,} with a system prompt"
    )
    if args.method == "cal" and not conversations.with_system:
        line += "\nNone has a system prompt, and CAL learns from those alone: it will stay the identity."
    if validation is not None and not len(validation):
        line += f"\n{val} has nothing within {max_tokens} tokens: there is no validation loss."
    return conversations, validation, line


def load_checkpoint(out: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> int:
    """Puts the run's checkpoint, if there is one, into model and optimizer. Returns how many steps are done."""
    file = out / "checkpoint.pt"
    if not file.exists():
        return 0
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        load_trainable(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]
    except (EOFError, LookupError, TypeError, AttributeError, ValueError, RuntimeError, pickle.UnpicklingError):
        raise ValueError(f"{file} is damaged: delete it, and --resume starts the run again") from None


def save_checkpoint(out: Path, step: int, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """All that the rest of a run needs: nothing is drawn at random after the blocks' first values, and the data's order
    follows from the step."""
    state = {"step": step + 1, "adapter": trainable(model), "optimizer": optimizer.state_dict()}
    torch.save(state, buffer := io.BytesIO())
    files.write_whole(out / "checkpoint.pt", buffer.getvalue())


# --- the loop ---------------------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a fifteenth of the steps, then a cosine down to a tenth of the peak at the last one."""
    warmup = steps // 15  # our choice
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def sum_over_processes(parameters: list[torch.nn.Parameter], numbers: list[float]) -> list[float]:
    """Adds up every parameter's gradient, and some numbers, over all processes, in one all_reduce."""
    # a process whose batches had no system token has no gradient: it adds zeros
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads] + [torch.tensor(numbers, device=grads[0].device)])
    dist.all_reduce(flat)
    *grads, numbers = flat.split([p.numel() for p in parameters] + [len(numbers)])
    for p, g in zip(parameters, grads):
        p.grad = g.view_as(p)
    return numbers.tolist()


def prefix_on_disk(args: argparse.Namespace, model: Transformer, folder: Path, path: Path) -> Callable[[Tensor], Tensor]:
    """A function from ids (B, T) to what the layers below the first block make of them, which it keeps in the folder."""
    under_blocks = partial(model, stop=min(map(int, model.inserted)))
    # beside the batch it depends on the weights, the code, where the first block stands, and the machine
    key = [files.stamps(sorted(path.iterdir())), files.file_hash(files.ROOT / "model.py"), list(model.inserted)]
    key = json.dumps([*key, args.compile, args.dtype, args.device, torch.get_num_threads(), versions()])
    return lambda ids: remembered(under_blocks, ids, folder, key)


def train(args: argparse.Namespace, model: Transformer, data: Conversations, validation: Conversations | None,
          path: Path, rank: int, world: int) -> None:  # fmt: skip
    """The steps: each is a line in metrics.jsonl, every --save_every-th one a checkpoint."""
    parameters, device = list(trainable(model).values()), args.device
    optimizer = torch.optim.AdamW(parameters, args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    first = load_checkpoint(args.out, model, optimizer)
    if world > 1:
        dist.all_gather_object(seen := [None] * world, first)
        if len(set(seen)) > 1:
            raise ValueError(f"the processes find checkpoints of steps {seen}: give all of them one shared --out")
    if args.resume and rank == 0:
        print(f"going on after step {first}" if first else f"{args.out} has no checkpoint: the run starts at its beginning")
    batches = make_batches(data.lengths, args.batch_tokens, args.seed)
    prefix = prefix_on_disk(args, model, data.folder, path) if args.cache_prefix else None
    if args.grad_checkpoint:  # less memory, more time (arXiv 1604.06174)
        model.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    multiple = 1
    if args.compile:
        compile_layers(model)
        multiple = 64  # lengths that suit the GPU
    asked: list[bool] = []  # Ctrl-C ends the step first; a second one does not wait

    def stop(*_: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    reset_peak_memory(device)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="train", disable=rank > 0)
    with files.keep_lines(args.out / "metrics.jsonl", first) if rank == 0 else open(os.devnull, "w") as metrics:
        for step in bar:
            start = time.perf_counter()
            lr = learning_rate(step, args.steps, args.lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            chosen = [batches[b] for b in batches_of_step(step, len(batches), args.accumulate, args.seed)]
            # our choice: the step's loss is a mean over all its targets, however they are spread over its batches
            n, total = sum(data.learned[i] for batch in chosen for i in batch), 0.0
            for batch in chosen[rank::world]:
                ids, system, targets = collate([data[i] for i in batch], device, multiple)
                below = prefix(ids) if prefix else None
                loss, _ = model.loss(model(ids, system, below=below), targets)
                (loss / n).backward()
                total += loss.item()
            stopping = bool(asked)
            if world > 1:  # all of them stop after the same step
                total, stopping = sum_over_processes(parameters, [total, float(stopping)])
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip)
            if not math.isfinite(total) or not norm.isfinite():
                raise ValueError(f"step {step} has loss {total / n}, gradient norm {norm}: lower --lr")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            seconds, last = time.perf_counter() - start, step + 1 == args.steps
            lengths = [data.lengths[i] for batch in chosen for i in batch]
            row = {"step": step, "loss": total / n, "lr": lr, "tokens": sum(lengths), "seconds": round(seconds, 4)}
            if share := mfu(model, device, sum(lengths), n, sum(lengths) / len(lengths), seconds * world):
                row["mfu"] = round(share, 4)
            if rank == 0 and validation and (last or (step + 1) % args.val_every == 0):
                row["val_loss"] = validate(model, validation, args.batch_tokens, device, multiple)
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
            used = f", MFU {share:.0%}" if share else ""
            speed = f"{row['tokens'] / seconds:.0f} tokens/s{used}, {peak_memory(device):.1f} GB"
            bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed}")
            if rank == 0 and (last or stopping or (step + 1) % args.save_every == 0):
                save_checkpoint(args.out, step, model, optimizer)
            if stopping:
                bar.close()
                sys.exit(f"stopped after step {step + 1}: the same command with --resume goes on from there")
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- the report -------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, flags: dict, model: Transformer, tok: Tokenizer, source: str,
           before: list[dict]) -> None:  # fmt: skip
    """Saves the adapter, asks the test sets again, and writes and prints what came of the run."""
    out, count = args.out, sum(p.numel() for p in trainable(model).values())
    about = {"base": args.base, "weights": source, "data": f"{Path(args.data).name}/{args.split}", "seed": args.seed}
    about |= {"flags": flags, "versions": versions()}
    save_adapter(model, out, **about)  # first: whatever else fails, the training is not lost
    about["parameters"] = count
    if count:
        rows = files.read_jsonl(out / "metrics.jsonl")
        speed = median(row["tokens"] / row["seconds"] for row in rows)
        share = median(row["mfu"] for row in rows) if all("mfu" in row for row in rows) else None
        print(f"{speed:,.0f} tokens/s, a median of the steps; MFU: {f'{share:.1%}' if share else 'unknown device'}")
        about |= {"tokens_per_second": speed, "mfu": share, "train_seconds": sum(row["seconds"] for row in rows)}
        about |= {"loss": rows[-1]["loss"], "val_loss": rows[-1].get("val_loss"), "peak_memory_gb": peak_memory(args.device)}
    ready_to_ask(model)
    # a reply has a new shape at every token: it is generated as the code stands
    with torch.compiler.set_stance("force_eager"):
        after = [{**row, "when": "after"} for row in (ask_in_order(model, tok, before, "trained") if before else [])]
    files.write_jsonl(out / "replies.jsonl", before + after)
    scores = {"before": by_set(before), "after": by_set(after)}
    pairs = list(zip(before, after))
    same = [first_sentence(old["reply"]) == first_sentence(new["reply"]) for old, new in pairs if old["set"] == "plain"]
    if same:  # what it cost where there is no rule to keep
        scores["same_sentence"] = sum(same) / len(same)
    if same and args.method != "full":  # which has no base left to compare with
        with torch.compiler.set_stance("force_eager"):
            scores["kl"] = divergence(model, tok, [old for old in before if old["set"] == "plain"])
    files.write_json(out / "results.json", {**scores, **about})
    (out / "checkpoint.pt").unlink(missing_ok=True)  # the run is whole; the adapter stays

    if before:
        table = show({"before": summarize(before), "after": summarize(after)})
        print(f"\nreplies that kept the rule and that were right, with 95 % intervals ({source}):\n\n{table}\n")
    if same:
        kl = f"; KL(base || trained) is {scores['kl']:.3f} nats a token" if "kl" in scores else ""
        print(f"without a rule, {scores['same_sentence']:.0%} of the replies begin with the base's very sentence{kl}\n")
    # an attack that worked and works no more, and a prompt without a rule where nothing changed
    won = [(o, n) for o, n in pairs if n["set"] == "attacks" and n["scores"]["kept"] and n["scores"]["right"]]
    calm = [(o, n) for o, n in pairs if n["set"] == "plain" and o["reply"] == n["reply"]]
    for old, new in [*[pair for pair in won if not pair[0]["scores"]["kept"]][:1], *calm[:1]]:
        print(f"system:  {new['messages'][0]['content']}\nuser:    {new['messages'][-1]['content']}")
        print(f"before:  {old['reply']!r}\nafter:   {new['reply']!r}\n")
    both = "" if args.method == "full" else " --both"
    print(f'python sample.py --adapter {out}{both} --system "…" --user "…" asks it yourself')


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    args = read_flags()
    rank, world = start_processes(args, timedelta(hours=2))  # the others wait while the first evaluates
    with files.claim(args.out) if rank == 0 else nullcontext():  # the first process alone writes
        run(args, rank, world)


def run(args: argparse.Namespace, rank: int, world: int) -> None:
    """Set-up, loop, report."""
    out, device, dtype = args.out, args.device, pick_dtype(args.dtype, args.device)
    flags = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "save_every")}
    flags["code"] = files.code_of_results()
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # tf32 for what is in fp32
    started = files.check_directory(out, flags, args.resume) if rank == 0 else flags

    # the base, the data, and what the base says before any training
    torch.manual_seed(args.seed)
    model, tok, path = load_base(args.base, device, dtype)
    source = weights_source(path)
    data, validation, line = read_data(args, tok, model.config.max_positions)
    about = {"text": data.about, "val": validation.about if validation else None}
    about["weights"] = [list(stamp) for stamp in files.stamps(sorted(path.glob("*.safetensors")))]
    if changed := [name for name, value in about.items() if started.get(name, value) != value]:
        what = {"text": "data", "val": "validation data", "weights": "base"}[changed[0]]
        raise ValueError(f"the {what} has changed since the run in {out} was started: give the same, or start anew")
    if rank == 0:
        files.write_json(out / "flags.json", {**flags, **about})
        print(f"base {args.base} ({source}) on {device} in {args.dtype}\n{line}")
        if world > 1:
            dist.barrier()  # now the other processes may start
    before = []
    if rank == 0 and args.ask != "none":
        examples = hierarchy.examples(args.eval_limit, hierarchy.TESTS if args.ask == "test" else hierarchy.VALS)
        before = [{"when": "before", **row} for row in ask_base(model, tok, examples, path)]

    # what is trained
    attach(model, args.method, args.placement, rope=args.cal_rope, ffn=args.cal_ffn, rank=args.rank, width=args.width)
    if rank == 0:
        print(f"method {args.method}: {sizes(model)}")
    if trainable(model):
        train(args, model, data, validation, path, rank, world)
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        report(args, flags, model, tok, source, before)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: the same command with --resume goes on")
    except torch.OutOfMemoryError:
        sys.exit("train.py: the GPU's memory is full: halve --batch_tokens and double --accumulate, or --grad_checkpoint")
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
