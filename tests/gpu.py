"""
What a GPU makes of nanoCAL, in under six minutes on an H200:  python -m tests.gpu --json gpu.json

The parts, each of which may fail without ending the others:
    gradient   of CAL in bf16 on the device against fp32 on the CPU
    replies    in fp32, of a ragged batch against single ones
    kernels    which attention kernels each shape may get: flash, memory-efficient, cuDNN, or only plain math
    scripts    train.py, eval.py and sample.py as a user runs them; the losses against the CPU's
    training   cal and lora at the exact shapes of Qwen2.5-1.5B and Llama-3.1-8B with random weights, plain, with --compile
               and with --grad_checkpoint: tokens/s, MFU, memory against tests/plan.py's, host synchronisations, the loss
On a CPU the shapes are tiny, and the numbers say that the program runs, no more. On a GPU SmolLM2's weights are taken where they
are in checkpoints/, else random ones of its shape. It ends with status 1 if a part fails or finds a fault.
"""

import argparse
import copy
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from cal import attach, trainable
from data.download import CHECKPOINTS, SMOLLM2
from data.files import ROOT, read_json, read_jsonl, write_json
from data.tokens import Conversation
from model import Config, Transformer, pick_device
from train import compile_layers, mfu, peak_memory, reset_peak_memory

# the published config.json files
QWEN = Config(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, n_layers=28, n_heads=12, n_kv_heads=2, head_dim=128,
    max_positions=32768, norm_eps=1e-6, rope_theta=1e6, tied=True, qkv_bias=True,
)  # fmt: skip
LLAMA = Config(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    max_positions=131072, norm_eps=1e-5, rope_theta=5e5, tied=False,
)  # fmt: skip
SMALL = replace(LLAMA, vocab_size=1000, hidden_size=128, intermediate_size=256, n_layers=8, n_heads=4, n_kv_heads=2,
                head_dim=32, tied=True)  # fmt: skip


def random_model(config: Config, device: str, dtype: torch.dtype) -> Transformer:
    """A model with weights as at the start of a pretraining: on the device at once, 16 GB of them pass no CPU."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, p in model.named_parameters():
        p.data.fill_(1.0) if "norm" in name else p.data.normal_(std=0.02, generator=generator)
    return model.eval()


def batch_of(config: Config, B: int, T: int, device: str, seed: int) -> Conversation:
    """Conversations that can be learned from: few of the words occur, half of the tokens are targets, and 64 are a system
    prompt. Drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, (B, T), generator=generator) * (config.vocab_size // 100)
    system = torch.zeros(B, T, dtype=torch.bool)
    system[:, 4 : 4 + min(64, T // 8)] = True
    targets = ids.roll(-1, dims=1)
    targets[:, : T // 2] = targets[:, -1] = -1
    return ids.to(device), system.to(device), targets.to(device)


def training_step(model: Transformer, method: str) -> Callable[..., Tensor]:
    """The step of train.py: of a batch, and what the layers below the first block make of it, if known. Its loss."""
    torch.manual_seed(0)
    parameters = list(trainable(attach(model, method)).values())
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(batch: Conversation, below: Tensor | None = None) -> Tensor:
        ids, system, targets = batch
        loss, n = model.loss(model(ids, system, below=below), targets)
        (loss / n).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() / n

    return step


def train(config: Config, method: str, how: str, steps: int, shapes: list[tuple[int, int]], device: str) -> dict:
    """The steps of train.py: losses, median tokens/s and MFU of the second half, peak GB, graphs that were compiled, and
    how often a step makes the CPU wait for the GPU. how: "plain", "compile" or "grad_checkpoint"."""
    torch._dynamo.reset()
    counters.clear()
    model = random_model(config, device, torch.bfloat16)
    take_step = training_step(model, method)
    if how == "compile":
        compile_layers(model)
    if how == "grad_checkpoint":
        model.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    reset_peak_memory(device)
    losses, speeds, shares, waits = [], [], [], 0
    for step in range(steps):
        B, T = shapes[step % len(shapes)]
        batch = batch_of(config, B, T, device, seed=step)
        n = int((batch[2] >= 0).sum())
        last = step + 1 == steps and device.startswith("cuda")
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn") if last else None
            loss = take_step(batch)
            torch.cuda.set_sync_debug_mode("default") if last else None
        waits = sum("synchroniz" in str(w.message) for w in warned)
        losses.append(loss.item())  # waits for the device
        seconds = time.perf_counter() - start
        speeds.append(B * T / seconds)
        shares.append(mfu(model, device, B * T, n, T, seconds))
    half = steps // 2
    return {
        "losses": losses,
        "tokens_per_second": median(speeds[half:]),
        "mfu": median(shares[half:]) if shares[0] else None,
        "peak_gb": peak_memory(device),
        "graphs": counters["stats"]["unique_graphs"],
        "synchronisations": waits,
    }


def bf16_error(device: str) -> float:
    """The gradient of CAL's blocks in bf16 on the device, against fp32 on the CPU: |difference| / |gradient|."""
    reference = attach(random_model(SMALL, "cpu", torch.float32))
    generator = torch.Generator().manual_seed(1)
    for p in trainable(reference).values():  # away from the identity, where most gradients are zero
        p.data.normal_(std=0.05, generator=generator)
    gradients = []
    for where, dtype in (("cpu", torch.float32), (device, torch.bfloat16)):
        model = copy.deepcopy(reference).to(where)
        for p in model.parameters():  # of the backbone: the blocks stay in fp32, as in training
            if not p.requires_grad:
                p.data = p.data.to(dtype)
        ids, system, targets = batch_of(SMALL, 4, 256, where, seed=0)
        loss, n = model.loss(model(ids, system), targets)
        (loss / n).backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in trainable(model).values()]))
    return ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()


# --- the parts: each returns what it found, "faults" among it ---------------------------------------------------------


def gradient(device: str, steps: int) -> dict:
    error = bf16_error(device)
    print(f"gradient in bf16 on {device} against fp32 on the CPU: {error:.1%} off")
    # bf16 keeps 8 bits, 0.4 %, of each of the many values that a gradient is made of
    return {"error": error, "faults": [] if error < 0.1 else [f"the gradient in bf16 is {error:.1%} off"]}


def replies(device: str, steps: int) -> dict:
    model = random_model(SMALL, device, torch.float32)
    prompts = [batch_of(SMALL, 1, T, device, seed=T)[0][0] for T in (5, 12, 33, 64)]
    together = model.generate(prompts, max_new_tokens=24, stop_ids=[])
    alone = [model.generate([p], max_new_tokens=24, stop_ids=[])[0] for p in prompts]
    different = sum(a != b for a, b in zip(together, alone))
    print(f"fp32 replies of a ragged batch that differ from single ones: {different} of {len(prompts)}")
    return {"different": different, "faults": [f"{different} batched replies differ"] if different else []}


def kernels(device: str, steps: int) -> dict:
    if not device.startswith("cuda"):
        print("attention kernels: only asked of a GPU")
        return {"faults": []}
    found = {}
    print("| attention | flash | memory-efficient | cuDNN |\n|---|---|---|---|")
    for name, c in {"Qwen2.5-1.5B": QWEN, "Llama-3.1-8B": LLAMA}.items():
        q = torch.zeros(2, c.n_heads, 512, c.head_dim, device=device, dtype=torch.bfloat16)
        for what, S, masked in (("the backbone's, causal", 512, False), ("CAL's, with a mask", 64, True)):
            k = q.new_zeros(2, c.n_kv_heads, S, c.head_dim)
            mask = torch.ones(2, 1, 512, S, dtype=torch.bool, device=device) if masked else None
            params = torch.backends.cuda.SDPAParams(q, k, k, mask, 0.0, not masked, True)
            can = [f(params, False) for f in (torch.backends.cuda.can_use_flash_attention,
                                              torch.backends.cuda.can_use_efficient_attention,
                                              torch.backends.cuda.can_use_cudnn_attention)]  # fmt: skip
            found[f"{name}, {what}"] = can
            print("|", " | ".join([f"{name}, {what}", *("yes" if x else "no" for x in can)]), "|")
    return {"kernels": found, "faults": []}


def scripts(device: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        here = CHECKPOINTS / SMOLLM2
        losses, cpu = {}, device == "cpu"
        real = (here / "config.json").is_file() and not cpu
        base = here if real else random_checkpoint(Path(folder, "random"), layers=4 if cpu else 30)
        for where in dict.fromkeys((device, "cpu")):
            out = Path(folder, where.replace(":", ""))
            few = ["--steps", str(steps if cpu else 20), "--ask", "none"] if where == "cpu" else []
            few += [] if cpu else ["--dtype", "bf16"]
            call("train.py", "--base", base, "--device", where, "--out", out, *few)
            losses[where] = [row["loss"] for row in read_jsonl(out / "metrics.jsonl")][:1]  # then the rates differ
        adapter = ["--adapter", Path(folder, device.replace(":", "")), "--device", device]
        call("eval.py", *adapter, "--limit", 1 if cpu else 36, "--out", Path(folder, "eval"))
        call("sample.py", *adapter, "--system", "Start every reply with [maple].", "--user", "Hello", "--max_new_tokens", 8)
        results = read_json(Path(folder, device.replace(":", "")) / "results.json")
    off = max(abs(a - b) / b for a, b in zip(losses[device], losses["cpu"]))
    print(f"train.py, eval.py and sample.py ran on {base}; the first loss is {off:.2%} off the CPU's")
    faults = [] if off < 0.02 else [f"the first losses {losses[device]} are not the CPU's {losses['cpu']}"]  # of bf16
    return {"base": str(base), "losses": losses, "results": results, "faults": faults}


def call(script: str, *flags: object) -> None:
    done = subprocess.run([sys.executable, script, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} ends with {done.returncode}: {done.stderr[-500:]}")


def random_checkpoint(folder: Path, layers: int) -> Path:
    """A checkpoint of SmolLM2's shape, so many layers, with random weights and a tokenizer of single bytes."""
    letters = [chr(b) if 33 <= b < 127 or 161 <= b < 256 and b != 173 else None for b in range(256)]
    spare = (chr(256 + n) for n in range(256))
    vocab = {letter or next(spare): b for b, letter in enumerate(letters)}
    control = [{"id": 256 + n, "content": t} for n, t in enumerate(("<|im_start|>", "<|im_end|>", "<|endoftext|>"))]
    config = {"model_type": "llama", "vocab_size": 259, "hidden_size": 576, "intermediate_size": 1536, "eos_token_id": 257}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    folder.mkdir()
    write_json(folder / "config.json", config | {"max_position_embeddings": 8192})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    write_json(folder / "tokenizer.json", {"added_tokens": control, "pre_tokenizer": byte_level, "model": model})
    weights = random_model(Config.from_file(folder / "config.json"), "cpu", torch.bfloat16).state_dict()
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def training(device: str, steps: int) -> dict:
    from tests.plan import plan  # not above: it imports much

    runs = [("small", SMALL, [(4, 128), (2, 256)])]
    if device.startswith("cuda"):
        runs = [("Qwen2.5-1.5B", QWEN, [(16, 512), (8, 1024)]), ("Llama-3.1-8B", LLAMA, [(8, 512), (4, 1024)])]
    table, faults = [], []
    print("| shape | method | how | tokens/s | MFU | peak, GB | planned | graphs | waits | loss: first, half, last |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape, config, shapes in runs:
        for method in ("cal", "lora"):
            first = None
            for how in ("plain", "compile", "grad_checkpoint"):
                r = train(config, method, how, steps, shapes, device)
                losses, (B, T) = r.pop("losses"), shapes[-1]
                planned = plan(config, method, B * T, T, grad_checkpoint=how == "grad_checkpoint").memory["planned peak"] / 1e9
                table.append({"shape": shape, "method": method, "how": how, "planned_gb": planned, "losses": losses, **r})
                curve = ", ".join(f"{losses[i]:.3f}" for i in (0, len(losses) // 2, -1))
                share = f"{r['mfu']:.1%}" if r["mfu"] else "unknown device"
                cells = [shape, method, how, f"{r['tokens_per_second']:,.0f}", share, f"{r['peak_gb']:.1f}", f"{planned:.1f}"]
                print("|", " | ".join([*cells, str(r["graphs"]), str(r["synchronisations"]), curve]), "|", flush=True)
                if not losses[-1] < losses[0]:
                    faults.append(f"the loss of {shape} {method} {how} does not fall")
                first = losses[0] if first is None else first
                if not abs(losses[0] - first) < 0.01 * first:  # bf16, summed in another order
                    faults.append(f"{shape} {method} {how} has the first loss {losses[0]}, not {first}")
                gc.collect()
                torch.cuda.empty_cache()
    return {"table": table, "faults": faults}


def main() -> None:
    parts = {f.__name__: f for f in (gradient, replies, kernels, scripts, training)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or cpu (cuda where it is)")
    parser.add_argument("--steps", type=int, default=50, help="of each run of training (%(default)s)")
    parser.add_argument("--only", choices=parts, help="one part (all)")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    args = parser.parse_args()
    device = pick_device(args.device)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    print(f"{name}, torch {torch.__version__}")
    found = {"device": name, "torch": torch.__version__, "cpus": os.cpu_count()}
    for part in [args.only] if args.only else parts:
        print(f"\n{part}\n", flush=True)
        start = time.perf_counter()
        try:
            found[part] = parts[part](device, args.steps)
        except Exception as error:  # noqa: BLE001, whatever it is: the other parts run
            found[part] = {"faults": [f"{part} failed: {error!r}"]}
            print(found[part]["faults"][0])
        found[part]["seconds"] = time.perf_counter() - start
        if args.json:
            write_json(args.json, found)
    if faults := [fault for part in parts for fault in found.get(part, {}).get("faults", [])]:
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()
