"""results/trace: the controls of causal tracing, on a tiny random model and on the real SmolLM2's tokenizer."""

import pytest
import torch

from data.chat import Tokenizer
from model import Transformer
from results.trace.trace import pairs_of_words, run, swapped, trace
from tests.small import IDS, SYSTEM, base, trained


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
