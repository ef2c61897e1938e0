"""cal.py: what tests/test_paper.py says in a few lines, in all its cases; batches, caches, gradients, files."""

import json

import pytest
import torch
from torch import Tensor

from cal import PLACEMENTS, attach, attention_mask, load_adapter, save_adapter
from model import Cache, Transformer
from tests.small import (
    FP32_AND_BF16,
    IDS,
    PROMPTS,
    SYSTEM,
    SYSTEMS,
    TARGETS,
    assert_one_sentence,
    base,
    generated_logits,
    randomise,
    trained,
    trained_block,
)

# --- placements ---------------------------------------------------------------------------------------------------

# our choice, written out by hand: boundary b is "after layer b"
EXPECTED = {
    "every": {1: [1], 2: [1, 2], 3: [1, 2, 3], 28: [*range(1, 29)], 30: [*range(1, 31)], 32: [*range(1, 33)]},
    "alternate": {
        1: [1],
        2: [2],
        3: [2],
        28: [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28],
        30: [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30],
        32: [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32],
    },
    "early_half": {1: [1], 2: [1], 3: [1], 28: [*range(1, 15)], 30: [*range(1, 16)], 32: [*range(1, 17)]},
    "late_half": {1: [1], 2: [1, 2], 3: [1, 2, 3], 28: [*range(14, 29)], 30: [*range(15, 31)], 32: [*range(16, 33)]},
    "late4th": {
        1: [1],
        2: [1, 2],
        3: [2, 3],
        28: [21, 22, 23, 24, 25, 26, 27, 28],
        30: [22, 23, 24, 25, 26, 27, 28, 29, 30],
        32: [24, 25, 26, 27, 28, 29, 30, 31, 32],
    },
    "late8th": {
        1: [1],
        2: [1, 2],
        3: [2, 3],
        28: [24, 25, 26, 27, 28],
        30: [26, 27, 28, 29, 30],
        32: [28, 29, 30, 31, 32],
    },
    "early8th": {1: [1], 2: [1, 2], 3: [1, 2], 28: [1, 2, 3, 4, 5], 30: [1, 2, 3, 4, 5], 32: [1, 2, 3, 4, 5]},
    "middle8th": {
        1: [1],
        2: [1, 2],
        3: [1, 2],
        28: [12, 13, 14, 15, 16],
        30: [13, 14, 15, 16, 17],
        32: [14, 15, 16, 17, 18],
    },
}


def test_there_are_eight_placements():
    assert sorted(PLACEMENTS) == sorted(EXPECTED)


@pytest.mark.parametrize("placement", EXPECTED)
def test_a_placement_gives_the_boundaries_of_the_design(placement):
    assert {L: list(PLACEMENTS[placement](L)) for L in EXPECTED[placement]} == EXPECTED[placement]


@pytest.mark.parametrize("placement", EXPECTED)
def test_a_placement_stays_inside_any_backbone_and_is_never_empty(placement):
    for L in range(1, 100):
        boundaries = list(PLACEMENTS[placement](L))
        assert boundaries and boundaries == sorted(set(boundaries) & set(range(1, L + 1))), L


def test_attach_puts_its_blocks_at_the_boundaries_of_the_placement():
    assert list(attach(base(), placement="late4th").inserted) == ["6", "7", "8"]


def test_the_block_at_boundary_b_runs_after_layer_b():
    model, order = attach(base(n_layers=4), placement="alternate"), []
    for i, layer in enumerate(model.layers, start=1):
        layer.register_forward_hook(lambda *_, i=i: order.append(f"layer {i}"))
    for b, block in model.inserted.items():
        block.register_forward_hook(lambda *_, b=b: order.append(f"block {b}"))
    model(IDS, SYSTEM)
    assert order == ["layer 1", "layer 2", "block 2", "layer 3", "layer 4", "block 4"]


# --- who sees whom ------------------------------------------------------------------------------------------------


def test_slots_that_a_row_does_not_fill_still_point_inside_the_row():
    positions, _ = attention_mask(torch.tensor([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]]).bool())
    assert positions.min() >= 0 and positions.max() < 5


def test_the_positions_of_a_long_row_keep_their_order():
    system = torch.rand(2, 2000, generator=torch.Generator().manual_seed(5)) < 0.5
    positions, _ = attention_mask(system)
    for row, places in zip(system, positions, strict=True):
        expected = row.nonzero().flatten()
        assert torch.equal(places[: len(expected)], expected)


@torch.no_grad()
def test_changing_one_row_of_a_batch_moves_no_other_row():
    block = trained_block()
    x = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(2))
    before, changed = block(x, SYSTEM), x.clone()
    changed[0] += 1
    after = block(changed, SYSTEM)
    assert torch.equal(after[1:], before[1:]) and not torch.equal(after[0], before[0])


# --- what the block computes --------------------------------------------------------------------------------------


def test_ffn_scales_the_width_of_the_feed_forward_part():
    block = attach(base(), ffn=0.5).inserted["8"]
    assert block.gate_proj.weight.shape == block.up_proj.weight.shape == (40, 48)
    assert block.down_proj.weight.shape == (48, 40)


@torch.no_grad()
def test_scale_multiplies_what_the_blocks_add():
    model, by_hand = trained(scale=0.5), trained()
    for block in by_hand.inserted.values():
        block.o_proj.weight *= 0.5
        block.down_proj.weight *= 0.5
    torch.testing.assert_close(model(IDS, SYSTEM), by_hand(IDS, SYSTEM), atol=1e-5, rtol=0)  # fp32 rounding


# --- bit for bit the base -----------------------------------------------------------------------------------------


@FP32_AND_BF16
def test_in_training_a_row_without_a_system_message_keeps_every_bit_beside_rows_that_have_one(dtype):
    hidden, plain = trained(dtype, placement="every").train()(IDS, SYSTEM), base(dtype).train()(IDS)
    assert hidden.requires_grad
    assert torch.equal(hidden[1], plain[1])


@FP32_AND_BF16
def test_in_generation_rows_without_a_system_message_keep_every_bit_beside_rows_that_have_one(dtype):
    ours, plain = generated_logits(trained(dtype), SYSTEMS), generated_logits(base(dtype), None)
    assert ours.shape == (12, 4, 61)
    assert torch.equal(ours[:, [1, 3]], plain[:, [1, 3]])


@FP32_AND_BF16
def test_in_generation_a_batch_without_a_system_message_keeps_every_bit(dtype):
    silent = [torch.zeros_like(system) for system in SYSTEMS]
    assert torch.equal(generated_logits(trained(dtype), silent), generated_logits(base(dtype), None))


@torch.no_grad()
def test_on_the_real_smollm2_only_tokens_that_see_a_system_message_move(smollm2):
    model = Transformer.from_pretrained(smollm2, dtype=torch.bfloat16)
    ids = torch.randint(0, 49152, (3, 20), generator=torch.Generator().manual_seed(4))
    before = model(ids)
    attach(model)
    assert torch.equal(model(ids, SYSTEM), before)
    randomise(model.inserted, seed=1)
    moved = (model(ids, SYSTEM) != before).any(dim=-1)
    assert torch.equal(moved, SYSTEM.cumsum(dim=1) > 0)  # from a row's first system token on


# --- generation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_full_forward(model: Transformer, prompt: Tensor, system: Tensor, n: int) -> list[int]:
    """Greedy tokens, each from the whole sequence anew: no cache, no batch."""
    ids = prompt.tolist()
    for _ in range(n):
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, : len(system)] = system
        ids.append(int(model.logits(model(torch.tensor([ids]), mask))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("options", [{}, {"placement": "every"}, {"rope": True}], ids=str)
def test_ragged_generation_equals_the_full_forward_pass_row_by_row(options):
    model = trained(**options)
    expected = [by_full_forward(model, p, s, 25) for p, s in zip(PROMPTS, SYSTEMS, strict=True)]
    silenced = by_full_forward(model, PROMPTS[0], torch.zeros_like(SYSTEMS[0]), 25)
    assert expected[0] != silenced  # the blocks do speak
    assert model.generate(PROMPTS, SYSTEMS, max_new_tokens=25, stop_ids=[]) == expected


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"placement": "every"}, {"rope": True}], ids=str)
def test_the_logits_of_every_generated_token_are_those_of_the_full_forward_pass(options):
    model = trained(**options)
    replies = model.generate(PROMPTS, SYSTEMS, max_new_tokens=12, stop_ids=[])
    steps = generated_logits(model, SYSTEMS)
    for row, (prompt, system, reply) in enumerate(zip(PROMPTS, SYSTEMS, replies, strict=True)):
        ids = torch.cat((prompt, torch.tensor(reply[:-1])))
        mask = torch.cat((system, torch.zeros(11, dtype=torch.bool)))
        full = model.logits(model(ids[None], mask[None]))[0, len(prompt) - 1 :]
        # fp32 rounding at logits near 10; blocks that turn a query by the wrong position are off by more than 1e-2
        torch.testing.assert_close(steps[:, row], full, atol=1e-4, rtol=0)


def test_a_batch_gives_the_tokens_that_single_prompts_give():
    model = trained()
    alone = [model.generate([p], [s], max_new_tokens=25)[0] for p, s in zip(PROMPTS, SYSTEMS, strict=True)]
    assert model.generate(PROMPTS, SYSTEMS, max_new_tokens=25) == alone


def test_rows_that_end_early_take_their_anchor_with_them():
    model = trained()
    endless = model.generate(PROMPTS, SYSTEMS, max_new_tokens=25, stop_ids=[])
    stop = endless[0][3]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in endless]
    assert len(expected[0]) == 3 and len(expected[2]) > 3
    assert model.generate(PROMPTS, SYSTEMS, max_new_tokens=25, stop_ids=[stop]) == expected


@torch.no_grad()
def test_a_system_prompt_after_the_first_call_that_fills_a_cache_is_refused():
    model, silent = trained(), torch.zeros(3, 10, dtype=torch.bool)
    cache = Cache(model.config, 3, 20, torch.device("cpu"), torch.float32)
    first = model(IDS[:, :10], SYSTEM[:, :10], cache)
    with pytest.raises(ValueError, match="comes with the first call"):
        model(IDS[:, 10:], ~silent, cache)
    rest = model(IDS[:, 10:], silent, cache)  # flags that say nothing are no prompt
    system = SYSTEM & (torch.arange(20) < 10)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), model(IDS, system), atol=1e-5, rtol=0)  # fp32 rounding


def test_the_model_takes_no_cache_while_gradients_are_on():
    model = trained()
    cache = Cache(model.config, 3, 20, torch.device("cpu"), torch.float32)
    with pytest.raises(RuntimeError, match="gradients"):
        model(IDS, SYSTEM, cache)


# --- training -----------------------------------------------------------------------------------------------------


def gradients(model: Transformer, ids: Tensor, system: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(model(ids, system), targets)[0].backward()
    return {name: p.grad.clone() for name, p in model.inserted.named_parameters()}


def test_the_optimizer_keeps_state_for_the_blocks_alone_and_moves_nothing_else():
    model, frozen = trained(), base().state_dict()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.loss(model(IDS, SYSTEM), TARGETS)[0].backward()
    optimizer.step()
    assert set(optimizer.state) == set(model.inserted.parameters())
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in frozen.items())


def test_every_weight_of_a_trained_block_has_a_gradient():
    grads = gradients(trained(), IDS, SYSTEM, TARGETS)
    assert len(grads) == 2 * 9 and all(grad.any() for grad in grads.values())


def test_adapters_stay_in_fp32_on_a_bf16_backbone():
    model = attach(base(torch.bfloat16))
    assert {p.dtype for p in model.inserted.parameters()} == {torch.float32}
    assert model(IDS, SYSTEM).dtype == torch.bfloat16


def test_rows_that_see_nothing_pass_their_gradient_on_untouched():
    x = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(2), requires_grad=True)
    upstream = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(3))
    trained_block()(x, SYSTEM).backward(upstream)
    assert torch.equal(x.grad[1], upstream[1]) and torch.equal(x.grad[0, :2], upstream[0, :2])


@FP32_AND_BF16
def test_rows_that_see_nothing_give_no_nan_forward_or_backward(dtype):
    model = trained(dtype, placement="every")
    hidden = model(IDS, SYSTEM)
    model.loss(hidden, TARGETS)[0].backward()
    assert hidden.isfinite().all() and all(p.grad.isfinite().all() for p in model.inserted.parameters())


def test_a_row_without_a_system_message_adds_nothing_to_the_gradient():
    model = trained()
    mixed = gradients(model, IDS, SYSTEM, TARGETS)
    alone = gradients(model, IDS[[0, 2]], SYSTEM[[0, 2]], TARGETS[[0, 2]])
    for name, grad in alone.items():
        torch.testing.assert_close(mixed[name], grad, atol=1e-4, rtol=1e-4)  # other shapes, other order of summation


def test_a_batch_without_any_system_token_counts_its_loss_like_the_base():
    silent = torch.zeros_like(SYSTEM)
    model, plain = trained().train(), base().train()
    loss, n = model.loss(model(IDS, silent), TARGETS)
    expected, m = plain.loss(plain(IDS), TARGETS)
    assert n == m == 3 * 8 and torch.equal(loss, expected)


def test_a_batch_without_any_system_token_adds_nothing_to_the_gradient_of_others():
    model, silent = trained(), torch.zeros_like(SYSTEM)
    expected = gradients(model, IDS, SYSTEM, TARGETS)
    model.zero_grad()
    (model.loss(model(IDS, SYSTEM), TARGETS)[0] + model.loss(model(IDS, silent), TARGETS)[0]).backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.inserted.named_parameters())


def test_the_loss_of_a_batch_without_any_system_token_goes_back_to_no_parameter():
    model = trained()
    model.loss(model(IDS, torch.zeros_like(SYSTEM)), TARGETS)[0].backward()
    assert all(p.grad is None for p in model.parameters())


# --- attach, save, load -------------------------------------------------------------------------------------------


def test_method_none_inserts_and_trains_nothing():
    model = attach(base(), method="none")
    assert len(model.inserted) == 0 and not any(p.requires_grad for p in model.parameters())


def test_attach_returns_the_model_it_was_given():
    model = base()
    assert attach(model) is model


def test_an_unknown_placement_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        attach(base(), placement="last8th")
    assert_one_sentence(error, "last8th", *PLACEMENTS)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        attach(base(), method="call")
    assert_one_sentence(error, "'call'", "cal,", "none")


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("options", [{}, {"placement": "alternate", "rope": True, "ffn": 0.5}], ids=str)
def test_a_saved_adapter_gives_the_same_outputs_when_loaded(options, dtype, tmp_path):
    model = trained(dtype, **options)
    save_adapter(model, tmp_path / "adapter")
    fresh = base(dtype)
    load_adapter(fresh, tmp_path / "adapter")
    assert torch.equal(fresh(IDS, SYSTEM), model(IDS, SYSTEM))


def test_a_saved_adapter_is_two_whole_files_with_the_information_given(tmp_path):
    save_adapter(trained(), tmp_path, base="a model", steps=150)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter.json", "adapter.safetensors"]
    about = json.loads((tmp_path / "adapter.json").read_text())
    assert (about["base"], about["steps"], about["method"], about["placement"]) == ("a model", 150, "cal", "late8th")


def test_an_adapter_file_holds_none_of_the_backbone(tmp_path):
    model = trained()
    save_adapter(model, tmp_path)
    numbers = sum(p.numel() for p in model.inserted.parameters())
    size = (tmp_path / "adapter.safetensors").stat().st_size
    assert 0 < size - 4 * numbers < 4096  # fp32, and a header of some 18 names


OTHER_SHAPES = {"hidden_size": 64, "intermediate_size": 96, "n_layers": 9, "n_kv_heads": 4, "vocab_size": 70}


@pytest.mark.parametrize("size", OTHER_SHAPES)
def test_an_adapter_on_a_base_of_another_shape_is_refused_with_what_differs(size, tmp_path):
    save_adapter(trained(), tmp_path)
    with pytest.raises(ValueError) as error:
        load_adapter(base(**{size: OTHER_SHAPES[size]}), tmp_path)
    assert_one_sentence(error, str(tmp_path), "another base", size)


@torch.no_grad()
def test_an_adapter_fits_the_same_shape_whatever_its_stop_ids(tmp_path):
    # the Hub's files and the wheel's describe one model, and differ in what its shape does not depend on
    model, other = trained(), base(stop_ids=(5,))
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    assert torch.equal(other(IDS, SYSTEM), model(IDS, SYSTEM))


@pytest.mark.parametrize("missing", ["adapter.json", "adapter.safetensors"])
def test_a_directory_without_one_of_its_files_gets_a_sentence_that_names_it(missing, tmp_path):
    save_adapter(trained(), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, missing)


@pytest.mark.parametrize("file", ["adapter.json", "adapter.safetensors"])
@pytest.mark.parametrize("damage", [lambda data: data[:-50], lambda data: b"", lambda data: b"{}"],
                         ids=["cut", "empty", "braces"])  # fmt: skip
def test_a_damaged_adapter_gets_a_sentence_that_names_the_file(damage, file, tmp_path):
    save_adapter(trained(), tmp_path)
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, file)


@pytest.mark.parametrize("name", ["method", "placement", "rope", "ffn", "base_config"])
@pytest.mark.parametrize("value", [None, 5, [], {"a": 1}])
def test_an_adapter_with_a_value_of_the_wrong_kind_is_refused_with_its_name(name, value, tmp_path):
    save_adapter(trained(), tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text()) | {name: value}
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    with pytest.raises(ValueError) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, "differ" if (name, value) == ("base_config", {"a": 1}) else name)


@pytest.mark.parametrize("system", [SYSTEM[:1], SYSTEM[:, 1:], SYSTEM.long(), SYSTEM[0]], ids=str)
def test_system_flags_of_another_shape_or_kind_are_refused_with_a_sentence(system):
    with pytest.raises(ValueError) as error:
        trained()(IDS, system)
    assert_one_sentence(error, "system is", "(3, 20)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused_with_the_tensors_name(value, tmp_path):
    model = trained()
    model.inserted["8"].v_proj.weight.data[3, 3] = value
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, "8.v_proj.weight", "not finite")


def test_an_adapter_that_lacks_a_tensor_is_refused_with_its_name(tmp_path):
    model = trained()
    del model.inserted["7"].q_proj
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, "7.q_proj.weight")
