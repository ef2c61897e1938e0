"""
A Llama / Qwen transformer in one file: Llama 2 to 3.2, SmolLM2, Qwen2, Qwen2.5 and Qwen3, loaded from public
safetensors checkpoints. Module names are those of the checkpoints, so that no weight is renamed or permuted.

Shapes in the comments: B batch, T tokens, D width, H query heads, K key/value heads, C head width, L layers,
V vocabulary, N target tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

# ----------------------------------------------------------------------------------------------------------------------
# configuration


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
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give a directory of config.json and safetensors files")
        c = read_json(path)
        family = c.get("model_type")
        if family not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{path} has model_type {family!r}: model.py knows llama, qwen2 and qwen3")
        if c.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{path} has hidden_act {c['hidden_act']!r}: model.py knows silu")
        if c.get("use_sliding_window"):
            raise ValueError(f"{path} asks for sliding-window attention, which model.py does not have")
        if c.get("quantization_config"):
            raise ValueError(f"{path} describes quantized weights: take the checkpoint with plain bf16 or fp32 weights")
        try:
            heads = c["num_attention_heads"]
            # older files keep theta and the scaling apart, newer ones put both under rope_parameters
            rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
            theta = rope.pop("rope_theta", None) or c.get("rope_theta") or 10000.0
            rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
            stop = c.get("eos_token_id")
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
            sizes = "vocab_size hidden_size intermediate_size n_layers n_heads n_kv_heads head_dim max_positions"
            for name in sizes.split():
                if type(value := getattr(config, name)) is not int or not 0 < value < 2**24:
                    raise ValueError(f"{path} gives {value!r} for {name}: it must be a whole number above 0")
            if config.n_heads % config.n_kv_heads or config.head_dim % 2:
                heads = f"{config.n_heads} heads over {config.n_kv_heads} key heads, {config.head_dim} wide"
                raise ValueError(f"{path} gives {heads}: the first must be a multiple of the second, and the width even")
            rope_frequencies(config)  # an unknown rope type is an error here, before any weight is read
        except KeyError as error:
            raise ValueError(f"{path} lacks the key {error}: it is not a complete model config") from None
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"{path} has a value of the wrong kind ({error}): download the checkpoint again") from None
        return config


def read_json(path: Path) -> dict:
    """The object in a JSON file of a checkpoint. ValueError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): get that file again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: get that file again")
    return content


# ----------------------------------------------------------------------------------------------------------------------
# rotary position embedding


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + C/2}) by its position's angle. x (B, heads, T, C); cos, sin from rope_tables."""
    # (a, b) becomes (a cos - b sin, b cos + a sin); the minus stands in the table
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_tables(config: Config, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos of every pair's angle, twice, and its sin, the first time negative: (B, 1, T, C), for positions (B, T)."""
    angles = positions[:, None, :, None] * rope_frequencies(config, positions.device)  # (B, 1, T, C/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# the layers


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    Grouped-query attention: q (B, H, T, C) over k and v (B, K, S, C) gives (B, T, H * C).
    mask is bool (B, T, S), True where a query sees a key; without it attention is causal over T = S tokens.
    """
    (B, H, T, C), dtype = q.shape, q.dtype
    if q.is_cpu and T > 1 and dtype == torch.bfloat16:
        # a CPU's forward pass takes as long in bf16 as in fp32, and its backward pass up to five times as long
        q, k, v = q.float(), k.float(), v.float()
    # softmax(Q K^T / sqrt(C)) V
    if mask is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    elif T > 1:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    else:
        # one token, while decoding: the H / K query heads that share a key head become rows of one product, and no
        # key is copied; four times as fast on a CPU
        y = F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, C), k, v, attn_mask=mask[:, None]).view(B, H, 1, C)
    return y.to(dtype).transpose(1, 2).reshape(B, T, H * C)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # x / sqrt(mean(x^2) + eps) * w; the weight is cast at use, since adapters keep theirs in fp32
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Packed:
    """
    For a CPU and bf16: the weights of layers that read the same input, once more and in the order in which oneDNN reads
    them. One product then gives, to the bit, what the layers gave one after the other. Freezes them.
    """

    @torch.no_grad()
    def __init__(self, *layers: nn.Module):
        self.weights = [layer.weight.requires_grad_(False) for layer in layers]
        self.sizes = [len(weight) for weight in self.weights]
        self.together = torch.ops.mkldnn._reorder_linear_weight(torch.cat(self.weights))
        biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
        self.bias = torch.cat(biases) if biases else None

    def serves(self, x: Tensor) -> bool:
        """Whether nothing asks for a gradient, which this product does not have."""
        return not (x.requires_grad or any(weight.requires_grad for weight in self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """x (…, D) gives (…, the sum of the layers' sizes)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.together, self.bias, "none", [], "")


class Linear(nn.Linear):
    """nn.Linear, whose weight can be packed."""

    packed: Packed | None = None

    def pack(self) -> None:
        self.packed = Packed(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x) if self.packed and self.packed.serves(x) else super().forward(x)


def project(x: Tensor, packed: Packed | None, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What each of the linear layers makes of x: in one product, if they are still those that were packed together."""
    same = packed and all(type(layer) is Linear and layer.weight is w for layer, w in zip(layers, packed.weights))
    if same and packed.serves(x):
        return packed(x).split(packed.sizes, dim=-1)
    return tuple(layer(x) for layer in layers)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads: (B, T, D) to (B, T, D)."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, c.head_dim, c.qk_norm
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.packed: Packed | None = None

    def pack(self) -> None:
        self.packed = Packed(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj.pack()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: "Cache | None" = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = project(x, self.packed, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.view(B, T, -1, self.head_dim) for y in (q, k, v))  # (B, T, H, C), and twice (B, T, K, C)
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
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.packed: Packed | None = None

    def pack(self) -> None:
        self.packed = Packed(self.gate_proj, self.up_proj)
        self.down_proj.pack()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.packed, self.gate_proj, self.up_proj)
        # SwiGLU: (silu(x W_gate) * x W_up) W_down
        return self.down_proj(F.silu(gate) * up)


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


# ----------------------------------------------------------------------------------------------------------------------
# the cache


class Cache:
    """
    Keys and values of a batch of conversations of different lengths, in buffers that never grow. Each row has its own
    write position, so shorter prompts need no left padding: what stands to the right of a row's position is unseen,
    and overwritten when the row gets there.
    """

    def __init__(self, config: Config, batch: int, length: int, device: torch.device, dtype: torch.dtype):
        shape = (batch, config.n_kv_heads, length, config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)  # where each row writes next
        self.used = 0  # no row has written at or beyond this slot
        self.rows = self.slots = self.mask = None  # of the tokens that are being written: where, and what each may read
        self.inserted: dict[str, dict[str, Tensor]] = {}  # what each inserted block keeps, by boundary

    def start(self, T: int) -> Tensor:
        """Positions (B, T) of the T tokens that every row is about to write."""
        if torch.is_grad_enabled():
            raise RuntimeError("a cache holds no gradients: call the model under torch.no_grad()")
        self.rows = torch.arange(len(self.positions), device=self.positions.device)[:, None]
        self.slots = self.positions[:, None] + torch.arange(T, device=self.positions.device)
        # the prompt sees itself alone, plain causal attention; later tokens see the keys at positions up to their own
        fresh = self.used == 0
        self.used += T
        slots = torch.arange(self.used, device=self.positions.device)
        self.mask = None if fresh else slots <= self.slots[:, :, None]  # (B, T, used)
        return self.slots

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes k and v (B, K, T, C) at the rows' slots; returns what the queries may read, and the mask for it."""
        self.keys[layer][self.rows, :, self.slots] = k.transpose(1, 2)
        self.values[layer][self.rows, :, self.slots] = v.transpose(1, 2)
        if self.mask is None:
            return k, v, None
        return self.keys[layer][:, :, : self.used], self.values[layer][:, :, : self.used], self.mask

    def keep(self, rows: Tensor) -> None:
        """Drops the rows (bool (B,), True stays) whose reply is finished."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]
        self.positions = self.positions[rows]
        self.used = int(self.positions.max())
        self.inserted = {b: {name: t[rows] for name, t in kept.items()} for b, kept in self.inserted.items()}


# ----------------------------------------------------------------------------------------------------------------------
# the model


class HeadLoss(torch.autograd.Function):
    """
    The summed cross-entropy of hidden (N, D) under the head (V, D) for targets (N,). Its gradient is a product of what
    the forward pass has at hand, so it is taken there: no logits are kept, and none are computed twice.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
        loss = hidden.new_zeros((), dtype=torch.float32)
        of_hidden, of_head = ctx.needs_input_grad[:2]
        ctx.of_hidden = torch.empty_like(hidden) if of_hidden else None
        ctx.of_head = torch.zeros_like(head) if of_head else None
        for start in range(0, len(targets), chunk):
            h, t = hidden[start : start + chunk], targets[start : start + chunk]
            logp = F.linear(h, head).float().log_softmax(-1)  # (chunk, V)
            # L = -sum_i log p_i[t_i];  dL / dlogits = p - onehot(t)
            loss -= logp.gather(1, t[:, None]).sum()
            if of_hidden or of_head:
                d = logp.exp_()
                d[torch.arange(len(t)), t] -= 1
                d = d.to(h.dtype)
            if of_hidden:
                ctx.of_hidden[start : start + chunk] = d @ head
            if of_head:
                ctx.of_head += d.T @ h
        return loss

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if d is None else d * g for d in (ctx.of_hidden, ctx.of_head)), None, None


class Transformer(nn.Module):
    """Embedding, L layers with whatever blocks are inserted between them, final norm, head."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.inserted = nn.ModuleDict()  # blocks at boundaries: inserted["26"] runs after layer 26 (cal.py fills it)
        self.packed: Packed | None = None  # the head
        self.grad_checkpoint = False  # less memory in training, more time: see run

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "Transformer":
        """
        Loads a directory of config.json and safetensors files (one, or shards with an index).
        Each tensor goes straight to its device and dtype: the weights stand in memory once.
        Raises FileNotFoundError or ValueError with one sentence that names the file or tensor at fault.
        """
        path = Path(path)
        config = Config.from_file(path / "config.json")
        generation = path / "generation_config.json"  # chat checkpoints list here what else ends a reply
        if generation.is_file():
            stop = read_json(generation).get("eos_token_id")
            config.stop_ids = tuple(stop) if isinstance(stop, list) else config.stop_ids if stop is None else (stop,)
        with torch.device("meta"):  # shapes alone, no memory yet
            model = cls(config)
        expected = model.state_dict()
        weights: dict[str, Tensor] = {}
        opened, seen = None, 0  # the file that is open, and how many bytes of it have been read
        for full_name, file in weight_files(path).items():
            name = full_name.removeprefix("model.")
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied):
                continue  # some files repeat what follows from the config, or the tied embedding
            if name not in expected:
                raise ValueError(f"{file} holds the tensor {full_name}, which its config.json has no place for")
            if file != opened or seen > 2**22:  # anew now and then: what it maps stays in memory
                f, opened, seen = safe_open(file, framework="pt"), file, 0
            shape, wanted = tuple(f.get_slice(full_name).get_shape()), tuple(expected[name].shape)
            if shape != wanted:
                raise ValueError(f"{full_name} in {file} has shape {shape}, but config.json asks for {wanted}")
            tensor = f.get_tensor(full_name)
            seen += tensor.nbytes
            weights[name] = tensor.to(device=device, dtype=dtype, copy=True)
            del tensor
        if missing := expected.keys() - weights.keys():
            raise ValueError(f"{path} lacks {len(missing)} tensors, such as {min(missing)}: download it again")
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def pack(self) -> "Transformer":
        """Packs the weights of all layers and of the head: they stand in memory twice then."""
        for layer in self.layers:
            layer.self_attn.pack()
            layer.mlp.pack()
        self.packed = Packed(self.head)
        return self

    def forward(
        self, ids: Tensor, system: Tensor | None = None, cache: Cache | None = None, below: Tensor | None = None
    ) -> Tensor:
        """
        ids (B, T) and system, bool (B, T), True on the system prompt's tokens, give hidden states (B, T, D) after the
        final norm. Right padding needs no mask: under causal attention no earlier token sees it. With a cache the
        tokens continue its rows. below (B, T, D) is what self.below(ids) gives, where that is known already.
        ValueError if a row would pass the context length.
        """
        if system is not None and (system.shape != ids.shape or system.dtype != torch.bool):
            raise ValueError(f"system is {system.dtype} of {tuple(system.shape)}: give bool of {tuple(ids.shape)}")
        T = ids.shape[1]
        tokens, context = T + (cache.used if cache else 0), self.config.max_positions
        if tokens > context:
            raise ValueError(f"{tokens} tokens do not fit the model's context of {context}: shorten the conversation")
        positions = cache.start(T) if cache else torch.arange(T, device=ids.device)[None]
        x = self.embed_tokens(ids) if below is None else below  # (B, T, D)
        done = 0 if below is None else self.layers_below
        cos, sin = rope_tables(self.config, positions, x.dtype)
        # Frozen layers below the first trainable block save nothing for a backward pass: neither their weights nor
        # their input asks for a gradient. With blocks in the last eighth that is seven eighths of the model.
        for b, layer in enumerate(self.layers, start=1):
            if b > done:
                x = self.run(layer, x, cos, sin, cache)
            if (boundary := str(b)) in self.inserted:
                kept = cache.inserted.setdefault(boundary, {}) if cache else None
                x = self.run(self.inserted[boundary], x, system, kept, positions)
        if cache:
            cache.positions = cache.positions + T
        return self.norm(x)

    @property
    def layers_below(self) -> int:
        """How many layers come before the first inserted block."""
        return min((int(boundary) for boundary in self.inserted), default=0)

    @torch.no_grad()
    def below(self, ids: Tensor) -> Tensor:
        """ids (B, T) to hidden states (B, T, D) before the first inserted block: no training changes these."""
        x = self.embed_tokens(ids)
        cos, sin = rope_tables(self.config, torch.arange(ids.shape[1], device=ids.device)[None], x.dtype)
        for layer in self.layers[: self.layers_below]:
            x = layer(x, cos, sin)
        return x

    def run(self, module: nn.Module, *args: object) -> Tensor:
        """module(*args). With grad_checkpoint its inputs alone are saved, and the backward pass computes the rest again."""
        if self.grad_checkpoint and torch.is_grad_enabled():
            return recompute(module, *args, use_reentrant=False, preserve_rng_state=False)
        return module(*args)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) to (…, V)."""
        if self.packed and self.packed.serves(hidden):
            return self.packed(hidden)
        return F.linear(hidden, self.head.weight)

    @property
    def head(self) -> nn.Module:
        """Whose weight (V, D) turns hidden states into logits."""
        return self.embed_tokens if self.config.tied else self.lm_head

    def loss(self, hidden: Tensor, targets: Tensor, chunk: int = 1024) -> tuple[Tensor, int]:
        """
        Cross-entropy in nats, summed over the n positions whose target is not -1, and n. hidden (B, T, D) and targets
        (B, T). The head, the largest tensor of the program, runs on those positions alone, a chunk at a time.
        """
        counted = targets >= 0
        hidden, targets = hidden[counted], targets[counted]  # (N, D), (N,)
        loss = HeadLoss.apply(hidden, self.head.weight, targets, chunk)
        if torch.is_grad_enabled() and not loss.requires_grad:
            loss.requires_grad_()  # no trainable block had a say: backward() is allowed, and reaches nothing
        return loss, len(targets)

    def generate(
        self,
        prompts: list[Tensor],
        systems: list[Tensor] | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_ids: list[int] | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """
        Continues a ragged batch: prompts are 1-D id tensors, systems bool tensors of the same lengths. Returns each
        row's new ids without the stop id. Temperature 0 is greedy; stop_ids=None takes the checkpoint's own.
        A reply ends at a stop id, after max_new_tokens, or at the end of the context.
        """
        replies: list[list[int]] = [[] for _ in prompts]
        for row, token in self.stream(prompts, systems, max_new_tokens, temperature, top_p, stop_ids, seed):
            replies[row].append(token)
        return replies

    @torch.inference_mode()
    def stream(
        self,
        prompts: list[Tensor],
        systems: list[Tensor] | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_ids: list[int] | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[int, int]]:
        """generate, one token at a time: yields (row, id) as they come."""
        if not prompts:
            return
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        if not temperature >= 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature is {temperature} and top_p {top_p}: give at least 0, and above 0 up to 1")
        weight = self.embed_tokens.weight
        device, context = weight.device, self.config.max_positions
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        system = torch.zeros(len(prompts), longest, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):  # right-padded
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty: give at least one token")
            if systems is not None and len(systems[row]) != len(prompt):
                raise ValueError(f"prompt {row} has {len(prompt)} ids but {len(systems[row])} system flags beside")
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
            if systems is not None:
                system[row, : len(prompt)] = torch.as_tensor(systems[row])
        if ids.max() >= self.config.vocab_size:
            raise ValueError(f"id {ids.max()} is beyond the vocabulary of {self.config.vocab_size}: take its tokenizer")
        stops = torch.tensor(self.config.stop_ids if stop_ids is None else stop_ids, dtype=torch.long, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.arange(len(prompts), device=device)  # the prompts that are still being answered

        # the prompts, all at once; then each row stands at its own length
        cache = Cache(self.config, len(prompts), min(longest + max_new_tokens, context), device, weight.dtype)
        hidden = self(ids, system, cache)[rows, lengths - 1]  # (B, D): of each row's last token
        cache.positions = lengths
        for step in range(max_new_tokens):
            token = sample(self.logits(hidden), temperature, top_p, generator)  # (B,)
            going = ~torch.isin(token, stops)
            yield from zip(rows[going].tolist(), token[going].tolist())
            going &= cache.positions < context
            if step + 1 == max_new_tokens or not going.any():
                return
            if not going.all():  # finished rows leave the batch
                rows, token = rows[going], token[going]
                cache.keep(going)
            hidden = self(token[:, None], None, cache)[:, 0]


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """The next ids (B,) from logits (B, V): the likeliest at temperature 0, else drawn from the top_p nucleus."""
    if temperature == 0:
        return logits.max(-1).indices  # argmax's, in a fourth of its time on a CPU
    p, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
    p[p.cumsum(-1) - p >= top_p] = 0  # once the likelier tokens add up to top_p, the rest is out (arXiv 1904.09751)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]


def weight_files(path: Path) -> dict[str, Path]:
    """The safetensors file of every tensor in a checkpoint directory, by tensor name. Errors as in from_pretrained."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    files = {single}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files: download the checkpoint again")
        names = set(weight_map.values())
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} names {outside[0]!r}, a path outside its directory: take another checkpoint")
        files = {path / name for name in names}
    found: dict[str, Path] = {}
    for file in sorted(files):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: download the checkpoint again")
        try:
            with safe_open(file, framework="pt") as f:
                found.update(dict.fromkeys(f.keys(), file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}): delete it and download it again") from None
    return found
