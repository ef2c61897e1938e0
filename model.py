"""
A Llama / Qwen transformer in one file: Llama 2 to 3.2, SmolLM2, Qwen2, Qwen2.5 and Qwen3, loaded from public
safetensors checkpoints. Module names are those of the checkpoints, so that no weight is renamed or permuted.

Shapes in the comments: B batch, T tokens, D width, H query heads, K key/value heads, C head width, L layers,
V vocabulary, N target tokens.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

# --- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """The sizes and switches of a model, under names of their own; from_file reads them from a checkpoint."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # C; Qwen3 sets it apart from D / H
    max_positions: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    tied: bool = False  # the head is the embedding matrix
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def from_file(cls, path: str | Path) -> "Config":
        """Reads a checkpoint's config.json. ValueError or FileNotFoundError: what is not supported or not there."""
        c, generation = read_json(Path(path)), Path(path).with_name("generation_config.json")
        known = {"model_type": ("llama", "qwen2", "qwen3"), "hidden_act": ("silu", None)}
        known |= {"use_sliding_window": (False, None), "quantization_config": (None,)}
        for key, values in known.items():
            if c.get(key) not in values:
                raise ValueError(f"{path} has {key} {c.get(key)!r:.99}: model.py knows {' and '.join(map(str, values))}")
        if generation.is_file():  # chat checkpoints list here what else ends a reply
            c |= {"eos_token_id": read_json(generation).get("eos_token_id") or c.get("eos_token_id")}
        try:
            family, heads, stop = c["model_type"], c["num_attention_heads"], c.get("eos_token_id")
            # older files keep theta and the scaling apart, newer ones have both under rope_parameters; where something
            # stands twice, transformers' choice
            rope = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
            theta = rope.get("rope_theta") or c.get("rope_theta") or 10000.0
            rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
            original = "original_max_position_embeddings"
            rope[original] = c.get(original) or rope.get(original) or c["max_position_embeddings"]
            config = cls(
                vocab_size=c["vocab_size"],
                hidden_size=c["hidden_size"],
                intermediate_size=c["intermediate_size"],
                n_layers=c["num_hidden_layers"],
                n_heads=heads,
                n_kv_heads=c.get("num_key_value_heads") or heads,
                head_dim=c.get("head_dim") or c["hidden_size"] // heads,
                max_positions=c["max_position_embeddings"],
                norm_eps=c.get("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling=None if rope["rope_type"] == "default" else rope,
                tied=c.get("tie_word_embeddings", False),
                qkv_bias=family == "qwen2" or c.get("attention_bias", False),
                o_bias=family != "qwen2" and c.get("attention_bias", False),
                mlp_bias=family == "llama" and c.get("mlp_bias", False),
                qk_norm=family == "qwen3",
                stop_ids=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
            )
            rope_frequencies(config)  # an unknown rope type is an error here, before any weight is read
        except KeyError as error:
            raise ValueError(f"{path} lacks the key {error}: it is not a complete model config") from None
        return config


def read_json(path: Path) -> dict:
    """The object in a JSON file of a checkpoint. ValueError if it is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object ({error}): get that file again") from None


# --- rotary position embedding ----------------------------------------------------------------------------------------


def rope_frequencies(config: Config, device: torch.device | str = "cpu") -> Tensor:
    """The C/2 rotation speeds, in radians a token, fp32. Sources: RoFormer (arXiv 2104.09864), Llama 3.1's scaling."""
    # f_i = theta^(-2i / C)
    i = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
    f = 1 / config.rope_theta ** (2 * i / config.head_dim)
    if config.rope_scaling is None:
        return f
    scaling, kind = config.rope_scaling, config.rope_scaling["rope_type"]
    if kind == "linear":
        return f / scaling["factor"]
    if kind == "llama3":
        # waves that fit often into the original context stay, those longer than it are slowed by the factor,
        # and the ones between are blended
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * f / (2 * torch.pi)  # over the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return blend * f + (1 - blend) * f / scaling["factor"]
    raise ValueError(f"config.json has rope type {kind!r}: model.py knows default, linear and llama3")


def rope_tables(config: Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos of every pair's angle, twice, and its sin, the first time negative: (B, 1, T, C), for positions (B, T)."""
    angles = positions[:, None, :, None] * rope_frequencies(config, positions.device)  # (B, 1, T, C/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + C/2}) by its position's angle. x (B, heads, T, C); cos, sin from rope_tables."""
    # (a, b) becomes (a cos - b sin, b cos + a sin); the minus stands in the table
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


# --- the layers -------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """Root mean square normalisation over the last dimension (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * w."""

    def forward(self, x: Tensor) -> Tensor:
        # the weight is cast at use, since adapters keep theirs in fp32
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention: q (B, H, T, C) over k and v (B, K, S, C) gives (B, T, H * C). mask is bool (B, T, S),
    True where a query sees a key; without it attention is causal over T = S tokens. (On a CPU the end of this file puts
    a faster one in its place.)"""
    (B, H, T, C), causal = q.shape, mask is None
    if T == 1:  # decoding: the H / K query heads that share a key head become rows of one product; no key is copied
        q, causal = q.view(B, k.shape[1], -1, C), False
    mask = None if mask is None else mask[:, None]
    # softmax(Q K^T / sqrt(C)) V
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return y.reshape(B, H, T, C).transpose(1, 2).reshape(B, T, H * C)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads: (B, T, D) to (B, T, D)."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, c.head_dim, c.qk_norm
        self.q_proj = nn.Linear(c.hidden_size, c.n_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "Cache | None" = None) -> Tensor:
        # (B, T, H, C), and twice (B, T, K, C)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(self.layer, k, v)
        return self.o_proj(attend(q, k, v, mask))


class MLP(nn.Module):
    """The feed-forward part, SwiGLU (arXiv 2002.05202): (B, T, D) to (B, T, D)."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        # (silu(x W_gate) * x W_up) W_down
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer, pre-norm: attention, then the feed-forward part, each added to its input."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "Cache | None" = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


# --- the cache --------------------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of a batch of conversations of different lengths, in buffers that never grow. Each row has its
    own write position, so shorter prompts need no left padding: what stands to the right of a row's position is unseen,
    and overwritten when the row gets there."""

    def __init__(self, config: Config, batch: int, length: int, device: torch.device, dtype: torch.dtype):
        shape = (batch, config.n_kv_heads, length, config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)  # where each row writes next
        self.used = 0  # the largest of these positions
        self.inserted: dict[str, dict[str, Tensor]] = {}  # what each inserted block keeps, by boundary

    def advance(self, T: int) -> Tensor:
        """Makes ready for the next T tokens of every row, and returns their positions (B, T)."""
        if torch.is_grad_enabled():
            raise RuntimeError("a cache holds no gradients: call the model under torch.no_grad()")
        device, fresh = self.positions.device, self.used == 0
        self.used += T
        self.rows = torch.arange(len(self.positions), device=device)[:, None]
        self.slots = self.positions[:, None] + torch.arange(T, device=device)
        # the prompt sees itself alone, plain causal attention; later tokens see the keys at positions up to their own
        self.mask = None if fresh else torch.arange(self.used, device=device) <= self.slots[:, :, None]  # (B, T, used)
        return self.slots

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes k and v (B, K, T, C) at the rows' slots; returns what the queries may read, and the mask for it."""
        self.keys[layer][self.rows, :, self.slots] = k.transpose(1, 2)
        self.values[layer][self.rows, :, self.slots] = v.transpose(1, 2)
        if self.mask is None:  # the prompt: it has all that it may read in its hands
            return k, v, None
        return self.keys[layer][:, :, : self.used], self.values[layer][:, :, : self.used], self.mask

    def keep_rows(self, going: Tensor) -> None:
        """Drops the rows whose reply is finished: going is bool (B,), True on those that stay."""
        self.keys, self.values = [k[going] for k in self.keys], [v[going] for v in self.values]
        self.positions = self.positions[going]
        self.used = int(self.positions.max())
        self.inserted = {b: {name: t[going] for name, t in kept.items()} for b, kept in self.inserted.items()}


# --- the transformer --------------------------------------------------------------------------------------------------


class HeadLoss(torch.autograd.Function):
    """The summed cross-entropy of hidden (N, D) under the head (V, D) for targets (N,), chunk by chunk: the N x V
    logits, the largest tensor of the program, never stand in memory. The gradient is a product of what the forward pass
    has at hand, so it is taken there, and no logit is computed twice; the backward pass only multiplies by its g."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
        loss, grad_hidden = hidden.new_zeros((), dtype=torch.float32), torch.zeros_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        ctx.gradients = grad_hidden, grad_head
        for h, t, grad_h in zip(hidden.split(chunk), targets.split(chunk), grad_hidden.split(chunk)):
            logp = F.linear(h, head).float().log_softmax(-1)  # (chunk, V)
            # L = -sum_i log p_i[t_i]
            loss -= logp.gather(1, t[:, None]).sum()
            if any(ctx.needs_input_grad):
                # dL / dlogits = p - onehot(t)
                grad_logits = logp.exp_()
                grad_logits[torch.arange(len(t)), t] -= 1
                grad_logits = grad_logits.to(h.dtype)
                grad_h.copy_(grad_logits @ head)
                if grad_head is not None:
                    grad_head += grad_logits.T @ h
        return loss

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if grad is None else grad * g for grad in ctx.gradients), None, None


class Transformer(nn.Module):
    """Embedding, L layers with whatever blocks are inserted between them, final norm, head. Layers are counted from 1."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.inserted = nn.ModuleDict()  # cal.py's blocks, by boundary: inserted["26"] runs after layer 26
        self.attention_mask: Callable | None = None  # cal.py's function: from the system mask, who sees whom
        self.run = lambda module, *args: module(*args)  # train.py --grad_checkpoint puts another function here

    def forward(self, ids: Tensor, system: Tensor | None = None, cache: Cache | None = None,
                below: Tensor | None = None, stop: int | None = None) -> Tensor:  # fmt: skip
        """ids (B, T) and system, bool (B, T), True on the system prompt's tokens, give hidden states (B, T, D) after
        the final norm. Right padding needs no mask: under causal attention no earlier token sees it. With a cache the
        tokens continue its rows. stop ends after layer `stop`, without the norm. below (B, T, D) is what stop=b gave, b
        being the first block's boundary: layers 1..b are skipped then, as no training changes them. The head is not in
        it: logits() and loss() run it on those tokens alone that need it."""
        if system is not None and (system.shape != ids.shape or system.dtype != torch.bool):
            raise ValueError(f"system is {system.dtype} of {tuple(system.shape)}: give bool of {tuple(ids.shape)}")
        T = ids.shape[1]
        tokens, context = T + (cache.used if cache else 0), self.config.max_positions
        if tokens > context:
            raise ValueError(f"{tokens} tokens do not fit the model's context of {context}: shorten the conversation")
        if cache and cache.used and system is not None and system.any():
            raise ValueError("a system prompt comes with the first call that fills a cache, which keeps its keys")
        positions = cache.advance(T) if cache else torch.arange(T, device=ids.device)[None]
        x = self.embed_tokens(ids) if below is None else below  # (B, T, D)
        done = 0 if below is None else min(map(int, self.inserted))  # the layers that have run already
        cos, sin = rope_tables(self.config, positions, x.dtype)
        # which token sees which system token is the same for every block: it is computed once
        anchor = self.attention_mask(system) if self.attention_mask and system is not None else None
        # Frozen layers below the first trainable block save nothing for a backward pass: neither their weights nor
        # their input asks for a gradient. With blocks in the last eighth that is seven eighths of the model.
        for b, layer in enumerate(self.layers, start=1):
            if b > done:
                x = self.run(layer, x, cos, sin, cache)
            if b == stop:
                return x
            if (boundary := str(b)) in self.inserted:
                kept = cache.inserted.setdefault(boundary, {}) if cache else None
                x = self.run(self.inserted[boundary], x, system, kept, anchor, positions)
        if cache:
            cache.positions = cache.positions + T  # not in place: generate sets them to a tensor of its own
        return self.norm(x)

    @property
    def head(self) -> nn.Module:
        """Whose weight (V, D) turns hidden states into logits."""
        return self.embed_tokens if self.config.tied else self.lm_head

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) to (…, V)."""
        return F.linear(hidden, self.head.weight)

    def loss(self, hidden: Tensor, targets: Tensor, chunk: int = 1024) -> tuple[Tensor, int]:
        """Cross-entropy in nats, summed over the n positions whose target is not -1, and n. hidden (B, T, D) and
        targets (B, T). The head runs on those positions alone."""
        counted = targets >= 0
        hidden, targets = hidden[counted], targets[counted]  # (N, D), (N,)
        # In two plain lines, with all logits in memory:
        #     logits = self.logits(hidden).float()  # (N, V)
        #     loss = F.cross_entropy(logits, targets, reduction="sum")
        loss = HeadLoss.apply(hidden, self.head.weight, targets, chunk)
        if torch.is_grad_enabled() and not loss.requires_grad:
            # nothing that is trained has a part in this loss (CAL has none without a system token): backward() may be
            # called on it all the same, and gives nobody a gradient
            loss.requires_grad_()
        return loss, len(targets)

    @classmethod
    def from_pretrained(cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "Transformer":
        """Loads a directory of config.json and safetensors files (one, or shards with an index). Each tensor goes
        straight to its device and dtype: the weights stand in memory once. Raises FileNotFoundError or ValueError with
        one sentence that names the file or tensor at fault."""
        config = Config.from_file(Path(path) / "config.json")
        with torch.device("meta"):  # shapes alone, no memory yet
            model = cls(replace(config, tied=False))
        expected, weights = model.state_dict(), {}
        for name, tensor in read_tensors(Path(path)):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old files repeat here what follows from the config
            ours, shape = name.removeprefix("model."), tuple(tensor.shape)
            if ours not in expected or shape != (wanted := tuple(expected[ours].shape)):
                asked = f"the shape {wanted}" if ours in expected else "no such tensor"
                raise ValueError(f"{path} holds {name} of shape {shape}, but its config.json asks for {asked}")
            weights[ours] = tensor.to(device=device, dtype=dtype, copy=True)
        # a head that stands in the file is used, whatever config.json says, unless it is the embedding once more
        head = weights.get("lm_head.weight")
        if config.tied and (head is None or torch.equal(head, weights.get("embed_tokens.weight", head))):
            model.config.tied = True
            del model.lm_head
            weights.pop("lm_head.weight", None)
        if missing := model.state_dict().keys() - weights.keys():
            hint = "is the head tied (tie_word_embeddings)?" if missing == {"lm_head.weight"} else "download it again"
            raise ValueError(f"{path} lacks {len(missing)} tensors, such as {min(missing)}: {hint}")
        model.load_state_dict(weights, assign=True)
        return model.eval()

    @torch.inference_mode()
    def generate(self, prompts: list[Tensor], systems: list[Tensor] | None = None, max_new_tokens: int = 256,
                 temperature: float = 0.0, top_p: float = 1.0, stop_ids: list[int] | None = None, seed: int = 0,
                 on_token: Callable[[int, int], None] | None = None) -> list[list[int]]:  # fmt: skip
        """Continues a ragged batch: prompts are 1-D id tensors, systems bool tensors of the same lengths. Returns each
        row's new ids without the stop id, and gives each to on_token(row, id) as it comes. Temperature 0 is greedy;
        stop_ids=None takes the checkpoint's own. A reply ends at one of them, after max_new_tokens, or at the end of
        the context."""
        if max_new_tokens < 1 or not temperature >= 0 or not 0 < top_p <= 1:
            given = f"max_new_tokens is {max_new_tokens}, temperature {temperature}, top_p {top_p}"
            raise ValueError(f"{given}: they must be at least 1, at least 0, and above 0 up to 1")
        if not all(map(len, prompts)) or (systems and list(map(len, systems)) != list(map(len, prompts))):
            raise ValueError("a prompt is empty, or has not as many system flags as ids: give one for each of its tokens")
        replies: list[list[int]] = [[] for _ in prompts]
        context, device, dtype = self.config.max_positions, self.embed_tokens.weight.device, self.embed_tokens.weight.dtype
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (B,)
        ids = pad_sequence(prompts, batch_first=True).to(device)  # (B, T), padded on the right
        system = None if systems is None else pad_sequence(systems, batch_first=True).to(device)
        stops = torch.tensor(self.config.stop_ids if stop_ids is None else stop_ids, dtype=torch.long, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.arange(len(prompts), device=device)  # the prompts that are still being answered

        # the prompts, all at once; then each row stands at its own length
        cache = Cache(self.config, len(prompts), min(ids.shape[1] + max_new_tokens, context), device, dtype)
        hidden = self(ids, system, cache)[rows, lengths - 1]  # (B, D): of each row's last token
        cache.positions = lengths
        for step in range(max_new_tokens):
            token = sample(self.logits(hidden), temperature, top_p, generator)  # (B,)
            written = ~torch.isin(token, stops)
            for row, new in zip(rows[written].tolist(), token[written].tolist()):
                replies[row].append(new)
                if on_token:
                    on_token(row, new)
            going = written & (cache.positions < context)
            if step + 1 == max_new_tokens or not going.any():
                break
            if not going.all():  # finished rows leave the batch
                rows, token = rows[going], token[going]
                cache.keep_rows(going)
            hidden = self(token[:, None], None, cache)[:, 0]
        return replies


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint directory with its name, not yet in memory. Errors as in from_pretrained."""
    index, files = path / "model.safetensors.index.json", [path / "model.safetensors"]
    if index.is_file() and not files[0].is_file():  # transformers, too, takes the single file where both are there
        weight_map = read_json(index).get("weight_map") or {"": index.name}  # without one the index itself is damaged
        files = sorted({path / Path(name).name for name in weight_map.values()})  # never outside this directory
    for file in files:
        try:
            opened, seen = safe_open(file, framework="pt"), 0
            for name in list(opened.keys()):
                if seen > 2**22:  # bytes; what has been read stays in memory until the file is opened again
                    opened, seen = safe_open(file, framework="pt"), 0
                tensor = opened.get_tensor(name)
                seen += tensor.nbytes
                yield name, tensor
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}): delete it and download it again") from None


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """The next ids (B,) from logits (B, V): the likeliest at temperature 0, else drawn from the top_p nucleus."""
    if temperature == 0:
        return logits.max(-1).indices  # argmax's, in a fourth of its time on a CPU
    p, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
    p[p.cumsum(-1) - p >= top_p] = 0  # once the likelier tokens add up to top_p, the rest is out (arXiv 1904.09751)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]


# --- devices ----------------------------------------------------------------------------------------------------------

# what this processor multiplies by itself; torch's names are private: where another version has others, it is slower
CPU_BF16 = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
CPU_AMX = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def pick_device(name: str | None) -> str:
    """The device to run on, by default the first of cuda, mps, cpu. ValueError if it is not on this machine."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} can't be used here ({str(error).splitlines()[0]}): try cpu") from None
    return name


def pick_dtype(name: str | None, device: str) -> torch.dtype:
    """By default bf16, but fp32 where bf16 products are emulated, and slower by far."""
    native = device.startswith("mps") or CPU_BF16
    if device.startswith("cuda"):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name or ("bf16" if native else "fp32")]


# --- what makes a CPU fast --------------------------------------------------------------------------------------------

plain_attend = attend


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """attend as above, everywhere. Over several tokens fp32 is as fast as bf16 on a CPU, five times as fast backward, and
    more exact; but with AMX bf16 is the faster where nothing learns."""
    slow = q.dtype == torch.bfloat16 and (q.requires_grad or k.requires_grad or not CPU_AMX)
    if q.is_cpu and q.shape[2] > 1 and slow:
        return plain_attend(q.float(), k.float(), v.float(), mask).bfloat16()
    return plain_attend(q, k, v, mask)


class Packed:
    """Linear layers that read the same input as one product, of their weights once more, in the order in which oneDNN
    reads them. To the bit what they give one after the other: q_proj computes q, k and v, the next two find theirs."""

    def __init__(self, layers: list[nn.Module]):
        weights = [layer.weight.requires_grad_(False) for layer in layers]  # frozen: this product has no gradient
        self.layers = [(layer, weight, weight._version) for layer, weight in zip(layers, weights)]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights))
        biases = [layer.bias.requires_grad_(False) for layer in layers if getattr(layer, "bias", None) is not None]
        self.bias = torch.cat(biases) if biases else None
        self.sizes, self.multiply = [len(weight) for weight in weights], torch.ops.mkldnn._linear_pointwise.default
        self.last = (None, ())  # the input of the last product, and its parts, one a layer

    def product(self, i: int, x: Tensor) -> Tensor:
        """What layer i makes of x (…, D): by a plain product where a gradient is asked for, or a weight has changed."""
        read, parts = self.last
        if read is not x:
            # _version counts changes in place
            changed = any(m.weight is not w or w._version != version or w.requires_grad for m, w, version in self.layers)
            if changed or x.requires_grad or x.dtype != torch.bfloat16 or torch.compiler.is_compiling():
                return F.linear(x, (layer := self.layers[i][0]).weight.to(x.dtype), getattr(layer, "bias", None))
            parts = self.multiply(x, self.weight, self.bias, "none", [], "").split(self.sizes, dim=-1)
        self.last = (x, parts) if i + 1 < len(parts) else (None, ())  # nothing is kept once all have their parts
        return parts[i]


def pack(model: Transformer) -> Transformer:
    """Packs and freezes what is in bf16 on a CPU that multiplies it. The weights stand in memory twice then. A weight that
    changes later is used as it is, but for changes through .data, which torch does not count: take torch.no_grad()."""
    groups = {"head": [model.head]}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.head:
            # q, k and v of a layer read the same input, so do gate and up; and a LoRA's A beside them, but not its B
            groups.setdefault(re.sub(r"(self_attn|mlp)\.([qkv]|gate|up)_proj(?!\.B)", r"\1", name), []).append(layer)
    for group in groups.values() if CPU_BF16 and hasattr(torch.ops.mkldnn, "_linear_pointwise") else ():
        if all(layer.weight.is_cpu and layer.weight.dtype == torch.bfloat16 for layer in group):
            packed = Packed(group)
            for i, layer in enumerate(group):
                owner, method = (model, "logits") if layer is model.head else (layer, "forward")
                setattr(owner, method, partial(packed.product, i))
    return model


Transformer.pack = pack
