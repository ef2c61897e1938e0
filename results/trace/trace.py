"""
Where in the layers does the rule's word stand? Causal tracing (arXiv 2202.05262): two system prompts differ in one word, and what
the model holds under the one is put into its run under the other, after one layer at a time.

    python -m results.trace.trace --adapter out/cal out/late --limit 4

writes trace.json and trace.png into out/trace. At each point, 0 before the first layer, l after layer l and the block that
stands there, the residual stream of a run is replaced by the other's, once at the system prompt's tokens and once at the
last token, which chooses the reply's first word. The share is how much of the difference of the two words' logits comes
with it: 0 is the run as it was, 1 the other run.
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor

from data.chat import Tokenizer
from data.files import ROOT, write_json
from model import Transformer
from results.adapters import models, parse
from sample import prompt

RULES = [  # a reply that keeps one of these begins with the word
    "Start every reply with the word {}.",
    "The first word of each answer must be {}.",
    "Begin all your answers with {}.",
    "Every message that you write opens with {} and goes on from there.",
]
QUESTIONS = ["What is the capital of France?", "Name a color.", "What is the plural of lion?", "Who wrote Hamlet?"]


def pairs_of_words(tok: Tokenizer, n: int) -> list[tuple[str, str]]:
    """n pairs of words that are one token each, at the start of a reply and after a space, so that all prompts are as long."""
    words = (ROOT / "data" / "hierarchy" / "words.txt").read_text(encoding="utf-8").split()
    short = [word for word in words if len(tok.encode(word)) == len(tok.encode(f" {word}")) == 1]
    random.Random(0).shuffle(short)
    return list(zip(short[:n], short[n : 2 * n], strict=True))


@torch.inference_mode()
def run(model: Transformer, ids: Tensor, system: Tensor, point: int | None = None, where: Tensor | None = None,
        other: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The logits (B, V) of the token after ids (B, T), and the residual stream (B, T, D) at each of the L + 1 points; at
    `point`, where `where` (B, T) is True, it is replaced by `other`."""
    stream: list[Tensor] = []

    def before(_: torch.nn.Module, given: tuple) -> tuple:
        x = given[0]
        if len(stream) == point:
            x = torch.where(where[:, :, None], other, x)
        stream.append(x)
        return (x, *given[1:])

    hooks = [module.register_forward_pre_hook(before) for module in (*model.layers, model.norm)]
    logits = model.logits(model(ids, system)[:, -1]).float()
    for hook in hooks:
        hook.remove()
    return logits, stream


def swapped(x: Tensor) -> Tensor:
    """To each row (2 N, …) the other one of its pair: row n and row N + n are one."""
    return x.roll(len(x) // 2, dims=0)


def toward_other(logits: Tensor, first: Tensor) -> float:
    """The logit of the other word minus that of the row's own, whose id is in first (2 N, 1), summed over the rows."""
    return float((logits.gather(1, swapped(first)) - logits.gather(1, first)).sum())


def trace(model: Transformer, tok: Tokenizer, limit: int) -> dict[str, list[float] | float]:
    """The shares by point, {"system": L + 1 numbers, "last": L + 1}, over `limit` pairs for each rule, either word's run
    put into the other's; and how far, on average, the
    logit of a run's own word stands above that of the other."""
    difference, moved = 0.0, {place: [0.0] * (len(model.layers) + 1) for place in ("system", "last")}
    pairs = pairs_of_words(tok, limit)
    words = [a for a, _ in pairs] + [b for _, b in pairs]
    for rule, question in zip(RULES, QUESTIONS):
        messages = [[{"role": "system", "content": rule.format(w)}, {"role": "user", "content": question}] for w in words]
        prompts = [prompt(tok, m) for m in messages]
        ids, system = (torch.stack(rows).to(model.embed_tokens.weight.device) for rows in zip(*prompts))  # (2 N, T)
        first = torch.tensor([tok.encode(word) for word in words], device=ids.device)  # (2 N, 1)
        last = (torch.arange(ids.shape[1], device=ids.device) == ids.shape[1] - 1).expand_as(system)

        logits, stream = run(model, ids, system)
        before, after = toward_other(logits, first), toward_other(swapped(logits), first)
        difference += after - before
        for place, where in (("system", system), ("last", last)):
            for point, x in enumerate(stream):
                patched, _ = run(model, ids, system, point, where, swapped(x))
                moved[place][point] += toward_other(patched, first) - before
    shares: dict = {place: [m / difference for m in of_place] for place, of_place in moved.items()}
    # from a run to the other one the difference turns round: it changes by twice its size
    return shares | {"difference": difference / (2 * len(RULES) * len(words)), "rows": len(RULES) * len(words)}


def plot(traced: dict[str, dict], file: Path) -> None:
    """One curve a run and place; the layers after which the run's blocks stand are shaded."""
    import matplotlib.pyplot as plt  # not above: only this needs it

    figure, axes = plt.subplots(1, len(traced), figsize=(4.2 * len(traced), 3.2), squeeze=False, sharey=True)
    for ax, (name, shares) in zip(axes[0], traced.items()):
        for b in shares["blocks"]:
            ax.axvspan(b - 0.5, b + 0.5, color="0.88", zorder=0)
        for place, style in (("system", "o-"), ("last", "s--")):
            at = "the system prompt" if place == "system" else "the last token"
            ax.plot(shares[place], style, markersize=3, label=f"put in at {at}")
        ax.set(title=f"{name} (difference {shares['difference']:.1f})", xlabel="after layer", ylim=(-0.15, 1.15))
    axes[0, 0].set_ylabel("share of the difference")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    args = parse(__doc__, limit=4, out="out/trace")
    args.dtype, traced = args.dtype or "fp32", {}
    for name, model, tok in models(args):
        blocks = [] if name == "base" else [int(b) for b in model.inserted]
        traced[name] = {"blocks": blocks, **trace(model, tok, args.limit)}
        print(f"{name}: the logit of its own word is {traced[name]['difference']:.2f} above that of the other")
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "trace.json", {"limit": args.limit, "rules": RULES, "questions": QUESTIONS, "runs": traced})
    plot(traced, args.out / "trace.png")
    print(f"{args.out}/trace.json, {args.out}/trace.png")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"trace: {error}")
