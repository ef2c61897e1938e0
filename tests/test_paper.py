"""
CALYREX (arXiv 2605.09737), claim by claim. Read this first: each test is one sentence of the method, in a few lines.

The model here is tiny and random (tests/small.py): 8 layers of width 48, blocks after layers 7 and 8 (late8th).
`trained(…)` has blocks in which no weight is still zero, as after a training.
"""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

import cal
from cal import PLACEMENTS, CrossAttentionLayer, attach, attention_mask, trainable
from model import Config, Transformer, attend
from tests.small import (
    FP32_AND_BF16,
    IDS,
    PROMPTS,
    SYSTEM,
    SYSTEMS,
    TARGETS,
    base,
    places_that_save,
    trained,
    trained_block,
)


def bits(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def tokens(T: int) -> Tensor:
    """Random hidden states of one conversation, (1, T, D)."""
    return torch.randn(1, T, 48, generator=torch.Generator().manual_seed(2))


# --- who sees whom ------------------------------------------------------------------------------------------------


def test_tokens_before_the_prompt_see_nothing_those_in_it_see_the_ones_before_and_those_after_it_see_all():
    positions, mask = attention_mask(bits("0011100"))
    assert positions.tolist() == [[2, 3, 4]]  # where the keys come from: three system tokens
    assert torch.equal(mask[0], bits("000",    # token 0, before the prompt: nothing
                                     "000",    # token 1
                                     "100",    # token 2, the first of the prompt: itself
                                     "110",    # token 3
                                     "111",    # token 4
                                     "111",    # token 5, the user's: all of the prompt, and nothing else
                                     "111"))  # fmt: skip


def test_rows_with_fewer_system_tokens_than_others_fill_up_with_keys_that_nobody_sees():
    positions, mask = attention_mask(bits("01100", "00000", "10111"))
    assert positions.shape == (3, 4) and mask.shape == (3, 5, 4)
    assert positions[0, :2].tolist() == [1, 2] and positions[2].tolist() == [0, 2, 3, 4]
    assert torch.equal(mask[0], bits("0000", "1000", "1100", "1100", "1100"))
    assert not mask[1].any()
    assert torch.equal(mask[2], bits("1000", "1000", "1100", "1110", "1111"))


def test_without_any_system_token_there_are_no_keys():
    positions, mask = attention_mask(torch.zeros(2, 5, dtype=torch.bool))
    assert positions.shape == (2, 0) and mask.shape == (2, 5, 0)


@torch.no_grad()
@pytest.mark.parametrize("row", ["0001111000", "1100000000", "0110011000", "0000000001"])
def test_a_system_token_reaches_itself_and_all_that_follow_and_any_other_token_itself_alone(row):
    block, system, T = trained_block(), bits(row), len(row)
    x = tokens(T)
    before = block(x, system)
    for j in range(T):
        changed = x.clone()
        changed[0, j] += 1
        moved = [i for i in range(T) if not torch.equal(block(changed, system)[0, i], before[0, i])]
        assert moved == (list(range(j, T)) if system[0, j] else [j]), j


# --- the block ----------------------------------------------------------------------------------------------------


def by_hand(block: CrossAttentionLayer, x: Tensor, system: Tensor, rope: bool = False) -> Tensor:
    """X' = X + Attn W_O and X'' = X' + FFN W_D in float64: one token, one head, one key at a time, from the weights."""
    w = {name.removesuffix(".weight"): p.detach().double() for name, p in block.named_parameters()}
    H, K, C, eps, theta = 4, 2, 16, 1e-6, 500.0

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / math.sqrt(sum(float(a) ** 2 for a in v) / len(v) + eps) * weight

    def heads(v: Tensor, position: int) -> list[list[float]]:
        """The C numbers of each head, turned by its position's angles where rope is on."""
        result = []
        for head in v.view(-1, C).tolist():
            turned = list(head)
            for i in range(C // 2 if rope else 0):
                angle = position * theta ** (-2 * i / C)
                a, b = head[i], head[i + C // 2]
                turned[i] = a * math.cos(angle) - b * math.sin(angle)
                turned[i + C // 2] = a * math.sin(angle) + b * math.cos(angle)
            result.append(turned)
        return result

    out = x.double().clone()
    for b, i in ((b, i) for b in range(len(x)) for i in range(x.shape[1])):
        seen = [j for j in range(i + 1) if system[b, j]]
        if not seen:
            continue
        normed = {j: norm(x[b, j].double(), w["norm1"]) for j in {*seen, i}}
        q = heads(w["q_proj"] @ normed[i], i)
        k = {j: heads(w["k_proj"] @ normed[j], j) for j in seen}
        v = {j: (w["v_proj"] @ normed[j]).view(K, C) for j in seen}
        read = []
        for h in range(H):
            group = h // (H // K)  # H / K neighbouring query heads share a key/value head
            scores = [math.exp(sum(map(float.__mul__, q[h], k[j][group])) / math.sqrt(C)) for j in seen]
            read.append(sum(s * v[j][group] for s, j in zip(scores, seen, strict=True)) / sum(scores))
        y = out[b, i] + w["o_proj"] @ torch.cat(read)
        gate, up = w["gate_proj"] @ norm(y, w["norm2"]), w["up_proj"] @ norm(y, w["norm2"])
        out[b, i] = y + w["down_proj"] @ (gate / (1 + torch.exp(-gate)) * up)
    return out


@torch.no_grad()
@pytest.mark.parametrize("rope", [False, True], ids=["no rotary", "rotary"])
def test_the_block_computes_the_two_equations(rope):
    block, x = trained_block(rope), torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(2))
    # fp32 rounding of sums over at most 80 terms; leaving out a head, a norm or a rotation is off by more than 1e-2
    torch.testing.assert_close(block(x, SYSTEM).double(), by_hand(block, x, SYSTEM, rope), atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_distance_to_the_prompt_does_not_matter():
    x = tokens(60)
    x[0, 10] = x[0, 59]  # the same token, near the prompt and far from it
    near, far = trained_block()(x, torch.arange(60)[None] < 4)[0, [10, 59]]
    torch.testing.assert_close(near, far, atol=1e-6, rtol=0)  # the same sum, perhaps vectorised otherwise


@torch.no_grad()
def test_no_softmax_runs_over_nothing(monkeypatch):
    """It would be NaN: a token that sees no system token is shown some keys, and what it made of them is thrown away."""
    masks = []
    monkeypatch.setattr(cal, "attend", lambda q, k, v, mask: masks.append(mask) or attend(q, k, v, mask))
    trained()(IDS, SYSTEM)
    assert len(masks) == 2 and all(mask.any(dim=-1).all() for mask in masks)


# --- the start: the identity --------------------------------------------------------------------------------------


@torch.no_grad()
@FP32_AND_BF16
def test_new_blocks_change_no_bit(dtype):
    assert torch.equal(attach(base(dtype), placement="every")(IDS, SYSTEM), base(dtype)(IDS))


def test_the_first_step_moves_the_two_projections_that_start_at_zero():
    model = attach(base())
    model.loss(model(IDS, SYSTEM), TARGETS)[0].backward()
    moved = {name for name, p in model.inserted.named_parameters() if p.grad.any()}
    # behind a zero W_O or W_D nothing else has a gradient yet
    assert moved == {f"{b}.{part}.weight" for b in (7, 8) for part in ("o_proj", "down_proj")}


# --- without a system prompt: the base ----------------------------------------------------------------------------


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("system", [None, torch.zeros_like(SYSTEM)], ids=["no mask", "an empty mask"])
def test_without_a_system_prompt_trained_blocks_change_no_bit(system, dtype):
    assert torch.equal(trained(dtype, placement="every")(IDS, system), base(dtype)(IDS))


@torch.no_grad()
@FP32_AND_BF16
def test_tokens_that_see_no_system_token_keep_every_bit_and_all_others_move(dtype):
    moved = (trained(dtype, placement="every")(IDS, SYSTEM) != base(dtype)(IDS)).any(dim=-1)
    assert torch.equal(moved, SYSTEM.cumsum(dim=1) > 0)  # from a row's first system token on


# --- a user's token, while the reply is written -------------------------------------------------------------------


def test_the_prompts_keys_and_values_are_computed_once_and_serve_every_token_of_the_reply():
    model, calls = trained(), Counter()
    for b, block in model.inserted.items():
        block.k_proj.register_forward_hook(lambda *_, b=b: calls.update([b]))
    model.generate(PROMPTS, SYSTEMS, max_new_tokens=25, stop_ids=[])
    assert calls == {"7": 1, "8": 1}


@torch.no_grad()
def test_with_the_cache_the_reply_is_that_of_the_whole_conversation_read_anew_for_every_token():
    model, ids, system = trained(), PROMPTS[0].tolist(), SYSTEMS[0].tolist()
    for _ in range(12):
        hidden = model(torch.tensor([ids]), torch.tensor([system]))
        ids, system = [*ids, int(model.logits(hidden)[0, -1].argmax())], [*system, False]
    assert model.generate([PROMPTS[0]], [SYSTEMS[0]], max_new_tokens=12, stop_ids=[]) == [ids[len(PROMPTS[0]) :]]


# --- what is trained, and where it stands -------------------------------------------------------------------------


def test_only_the_blocks_are_trained():
    model = attach(base())
    assert set(trainable(model)) == {f"inserted.{name}" for name, _ in model.inserted.named_parameters()}


def test_the_layers_below_the_first_block_keep_nothing_for_the_backward_pass():
    assert places_that_save(attach(base())) == {"block 7", "layer 8", "block 8"}


def test_late8th_is_five_blocks_in_the_last_eighth_of_the_papers_models():
    assert PLACEMENTS["late8th"](28) == [24, 25, 26, 27, 28]  # Qwen2.5-1.5B
    assert PLACEMENTS["late8th"](32) == [28, 29, 30, 31, 32]  # Llama-3.1-8B


def test_the_baselines_have_as_many_parameters_to_one_percent():
    config = Config(49152, 576, 1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, max_positions=8192, tied=True)
    counts = {}
    for method in ("cal", "mlp", "lora"):
        with torch.device("meta"):  # SmolLM2-135M's shape, without memory
            counts[method] = sum(p.numel() for p in trainable(attach(Transformer(config), method)).values())
    assert counts["mlp"] == pytest.approx(counts["cal"], rel=0.01)
    assert counts["lora"] == pytest.approx(counts["cal"], rel=0.01)
