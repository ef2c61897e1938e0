"""
One reply, or a chat in the terminal:

    python sample.py --user "What is the capital of France?"         the bare base
    python sample.py --adapter out/cal --system "…" --user "…"       a trained adapter
    python sample.py --adapter out/cal --system "…"                  a chat that streams; an empty line ends it
    python sample.py --adapter out/cal --both --system "…"           base and adapter, side by side
    python sample.py --adapter out/cal --show --system "…" --user "…"  and which words of the system prompt the reply looked at
    python sample.py --adapter out/lora --merge out/merged           no reply: LoRA and base as one plain checkpoint
"""

import argparse
import math
import os
import shutil
import sys
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

import torch
import torch.distributed as dist
from torch import Tensor

from cal import CrossAttentionLayer, adapter_info, attention_mask, cast, load_adapter, save_merged, set_scale
from data import look
from data.chat import SYSTEM, Tokenizer, render
from data.download import checkpoint
from model import Transformer, pick_device, pick_dtype

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which model runs, and on what; the same in sample.py and eval.py."""
    parser.add_argument("--adapter", help="a directory that train.py wrote; it names its base")
    parser.add_argument("--base", help=f"a checkpoint directory or Hub id (default: the adapter's, else {BASE})")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies what the adapter adds: 0 is the base")
    add_device_flags(parser)


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say on what; the same in train.py."""
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of the backbone (default: bf16 where that is native)")


def start_processes(args: argparse.Namespace, timeout: timedelta, backend: str | None = None) -> tuple[int, int]:
    """This process's rank and how many there are: torchrun starts them, each with a GPU and the whole model of its own.
    timeout is how long one may wait for another. The first goes on at once, the others when it calls dist.barrier()."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        if torch.cuda.is_available():  # before anything touches another's GPU
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        args.device = f"cuda:{os.environ['LOCAL_RANK']}" if pick_device(args.device) == "cuda" else args.device
        dist.init_process_group(backend, timeout=timeout)
    if rank > 0:
        dist.barrier()  # the first process downloads and prepares what is missing
    return rank, world


def load_base(base: str, device: str, dtype: torch.dtype) -> tuple[Transformer, Tokenizer, Path]:
    """The model, its tokenizer and the checkpoint directory of a Hub id or directory. ValueError if they do not fit."""
    path = checkpoint(base)
    tok = Tokenizer.from_pretrained(path)
    model = Transformer.from_pretrained(path, device, dtype)
    if tok.vocab_size > model.config.vocab_size:
        sizes = f"a tokenizer of {tok.vocab_size} ids, but an embedding of {model.config.vocab_size}"
        raise ValueError(f"{path} has {sizes}: the two are not of one checkpoint, download it again")
    model.config.stop_ids += tuple(tok.stop_ids)  # beside the checkpoint's own, what ends a message in its chat format
    return pack_if_small(model), tok, path


def pack_if_small(model: Transformer) -> Transformer:
    """model.pack(), which makes a CPU faster by up to a half, where a model of this size can be kept twice."""
    return model.pack() if sum(p.numel() for p in model.parameters()) < 2e9 else model


def ready_to_ask(model: Transformer) -> None:
    """Ends the training of what is attached: it is made as fast as the backbone, which changes no bit of a reply, but
    nothing is trainable any more."""
    cast(model)
    pack_if_small(model)


def load(args: argparse.Namespace, merge: bool = False) -> tuple[Transformer, Tokenizer, Path]:
    """load_base for add_model_flags' flags, with the adapter attached if there is one: in fp32 if it is to be merged."""
    if not math.isfinite(args.scale):
        raise ValueError(f"--scale is {args.scale}: give a number")
    if args.scale != 1 and not args.adapter:
        raise ValueError("--scale multiplies what an adapter adds: give --adapter")
    about = adapter_info(args.adapter) if args.adapter else {"base": BASE}
    if not (base := args.base or about.get("base")):
        raise ValueError(f"{args.adapter}/adapter.json does not name its base: give --base")
    device = pick_device(args.device)
    # a backbone that was trained itself is in fp32, and bf16 would round what it learned
    dtype = pick_dtype(args.dtype or ("fp32" if about.get("method") == "full" else None), device)
    model, tok, path = load_base(base, device, dtype)
    if args.adapter:
        load_adapter(model, args.adapter, args.scale)
        if not merge:
            ready_to_ask(model)
    return model, tok, path


def prompt(tok: Tokenizer, messages: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and the system mask (both 1-D) that ask for the next reply."""
    ids, roles = render(tok, messages, add_generation_prompt=True)
    return torch.tensor(ids), torch.tensor(roles) == SYSTEM


def reply(model: Transformer, tok: Tokenizer, messages: list[dict], args: argparse.Namespace, quiet: bool = False) -> list[int]:
    """Generates the next reply, prints it as it comes, and returns its ids."""
    ids, system = prompt(tok, messages)
    new, shown, text = [], "", ""

    def on_token(_: int, token: int) -> None:
        nonlocal shown, text
        new.append(token)
        text = tok.decode(new)
        if not quiet and not text.endswith("\ufffd"):  # a character may still lack bytes
            print(text[len(shown) :], end="", flush=True)
            shown = text

    options = {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the reply
        model.generate([ids], [system], args.max_new_tokens, **options, on_token=on_token)
    if not quiet:
        print(text[len(shown) :])
    return new


def both(model: Transformer, tok: Tokenizer, messages: list[dict], args: argparse.Namespace) -> list[int]:
    """Prints the base's reply (the blocks at scale 0) and the adapter's side by side; returns the adapter's ids."""
    columns = []
    width = max(8, shutil.get_terminal_size().columns // 2 - 2)
    for name, scale in (("base", 0.0), ("adapter", args.scale)):
        set_scale(model, scale)
        print(f"{name} writes …", end="\r", file=sys.stderr, flush=True)
        new = reply(model, tok, messages, args, quiet=True)
        lines = tok.decode(new).splitlines()
        columns.append([name, "-" * width, *(part for line in lines for part in wrap(line, width) or [""])])
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{left:<{width}}    {right}".rstrip())
    return new


# --- where a reply looked ---------------------------------------------------------------------------------------------


def attention_weights(block: CrossAttentionLayer, x: Tensor, system: Tensor) -> Tensor:
    """How much the tokens in x (B, T, D), a CAL block's input, look at the system's (bool (B, T)): (B, H, T, S), where a
    row adds up to 1, or is 0 throughout where a token sees none."""
    positions, mask = attention_mask(system)
    prompt = block.norm1(x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[-1])))  # (B, S, D)
    q = block.heads(block.q_proj(block.norm1(x)), torch.arange(x.shape[1], device=x.device)[None])  # (B, H, T, C)
    k = block.heads(block.k_proj(prompt), positions)  # (B, K, S, C)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # softmax(Q K^T / sqrt(C))
    scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask[:, None], -math.inf).softmax(-1).nan_to_num(0)


@torch.inference_mode()
def looks(model: Transformer, ids: Tensor, system: Tensor, new: list[int]) -> Tensor:
    """How much each of the N tokens of a reply looked at the prompt's S system tokens: (blocks, H, N, S). A token was
    chosen by what the one before it saw, so its row is that one's."""
    device, kept = model.embed_tokens.weight.device, []
    keep = lambda block, given, _: kept.append(attention_weights(block, *given[:2])[0])
    hooks = [block.register_forward_hook(keep) for block in model.inserted.values()]
    ids = torch.cat((ids, torch.tensor(new[:-1], dtype=torch.long)))  # the last one chose nothing
    system = torch.nn.functional.pad(system, (0, len(new) - 1))
    model(ids[None].to(device), system[None].to(device))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)[:, :, -len(new) :].cpu()


def show(model: Transformer, tok: Tokenizer, messages: list[dict], new: list[int], args: argparse.Namespace) -> None:
    """Prints where the reply looked, and writes the page of --html."""
    ids, system = prompt(tok, messages)
    if not new or not system.any():
        return print("there is nothing to show: give a --system, and a --user that gets a reply")
    weights, words = looks(model, ids, system, new), look.words(tok, ids[system].tolist())
    blocks = slice(None) if args.show_block is None else [list(model.inserted).index(str(args.show_block))]
    heads = slice(None) if args.show_head is None else [args.show_head]
    print(f"\n{look.shade(words, weights[blocks][:, heads].mean(dim=(0, 1, 2)).tolist(), sys.stdout.isatty())}")
    if args.html:
        set_scale(model, 0.0)
        base = tok.decode(reply(model, tok, messages, args, quiet=True))
        set_scale(model, args.scale)
        about = {"system": words, "user": messages[-1]["content"], "reply": look.words(tok, new), "base": base}
        about |= {"blocks": list(model.inserted), "weights": weights.double().round(decimals=4).tolist()}
        look.write_page(args.html, about)
        print(f"{args.html} shows it word by word: open it in a browser")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--system", default="", help="the system prompt: what CAL anchors every token to")
    parser.add_argument("--user", help="one user message; without it, a chat in the terminal")
    parser.add_argument("--both", action="store_true", help="show the base's reply beside the adapter's")
    parser.add_argument("--show", action="store_true", help="shade the system prompt by how much the reply looked at it")
    parser.add_argument("--show_block", type=int, metavar="B", help="only the block after layer B (default: all)")
    parser.add_argument("--show_head", type=int, metavar="H", help="only its head H, from 0 (default: all)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows it word by word")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="write a Hugging Face checkpoint there, in --dtype")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="tokens a reply may have (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest words of this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    args = parser.parse_args()
    args.show |= args.html is not None or args.show_block is not None or args.show_head is not None
    method = adapter_info(args.adapter)["method"] if args.adapter else None
    if (args.both or args.merge) and not args.adapter:
        raise ValueError("--both and --merge are about an adapter and its base: give --adapter")
    if args.show and method != "cal":
        raise ValueError("--show is of CAL, whose blocks look at the system prompt: give the --adapter of such a run")
    if args.merge and args.merge.exists():
        raise ValueError(f"{args.merge} already exists: give --merge another directory, or delete it")

    model, tok, path = load(args, merge=args.merge is not None)
    if args.merge:
        save_merged(model, path, args.merge)
        return print(f"{args.merge} is a checkpoint now: python sample.py --base {args.merge}")
    blocks, heads = list(map(int, model.inserted)), list(range(model.config.n_heads))
    for value, known in ((args.show_block, blocks), (args.show_head, heads)):
        if value is not None and value not in known:
            raise ValueError(f"this adapter has no such block or head: choose from {', '.join(map(str, known))}")

    def answer(messages: list[dict]) -> list[int]:
        new = (both if args.both else reply)(model, tok, messages, args)
        if args.show:
            show(model, tok, messages, new, args)
        return new

    messages = [{"role": "system", "content": args.system}] if args.system else []
    if args.user is not None:
        answer(messages + [{"role": "user", "content": args.user}])
        return
    print("A chat: an empty line ends it.")
    while line := input("\n> "):
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": tok.decode(answer(messages))})
        except ValueError as error:  # this line can't be answered, but the chat goes on
            messages.pop()
            print(error)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, EOFError):
        print()
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
