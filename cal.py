"""
CALYREX (arXiv 2605.09737): a Cross-Attention Layer (CAL) between the frozen layers of a pretrained transformer.
Queries come from every token, keys and values only from the system prompt's tokens of the same sequence, so each token
is anchored to the operator's words anew, whatever the conversation has become. Only these blocks are trained.
Beside it stand the baselines of the paper's comparison, LoRA and ParallelMLP, with as many parameters.

Shapes in the comments are named as in model.py, and S is the system tokens.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from data.files import read_json, write_json, write_whole
from model import Config, RMSNorm, Transformer, attend, rope_tables, rotate

# --- who sees whom ----------------------------------------------------------------------------------------------------


def attention_mask(system: Tensor) -> tuple[Tensor, Tensor]:
    """From system, bool (B, T), True on the system prompt's tokens: positions (B, S), where each row's system tokens
    stand, and mask, bool (B, T, S). S is the most that a row has; rows with fewer fill up with position 0, masked."""
    # our choice: one formula, the token at place i sees the system token at place j  iff  j <= i
    #   before the prompt: nothing; inside it: itself and what precedes it; after it: all of it
    counts = system.sum(dim=1, keepdim=True)  # (B, 1)
    S = int(counts.max())
    real = torch.arange(S, device=system.device) < counts  # (B, S)
    positions = (~system).int().argsort(dim=1, stable=True)[:, :S]  # a stable sort brings system tokens to the front
    positions = positions.masked_fill(~real, 0)
    tokens = torch.arange(system.shape[1], device=system.device)
    mask = real[:, None, :] & (positions[:, None, :] <= tokens[None, :, None])
    return positions, mask


# --- the block --------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """No bias; the weight stays in fp32, where small updates survive, and is cast to the activations' dtype at use."""

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class CrossAttentionLayer(nn.Module):
    """One CAL block:  X'  = X  + Attn(norm1(X), norm1(X_system)) W_O
                    X'' = X' + FFN(norm2(X')) W_D
    W_O and W_D start at zero, so a new block is the identity. A token that sees no system token is left exactly as it
    was, FFN included: without a system prompt the model is the base, bit for bit."""

    def __init__(self, c: Config, rope: bool = False, ffn: float = 1.0):
        super().__init__()
        # our choice: pre-norm, the backbone's own head counts, SwiGLU of ffn times the backbone's width, no bias
        self.config, self.rope, self.scale = c, rope, 1.0
        self.width = width = max(1, round(ffn * c.intermediate_size))
        self.norm1 = RMSNorm(c.hidden_size, c.norm_eps)
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.hidden_size)
        self.norm2 = RMSNorm(c.hidden_size, c.norm_eps)
        self.gate_proj = Linear(c.hidden_size, width)
        self.up_proj = Linear(c.hidden_size, width)
        self.down_proj = Linear(width, c.hidden_size)
        for proj in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj):
            nn.init.normal_(proj.weight, std=c.hidden_size**-0.5)  # our choice: outputs as large as inputs
        for proj in (self.o_proj, self.down_proj):
            nn.init.zeros_(proj.weight)

    def forward(self, x: Tensor, system: Tensor | None, cache: dict[str, Tensor] | None = None,
                anchor: tuple[Tensor, Tensor] | None = None, positions: Tensor | None = None) -> Tensor:  # fmt: skip
        """x (B, T, D) and system, bool (B, T), give (B, T, D). anchor is what attention_mask(system) gives, where that is
        known already. In generation the first call leaves the prompt's keys and values in cache; later calls, whose tokens
        all come after the prompt, read them there, and they never grow. positions (1 or B, T) are those of x's tokens,
        for --cal_rope alone; None is 0..T-1."""
        B, T, D = x.shape
        if cache:  # not empty: the call that read the prompt has filled it
            k, v, mask, sees = (cache[name] for name in ("k", "v", "mask", "sees"))
            mask = mask.expand(B, T, -1)
        elif system is None:
            return x
        else:
            where, mask = anchor or attention_mask(system)  # (B, S), (B, T, S)
            prompt = self.norm1(x.gather(1, where[:, :, None].expand(-1, -1, D)))  # (B, S, D)
            k, v = self.heads(self.k_proj(prompt), where), self.heads(self.v_proj(prompt))  # (B, K, S, C)
            # The softmax over no key at all is NaN. So a token that sees no system token is shown every key here, and
            # the last line of this function throws away what it made of them.
            sees = mask.any(dim=-1, keepdim=True)  # (B, T, 1)
            mask = mask | ~sees
            if cache is not None:
                # all tokens of later calls come after the prompt: they see what the last token of this call sees
                cache.update(k=k, v=v, mask=mask[:, -1:].clone(), sees=sees[:, -1:].clone())
        if mask.shape[-1] == 0:  # no system prompt in the whole batch
            return x
        positions = torch.arange(T, device=x.device)[None] if positions is None else positions
        q = self.heads(self.q_proj(self.norm1(x)), positions)  # (B, H, T, C)
        # X' = X + Attn W_O
        y = x.add(self.o_proj(attend(q, k, v, mask)), alpha=self.scale)
        # X'' = X' + (silu(N W_gate) * N W_up) W_D,  N = norm2(X')
        n = self.norm2(y)
        y = y.add(self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n)), alpha=self.scale)
        # our choice: a token that sees no system token stays exactly as it was, the feed-forward part included
        return torch.where(sees, y, x)

    def heads(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Splits (B, T, heads * C) into (B, heads, T, C)."""
        x = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        # our choice: no rotary, for a rule must not fade with distance; --cal_rope turns it on, for the ablation
        if self.rope and positions is not None:
            x = rotate(x, *rope_tables(self.config, positions, x.dtype))
        return x


# --- the baselines ----------------------------------------------------------------------------------------------------


class ParallelMLP(nn.Module):
    """A feed-forward block at CAL's place, without its routing:  X' = X + FFN(norm(X)) W_D. It works on every token alike
    and does not know which ones are the system prompt's. W_D starts at zero: a new block is the identity."""

    def __init__(self, c: Config, width: int):
        super().__init__()
        # our choice: pre-norm, SwiGLU and random values as in CAL, so that the routing alone is what differs
        self.width, self.scale = width, 1.0
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.gate_proj = Linear(c.hidden_size, width)
        self.up_proj = Linear(c.hidden_size, width)
        self.down_proj = Linear(width, c.hidden_size)
        for proj in (self.gate_proj, self.up_proj):
            nn.init.normal_(proj.weight, std=c.hidden_size**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x (B, T, D) gives (B, T, D); the system mask, and all else that CAL is given, is not looked at."""
        # X' = X + (silu(N W_gate) * N W_up) W_D,  N = norm(X)
        n = self.norm(x)
        return x.add(self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n)), alpha=self.scale)


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained update of low rank beside it (LoRA, arXiv 2106.09685):  y = x W^T + x A^T B^T.
    B starts at zero, so a new one computes what the frozen layer did."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        # our choice: alpha equals the rank, so that no factor alpha / rank is left
        self.linear, self.scale = linear, 1.0
        self.A = Linear(linear.in_features, rank)
        self.B = Linear(rank, linear.out_features)
        nn.init.normal_(self.A.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).add(self.B(self.A(x)), alpha=self.scale)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The frozen layer with the weight  W + scale B A,  summed in fp32."""
        weight = self.linear.weight
        weight.copy_(weight.float() + self.scale * self.B.weight @ self.A.weight)
        return self.linear


def replace(module: nn.Module, kind: type[nn.Module], new: Callable[[nn.Module], nn.Module]) -> None:
    """Puts new(child) in the place of every child of that kind, however deep within module."""
    for name, child in list(module.named_children()):
        if type(child) is kind:
            setattr(module, name, new(child))
        else:
            replace(child, kind, new)


# --- where the blocks go ----------------------------------------------------------------------------------------------


def span(first: int, last: int, L: int) -> list[int]:
    """The boundaries first..last, as far as a backbone of L layers has them, and at least one."""
    return [b for b in range(first, last + 1) if 1 <= b <= L] or [1]


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


# --- attach -----------------------------------------------------------------------------------------------------------

METHODS = ("cal", "mlp", "lora", "full", "none")


def attach(model: Transformer, method: str = "cal", placement: str = "late8th", scale: float = 1.0, rope: bool = False,
           ffn: float = 1.0, rank: int | None = None, width: int | None = None) -> Transformer:  # fmt: skip
    """Freezes the backbone and adds what the method trains: CAL blocks or ParallelMLP blocks at the placement's
    boundaries, LoRA on every linear of every layer, nothing ("none"); or frees the whole backbone ("full"). LoRA's rank
    and ParallelMLP's width, where they are not given, are those that have as many parameters as CAL at that placement.
    rope turns rotary on in CAL, ffn is the width of its feed-forward part in the backbone's. Returns the model."""
    for name, value, known in (("method", method, METHODS), ("placement", placement, PLACEMENTS)):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    c, device = model.config, model.embed_tokens.weight.device
    boundaries = PLACEMENTS[placement](c.n_layers)
    with torch.device("meta"):  # counted without memory
        parameters = sum(p.numel() for p in CrossAttentionLayer(c, rope, ffn).parameters())  # of a CAL block
    model.inserted.clear()  # of an earlier attach, as are the LoRAs
    replace(model.layers, LoRALinear, lambda lora: lora.linear)
    model.requires_grad_(method == "full")
    model.attention_mask = attention_mask if method == "cal" else None
    with torch.device("meta" if device.type == "meta" else "cpu"):  # on the CPU a seed gives the same everywhere
        if method == "cal":
            model.inserted.update({str(b): CrossAttentionLayer(c, rope, ffn) for b in boundaries})
        if method == "mlp":
            # a norm of D and three matrices of D x width
            width_of_cal = round((parameters - c.hidden_size) / (3 * c.hidden_size))
            model.inserted.update({str(b): ParallelMLP(c, width or width_of_cal) for b in boundaries})
        if method == "lora":
            rank_of_cal = lora_rank(model, parameters * len(boundaries))
            replace(model.layers, nn.Linear, lambda linear: LoRALinear(linear, rank or rank_of_cal))
    model.to(device)
    model.adapter = {"method": method, "placement": placement, "rope": rope, "ffn": float(ffn), "rank": rank, "width": width}
    set_scale(model, scale)
    return model


def lora_rank(model: Transformer, parameters: int) -> int:
    """The rank with which LoRA on every linear of every layer comes nearest to so many parameters, and at least 1."""
    linears = [module for module in model.layers.modules() if type(module) is nn.Linear]
    return max(1, round(parameters / sum(m.in_features + m.out_features for m in linears)))


def set_scale(model: Transformer, scale: float) -> None:
    """The strength of what the adapter adds: 0 is the base bit for bit, 1 as trained. ValueError for method full."""
    if model.adapter["method"] == "full" and scale != 1:
        raise ValueError(f"the scale is {scale}, but method full changed the base itself: it has no other scale than 1")
    for module in model.modules():
        if isinstance(module, (CrossAttentionLayer, ParallelMLP, LoRALinear)):
            module.scale = scale


def trainable(model: Transformer) -> dict[str, nn.Parameter]:
    """The parameters that the method trains, by name: all that an adapter's file holds."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def cast(model: Transformer) -> None:
    """Ends the training of an adapter: its weights take the backbone's dtype for good, which changes no bit of a reply."""
    for p in trainable(model).values():
        p.data = p.data.to(model.embed_tokens.weight.dtype)


def sizes(model: Transformer) -> str:
    """In a line, what is trained: "17,702,784 parameters, 5 blocks of width 1536 after layers 26, 27, 28, 29, 30"."""
    method, count = model.adapter["method"], f"{sum(p.numel() for p in trainable(model).values()):,} parameters"
    if method == "lora":
        return f"{count}, rank {model.layers[0].mlp.up_proj.A.out_features} on every linear of every layer"
    if not model.inserted:
        return f"{count}, the whole backbone" if method == "full" else "nothing"
    width = next(iter(model.inserted.values())).width
    return f"{count}, {len(model.inserted)} blocks of width {width} after layers {', '.join(model.inserted)}"


# --- save and load ----------------------------------------------------------------------------------------------------


def base_config(model: Transformer) -> dict:
    """What an adapter's weights depend on in the base, as JSON would give it back."""
    return {name: value for name, value in asdict(model.config).items() if name != "stop_ids"}


def fingerprint(model: Transformer) -> str | None:
    """A hash of a few of the base's weights, the same in fp32 and bf16; None for method full, which changes them."""
    last = model.layers[-1].mlp.down_proj
    rows = getattr(last, "linear", last).weight[:16].detach().bfloat16().cpu()  # within a LoRALinear, the frozen one
    return None if model.adapter["method"] == "full" else hashlib.sha256(rows.view(torch.uint8).numpy()).hexdigest()[:16]


def save_adapter(model: Transformer, path: str | Path, **info: object) -> None:
    """Writes adapter.safetensors (what was trained, as it is: fp32) and adapter.json (how it was attached, its size,
    the base's config, and info) into the directory path."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach() for name, p in trainable(model).items()}
    about = {**model.adapter, "sizes": sizes(model), "parameters": sum(p.numel() for p in state.values())}
    write_whole(path / "adapter.safetensors", save(state))
    about |= {"base_config": base_config(model), "fingerprint": fingerprint(model)}
    write_json(path / "adapter.json", about | info)


def load_adapter(model: Transformer, path: str | Path, scale: float = 1.0) -> Transformer:
    """Attaches the adapter saved in the directory path. FileNotFoundError if one of its two files is missing,
    ValueError if it is damaged or was trained on a base of another shape; of other weights it is said."""
    about, file = adapter_info(path), Path(path) / "adapter.safetensors"
    ours, theirs = base_config(model), about["base_config"]
    if different := [name for name in ours if ours[name] != theirs.get(name)]:
        raise ValueError(f"the adapter in {path} has another base ({', '.join(different)} differ): give that one")
    attach(model, scale=scale, **{name: about[name] for name in ADAPTER_TYPES})
    try:
        load_trainable(model, load_file(file))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): copy it again or train anew") from None
    if about.get("fingerprint") not in (None, fingerprint(model)):
        print(f"the adapter in {path} was trained on other weights than this base's: expect less of it", file=sys.stderr)
    return model


@torch.no_grad()
def load_trainable(model: Transformer, state: dict[str, Tensor]) -> None:
    """Copies the tensors of state into the model's trainable parameters. ValueError where they are not the same."""
    ours, theirs = ({name: p.shape for name, p in tensors.items()} for tensors in (trainable(model), state))
    if odd := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        shapes = f"the shape {theirs.get(odd[0])} instead of {ours.get(odd[0])}"
        raise ValueError(f"{odd[0]}, one of {len(odd)} such tensors, has {shapes}")
    if bad := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{bad[0]} is not finite")
    for name, p in trainable(model).items():
        p.copy_(state[name])


# what attach is told when an adapter is loaded, as adapter.json has it
ADAPTER_TYPES = {"method": str, "placement": str, "rope": bool, "ffn": float, "rank": int | None, "width": int | None}


def adapter_info(path: str | Path) -> dict:
    """adapter.json of a saved adapter. FileNotFoundError or ValueError with one sentence where there is none."""
    for name in ("adapter.json", "adapter.safetensors"):
        if not (Path(path) / name).is_file():
            raise FileNotFoundError(f"{path} holds no {name}: give the --out of a run of train.py that came to its end")
    about, types = read_json(Path(path) / "adapter.json"), {**ADAPTER_TYPES, "base_config": dict}
    if wrong := [name for name, kind in types.items() if name not in about or not isinstance(about[name], kind)]:
        raise ValueError(f"{path}/adapter.json lacks {', '.join(wrong)}: copy it again or train anew")
    return about


def save_merged(model: Transformer, base: str | Path, path: str | Path) -> None:
    """Writes a plain Hugging Face checkpoint into the new directory path: the backbone's weights with what LoRA added
    to them, in the backbone's dtype, and the other files of base, the checkpoint directory that it came from. After it
    the model itself is merged. ValueError for the methods that add blocks, which no plain checkpoint has a place
    for."""
    if model.inserted:
        raise ValueError(f"method {model.adapter['method']} adds blocks, which a plain checkpoint has no place for")
    replace(model.layers, LoRALinear, LoRALinear.merged)
    base, path = Path(base), Path(path)
    part = path.with_name(f"{path.name}.part")  # whole before it has its name
    part.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():  # the tokenizer and the chat template; not the weights, their index and their source
        if file.suffix in (".json", ".jinja", ".model") and file.name not in ("source.json", "model.safetensors.index.json"):
            shutil.copyfile(file, part / file.name)
    config = {name: value for name, value in read_json(base / "config.json").items() if name != "dtype"}
    write_json(part / "config.json", config | {"torch_dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch.")})
    file, state = part / "model.safetensors", model.state_dict()
    weights = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in state.items()}
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} can't be written ({error}): mend that, and run this again") from None
    file.chmod(0o644)  # safetensors lets nobody else read it
    part.rename(path)
