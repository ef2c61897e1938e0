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
import platform
import random
import re
import signal
import sys
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tqdm import tqdm

from cal import METHODS, PLACEMENTS, attach, cast, load_trainable, save_adapter, size_table, trainable, write_whole
from data.download import ROOT, stamps, weights_source
from data.hierarchy.prepare import prepare_if_needed
from data.tokens import Conversations, States, collate, make_batches
from eval import HIERARCHY, ask_base, ask_in_order, load_sets, read_jsonl, show, summarize, write_json, write_jsonl
from model import Transformer, read_json
from sample import BASE, add_device_flags, load_base, pick_device, pick_dtype

# ----------------------------------------------------------------------------------------------------------------------
# training


def batches_of_step(step: int, n: int, accumulate: int, seed: int) -> list[int]:
    """Which of n batches a step takes; every epoch is a new shuffle. To resume, the step's number is enough."""
    chosen = []
    for position in range(step * accumulate, (step + 1) * accumulate):
        epoch, place = divmod(position, n)
        order = list(range(n))
        random.Random(f"{seed} {epoch}").shuffle(order)
        chosen.append(order[place])
    return chosen


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up over `warmup` (< steps) steps, then a cosine down to a tenth of the peak at the last one."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(model: Transformer, conversations: Conversations, batch_tokens: int, device: str, multiple: int = 1) -> float:
    """Loss in nats a target over the same conversations each time."""
    total, count = 0.0, 0
    for batch in make_batches(conversations.lengths, batch_tokens, seed=0):
        ids, system, targets = collate([conversations[i] for i in batch], device, multiple)
        loss, n = model.loss(model(ids, system), targets)
        total, count = total + loss.item(), count + n
    return total / count


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


# ----------------------------------------------------------------------------------------------------------------------
# the machine

# Products of bf16 matrices, in TFLOP/s without sparsity: the makers' data sheets, by torch.cuda.get_device_name's name.
# A device that is not here has no MFU: none is better than a wrong one.
PEAK_TFLOPS = {
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "NVIDIA A10": 125,
    "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
}


def peak_flops(device: str, dtype: torch.dtype) -> float | None:
    """The most floating-point operations a second that the device can do in this dtype; None where it is not known."""
    known = device.startswith("cuda") and dtype == torch.bfloat16
    tera = PEAK_TFLOPS.get(torch.cuda.get_device_name(device)) if known else None
    return tera and tera * 1e12


def flops(model: Transformer, tokens: int, targets: int, length: float) -> float:
    """
    The floating-point operations that a training step needs in its matrix products, two a multiply-add: `tokens` in
    conversations of `length` each, `targets` to predict. As in PaLM (arXiv 2204.02311, appendix B) attention counts all
    pairs, and nothing counts twice that is computed again to save memory. CAL's keys and values, few, are left out.
    """
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


def compile_layers(model: Transformer) -> None:
    """torch.compile, layer by layer, so that one compilation serves all; with sizes left open, it is a handful of times."""
    torch._dynamo.config.capture_scalar_outputs = True  # cal.py counts the system tokens
    for module in [*model.layers, *model.inserted.values()]:
        module.compile(dynamic=True)


def reset_peak_memory(device: str) -> None:
    """Forgets the peak so far, which an evaluation may have made; macOS and Windows can't."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # proc(5): of Linux, and not in every sandbox
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> float:
    """The most memory that this process has held, in GB: on the GPU if it runs there, else resident; 0 on Windows."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e9
    with suppress(OSError, TypeError):  # getrusage would count what a parent had before it started us
        return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9
    if os.name == "nt":
        return 0.0
    import resource  # of Unix alone

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # macOS counts bytes


def by_set(table: dict[str, dict]) -> dict[str, dict]:
    """summarize's scores of data/hierarchy as results.json has them: by set, who kept the rule, and who was right."""
    rows = {}
    for name, scores in table.items():
        kept = scores["kept"]
        rows[name] = {"followed": kept["mean"], "n": kept["n"], "low": kept["low"], "high": kept["high"]}
        rows[name]["right"] = scores["right"]["mean"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--base", default=BASE, help="a checkpoint directory or Hub id (%(default)s)")
    flag("--data", default="hierarchy", help="a folder, of data/ or any, with JSONL files of messages (%(default)s)")
    flag("--split", default="train", help="which of its files to learn from; hierarchy has train, single (%(default)s)")
    flag("--method", default="cal", choices=METHODS, help="what is trained; none is the bare base (%(default)s)")
    flag("--placement", default="late8th", choices=PLACEMENTS, help="where the blocks go (%(default)s)")
    flag("--rank", type=int, help="LoRA's (as many parameters as CAL has at the placement)")
    flag("--width", type=int, help="ParallelMLP's (as many parameters as CAL has at the placement)")
    flag("--cal_rope", action="store_true", help="rotary in CAL, for the ablation")
    flag("--cal_ffn", type=float, default=1.0, help="width of CAL's feed-forward part, in the backbone's (%(default)s)")
    flag("--steps", type=int, default=300, help="optimizer steps (%(default)s)")
    flag("--batch_tokens", type=int, help="tokens in a batch, padding included (640, on cuda 8192)")
    flag("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    flag("--max_tokens", type=int, default=2048, help="longer conversations are left out (%(default)s)")
    flag("--cache_prefix", action="store_true", help="keep what the layers below the first block give on the disk")
    flag("--grad_checkpoint", action="store_true", help="less memory, more time: compute twice instead of saving")
    flag("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (on cuda; off elsewhere)")
    flag("--lr", type=float, help="peak learning rate (2e-3; full 1e-4)")
    flag("--warmup", type=int, help="steps until the peak (a fifteenth of --steps)")
    flag("--clip", type=float, default=1.0, help="largest gradient norm (%(default)s)")
    flag("--seed", type=int, default=0, help="of the new blocks and of the data's order (%(default)s)")
    add_device_flags(parser)
    flag("--out", type=Path, help="the run's directory (out/METHOD)")
    flag("--val_every", type=int, default=100, help="steps between validations (%(default)s)")
    flag("--save_every", type=int, default=100, help="steps between checkpoints (%(default)s)")
    flag("--resume", action="store_true", help="go on with the run in --out; repeat its other flags")
    flag("--no_eval", action="store_true", help="train alone, without the test sets")
    flag("--eval_limit", type=int, help="prompts of each test set (72, of shots24 36)")
    args = parser.parse_args()
    device = args.device = pick_device(args.device)
    on_gpu = device.startswith("cuda")
    if args.batch_tokens is None:  # our choice: see the README's table of what fits
        args.batch_tokens = 8192 if on_gpu else 640
    if args.compile is None:
        args.compile = on_gpu
    for name in ("steps", "batch_tokens", "accumulate", "max_tokens", "val_every", "save_every"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be at least 1")
    if args.lr is None:  # our choice: one for all that are compared; a whole backbone bears less
        args.lr = 1e-4 if args.method == "full" else 2e-3
    if args.cache_prefix and args.method not in ("cal", "mlp"):
        raise ValueError(f"--cache_prefix is of cal and mlp, which leave layers as they are: {args.method} does not need it")
    for name, method in (("rank", "lora"), ("width", "mlp")):
        if getattr(args, name) is not None and args.method != method:
            raise ValueError(f"--{name} is of --method {method}, and this is {args.method}: leave it out")
    for name in ("lr", "clip", "cal_ffn"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must be a number above 0")
    if args.warmup is None:
        args.warmup = args.steps // 15
    if not 0 <= args.warmup < args.steps:
        raise ValueError(f"--warmup is {args.warmup}: it must be at least 0, and fewer than the {args.steps} steps")
    # torchrun starts `world` of these processes; each has the whole frozen backbone, and the first alone writes
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    say = print if rank == 0 else lambda text: None
    if args.accumulate % world:
        raise ValueError(f"--accumulate is {args.accumulate}: it must be a multiple of the {world} processes")
    if world > 1:
        device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
        dist.init_process_group(timeout=timedelta(hours=2))  # the others wait while the first evaluates
    if args.method == "full":  # its weights are trained themselves, and bf16 would swallow small updates
        args.dtype = args.dtype or "fp32"
    dtype = pick_dtype(args.dtype, device)
    args.dtype = "bf16" if dtype == torch.bfloat16 else "fp32"
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # tf32 for what is in fp32

    # the run's directory
    out = args.out or Path("out") / args.method
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: give a directory")
    flags_file, checkpoint_file, replies_file = out / "flags.json", out / "checkpoint.pt", out / "replies.jsonl"
    flags = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "save_every")}
    there = {file.name for file in out.iterdir()} - {"flags.json.part"} if out.exists() else set()
    if args.resume:
        if "results.json" in there:
            raise ValueError(f"the run in {out} is complete: nothing to resume")
        if there and not flags_file.exists():
            raise ValueError(f"{out} holds no run to resume, but {min(there)}: give the run's --out")
        started = read_json(flags_file) if flags_file.exists() else flags  # it died before it began: start
        if different := [f"--{k}" for k in flags if flags[k] != started.get(k)]:
            raise ValueError(f"the run in {out} was started with another {', '.join(different)}: give the same")
    elif rank == 0 and "results.json" in there:
        raise ValueError(f"{out} already holds a run, a complete one: give another --out, or delete it")
    elif rank == 0 and "flags.json" in there:
        raise ValueError(f"{out} already holds a run: go on with --resume, give another --out, or delete it")
    elif rank == 0 and there:
        raise ValueError(f"{out} already holds {min(there)}, which is of no run: give another --out")

    # the base and what it says before any training; then what is trained
    if rank > 0:
        dist.barrier()  # the first process downloads and prepares what is missing
    torch.manual_seed(args.seed)
    model, tok, path = load_base(args.base, device, dtype, pack=not args.compile)
    source = weights_source(path)
    options = {"rope": args.cal_rope, "ffn": args.cal_ffn, "rank": args.rank, "width": args.width}
    attach(model, args.method, args.placement, **options)
    parameters = list(trainable(model).values())
    optimizer = None
    if parameters:
        optimizer = torch.optim.AdamW(parameters, args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    say(f"base {args.base} ({source}) on {device} in {args.dtype}")
    blocks = f", after layers {', '.join(model.inserted)} of {model.config.n_layers}" if model.inserted else ""
    say(f"method {args.method}{blocks}\n\n{size_table(model.config, args.placement, **options)}\n")

    # the data
    folder = HIERARCHY.parent / args.data if (HIERARCHY.parent / args.data).is_dir() else Path(args.data)
    train_file, val_file = folder / f"{args.split}.jsonl", folder / "val.jsonl"
    if folder.resolve() == HIERARCHY:
        prepare_if_needed()
    if not train_file.is_file():
        hint = "--data is a folder, --split one of its JSONL files"
        if (folder / "prepare.py").exists():
            hint = f"python -m data.{folder.name}.prepare makes it, if it is one of that data set's files"
        raise FileNotFoundError(f"{train_file} does not exist: {hint}")
    max_tokens = min(args.max_tokens, model.config.max_positions)
    conversations = Conversations(train_file, tok, max_tokens)
    if not len(conversations):
        raise ValueError(f"{train_file} has no conversation to learn from within {max_tokens} tokens")
    validation = Conversations(val_file, tok, max_tokens) if val_file.exists() else []
    lengths = conversations.lengths
    batches = make_batches(lengths, args.batch_tokens, args.seed)
    say(
        f"data {folder.name}/{args.split}: {len(conversations):,} conversations in {len(batches):,} batches "
        f"({-(-len(batches) // args.accumulate):,} steps an epoch), "
        f"{sum(lengths) / len(lengths):.0f} tokens each on average "
        f"({conversations.dropped:,} left out: over {max_tokens} tokens, or without a reply), "
        f"{conversations.with_system:,} with a system prompt"
    )
    if args.method == "cal" and not conversations.with_system:
        say("None has a system prompt, and CAL learns from those alone: it will stay the identity.")
    if args.resume and started.get("text", conversations.about) != conversations.about:
        raise ValueError(f"{train_file} has changed since the run in {out} was started: give the same, or start anew")

    states = None
    if args.cache_prefix:
        chip = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        machine = [device.split(":")[0], chip, torch.get_num_threads(), torch.__version__]
        key = [stamps(sorted(path.iterdir())), (ROOT / "model.py").read_text(), model.layers_below, machine, args.compile]
        states = States(conversations, model.config.hidden_size, dtype, key)

    tests = [] if args.no_eval or rank > 0 else load_sets(args.eval_limit)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_json(flags_file, {**flags, "text": conversations.about})
        if world > 1:
            dist.barrier()

    # the base's replies, before any training
    before: list[dict] = []
    if tests:
        before = [{"when": "before", **row} for row in ask_base(model, tok, tests, path)]

    # where to start
    first, metrics_file = 0, out / "metrics.jsonl"
    if checkpoint_file.exists():
        try:
            saved = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
            first = range(args.steps + 1).index(saved["step"])
            load_trainable(model, saved["adapter"])
            optimizer.load_state_dict(saved["optimizer"])
        except (EOFError, LookupError, TypeError, AttributeError, ValueError, RuntimeError, pickle.UnpicklingError):
            raise ValueError(f"{checkpoint_file} is damaged: delete it, and --resume starts the run again") from None
    if world > 1:
        steps_seen: list = [None] * world
        dist.all_gather_object(steps_seen, first)
        if len(set(steps_seen)) > 1:
            raise ValueError(f"the processes find checkpoints of steps {steps_seen}: give all of them one shared --out")
    if args.resume:
        say(f"going on after step {first}" if first else "the run had no checkpoint yet: it starts again")
    if rank == 0:  # the lines that a killed run wrote after its last checkpoint are written again
        written = metrics_file.read_text(encoding="utf-8") if metrics_file.exists() else ""
        kept = written.splitlines(keepends=True)[:first]
        if len(kept) < first:
            raise ValueError(f"{metrics_file} lacks steps before {first}: delete {out} and start again")
        write_whole(metrics_file, "".join(kept))

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    signal.signal(signal.SIGINT, stop)  # Ctrl-C ends the step first

    model.grad_checkpoint = args.grad_checkpoint
    multiple = 1
    if args.compile:
        multiple = 64  # lengths that suit the GPU
        compile_layers(model)
    peak_rate = peak_flops(device, dtype)
    reset_peak_memory(device)
    steps = range(first, args.steps if parameters else 0)
    bar = tqdm(steps, initial=first, total=args.steps, desc="train", disable=rank > 0)
    with metrics_file.open("a") if rank == 0 else open(os.devnull, "w") as metrics:
        for step in bar:
            start = time.perf_counter()
            lr = learning_rate(step, args.steps, args.lr, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            chosen = [batches[b] for b in batches_of_step(step, len(batches), args.accumulate, args.seed)]
            # our choice: the step's loss is a mean over all its targets, however they are spread over its batches
            n = sum(conversations.learned[i] for batch in chosen for i in batch)
            total = 0.0
            for batch in chosen[rank::world]:
                ids, system, targets = collate([conversations[i] for i in batch], device, multiple)
                below = states.fetch(batch, ids, model.below) if states else None
                loss, _ = model.loss(model(ids, system, below=below), targets)
                (loss / n).backward()
                total += loss.item()
            if world > 1:
                total, stopped = sum_over_processes(parameters, [total, float(stopping)])
                stopping = stopped > 0
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip)
            if not math.isfinite(total) or not norm.isfinite():
                raise ValueError(f"step {step} has loss {total / n}, gradient norm {norm}: lower --lr")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            tokens = sum(lengths[i] for batch in chosen for i in batch)
            seconds = time.perf_counter() - start
            row = {"step": step, "loss": total / n, "lr": lr, "tokens": tokens, "seconds": round(seconds, 4)}
            if peak_rate:
                length = tokens / sum(len(batch) for batch in chosen)
                row["mfu"] = round(flops(model, tokens, n, length) / (seconds * peak_rate * world), 4)
            last = step + 1 == args.steps
            if rank == 0 and validation and (last or (step + 1) % args.val_every == 0):
                row["val_loss"] = validate(model, validation, args.batch_tokens, device, multiple)
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
            mfu = f", MFU {row['mfu']:.0%}" if peak_rate else ""
            speed = f"{tokens / seconds:.0f} tokens/s{mfu}, {peak_memory(device):.1f} GB"
            bar.set_postfix_str(f"loss {total / n:.3f}, {speed}")
            if rank == 0 and (last or stopping or (step + 1) % args.save_every == 0):
                if not all(p.isfinite().all() for p in parameters):
                    raise ValueError(f"a weight is not finite after step {step}: lower --lr")
                # a run can die at any moment, and this is all that its rest needs: nothing is drawn at random after
                # the blocks' first values, and the data's order follows from the step
                state = {"step": step + 1, "adapter": trainable(model), "optimizer": optimizer.state_dict()}
                torch.save(state, buffer := io.BytesIO())
                write_whole(checkpoint_file, buffer.getvalue())
            if stopping:
                bar.close()
                sys.exit(f"stopped after step {step + 1}: the same command with --resume goes on from there")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if world > 1:
        dist.destroy_process_group()
    if rank > 0:
        return

    # what came of it
    peak = peak_memory(device)
    rows = read_jsonl(metrics_file)
    speed = {"tokens_per_second": median(row["tokens"] / row["seconds"] for row in rows) if rows else None}
    speed["mfu"] = median(row["mfu"] for row in rows) if rows and peak_rate else None
    if rows:
        mfu = f"{speed['mfu']:.1%}" if peak_rate else "unknown device"
        print(f"{speed['tokens_per_second']:,.0f} tokens/s, a median of the steps; MFU: {mfu}")
    about = {
        "base": args.base,
        "weights": source,
        "data": f"{folder.name}/{args.split}",
        "seed": args.seed,
        "loss": rows[-1]["loss"] if rows else None,
        "val_loss": rows[-1].get("val_loss") if rows else None,
        "flags": flags,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    save_adapter(model, out, **about)
    cast(model)
    # a reply has a new shape at every token: it is generated as the code stands
    with torch.compiler.set_stance("force_eager") if args.compile else nullcontext():
        after = [{"when": "after", **row} for row in ask_in_order(model, tok, tests)] if tests else []
    tables = {"before": summarize(before), "after": summarize(after)}
    results = {
        **{when: by_set(table) for when, table in tables.items()},
        **about,
        "parameters": sum(p.numel() for p in parameters),
        "train_seconds": sum(row["seconds"] for row in rows),
        **speed,
        "peak_memory_gb": peak,
    }
    write_jsonl(replies_file, before + after)
    write_json(out / "results.json", results)
    checkpoint_file.unlink(missing_ok=True)  # the run is whole; the adapter stays

    if tests:
        print(f"\nreplies that kept the rule and that were right, with 95 % intervals ({source}):\n\n{show(tables)}\n")
    for name in ("rules", "attacks"):
        for old, new in [pair for pair in zip(before, after) if pair[1]["set"] == name][:1]:
            print(f"system:  {new['messages'][0]['content']}\nuser:    {new['messages'][-1]['content']}")
            print(f"before:  {old['reply']!r}\nafter:   {new['reply']!r}\n")
    print(f'python sample.py --adapter {out} --both --system "…" --user "…" asks it yourself')


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: the same command with --resume goes on")
    except torch.OutOfMemoryError:
        sys.exit(
            "train.py: the GPU's memory is full: start again with half the --batch_tokens and twice the --accumulate, or "
            "with --grad_checkpoint"
        )
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
