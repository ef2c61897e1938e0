"""The flags and the loop that the experiments here share: the base first, then each adapter."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from data.chat import Tokenizer
from model import Transformer
from sample import add_device_flags, load


def parse(about: str, limit: int, out: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", nargs="*", default=[], help="runs of train.py with one base, which comes first itself")
    parser.add_argument("--base", help="a checkpoint directory or Hub id (default: the adapters', else SmolLM2)")
    parser.add_argument("--limit", type=int, default=limit, help="how many prompts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="a directory (%(default)s)")
    add_device_flags(parser)
    args = parser.parse_args()
    names = [Path(adapter).name for adapter in args.adapter]
    if len(set(names)) < len(names) or args.limit < 1:
        raise ValueError("give each adapter a directory name of its own, and a --limit of at least 1")
    return args


def models(args: argparse.Namespace) -> Iterator[tuple[str, Transformer, Tokenizer]]:
    """"base", and the name of each adapter's directory, with the model that it makes and its tokenizer."""
    about = {"base": args.base, "device": args.device, "dtype": args.dtype}
    if not args.adapter:
        model, tok, _ = load(argparse.Namespace(adapter=None, scale=1.0, **about))
        yield "base", model, tok
    for n, adapter in enumerate(args.adapter):
        for name, scale in ([("base", 0.0)] if n == 0 else []) + [(Path(adapter).name, 1.0)]:
            model, tok, _ = load(argparse.Namespace(adapter=adapter, scale=scale, **about))
            yield name, model, tok
