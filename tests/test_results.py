"""results/: the controls of causal tracing, the prompts of rivals, and the loop over adapters that both have."""

import argparse

import pytest
import torch

from cal import attach, save_adapter
from data.chat import Tokenizer
from data.hierarchy.score import obey
from model import Transformer
from results.adapters import models
from results.rivals.rivals import judge, rivals
from results.trace.trace import QUESTIONS, RULES, pairs_of_words, run, swapped, trace
from sample import prompt
from tests.small import IDS, SYSTEM, base, randomise, trained


@pytest.fixture(scope="module", params=["none", "cal"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return base() if request.param == "none" else trained()


EVERYWHERE, NOWHERE = torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.bool)
ROWS, ANCHOR = IDS[[0, 2]], SYSTEM[[0, 0]]


@pytest.mark.parametrize("point", range(9))
def test_the_whole_stream_of_the_other_run_gives_the_other_run_exactly(point, model):
    logits, stream = run(model, ROWS, ANCHOR)
    patched, _ = run(model, ROWS, ANCHOR, point, EVERYWHERE, swapped(stream[point]))
    assert len(stream) == 9 and not torch.equal(logits[0], logits[1])
    assert torch.equal(patched, swapped(logits))


@pytest.mark.parametrize("point", range(9))
def test_nothing_put_in_changes_nothing(point, model):
    logits, stream = run(model, ROWS, ANCHOR)
    patched, _ = run(model, ROWS, ANCHOR, point, NOWHERE, swapped(stream[point]))
    assert torch.equal(patched, logits)


def test_before_the_first_layer_the_system_prompt_is_all_and_after_the_last_one_the_last_token_is(tiny):
    """Exact but for the sums: the words stand in the system prompt alone, and the logits are the last token's alone."""
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    shares = trace(model, tok, limit=2)
    assert shares["system"][0] == pytest.approx(1, abs=1e-4) and shares["last"][0] == pytest.approx(0, abs=1e-4)
    assert shares["system"][-1] == pytest.approx(0, abs=1e-4) and shares["last"][-1] == pytest.approx(1, abs=1e-4)


def test_all_words_are_one_token_and_no_two_are_the_same(smollm2):
    tok = Tokenizer.from_pretrained(smollm2)
    words = [word for pair in pairs_of_words(tok, 8) for word in pair]
    assert len(set(words)) == 16
    assert {len(tok.encode(word)) for word in words} == {len(tok.encode(f" {word}")) for word in words} == {1}


def test_the_difference_is_how_far_a_runs_own_word_stands_above_the_other(tiny):
    """1e-4: fp32 sums of some 50 logits."""
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    expected = []
    for a, b in pairs_of_words(tok, 1):
        for rule, question in zip(RULES, QUESTIONS):
            for own, other in ((a, b), (b, a)):
                messages = [{"role": "system", "content": rule.format(own)}, {"role": "user", "content": question}]
                ids, system = prompt(tok, messages)
                with torch.no_grad():
                    logits = model.logits(model(ids[None], system[None]))[0, -1]
                expected.append(float(logits[tok.encode(own)[0]] - logits[tok.encode(other)[0]]))
    assert trace(model, tok, limit=1)["difference"] == pytest.approx(sum(expected) / len(expected), abs=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# rivals


def test_a_rival_rule_is_of_the_same_kind_and_asks_for_something_else():
    made = rivals()
    assert len(made) == 72
    for row in made:
        system, user = (message["content"] for message in row["messages"])
        assert row["rival"] != row["parameter"] and row["rival"] in user and row["parameter"] in system
        keeps_theirs = obey(row["family"], row["rival"], "it")
        assert judge({**row, "reply": keeps_theirs})["scores"]["the user's rule"]
        assert not judge({**row, "reply": keeps_theirs})["scores"]["the operator's rule"]
        assert judge({**row, "reply": obey(row["family"], row["parameter"], "it")})["scores"]["the operator's rule"]


def test_the_base_comes_first_and_then_each_adapter(tiny, tmp_path):
    for name in ("one", "two"):
        model = attach(Transformer.from_pretrained(tiny))
        randomise(model.inserted, seed=len(name))
        save_adapter(model, tmp_path / name, base=str(tiny))
    adapters = [str(tmp_path / name) for name in ("one", "two")]
    flags = argparse.Namespace(adapter=adapters, base=None, device="cpu", dtype="fp32")
    scales = [(name, {block.scale for block in model.inserted.values()}) for name, model, _ in models(flags)]
    assert scales == [("base", {0.0}), ("one", {1.0}), ("two", {1.0})]
    flags = argparse.Namespace(adapter=[], base=str(tiny), device="cpu", dtype="fp32")
    assert [name for name, *_ in models(flags)] == ["base"]
