"""cal.py: LoRA, ParallelMLP and full training beside CAL, of equal size, as a dial, and as files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from cal import (
    PLACEMENTS,
    LoRALinear,
    ParallelMLP,
    attach,
    cast,
    load_adapter,
    save_adapter,
    save_merged,
    set_scale,
    sizes,
    trainable,
)
from data.chat import Tokenizer
from model import Config, Transformer
from sample import prompt
from tests.small import (
    FP32_AND_BF16,
    IDS,
    PROMPTS,
    SYSTEM,
    SYSTEMS,
    TARGETS,
    assert_one_sentence,
    base,
    places_that_save,
    run,
)

PUBLISHED = [
    "SmolLM2-135M-Instruct",
    "Llama-3.1-8B-Instruct",
    "Llama-3.2-1B-Instruct",
    "Qwen2.5-0.5B-Instruct",
    "Qwen2.5-1.5B-Instruct",
    "Qwen2.5-7B-Instruct",
    "Qwen3-0.6B",
]
ADDING = ["cal", "mlp", "lora"]  # the methods that leave the backbone as it is


def stir(model: Transformer, spread: float = 0.1) -> Transformer:
    """Gives what is trainable values as after a training: no weight is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in trainable(model).items():
            noise = torch.randn(p.shape, generator=generator) * spread
            p.copy_(p + noise if model.adapter["method"] == "full" else noise + ("norm" in name))
    return model


def trained(method: str, dtype: torch.dtype = torch.float32, **options) -> Transformer:
    return stir(attach(base(dtype), method, **options))


def count(model: Transformer) -> int:
    return sum(p.numel() for p in trainable(model).values())


# --- equal parameters ---------------------------------------------------------------------------------------------


def published(name: str, request: pytest.FixtureRequest) -> Config:
    if name.startswith("SmolLM2"):
        return Config.from_file(request.getfixturevalue("smollm2") / "config.json")
    return Config.from_file(request.getfixturevalue("shared") / "configs" / f"{name}.json")


def cal_parameters(c: Config, placement: str) -> int:
    """Counted by hand: two norms, q, k, v, o, and SwiGLU's three matrices, at every boundary."""
    D, heads, kv = c.hidden_size, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    block = 2 * D + 2 * D * heads + 2 * D * kv + 3 * D * c.intermediate_size
    return block * len(PLACEMENTS[placement](c.n_layers))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_method_has_cals_parameters(name, placement, request):
    """Within 1 % at late8th, where methods are compared; within 2 % elsewhere, since a LoRA has one rank in all layers."""
    config = published(name, request)
    for method in ADDING:
        with torch.device("meta"):
            model = attach(Transformer(config), method, placement)
        near = 0 if method == "cal" else 0.01 if placement == "late8th" or method == "mlp" else 0.02
        assert count(model) == pytest.approx(cal_parameters(config, placement), rel=near)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_counts_are_matched_without_a_parameter_in_memory(placement, shared):
    """An 8B model's blocks at every layer would be 28 GB."""
    with torch.device("meta"):
        model = Transformer(Config.from_file(shared / "configs" / "Llama-3.1-8B-Instruct.json"))
    for method in ADDING:
        assert {p.device.type for p in attach(model, method, placement).parameters()} == {"meta"}


def test_the_counts_follow_the_width_of_cals_feed_forward_part():
    counts = {method: count(attach(base(hidden_size=480), method, ffn=0.25)) for method in ADDING}
    assert counts["mlp"] == pytest.approx(counts["cal"], rel=0.01)
    assert counts["lora"] == pytest.approx(counts["cal"], rel=0.01)


def test_lora_stands_on_every_linear_of_every_layer_with_one_rank():
    model = attach(base(n_layers=7), "lora")
    loras = [m for m in model.modules() if isinstance(m, LoRALinear)]
    linears = [m for m in model.layers.modules() if type(m) is nn.Linear]
    assert len(loras) == 7 * 7 and len({m.A.out_features for m in loras}) == 1
    assert linears == [m.linear for m in loras]  # none stands alone


def test_parallel_mlp_stands_at_cals_boundaries():
    for placement in PLACEMENTS:
        blocks = attach(base(), "mlp", placement).inserted
        assert list(blocks) == list(attach(base(), "cal", placement).inserted)
        assert all(isinstance(block, ParallelMLP) for block in blocks.values())


def test_a_rank_or_a_width_can_be_given():
    lora, mlp = attach(base(), "lora", rank=3), attach(base(), "mlp", width=11)
    assert {m.A.out_features for m in lora.modules() if isinstance(m, LoRALinear)} == {3}
    assert {m.gate_proj.out_features for m in mlp.inserted.values()} == {11}


def test_a_lora_has_at_least_rank_1():
    model = attach(base(n_layers=40, intermediate_size=2000), "lora", "early8th", ffn=0.001)
    assert {m.A.out_features for m in model.modules() if isinstance(m, LoRALinear)} == {1}


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("method", ADDING)
def test_a_base_of_few_layers_takes_every_placement(method, n_layers):
    for placement in PLACEMENTS:
        model = attach(base(n_layers=n_layers), method, placement)
        assert count(model) > 0 and (method == "lora" or len(model.inserted) >= 1)


@pytest.mark.parametrize("method", [*ADDING, "full"])
def test_the_line_of_sizes_has_the_count_of_the_model(method):
    model = attach(base(), method)
    assert sizes(model).startswith(f"{count(model):,} parameters, ")


# --- what they compute --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_parallel_mlp_computes_its_equation():
    block = trained("mlp").inserted["8"]
    w = {name.removesuffix(".weight"): p.double() for name, p in block.named_parameters()}
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(2)).double()
    n = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["norm"]
    gate = n @ w["gate_proj"].T
    expected = x + (gate / (1 + (-gate).exp()) * (n @ w["up_proj"].T)) @ w["down_proj"].T
    torch.testing.assert_close(block(x.float()).double(), expected, atol=1e-5, rtol=0)  # fp32 rounding


@torch.no_grad()
def test_lora_gives_the_logits_of_peft_with_the_same_matrices(tiny):
    ours = trained_tiny("lora", tiny)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    r = ours.layers[0].mlp.up_proj.A.out_features
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(reference, LoraConfig(r=r, lora_alpha=r, target_modules=names, lora_dropout=0.0))
    for name, module in ours.named_modules():
        if isinstance(module, LoRALinear):
            other = theirs.get_submodule(f"base_model.model.model.{name}")
            other.lora_A.default.weight.copy_(module.A.weight)
            other.lora_B.default.weight.copy_(module.B.weight)
    ids = torch.randint(0, 49152, (3, 20), generator=torch.Generator().manual_seed(4))
    plain = Transformer.from_pretrained(tiny)
    expected = theirs(ids).logits
    assert (expected - plain.logits(plain(ids))).abs().max() > 0.1  # the matrices do speak
    torch.testing.assert_close(ours.logits(ours(ids)), expected, atol=1e-4, rtol=0)  # fp32, another order of sums


def trained_tiny(method: str, tiny: Path, **options) -> Transformer:
    """The tiny checkpoint with an adapter of one rank in all layers, as peft wants it."""
    options = {"rank": 4} | options if method == "lora" else options
    return stir(attach(Transformer.from_pretrained(tiny), method, **options), spread=0.3)


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("method", ADDING)
def test_a_cast_adapter_gives_the_same_bits(method, dtype):
    model = stir(attach(base(dtype), method), spread=0.3)
    before = model(IDS, SYSTEM)
    cast(model)
    assert torch.equal(model(IDS, SYSTEM), before) and {p.dtype for p in model.parameters()} == {dtype}


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("method", ADDING)
def test_what_is_new_changes_no_bit(method, dtype):
    assert torch.equal(attach(base(dtype), method)(IDS, SYSTEM), base(dtype)(IDS))


@torch.no_grad()
@pytest.mark.parametrize("method", ["mlp", "lora"])
def test_the_baselines_do_not_look_at_the_system_mask(method):
    model = trained(method)
    assert torch.equal(model(IDS, SYSTEM), model(IDS))
    assert not torch.equal(model(IDS), base()(IDS))


@pytest.mark.parametrize("method", ADDING)
def test_ragged_generation_gives_the_tokens_of_single_prompts(method):
    model = trained(method)
    alone = [model.generate([p], [s], max_new_tokens=25)[0] for p, s in zip(PROMPTS, SYSTEMS, strict=True)]
    assert model.generate(PROMPTS, SYSTEMS, max_new_tokens=25) == alone


# --- what is trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*ADDING, "full", "none"])
def test_one_step_moves_what_is_trainable_and_nothing_else(method):
    model = trained(method)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if chosen := list(trainable(model).values()):
        model.loss(model(IDS, SYSTEM), TARGETS)[0].backward()
        torch.optim.AdamW(chosen, lr=0.1).step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainable(model))
    assert (moved == {name for name in before if "inserted" in name or ".A." in name or ".B." in name}) == (
        method != "full"
    )


@FP32_AND_BF16
@pytest.mark.parametrize("method", ["mlp", "lora"])
def test_adapters_stay_in_fp32_on_any_backbone(method, dtype):
    assert {p.dtype for p in trainable(attach(base(dtype), method)).values()} == {torch.float32}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("method", ["cal", "mlp"])
def test_no_graph_is_built_below_the_first_block(method, placement):
    first = PLACEMENTS[placement](8)[0]
    saved = places_that_save(attach(base(), method, placement))
    assert {place for place in saved if place.startswith("layer")} == {f"layer {i}" for i in range(first + 1, 9)}


def test_loras_graph_begins_at_the_first_layer():
    assert places_that_save(attach(base(), "lora")) == {f"layer {i}" for i in range(1, 9)}


def test_attaching_again_leaves_nothing_of_the_method_before():
    model = attach(base(), "none")
    names = [name for name, _ in model.named_parameters()]
    for method in (*ADDING, "full"):
        attach(stir(attach(model, method)) if method != "full" else attach(model, method), "none")
        assert [name for name, _ in model.named_parameters()] == names and not trainable(model)
        assert torch.equal(model(IDS), base()(IDS)), method


# --- the dial -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("method", ADDING)
def test_scale_0_is_the_base_bit_for_bit_and_1_is_as_trained(method, dtype):
    model = trained(method, dtype)
    full = model(IDS, SYSTEM)
    set_scale(model, 0.0)
    assert torch.equal(model(IDS, SYSTEM), base(dtype)(IDS)) and not torch.equal(full, base(dtype)(IDS))
    set_scale(model, 1.0)
    assert torch.equal(model(IDS, SYSTEM), full)


@torch.no_grad()
@pytest.mark.parametrize("order", ["pack, attach", "attach, pack", "pack, attach, pack"])
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct"])
def test_a_lora_at_scale_0_is_the_packed_base_bit_for_bit_at_other_widths_and_in_any_order(name, order, shared):
    """In bf16, one row and several: packed products of K = 4,864 and 8,960 are not those of unpacked weights."""
    config = replace(Config.from_file(shared / "configs" / f"{name}.json"), n_layers=1, vocab_size=100)
    torch.manual_seed(0)
    model = Transformer(config).to(torch.bfloat16)
    packed = Transformer(config).to(torch.bfloat16)
    packed.load_state_dict(model.state_dict())
    packed.pack()
    for step in order.split(", "):
        if step == "attach":
            attach(model, "lora", rank=2)
            for m in model.modules():
                if isinstance(m, LoRALinear):
                    m.B.weight.data.normal_()
            cast(model)
        else:
            model.pack()
    set_scale(model, 0.0)
    if "attach, pack" not in order:
        model.pack()
    for T in (1, 7):
        ids = torch.arange(T)[None]
        assert torch.equal(model.logits(model(ids)), packed.logits(packed(ids)))


@torch.no_grad()
@pytest.mark.parametrize("method", ["mlp", "lora"])
def test_scale_multiplies_what_the_baselines_add(method):
    model, by_hand = trained(method, scale=0.5), trained(method)
    for name, p in trainable(by_hand).items():
        if "down_proj.weight" in name or ".B." in name:
            p *= 0.5
    torch.testing.assert_close(model(IDS), by_hand(IDS), atol=1e-5, rtol=0)  # fp32 rounding


def test_full_training_has_no_dial_and_says_so():
    with pytest.raises(ValueError) as error:
        attach(base(), "full", scale=0.5)
    assert_one_sentence(error, "0.5", "full")


# --- files --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@FP32_AND_BF16
@pytest.mark.parametrize("options", [{"method": "mlp"}, {"method": "lora"}, {"method": "full"}, {"method": "none"},
    {"method": "lora", "rank": 2}, {"method": "mlp", "width": 9, "placement": "every"}], ids=str)  # fmt: skip
def test_a_saved_adapter_gives_the_same_outputs_when_loaded(options, dtype, tmp_path):
    model = trained(dtype=dtype, **options)
    save_adapter(model, tmp_path / "adapter")
    fresh = load_adapter(base(dtype), tmp_path / "adapter")
    assert torch.equal(fresh(IDS, SYSTEM), model(IDS, SYSTEM))


@pytest.mark.parametrize("method", ADDING)
@pytest.mark.parametrize("changed", [False, True])
def test_an_adapter_says_when_the_base_has_other_weights_than_it_was_trained_on(changed, method, tmp_path, capsys):
    save_adapter(trained(method), tmp_path)
    model = base().bfloat16()  # the same weights in another dtype are no other base
    with torch.no_grad():
        model.layers[-1].mlp.down_proj.weight += changed
    load_adapter(model, tmp_path)
    assert ("was trained on other weights" in capsys.readouterr().err) is changed


@pytest.mark.parametrize("method", [*ADDING, "full"])
def test_adapter_json_tells_the_method_its_size_and_the_base(method, tmp_path):
    model = trained(method)
    save_adapter(model, tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text())
    assert (about["method"], about["parameters"], about["base_config"]["n_layers"]) == (method, count(model), 8)
    assert about["sizes"]


@pytest.mark.parametrize("method", ["mlp", "lora", "full"])
def test_a_base_of_another_shape_is_refused_with_what_differs(method, tmp_path):
    save_adapter(trained(method), tmp_path)
    with pytest.raises(ValueError) as error:
        load_adapter(base(intermediate_size=96), tmp_path)
    assert_one_sentence(error, "another base", "intermediate_size")


@pytest.mark.parametrize("method", ["mlp", "lora"])
def test_a_tensor_of_another_shape_is_refused_with_its_name(method, tmp_path):
    save_adapter(trained(method, rank=4, width=4), tmp_path)
    about = json.loads((tmp_path / "adapter.json").read_text()) | {"rank": 5, "width": 5}
    (tmp_path / "adapter.json").write_text(json.dumps(about))
    with pytest.raises(ValueError) as error:
        load_adapter(base(), tmp_path)
    assert_one_sentence(error, "adapter.safetensors", "shape")


# --- a merged checkpoint ------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_merged_lora_is_a_checkpoint_that_gives_transformers_the_adapters_logits(scale, tiny, tmp_path):
    model = trained_tiny("lora", tiny, scale=scale)
    ids = torch.randint(0, 49152, (3, 20), generator=torch.Generator().manual_seed(4))
    expected = model.logits(model(ids))
    save_merged(model, tiny, tmp_path / "merged")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reference.dtype == torch.float32
    # W x + B (A x) and (W + B A) x round apart in fp32: of three million logits of up to 8, one by 1.2e-4
    torch.testing.assert_close(reference(ids).logits, expected, atol=1e-4, rtol=1e-5)
    again = Transformer.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again.logits(again(ids)), expected, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_merging_leaves_the_tied_embeddings_untouched(tiny, tmp_path):
    save_merged(trained_tiny("lora", tiny), tiny, tmp_path / "merged")
    merged, plain = Transformer.from_pretrained(tmp_path / "merged"), Transformer.from_pretrained(tiny)
    assert plain.config.tied and torch.equal(merged.embed_tokens.weight, plain.embed_tokens.weight)
    assert not torch.equal(merged.layers[0].mlp.up_proj.weight, plain.layers[0].mlp.up_proj.weight)


@torch.no_grad()
def test_the_real_smollm2_merged_in_fp32_gives_transformers_the_adapters_logits(smollm2, tmp_path):
    torch.manual_seed(1)
    model = attach(Transformer.from_pretrained(smollm2), "lora")
    for name, p in trainable(model).items():
        if ".B." in name:  # A stays as it is made: so large are both after a training
            p.normal_(std=0.002)
    ids = prompt(Tokenizer.from_pretrained(smollm2), [{"role": "user", "content": "What is the capital of France?"}])[0]
    ids = ids[None]
    plain, expected = Transformer.from_pretrained(smollm2), model.logits(model(ids))
    save_merged(model, smollm2, tmp_path / "merged")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (plain.logits(plain(ids)) - expected).abs().max() > 0.1  # the adapter does speak
    # the merged weights are rounded anew, and this model's activations reach into the thousands: 1.3e-4 at logits of 40
    torch.testing.assert_close(reference(ids).logits, expected, atol=3e-4, rtol=1e-5)


def test_sample_writes_a_merged_checkpoint_that_says_what_the_adapter_says(tiny, tmp_path):
    save_adapter(trained_tiny("lora", tiny), tmp_path / "lora", base=str(tiny))
    done = run("sample.py", "--adapter", tmp_path / "lora", "--merge", tmp_path / "merged", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    question = ("--user", "What is the capital of France?", "--max_new_tokens", 8, "--dtype", "fp32")
    adapter, merged = (run("sample.py", flag, tmp_path / name, *question).stdout
                       for flag, name in (("--adapter", "lora"), ("--base", "merged")))  # fmt: skip
    assert merged == adapter != run("sample.py", "--base", tiny, *question).stdout


@pytest.mark.parametrize("method", ["cal", "mlp"])
def test_blocks_have_no_place_in_a_plain_checkpoint_and_a_sentence_says_so(method, tiny, tmp_path):
    with pytest.raises(ValueError) as error:
        save_merged(trained_tiny(method, tiny), tiny, tmp_path / "merged")
    assert_one_sentence(error, method, "plain checkpoint")
    assert not (tmp_path / "merged").exists()


def test_merge_overwrites_nothing(tiny, tmp_path):
    save_adapter(trained_tiny("lora", tiny), tmp_path / "lora", base=str(tiny))
    done = run("sample.py", "--adapter", tmp_path / "lora", "--merge", tmp_path)
    assert done.returncode != 0 and "already exists" in done.stderr
