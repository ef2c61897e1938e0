"""
CALYREX (arXiv 2605.09737): a Cross-Attention Layer (CAL) between the frozen layers of a pretrained transformer.
Queries come from every token, keys and values only from the system prompt's tokens of the same sequence, so each token
is anchored to the operator's words anew, whatever the conversation has become. Only these blocks are trained.

Shapes in the comments: B batch, T tokens, S system tokens, D width, H query heads, K key/value heads, C head width,
L layers.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from model import Config, RMSNorm, Transformer, attend, read_json, rope_tables, rotate

METHODS = ("cal", "none")


# ----------------------------------------------------------------------------------------------------------------------
# who sees whom


def attention_mask(system: Tensor) -> tuple[Tensor, Tensor]:
    """
    From system, bool (B, T), True on the system prompt's tokens: positions (B, S), where each row's system tokens
    stand, and mask, bool (B, T, S). S is the most that a row has; rows with fewer fill up with position 0, masked.
    """
    # our choice: one formula, token i sees system token j  iff  j <= i
    #   before the prompt: nothing; inside it: itself and what precedes it; after it: all of it
    counts = system.sum(dim=1, keepdim=True)  # (B, 1)
    S = int(counts.max())
    real = torch.arange(S, device=system.device) < counts  # (B, S)
    positions = (~system).int().argsort(dim=1, stable=True)[:, :S]  # a stable sort brings system tokens to the front
    positions = positions.masked_fill(~real, 0)
    tokens = torch.arange(system.shape[1], device=system.device)
    mask = real[:, None, :] & (positions[:, None, :] <= tokens[None, :, None])
    return positions, mask


# ----------------------------------------------------------------------------------------------------------------------
# the block


class Linear(nn.Linear):
    """No bias; the weight stays in fp32, where small updates survive, and is cast to the activations' dtype at use."""

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class CrossAttentionLayer(nn.Module):
    """
    One CAL block:  X'  = X  + Attn(norm1(X), norm1(X_system)) W_O
                    X'' = X' + FFN(norm2(X')) W_D
    W_O and W_D start at zero, so a new block is the identity. A token that sees no system token is left exactly as it
    was, FFN included: without a system prompt the model is the base, bit for bit.
    """

    def __init__(self, c: Config, rope: bool = False, ffn: float = 1.0, scale: float = 1.0):
        super().__init__()
        # our choice: pre-norm, the backbone's own head counts, SwiGLU of ffn times the backbone's width, no bias
        hidden = max(1, round(ffn * c.intermediate_size))
        self.config, self.rope, self.scale = c, rope, scale
        self.norm1 = RMSNorm(c.hidden_size, c.norm_eps)
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.hidden_size)
        self.norm2 = RMSNorm(c.hidden_size, c.norm_eps)
        self.gate_proj = Linear(c.hidden_size, hidden)
        self.up_proj = Linear(c.hidden_size, hidden)
        self.down_proj = Linear(hidden, c.hidden_size)
        for proj in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj):
            nn.init.normal_(proj.weight, std=c.hidden_size**-0.5)  # our choice: outputs as large as inputs
        for proj in (self.o_proj, self.down_proj):
            nn.init.zeros_(proj.weight)

    def forward(
        self,
        x: Tensor,
        system: Tensor | None,
        cache: dict[str, Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """
        x (B, T, D) and system, bool (B, T), give (B, T, D). In generation the first call leaves the system prompt's
        keys and values in cache; later calls, whose tokens all come after the prompt, read them, and they never grow.
        positions, of x's tokens in the sequence, (1 or B, T), matter to --cal_rope alone; None is 0..T-1.
        """
        B, T, D = x.shape
        if cache:
            k, v = cache["k"], cache["v"]
            mask = cache["real"][:, None, :].expand(B, T, -1)
        elif system is None:
            return x
        else:
            where, mask = attention_mask(system)  # (B, S), (B, T, S)
            prompt = self.norm1(x.gather(1, where[:, :, None].expand(-1, -1, D)))  # (B, S, D)
            k, v = self.heads(self.k_proj(prompt), where), self.heads(self.v_proj(prompt))  # (B, K, S, C)
            if cache is not None and not torch.is_grad_enabled():
                cache.update(k=k, v=v, real=mask[:, -1])  # nothing comes after the last slot: it sees all
        if mask.shape[-1] == 0:  # no system prompt in the whole batch
            return x
        if positions is None:
            positions = torch.arange(T, device=x.device)[None]

        q = self.heads(self.q_proj(self.norm1(x)), positions)  # (B, H, T, C)
        # a token that sees nothing would get a softmax over nothing, NaN: it reads everything, and is put back below
        seen = mask.any(dim=-1, keepdim=True)  # (B, T, 1)
        # X' = X + Attn W_O
        y = x + self.scale * self.o_proj(attend(q, k, v, mask | ~seen))
        # X'' = X' + (silu(N W_gate) * N W_up) W_D,  N = norm2(X')
        n = self.norm2(y)
        y = y + self.scale * self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))
        # our choice: such a token stays exactly as it was, the feed-forward part included
        return torch.where(seen, y, x)

    def heads(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Splits (B, T, heads * C) into (B, heads, T, C)."""
        x = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        # our choice: no rotary, for a rule must not fade with distance; --cal_rope turns it on, for the ablation
        if self.rope and positions is not None:
            x = rotate(x, *rope_tables(self.config, positions, x.dtype))
        return x


# ----------------------------------------------------------------------------------------------------------------------
# where the blocks go


def span(first: int, last: int, L: int) -> list[int]:
    """The boundaries first..last, kept within 1..L, and at least one."""
    last = max(1, min(last, L))
    return list(range(max(1, min(first, last)), last + 1))


def eighth(L: int) -> int:
    """How many boundaries late8th has; its controls have as many."""
    return L + 1 - (7 * L) // 8


# our choice: boundary b is "after layer b", 1..L; each placement gives the boundaries for a backbone of L layers
PLACEMENTS: dict[str, Callable[[int], list[int]]] = {
    "every": lambda L: span(1, L, L),
    "alternate": lambda L: span(1, L, L)[1::2] or [1],
    "early_half": lambda L: span(1, L // 2, L),
    "late_half": lambda L: span(L // 2, L, L),
    "late4th": lambda L: span(3 * L // 4, L, L),
    "late8th": lambda L: span(7 * L // 8, L, L),  # the paper's best
    # our choice: two controls of late8th's count, at the start and in the middle
    "early8th": lambda L: span(1, eighth(L), L),
    "middle8th": lambda L: span((L - eighth(L)) // 2 + 1, (L - eighth(L)) // 2 + eighth(L), L),
}


# ----------------------------------------------------------------------------------------------------------------------
# attach, save, load


def attach(
    model: Transformer,
    method: str = "cal",
    placement: str = "late8th",
    scale: float = 1.0,
    rope: bool = False,
    ffn: float = 1.0,
) -> Transformer:
    """
    Freezes the backbone and inserts new, trainable blocks (method "cal"), or none. scale multiplies what the blocks
    add, ffn the width of their feed-forward part; rope turns rotary on in them. Returns the model.
    ValueError names the known methods and placements.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(PLACEMENTS)}")
    model.requires_grad_(False)
    model.inserted.clear()
    if method == "cal":
        for b in PLACEMENTS[placement](model.config.n_layers):
            model.inserted[str(b)] = CrossAttentionLayer(model.config, rope, ffn, scale)
    model.inserted.to(model.embed_tokens.weight.device)  # made on the CPU: a seed gives the same blocks everywhere
    model.adapter = {"method": method, "placement": placement, "rope": rope, "ffn": float(ffn)}
    return model


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes beside and renames, so that the file is never half there. OSError says which file, and why not."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{file} can't be written ({error.strerror}): make room for it, and run this again") from None


def base_config(model: Transformer) -> dict:
    """What an adapter's weights depend on in the base, as JSON would give it back."""
    return {name: value for name, value in asdict(model.config).items() if name != "stop_ids"}


def save_adapter(model: Transformer, path: str | Path, **info: object) -> None:
    """
    Writes adapter.safetensors (the blocks, fp32) and adapter.json (how they were attached, the base's config, and
    info) into the directory path.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    about = {**model.adapter, "base_config": base_config(model), **info}
    write_whole(path / "adapter.safetensors", save(model.inserted.state_dict()))
    write_whole(path / "adapter.json", json.dumps(about, indent=1) + "\n")


def load_adapter(model: Transformer, path: str | Path, scale: float = 1.0) -> Transformer:
    """
    Attaches the adapter saved in the directory path. FileNotFoundError if one of its two files is missing, ValueError
    if it is damaged or was trained on a base of another shape.
    """
    about = adapter_info(path)
    ours, theirs = base_config(model), about["base_config"]
    if different := [name for name in ours if ours[name] != theirs.get(name)]:
        raise ValueError(f"the adapter in {path} has another base ({', '.join(different)} differ): give that one")
    attach(model, about["method"], about["placement"], scale, about["rope"], about["ffn"])
    file = Path(path) / "adapter.safetensors"
    try:
        model.inserted.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is damaged ({reason}): copy it again or train anew") from None
    return model


def adapter_info(path: str | Path) -> dict:
    """adapter.json of a saved adapter. FileNotFoundError or ValueError with one sentence where there is none."""
    path = Path(path)
    for name in ("adapter.json", "adapter.safetensors"):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} holds no {name}: give a directory that train.py wrote (--out)")
    about = read_json(path / "adapter.json")
    types = {"method": str, "placement": str, "rope": bool, "ffn": float, "base_config": dict}
    if wrong := [name for name, kind in types.items() if not isinstance(about.get(name), kind)]:
        raise ValueError(f"{path / 'adapter.json'} lacks {', '.join(wrong)}: copy it again or train anew")
    return about
