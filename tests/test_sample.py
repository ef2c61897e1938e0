"""sample.py: one reply or a chat, of the base or with an adapter."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cal import CrossAttentionLayer, attach, load_adapter, save_adapter
from data import look
from data.chat import Tokenizer
from model import Transformer
from sample import attention_weights, looks, prompt
from tests.small import ROOT, run

RULE = "Start every reply with [maple] and then answer."
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", params=[False, True], ids=["", "rope"])
def any_adapter(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tiny, tmp_path_factory.mktemp("any"), rope=request.param)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tiny, tmp_path_factory.mktemp("adapter"))


def random_adapter(tiny: Path, path: Path, rope: bool = False) -> Path:
    """A saved adapter of the tiny base whose blocks change what it says."""
    torch.manual_seed(1)
    model = attach(Transformer.from_pretrained(tiny), rope=rope)
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, std=0.5)
    save_adapter(model, path, base=str(tiny))
    return path


def ask(*flags: object) -> str:
    done = run("sample.py", *flags, "--dtype", "fp32", "--max_new_tokens", 8)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_real_base_answers(smollm2):
    # in fp32, for in bf16 the first word hangs on the last bit of a logit
    assert "Paris" in run("sample.py", "--user", QUESTION, "--max_new_tokens", 12, "--dtype", "fp32").stdout


def test_a_reply_ends_at_the_stop_ids_of_the_checkpoint_too(tiny, tmp_path):
    flags = ("--user", QUESTION, "--max_new_tokens", 8, "--dtype", "fp32")
    tok, folder = Tokenizer.from_pretrained(tiny), shutil.copytree(tiny, tmp_path / "base")
    ids, _ = prompt(tok, [{"role": "user", "content": QUESTION}])
    first = Transformer.from_pretrained(tiny).generate([ids], max_new_tokens=1)[0][0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 2]}))
    assert run("sample.py", "--base", folder, *flags).stdout == "\n"  # it would have been the first word


def test_an_adapter_that_does_not_name_its_base_is_refused_unless_one_is_given(tiny, adapter, tmp_path):
    nameless = shutil.copytree(adapter, tmp_path / "nameless")
    about = json.loads((adapter / "adapter.json").read_text())
    (nameless / "adapter.json").write_text(json.dumps({name: about[name] for name in about if name != "base"}))
    done = run("sample.py", "--adapter", nameless, "--user", QUESTION)
    assert done.returncode != 0 and "does not name its base: give --base" in done.stderr
    assert ask("--adapter", nameless, "--base", tiny, "--user", QUESTION) == ask("--adapter", adapter, "--user", QUESTION)


def test_an_adapter_brings_its_base_and_changes_the_reply(tiny, adapter):
    with_rule = ("--system", RULE, "--user", QUESTION)
    assert ask("--adapter", adapter, *with_rule) != ask("--base", tiny, *with_rule)


def test_without_a_system_message_the_adapter_says_what_the_base_says(tiny, adapter):
    assert ask("--adapter", adapter, "--user", QUESTION) == ask("--base", tiny, "--user", QUESTION)


def test_scale_0_is_the_base(tiny, adapter):
    with_rule = ("--system", RULE, "--user", QUESTION)
    assert ask("--adapter", adapter, "--scale", 0, *with_rule) == ask("--base", tiny, *with_rule)


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--scale", "0.5", "--user", "x"], "--scale multiplies"), (["--merge", "m"], "give --adapter")],
)
def test_flags_of_adapters_without_one_are_a_sentence(flags, says, tiny):
    done = run("sample.py", "--base", tiny, *flags)
    assert done.returncode != 0 and says in done.stderr


def test_a_backbone_that_was_trained_itself_answers_in_fp32_and_alone(tiny, tmp_path):
    save_adapter(attach(Transformer.from_pretrained(tiny), "full"), tmp_path / "full", base=str(tiny))
    fp32 = run("sample.py", "--adapter", tmp_path / "full", "--user", QUESTION, "--max_new_tokens", 8).stdout
    assert fp32 == ask("--base", tiny, "--user", QUESTION)
    done = run("sample.py", "--adapter", tmp_path / "full", "--both", "--user", QUESTION)
    assert done.returncode != 0 and "method full changed the base itself" in done.stderr


def test_both_shows_the_bases_reply_and_the_adapters(tiny, adapter):
    with_rule = ("--system", RULE, "--user", QUESTION)
    base, anchored = ask("--base", tiny, *with_rule).strip(), ask("--adapter", adapter, *with_rule).strip()
    shown = ask("--adapter", adapter, "--both", *with_rule).splitlines()
    half = shown[0].index("adapter")  # the second column starts there
    columns = [" ".join(line[:half].strip() for line in shown[2:]), " ".join(line[half:] for line in shown[2:])]
    assert shown[0].split() == ["base", "adapter"]
    assert ["".join(c.split()) for c in columns] == ["".join(text.split()) for text in (base, anchored)]


def test_a_chat_answers_line_by_line_and_ends_at_an_empty_one(tiny):
    done = run("sample.py", "--base", tiny, "--max_new_tokens", 4, "--dtype", "fp32", input="Hello\nAnd again\n\n")
    assert done.returncode == 0 and done.stdout.count("\n> ") == 3


def test_a_chat_streams_the_reply_that_one_call_gives(tiny):
    chat = run("sample.py", "--base", tiny, "--max_new_tokens", 8, "--dtype", "fp32", input=f"{QUESTION}\n\n").stdout
    assert ask("--base", tiny, "--user", QUESTION).strip() in chat


def test_a_chat_goes_on_after_a_line_that_does_not_fit_the_context(tiny):
    flags = ("--base", tiny, "--max_new_tokens", 2, "--dtype", "fp32")
    done = run("sample.py", *flags, input="word " * 9000 + "\nHello\n\n")
    assert done.returncode == 0 and "context" in done.stdout and done.stdout.count("\n> ") == 3


# ----------------------------------------------------------------------------------------------------------------------
# where a reply looked


def blocks_input(base: Path, adapter: Path) -> tuple[CrossAttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first block of an adapter, what it was given in a conversation, and what its attention made of that."""
    model, tok = load_adapter(Transformer.from_pretrained(base), adapter), Tokenizer.from_pretrained(base)
    ids, system = prompt(tok, [{"role": "system", "content": RULE}, {"role": "user", "content": QUESTION}])
    block, kept = next(iter(model.inserted.values())), []
    block.register_forward_hook(lambda _, given, made: kept.append(given[0]))
    block.o_proj.register_forward_hook(lambda _, given, made: kept.append(given[0]))
    with torch.no_grad():
        model(ids[None], system[None])
    attended, x = kept
    return block, x, system[None], attended


@torch.no_grad()
def test_the_weights_are_a_plain_softmax_of_queries_and_keys(tiny, adapter):
    """1e-6: fp32, one head and one token at a time."""
    block, x, system, _ = blocks_input(tiny, adapter)
    weights, places = attention_weights(block, x, system)[0], system[0].nonzero()[:, 0].tolist()
    H, C = block.config.n_heads, block.config.head_dim
    group = H // block.config.n_kv_heads
    n = block.norm1(x[0])
    q, k = (n @ block.q_proj.weight.T).view(-1, H, C), (n @ block.k_proj.weight.T).view(-1, H // group, C)
    for h in range(H):
        for i in range(x.shape[1]):
            seen = [j for j in places if j <= i]
            scores = torch.tensor([math.exp(float(q[i, h] @ k[j, h // group]) / C**0.5) for j in seen])
            expected = [*(scores / scores.sum()).tolist(), *[0.0] * (len(places) - len(seen))]
            assert weights[h, i].tolist() == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_the_weights_times_the_values_are_what_the_blocks_attention_gave(tiny, any_adapter):
    """1e-5: fp32, summed in another order. Tokens that see nothing are thrown away by the block."""
    block, x, system, attended = blocks_input(tiny, any_adapter)
    v = block.heads(block.v_proj(block.norm1(x[system][None])))  # (1, K, S, C)
    weights = attention_weights(block, x, system)
    y = weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    sees = weights.sum(dim=(1, 3)) > 0
    assert sees.sum() > 20
    assert torch.allclose(y.transpose(1, 2).flatten(2)[sees], attended[sees], atol=1e-5)


def test_a_row_of_looks_is_of_the_token_that_chose_the_word(tiny, adapter):
    """1e-6: one more token in the sequence rounds otherwise."""
    model, tok = load_adapter(Transformer.from_pretrained(tiny), adapter), Tokenizer.from_pretrained(tiny)
    ids, system = prompt(tok, [{"role": "system", "content": RULE}, {"role": "user", "content": QUESTION}])
    given = []
    next(iter(model.inserted.values())).register_forward_hook(lambda block, args, _: given.append((block, *args[:2])))
    one = looks(model, ids, system, [5])[0]
    two = looks(model, ids, system, [5, 9])[0]
    last = attention_weights(*given[0])[0, :, len(ids) - 1]  # the prompt's last token
    assert one.shape == (4, 1, int(system.sum())) and two.shape[1] == 2
    assert torch.allclose(one[:, 0], last, atol=1e-6) and torch.allclose(two[:, 0], last, atol=1e-6)


@pytest.mark.parametrize(
    ("choice", "blocks", "heads"),
    [(("--show",), [0, 1], range(4)), (("--show_block", 8), [1], range(4)), (("--show_head", 2), [0, 1], [2]),
     (("--show_block", 7, "--show_head", 3), [0], [3])],
)  # fmt: skip
def test_show_says_which_words_the_chosen_blocks_and_heads_looked_at_most(choice, blocks, heads, tiny, adapter):
    model, tok = load_adapter(Transformer.from_pretrained(tiny), adapter), Tokenizer.from_pretrained(tiny)
    ids, system = prompt(tok, [{"role": "system", "content": RULE}, {"role": "user", "content": QUESTION}])
    weights = looks(model, ids, system, model.generate([ids], [system], 8)[0])
    means = sum(weights[b, h].mean(dim=0) for b in blocks for h in heads) / (len(blocks) * len(heads))
    top = int(means.argmax())
    word = tok.decode([int(ids[system][top])]).strip()
    said = ask("--adapter", adapter, "--system", RULE, "--user", QUESTION, *choice)
    assert RULE in said and f"looked at most: {word!r} {float(means[top]):.0%}" in said


def test_without_show_nothing_is_said_of_it(adapter):
    assert "looked at" not in ask("--adapter", adapter, "--system", RULE, "--user", QUESTION)


@pytest.mark.parametrize("text", [RULE, "Sei naïve 🦊, 日本語 ok", "\n\n a\tb"])
def test_the_words_of_a_text_are_the_text_again(text, smollm2):
    tok = Tokenizer.from_pretrained(smollm2)
    words = look.words(tok, tok.encode(text))
    assert "".join(words) == text and len(words) == len(tok.encode(text)) and "\ufffd" not in "".join(words)


def test_the_page_holds_the_words_and_the_weights_and_loads_nothing(tiny, adapter, tmp_path):
    evil = "What is </script><img src=x>?"
    said = ask("--adapter", adapter, "--system", RULE, "--user", evil, "--html", tmp_path / "page.html")
    assert str(tmp_path / "page.html") in said
    page = (tmp_path / "page.html").read_text()
    about = json.loads(re.search(r"const about = (.*);\n", page)[1])
    assert "".join(about["system"]) == RULE and about["user"] == evil and "<img" not in page
    assert "".join(about["reply"]) and about["base"] + "\n" == ask("--base", tiny, "--system", RULE, "--user", evil)
    assert about["blocks"] == ["7", "8"]
    weights = torch.tensor(about["weights"])
    assert weights.shape == (2, 4, len(about["reply"]), len(about["system"]))
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=0.005)  # rounded to four digits
    template = (ROOT / "data" / "look.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", template)


@pytest.mark.parametrize(
    ("method", "flags", "says"),
    [("mlp", ["--show"], "--show is of CAL"), ("cal", ["--show_block", 3], "choose from 7, 8"),
     ("cal", ["--show_head", 4], "choose from 0, 1, 2, 3")],
)  # fmt: skip
def test_what_can_not_be_shown_is_a_sentence(method, flags, says, tiny, tmp_path):
    save_adapter(attach(Transformer.from_pretrained(tiny), method), tmp_path / "a", base=str(tiny))
    done = run("sample.py", "--adapter", tmp_path / "a", "--system", RULE, "--user", QUESTION, *flags)
    assert done.returncode != 0 and says in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--adapter", "no/such/adapter"], "adapter.json"),
        (["--both"], "--adapter"),
        (["--base", "data"], "config.json"),
        (["--device", "abacus"], "abacus"),
        (["--device", "meta"], "meta"),
        (["--dtype", "int3"], "int3"),
        (["--scale", "nan"], "--scale is nan"),
        (["--temperature", "-1"], "temperature"),
        (["--top_p", "0"], "top_p"),
        (["--max_new_tokens", "0"], "max_new_tokens"),
    ],
)
def test_a_bad_flag_is_one_sentence(flags, says, smollm2):
    done = run("sample.py", "--user", "Hello", *flags)
    assert done.returncode != 0 and says in done.stderr


def test_a_tokenizer_larger_than_the_embedding_is_one_sentence(tiny, tmp_path):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text()) | {"vocab_size": 1000}
    (broken / "config.json").write_text(json.dumps(config))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:1000].clone()
    save_file(weights, broken / "model.safetensors")
    done = run("sample.py", "--base", broken, "--user", "Hello")
    assert done.returncode != 0 and "embedding of 1000" in done.stderr


def test_a_conversation_longer_than_the_context_is_one_sentence(tiny):
    done = run("sample.py", "--base", tiny, "--user", "word " * 9000)
    assert done.returncode != 0 and "context" in done.stderr


@pytest.mark.parametrize("script", ["sample.py", "train.py", "eval.py"])
def test_a_script_that_is_started_with_an_unknown_base_ends_in_one_line_and_no_traceback(script, tmp_path):
    out = [] if script == "sample.py" else ["--out", tmp_path / "out"]
    command = [sys.executable, script, "--base", "no such place", *out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"{script}: no such place") and done.stderr.count("\n") == 1
