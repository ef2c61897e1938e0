"""
What this machine's GPU makes of training, in under six minutes on an H200:  python -m tests.gpu

50 steps of cal and lora, compiled and not, at the exact shapes of Qwen2.5-1.5B and Llama-3.1-8B, with random weights, so
that nothing is downloaded: tokens/s, MFU, peak memory and the loss. Before them, a small model in bf16 on the device
against fp32 on the CPU. On a CPU the shapes are tiny, and the numbers say that the script runs, no more.
It ends with status 1 if a check fails: a loss that does not fall, or bf16, or the compiled model, too far off.
"""

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cal import attach, trainable
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
    """
    Conversations that can be learned from: few of the words occur, half of the tokens are targets, and 64 are a system
    prompt. Drawn on the CPU: the same on every device.
    """
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


def train(config: Config, method: str, compiled: bool, steps: int, shapes: list[tuple[int, int]], device: str) -> dict:
    """The steps of train.py: losses, median tokens/s and MFU of the second half, peak GB, graphs that were compiled."""
    torch._dynamo.reset()
    counters.clear()
    model = random_model(config, device, torch.bfloat16)
    take_step = training_step(model, method)
    if compiled:
        compile_layers(model)
    reset_peak_memory(device)
    losses, speeds, shares = [], [], []
    for step in range(steps):
        B, T = shapes[step % len(shapes)]
        batch = batch_of(config, B, T, device, seed=step)
        n = int((batch[2] >= 0).sum())
        start = time.perf_counter()
        losses.append(take_step(batch).item())
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or cpu (cuda where it is)")
    parser.add_argument("--steps", type=int, default=50, help="of each run (%(default)s)")
    args = parser.parse_args()
    device = pick_device(args.device)
    on_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if on_gpu else device
    print(f"{name}, torch {torch.__version__}, {args.steps} steps a run\n")
    faults = []

    error = bf16_error(device)
    print(f"gradient in bf16 on {device} against fp32 on the CPU: {error:.1%} off\n")
    if not error < 0.1:  # bf16 keeps 8 bits, 0.4 %, of each of the many values that a gradient is made of
        faults.append(f"the gradient in bf16 is {error:.1%} off")

    runs = [("small", SMALL, [(4, 128), (2, 256)])]
    if on_gpu:
        runs = [("Qwen2.5-1.5B", QWEN, [(16, 512), (8, 1024)]), ("Llama-3.1-8B", LLAMA, [(8, 512), (4, 1024)])]
    print("| shape | method | compiled | tokens/s | MFU | peak, GB | graphs | loss: first, at a quarter, half, last |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, config, shapes in runs:
        for method in ("cal", "lora"):
            results = {}
            for compiled in (False, True):
                r = results[compiled] = train(config, method, compiled, args.steps, shapes, device)
                losses = r["losses"]
                curve = ", ".join(f"{losses[i]:.3f}" for i in (0, len(losses) // 4, len(losses) // 2, -1))
                mfu = f"{r['mfu']:.1%}" if r["mfu"] else "unknown device"
                cells = [shape, method, "yes" if compiled else "no", f"{r['tokens_per_second']:,.0f}", mfu]
                print("|", " | ".join([*cells, f"{r['peak_gb']:.1f}", str(r["graphs"]), curve]), "|", flush=True)
                if not losses[-1] < losses[0]:
                    faults.append(f"the loss of {shape} {method} does not fall")
                gc.collect()
                torch.cuda.empty_cache()
            first, second = results[False]["losses"][0], results[True]["losses"][0]
            if not abs(first - second) < 0.01 * first:  # bf16, summed in another order
                faults.append(f"the compiled {shape} {method} has the first loss {second}, not {first}")
    if faults:
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()
