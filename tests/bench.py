"""
nanoCAL against what people would use instead, transformers and peft, on this machine:

    python -m tests.bench                                     SmolLM2 in bf16 on the CPU
    python -m tests.bench --only generation --json rows.json  one part; kept as JSON
    python -m tests.bench --device cuda --shape llama-3.1-8b  random weights in a real model's shape (or qwen2.5-1.5b)
    python -m tests.bench --plan --help                       what training will cost (tests/plan.py)

Both sides of a row run in turns, in one process, and medians of their times are compared. Let nothing else run.
"""

import argparse
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from cal import attach, cast, lora_rank, trainable
from data.chat import Tokenizer, render
from data.download import checkpoint
from data.files import read_jsonl
from data.hierarchy.prepare import HERE as HIERARCHY
from data.hierarchy.prepare import prepare_if_needed
from data.tokens import Conversation, Conversations, collate, make_batches
from eval import versions
from model import Cache, Transformer, pick_device
from sample import BASE, load_base
from tests import plan
from tests.gpu import LLAMA, QWEN, random_model, training_step
from train import peak_memory, reset_peak_memory

REPEATS = 5
N = 65  # tokens of a reply
SHAPES = {"qwen2.5-1.5b": QWEN, "llama-3.1-8b": LLAMA}
DTYPE = torch.bfloat16
# what; ours and theirs; the target of ours / theirs; which is better, a higher or a lower ratio
Row = tuple[str, float, float, float | None, str]


def in_turns(*sides: Callable[[], float], repeats: int = REPEATS) -> list[list[float]]:
    """What each side measures, every time. They run in turns, so that a slow minute of the machine is slow for all."""
    rounds = [[side() for side in sides] for _ in range(repeats + 1)]
    return [list(values) for values in zip(*rounds[1:])]  # the first time is for warming up


def now(device: str) -> float:
    """Seconds, once the device has done all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device: str, side: Callable[[], object]) -> float:
    start = now(device)
    side()
    return now(device) - start


def medians(device: str, *sides: Callable[[], object]) -> list[float]:
    """Median seconds of each side."""
    return [median(times) for times in in_turns(*(partial(seconds, device, side) for side in sides))]


def alone(function: Callable, *args: object) -> object:
    """function(*args) in a process of its own, where nothing that others have left behind is measured."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


# ----------------------------------------------------------------------------------------------------------------------
# the two sides


def our_model(path: Path, shape: str | None, device: str) -> Transformer:
    """The checkpoint at path, or random weights in a shape."""
    if shape:
        return random_model(SHAPES[shape], device, DTYPE)
    return load_base(str(path), device, DTYPE)[0]


def their_model(path: Path, shape: str | None, device: str) -> torch.nn.Module:
    """The same in transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    if not shape:
        return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE).to(device)
    c = SHAPES[shape]
    config = (Qwen2Config if c.qkv_bias else LlamaConfig)(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads,
        max_position_embeddings=c.max_positions, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE)


def labels_of(targets: Tensor) -> Tensor:
    """What transformers wants: a label stands on the token itself, where our target stands one place before it."""
    labels = targets.roll(1, dims=1)
    return labels.masked_fill(labels < 0, -100)


def their_step(model: torch.nn.Module, rank: int, fp32: bool) -> Callable[[Conversation], None]:
    """A training step of peft's LoRA on every linear; fp32: of its factors, as by default, else they are in bf16."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=fp32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def step(batch: Conversation) -> None:
        ids, _, targets = batch
        model(input_ids=ids, labels=labels_of(targets), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rank_of_cal(model: Transformer) -> int:
    """The rank of a LoRA with as many parameters as CAL has."""
    with torch.device("meta"):
        model = Transformer(model.config)
        count = sum(p.numel() for p in trainable(attach(model)).values())
        return lora_rank(attach(model, "none"), count)


# ----------------------------------------------------------------------------------------------------------------------
# training


def short_batch(tok: Tokenizer, device: str) -> Conversation:
    """A batch of data/hierarchy, of the median length."""
    prepare_if_needed()
    conversations = Conversations(HIERARCHY / "train.jsonl", tok, 2048)
    batches = make_batches(conversations.lengths, 640, seed=0)
    return collate([conversations[i] for i in batches[len(batches) // 2]], device)


def long_batch(device: str) -> Conversation:
    """Conversations of 512 tokens: 64 of the system prompt, and half of them targets."""
    B = 16 if device.startswith("cuda") else 2
    ids, place = torch.randint(40_000, (B, 512), device=device), torch.arange(512, device=device).expand(B, 512)
    targets = ids.roll(-1, dims=1).masked_fill((place < 256) | (place == 511), -1)
    return ids, (place >= 4) & (place < 68), targets


def training(path: Path, shape: str | None, device: str) -> Iterator[Row]:
    """Tokens a second of a step of one batch. peft's side is the faster of its two settings."""
    model = our_model(path, shape, device)
    rank = rank_of_cal(model)
    cal, lora = training_step(model, "cal"), training_step(our_model(path, shape, device), "lora")
    theirs = [their_step(their_model(path, shape, device), rank, fp32) for fp32 in (True, False)]
    tok = Tokenizer.from_pretrained(checkpoint(BASE) if shape else path)
    for name, batch, plain, cached in (
        ("data/hierarchy", short_batch(tok, device), 2.2, 4.2),
        ("512-token conversations", long_batch(device), 1.9, 3.3),
    ):
        with torch.no_grad():
            below = model(batch[0], stop=min(map(int, model.inserted)))
        sides = [partial(cal, batch), partial(cal, batch, below), partial(lora, batch)]
        ours, with_cache, our_lora, *other = medians(device, *sides, *(partial(step, batch) for step in theirs))
        tokens, best = batch[0].numel(), batch[0].numel() / min(other)
        yield f"training, CAL, {name}, tokens/s", tokens / ours, best, plain, "higher"
        yield f"training, CAL, {name}, --cache_prefix, tokens/s", tokens / with_cache, best, cached, "higher"
        if cached == 4.2:
            yield f"training, LoRA, {name}, tokens/s", tokens / our_lora, best, 1.2, "higher"


def memory_of_steps(side: str, path: Path, shape: str | None, device: str) -> float:
    """GB that three steps take at most, above what the model had before; of peft with factors in bf16."""
    model = our_model(path, shape, device)
    rank = rank_of_cal(model)
    if side == "ours":
        step = training_step(model, "cal")
    else:
        del model
        step = their_step(their_model(path, shape, device), rank, fp32=False)
    gc.collect()
    reset_peak_memory(device)
    before = peak_memory(device)
    for _ in range(3):
        step(long_batch(device))
    return peak_memory(device) - before


# ----------------------------------------------------------------------------------------------------------------------
# generation


def generation(path: Path, shape: str | None, device: str) -> Iterator[Row]:
    """Tokens a second of reading a prompt, and of writing."""
    model, theirs = our_model(path, shape, device), their_model(path, shape, device)
    vocabulary, context = model.config.vocab_size, model.config.max_positions
    theirs.generation_config.eos_token_id = None  # no reply ends early, on both sides
    long = torch.randint(vocabulary, (1, 2048), device=device)

    @torch.inference_mode()
    def prefill() -> None:
        model.logits(model(long, None, Cache(model.config, 1, 2048, long.device, DTYPE))[:, -1])

    @torch.inference_mode()
    def their_prefill() -> None:
        theirs(long, use_cache=True, logits_to_keep=1)

    ours, other = medians(device, prefill, their_prefill)
    yield "prefill of 2,048 tokens, tokens/s", 2048 / ours, 2048 / other, 1.0, "higher"

    for B, target in ((1, 1.7), (16, 2.0)):
        prompts = [torch.randint(vocabulary, (64 + 3 * i,)) for i in range(B)]
        ids, mask = torch.zeros(2, B, 64 + 3 * (B - 1), dtype=torch.long, device=device)
        for row, seen, prompt in zip(ids, mask, prompts):  # padded on the left, as transformers wants it
            row[-len(prompt) :], seen[-len(prompt) :] = prompt, 1

        # seconds of a step, between the first and the last token of each row's reply
        def our_reply(prompts: list[Tensor] = prompts) -> float:
            times: list[float] = []
            model.generate(prompts, max_new_tokens=N, stop_ids=[], on_token=lambda *_: times.append(now(device)))
            return (times[-1] - times[0]) / (N - 1)

        def their_reply(cache: str | None, ids: Tensor = ids, mask: Tensor = mask) -> float:
            times: list[float] = []

            def every_token(ids: Tensor, _: object) -> Tensor:
                times.append(now(device))
                return torch.zeros(len(ids), dtype=torch.bool, device=device)  # whose reply ends here

            more = {"do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
            more |= {"max_new_tokens": N, "stopping_criteria": [every_token]}
            theirs.generate(ids, attention_mask=mask, **more)
            return (times[-1] - times[0]) / (N - 1)

        sides = our_reply, partial(their_reply, None), partial(their_reply, "static")
        step, *other = (median(times) for times in in_turns(*sides))
        name = "one row" if B == 1 else f"{B} ragged rows"
        yield f"decode, {name}, tokens/s", B / step, B / min(other), target, "higher"
        yield f"decode, {name}, against its products alone", B / step, B / products(model, B, device), None, "higher"

    # CAL beside the bare model, after prompts whose first 64 tokens are the system's
    cal, shares = attach(our_model(path, shape, device)), []
    for p in trainable(cal).values():
        p.data.normal_(std=0.02)
    cast(cal)
    cal.pack()
    for history in (512, min(8192, context - 64)):
        ids = torch.randint(vocabulary, (1, history), device=device)
        # the share is a small difference of large times: more of them, each compared with its neighbour
        sides = (partial(seconds, device, decoder(m, ids)) for m in (cal, model))
        with_cal, without = in_turns(*sides, repeats=5 * REPEATS)
        shares.append(median(1 - b / a for a, b in zip(with_cal, without)))
        if history == 512:
            rates = 8 / median(with_cal), 8 / median(without)
            yield "decode, with CAL against without, tokens/s", *rates, 0.85, "higher"
    yield f"CAL's share of a decoding step, after {history:,} tokens against 512", *shares[::-1], 1.0, "lower"


@torch.inference_mode()
def decoder(model: Transformer, ids: Tensor) -> Callable[[], None]:
    """Writes 8 tokens after ids (1, T), from the same cache each time."""
    T = ids.shape[1]
    cache = Cache(model.config, 1, T + 8, ids.device, DTYPE)
    model(ids, torch.arange(T, device=ids.device)[None] < 64, cache)

    @torch.inference_mode()
    def decode() -> None:
        cache.positions, cache.used, token = torch.full_like(cache.positions, T), T, ids[:, -1:]
        for _ in range(8):
            token = model.logits(model(token, None, cache)).max(-1).indices

    return decode


def products(model: Transformer, B: int, device: str) -> float:
    """Seconds of a decoding step's products with the weights, one after the other, and of nothing else."""
    o, down = model.layers[0].self_attn.o_proj, model.layers[0].mlp.down_proj
    sizes = model.config.hidden_size, o.in_features, down.in_features
    x, heads, wide = (torch.randn(B, size, device=device, dtype=DTYPE) for size in sizes)

    @torch.inference_mode()
    def step() -> None:
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
            attention.o_proj(heads)
            mlp.gate_proj(x), mlp.up_proj(x)
            mlp.down_proj(wide)
        model.logits(x)

    return medians(device, step)[0]


# ----------------------------------------------------------------------------------------------------------------------
# loading and tokenizing


def load(side: str, path: Path) -> torch.nn.Module:
    """A checkpoint in bf16, a number of each of its pages read: theirs stay on the disk until somebody asks for them."""
    model = their_model(path, None, "cpu") if side == "theirs" else Transformer.from_pretrained(path, "cpu", DTYPE)
    for p in model.parameters():
        p.detach().flatten()[::2048].sum()
    return model


def memory_of_load(side: str, path: Path) -> float:
    """The most memory that loading takes, in weights."""
    import transformers.models.llama.modeling_llama  # noqa: F401  not to be measured

    reset_peak_memory("cpu")
    before = peak_memory("cpu")
    model = load(side, path)
    return (peak_memory("cpu") - before) / (sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9)


def files(path: Path) -> Iterator[Row]:
    """Checkpoints a second, and conversations a second."""
    ours, theirs = medians("cpu", partial(load, "ours", path), partial(load, "theirs", path))
    yield "checkpoints loaded a second", 1 / ours, 1 / theirs, 1.0, "higher"
    # 1.15 weights are the target, whatever theirs is
    ours, theirs = (alone(memory_of_load, side, path) for side in ("ours", "theirs"))
    yield "memory of loading, in weights (ours at most 1.15)", ours, theirs, None, "lower"

    import tokenizers

    prepare_if_needed()
    records = (3 * read_jsonl(HIERARCHY / "train.jsonl"))[:10_000]
    tok, theirs = Tokenizer.from_pretrained(path), tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [tok.decode(render(tok, record["messages"])[0]) for record in records]
    ours, theirs = medians("cpu", lambda: [render(tok, r["messages"]) for r in records], lambda: theirs.encode_batch(texts))
    yield "conversations tokenized a second", 10_000 / ours, 10_000 / theirs, 1.0, "higher"


def processor() -> str:
    """Its maker's name for it, where Linux tells."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or cpu (cpu)", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in this shape (SmolLM2's own)")
    parser.add_argument("--only", choices=("training", "memory", "generation", "files"), help="one part (all)")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    if args.json:
        args.json.touch()  # an error now is better than one after ten minutes
    device, path = pick_device(args.device), checkpoint(BASE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def memory() -> Iterator[Row]:
        ours, theirs = (alone(memory_of_steps, side, path, args.shape, device) for side in ("ours", "theirs"))
        yield "peak memory of a 512-token step, above the weights, GB", ours, theirs, 0.5, "lower"

    parts = {
        "training": lambda: training(path, args.shape, device),
        "memory": memory,
        "generation": lambda: generation(path, args.shape, device),
        "files": lambda: files(path),
    }
    chosen = [args.only] if args.only else list(parts)
    name = f"{processor()}, {versions()['processor']}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else name
    print(f"{args.shape or 'SmolLM2-135M'} in bf16 on {device} ({name}), torch {torch.__version__}, {platform.machine()}\n")
    print("| what | ours | theirs | ratio | target |\n|---|---|---|---|---|")
    rows = []
    for part in chosen:
        for what, ours, theirs, target, better in parts[part]():
            row = {"what": what, "ours": ours, "theirs": theirs, "ratio": ours / theirs}
            rows.append(row | {"target": target, "better": better})
            bound = f"{'at least' if better == 'higher' else 'at most'} {target}" if target else ""
            print(f"| {what} | {ours:,.4g} | {theirs:,.4g} | {ours / theirs:.2f} | {bound} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    try:
        if "--plan" in sys.argv:
            plan.main([flag for flag in sys.argv[1:] if flag != "--plan"])
        else:
            main()
    except (ValueError, OSError) as error:
        sys.exit(f"bench.py: {error}")
