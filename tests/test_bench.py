"""bench.py: that both sides of a comparison do the same work. Its times are nobody's test."""

from pathlib import Path

import pytest
import torch

from cal import attach, trainable
from model import Transformer
from tests import bench
from tests.bench import labels_of, long_batch, medians, rank_of_cal, their_step


@pytest.fixture
def both(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    return bench.our_model(tiny, None, "cpu"), bench.their_model(tiny, None, "cpu")


def test_both_sides_learn_the_same_targets(both):
    """The same mean loss on the same batch (1e-4: fp32 sums in another order)."""
    ours, theirs = both
    ids, system, targets = long_batch("cpu")
    loss, n = ours.loss(ours(ids, system), targets)
    expected = theirs(input_ids=ids, labels=labels_of(targets)).loss.item()
    assert n == 2 * 255 and loss.item() / n == pytest.approx(expected, abs=1e-4)


def test_pefts_lora_has_as_many_parameters_as_cal(smollm2):
    """Within a half of a rank on all 30 layers: rank 58 is 305,280 parameters a rank."""
    model = Transformer.from_pretrained(smollm2, dtype=torch.bfloat16)
    theirs, rank = bench.their_model(smollm2, None, "cpu"), rank_of_cal(model)
    their_step(theirs, rank, fp32=False)
    lora = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert lora == pytest.approx(sum(p.numel() for p in trainable(attach(model)).values()), rel=0.01)


def test_a_step_of_theirs_trains(both):
    _, theirs = both
    step, batch = their_step(theirs, 4, fp32=True), long_batch("cpu")
    with torch.no_grad():
        before = theirs(input_ids=batch[0], labels=labels_of(batch[2])).loss
        for _ in range(3):
            with torch.enable_grad():
                step(batch)
        assert theirs(input_ids=batch[0], labels=labels_of(batch[2])).loss < before


def test_the_sides_take_turns():
    order = []
    medians("cpu", lambda: order.append("ours"), lambda: order.append("theirs"))
    assert order == ["ours", "theirs"] * 6  # one to warm up, five that count
