"""
What training will cost, before a weight is downloaded and without a GPU:

    python -m tests.plan --base Qwen/Qwen2.5-1.5B-Instruct      a directory, Hub id or config.json
    python -m tests.plan --base MODEL MODEL …                   which methods fit on which GPU (a minute each)

A training step runs on torch's meta device, where a tensor has a shape and a size but no memory, and a ledger notes
each block of memory when it is made and when it is freed. So nothing here is a formula: it is the step of train.py,
and a change of the model shows. What the ledger can't see: what a kernel takes for itself while it runs, the CUDA
context (about 0.5 GB), and memory that the allocator keeps.
"""

import argparse
import re
import sys
import weakref
from bisect import bisect
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.flop_counter import flop_registry
from tqdm import tqdm

from cal import PLACEMENTS, attach, sizes, trainable
from data.download import CHECKPOINTS, ROOT, checkpoint, hub_file
from data.report import markdown
from model import Config, Transformer
from sample import BASE
from train import flops

KINDS = ("weights", "adapter", "gradients", "optimizer", "activations", "transient")
METHODS = ("cal", "mlp", "lora", "full")
CARDS = (16, 24, 48, 80)  # GB
BATCHES = [2**n for n in range(10, 17)]  # tokens
aten = torch.ops.aten
# torch's counter knows the fused attention of GPUs: the CPU's multiplies the same
flash, on_cpu = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = aten._scaled_dot_product_flash_attention_backward
on_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
FLOPS = {**flop_registry, on_cpu: flop_registry[flash], on_cpu_backward: flop_registry[flash_backward]}

# ----------------------------------------------------------------------------------------------------------------------
# the ledger


class Ledger(TorchDispatchMode):
    """
    Sees every operation of torch, those of the backward pass too, and writes down which memory it makes and when that
    is freed. `targets` and `system` are how many target tokens the batch has and how many system tokens a row: the
    step asks its data for them, and meta tensors have none.
    """

    def __init__(self, targets: int, system: int):
        super().__init__()
        self.targets, self.system = targets, system
        self.where = ""  # the module that runs
        self.made: list[tuple[str, tuple, int]] = []  # every block that there ever was: name, shape, bytes
        self.kinds: dict[int, str] = {}  # what a block, by its number in made, turned out to be
        self.alive: dict[int, int] = {}  # address to number
        self.entries: list[int] = []  # n: block n is made; ~n: it is freed
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default and args[0].is_meta:  # attention_mask's int(counts.max())
            return self.system
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:  # loss's hidden[counted]
            out = args[0].new_empty(self.targets, *args[0].shape[args[1][0].dim() :])
        else:
            out = func(*args, **(kwargs or {}))
        if count := FLOPS.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        where = "backward" if torch._C._current_graph_task_id() >= 0 else self.where or "head and loss"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, f"{where}: {func.overloadpacket.__name__}")
        return out

    def note(self, tensor: Tensor, name: str) -> int:
        """The number of the tensor's block, which is new if no other tensor shares it."""
        block = tensor.untyped_storage()
        if block._cdata not in self.alive:
            self.alive[block._cdata] = len(self.made)
            self.entries.append(len(self.made))
            self.made.append((name, tuple(tensor.shape), block.nbytes()))
            weakref.finalize(block, lambda address: self.entries.append(~self.alive.pop(address)), block._cdata)
        return self.alive[block._cdata]

    def label(self, kind: str, tensors: list[Tensor]) -> None:
        self.kinds.update({self.note(tensor, kind): kind for tensor in tensors})

    def at_the_peak(self) -> set[int]:
        """The blocks that are there when all of them together are largest."""
        held = high = end = 0
        for i, n in enumerate(self.entries):
            held += self.made[n][2] if n >= 0 else -self.made[~n][2]
            if held > high:
                high, end = held, i + 1
        return {n for n in self.entries[:end] if n >= 0} - {~n for n in self.entries[:end] if n < 0}


def fused_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask=None, is_causal=False, enable_gqa=False) -> Tensor:
    """
    For meta tensors torch would choose attention with a matrix of T x T in memory. This is what a CPU takes; it saves
    what a GPU's flash attention saves: q, k, v, the output and a number a row.
    """
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype)  # torch makes 0 and -inf of it
    return on_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]


# ----------------------------------------------------------------------------------------------------------------------
# the plan


@dataclass
class Plan:
    """What one optimizer step costs: dicts of numbers, a row each in the report."""

    sizes: str
    parameters: dict[str, int]
    memory: dict[str, int]  # bytes at the fullest moment, by kind; their sum, the planned peak
    flops: dict[str, float]  # a token
    largest: list[tuple[str, tuple, int, int, int]]  # at that moment: name, shape, bytes, how many, bytes in all


def plan(
    config: Config,
    method: str,
    batch_tokens: int = 4096,
    length: int = 1024,
    share: float = 0.5,
    system: int = 64,
    placement: str = "late8th",
    dtype: torch.dtype | None = None,
    grad_checkpoint: bool = False,
    foreach: bool = True,
) -> Plan:
    """
    Runs a step of train.py on the meta device: conversations of `length` tokens, of which the share `share` are
    targets and `system` are the system prompt's. dtype None is what train.py takes on a GPU: bf16, for full fp32.
    foreach: AdamW works on all tensors at once, as torch does on GPUs but not on CPUs, and takes more memory for it.
    """
    B = batch_tokens // length
    if B < 1:
        raise ValueError(f"a batch of {batch_tokens} tokens holds no conversation of {length}: raise --batch_tokens")
    dtype = dtype or (torch.float32 if method == "full" else torch.bfloat16)
    with torch.device("meta"):
        model = attach(Transformer(config).to(dtype), method, placement)
        ids, is_system, targets = torch.zeros(3, B, length, dtype=torch.long).unbind()
    if grad_checkpoint:
        model.run = partial(recompute, use_reentrant=False, preserve_rng_state=False)
    parameters = list(trainable(model).values())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, foreach=foreach)
    ledger = Ledger(round(share * B * length), system)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: setattr(ledger, "where", name))
        module.register_forward_hook(lambda *_, name=name: setattr(ledger, "where", name.rpartition(".")[0]))
    for name, p in model.named_parameters():
        ledger.kinds[ledger.note(p, name)] = "adapter" if p.requires_grad and method != "full" else "weights"
    with patch.object(F, "scaled_dot_product_attention", fused_attention), ledger:
        # AdamW's two states come with its first step; the second is like all that follow
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        ledger.label("optimizer", [t for state in optimizer.state.values() for t in state.values()])

        known = set(ledger.alive.values())
        loss, _ = model.loss(model(ids, is_system > 0), targets)
        saved = set(ledger.alive.values()) - known
        ledger.kinds.update(dict.fromkeys(saved, "activations"))
        forward = ledger.flops
        loss.backward()
        ledger.where = "clip and optimizer"
        ledger.label("gradients", [p.grad for p in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    peak, memory, count = ledger.at_the_peak(), dict.fromkeys(KINDS, 0), Counter()
    for n, (name, shape, size) in enumerate(ledger.made):
        kind = ledger.kinds.get(n, "transient")
        if n in peak:
            memory[kind] += size
            name = kind if kind in ("gradients", "optimizer") else re.sub(r"\.\d+\.", ".*.", name)
            count[name, shape, size] += 1
    memory["planned peak"] = sum(memory.values())
    memory["saved by the forward pass"] = sum(ledger.made[n][2] for n in saved)
    counts = dict.fromkeys(("embedding", "layers", "norm and head", "adapter", "frozen", "trained"), 0)
    for name, p in model.named_parameters():
        part = {"embed_tokens": "embedding", "layers": "layers"}.get(name.partition(".")[0], "norm and head")
        counts["adapter" if p.requires_grad and method != "full" else part] += p.numel()
        counts["trained" if p.requires_grad else "frozen"] += p.numel()
    work = {"forward": forward, "backward": ledger.flops - forward, "in all": ledger.flops}
    work["needed"] = flops(model, B * length, ledger.targets, length)
    return Plan(
        sizes=sizes(model),
        parameters=counts,
        memory=memory,
        flops={name: n / (B * length) for name, n in work.items()},
        largest=sorted(((*about, n, about[2] * n) for about, n in count.items()), key=lambda row: -row[-1])[:8],
    )


def report(plans: dict[str, Plan]) -> str:
    """All about one base: a column a method; then each method's largest tensors."""
    text = []
    for title, part, unit in (
        ("parameters", "parameters", 1),
        ("memory at the fullest moment of a step, MB", "memory", 1e6),
        ("floating-point operations a token, millions (needed: what is computed twice counts once)", "flops", 1e6),
    ):
        columns = [getattr(p, part) for p in plans.values()]
        rows = [[name, *(f"{column[name] / unit:,.0f}" for column in columns)] for name in columns[0]]
        text.append(f"{title}\n\n{markdown(['', *plans], rows)}")
    for method, p in plans.items():
        rows = [
            [name, shape, f"{n} x {size / 1e6:,.1f}", f"{total / 1e6:,.0f}"]
            for name, shape, size, n, total in p.largest
        ]
        head = ["tensors", "shape", "MB each", "MB"]
        text.append(f"what fills the fullest moment of {method}, {p.sizes}\n\n{markdown(head, rows)}")
    return "\n\n".join(text)


def largest_batches(config: Config, method: str, **options: object) -> list[str]:
    """For each card the most tokens of BATCHES whose step fits in 90 % of it, without / with --grad_checkpoint."""
    columns = []
    for grad_checkpoint in (False, True):
        more = {"grad_checkpoint": grad_checkpoint, **options}
        peak = cache(lambda tokens, more=more: plan(config, method, tokens, **more).memory["planned peak"])
        fitting = [bisect(BATCHES, 0.9 * card * 1e9, key=peak) for card in CARDS]  # the first so many of BATCHES
        columns.append([f"{BATCHES[n - 1] // 1024}k" if n else "–" for n in fitting])
    return [" / ".join(cell) for cell in zip(*columns)]


# ----------------------------------------------------------------------------------------------------------------------
# the command


def read_config(base: str) -> Config:
    """The config of a directory, Hub id or config.json, without weights. Errors as Config.from_file and download."""
    if base.endswith(".json"):
        if not Path(base).is_file():
            raise FileNotFoundError(f"{base} does not exist: give a directory, a Hub id or a config.json")
        return Config.from_file(base)
    if base == BASE or Path(base).is_dir() or (CHECKPOINTS / base).is_dir():
        return Config.from_file(checkpoint(base) / "config.json")
    folder = ROOT / ".cache" / "configs" / base
    try:
        there = hub_file(base, "config.json", folder)
    except ConnectionError as error:
        raise ConnectionError(f"{error}, or give its config.json") from None
    if not there:
        raise FileNotFoundError(f"{base} is no directory, no config.json and no model on the Hub: check the spelling")
    return Config.from_file(folder / "config.json")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--base", nargs="+", default=[BASE], help="directories, Hub ids or config.json files (%(default)s)")
    flag("--batch_tokens", type=int, default=8192, help="tokens in a batch (%(default)s)")
    flag("--length", type=int, default=1024, help="tokens of each conversation (%(default)s)")
    flag("--targets", type=float, default=0.5, help="share of the tokens that are targets (%(default)s)")
    flag("--system", type=int, default=64, help="system tokens in each conversation (%(default)s)")
    flag("--placement", default="late8th", choices=PLACEMENTS, help="where the blocks go (%(default)s)")
    flag("--grad_checkpoint", action="store_true", help="compute twice instead of saving")
    flag("--dtype", choices=("bf16", "fp32"), help="of the backbone (bf16; full fp32)")
    args = parser.parse_args(argv)
    if not 0 < args.targets <= 1:
        raise ValueError(f"--targets is {args.targets}: it is a share, above 0 and at most 1")
    if not 0 < args.system <= args.length:
        raise ValueError(f"--system is {args.system}: it must be at least 1, and at most --length, {args.length}")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[args.dtype]
    options = {"length": args.length, "share": args.targets, "system": args.system}
    options |= {"placement": args.placement, "dtype": dtype}
    configs = {base: read_config(base) for base in args.base}
    if len(configs) == 1:
        [(base, config)] = configs.items()
        more = {"grad_checkpoint": args.grad_checkpoint, **options}
        plans = {method: plan(config, method, args.batch_tokens, **more) for method in METHODS}
        batch = f"{args.batch_tokens // args.length} conversations of {args.length:,} tokens"
        print(f"{base}: {config.n_layers} layers of width {config.hidden_size}, a batch of {batch}\n")
        print(report(plans))
        return
    rows = []
    for base, config in tqdm(configs.items(), desc="plan"):
        name = Path(base).stem
        rows += [[name, method, *largest_batches(config, method, **options)] for method in METHODS]
    print(markdown(["base", "method", *(f"{card} GB" for card in CARDS)], rows))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"plan.py: {error}")
