"""eval.py: the loop over prompts, the scores and their intervals."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.chat import Tokenizer
from eval import SETS, ask, load_sets, read_jsonl, show, summarize, write_jsonl
from model import Transformer
from tests.conftest import run


def verdicts(name: str, followed: int, n: int) -> list[dict]:
    return [{"set": name, "followed": i < followed, "right": i % 4 == 0} for i in range(n)]


def test_summarize_counts_each_set_by_itself():
    table = summarize(verdicts("rules", 30, 40) + verdicts("plain", 5, 5))
    assert (table["rules"]["followed"], table["rules"]["n"]) == (0.75, 40)
    assert (table["plain"]["followed"], table["plain"]["n"]) == (1.0, 5)


def test_the_bootstrap_interval_agrees_with_the_binomial_one():
    """Resampling 0/1 verdicts is a binomial draw: the quantiles of Binomial(200, 0.7) / 200, to its steps of 0.005 and
    the noise of 2,000 resamples (together under 0.02)."""
    entry = summarize(verdicts("rules", 140, 200))["rules"]
    draws = np.random.default_rng(7).binomial(200, 0.7, 200_000) / 200
    assert np.allclose([entry["low"], entry["high"]], np.quantile(draws, (0.025, 0.975)), atol=0.02)


def test_replies_come_back_in_the_order_of_the_prompts_whatever_the_batches(tiny):
    """fp32: a batch gives the tokens that single prompts give."""
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    examples = [e for e in load_sets(2) if e["set"] != "shots24"]
    together = ask(model, tok, examples, max_new_tokens=5)
    alone = ask(model, tok, examples, max_new_tokens=5, batch_tokens=1)
    assert together == alone and [r["messages"] for r in together] == [e["messages"] for e in examples]


def test_load_sets_takes_the_first_prompts_of_every_set():
    names = [e["set"] for e in load_sets(3)]
    assert names == [name for name in SETS for _ in range(3)]


def test_an_evaluation_keeps_replies_that_rescore_recounts_to_the_same_table(tiny, tmp_path):
    done = run("eval.py", "--base", tiny, "--limit", 1, "--max_new_tokens", 3, "--out", tmp_path / "base")
    assert done.returncode == 0, done.stderr
    again = run("eval.py", "--rescore", tmp_path / "base")
    assert again.stdout.strip() and again.stdout in done.stdout


def test_rescore_judges_the_replies_and_does_not_trust_the_kept_verdicts(tmp_path):
    row = {"when": "base", "set": "rules", "family": "bracket", "parameter": "maple", "answer": "Paris"}
    row |= {"reply": "[maple] Paris", "followed": False, "right": False}
    (tmp_path / "replies.jsonl").write_text(json.dumps(row) + "\n")
    assert "| rules | 1 | 100% (100 to 100) | 100% |" in run("eval.py", "--rescore", tmp_path).stdout


def test_show_puts_every_table_into_one_row_a_set():
    table = show({"before": summarize(verdicts("rules", 1, 4)), "after": summarize(verdicts("rules", 3, 4))})
    assert table.splitlines()[0] == "| set | n | kept, before | kept, after | right, before | right, after |"
    assert table.splitlines()[2].startswith("| rules | 4 | 25% (") and table.splitlines()[2].endswith("| 25% | 25% |")


def test_a_rule_not_to_answer_does_not_count_among_the_right_answers():
    rows = [{"set": "rules", "followed": True, "right": right} for right in (True, False, None, None)]
    assert summarize(rows)["rules"]["right"] == 0.5


def test_a_damaged_line_is_named(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl line 2"):
        read_jsonl(tmp_path / "x.jsonl")


def test_replies_with_any_line_separator_of_unicode_are_read_back(tmp_path):
    rows = [{"reply": f"a{separator}b"} for separator in "\u2028\u2029\x85\x0b\x0c\x1c\r\n"]
    write_jsonl(tmp_path / "replies.jsonl", rows)
    assert read_jsonl(tmp_path / "replies.jsonl") == rows


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rescore", "data"], "replies.jsonl"),
        (["--adapter", "data"], "adapter.json"),
        (["--limit", "0"], "limit"),
        (["--batch_tokens", "0"], "--batch_tokens"),
    ],
)
def test_a_bad_flag_is_one_sentence(flags, says):
    done = run("eval.py", *flags)
    assert done.returncode != 0 and says in done.stderr


def test_jsonl_of_other_editors_is_read(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')  # a byte order mark, a blank line
    assert read_jsonl(tmp_path / "x.jsonl") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("line", [b"\xff\xfe\xff", b"[" * 100_000])
def test_a_line_that_is_no_json_at_all_is_named(line, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"x\.jsonl line 2"):
        read_jsonl(tmp_path / "x.jsonl")


@pytest.mark.parametrize("row", ["[]", "5", "{}", '{"reply": 5}', '{"reply": "x", "family": "no such", "parameter": ""}'])
def test_replies_that_are_none_are_one_sentence(row, tmp_path):
    (tmp_path / "replies.jsonl").write_text(row + "\n")
    done = run("eval.py", "--rescore", tmp_path)
    assert done.returncode != 0 and "replies.jsonl" in done.stderr


def test_an_out_directory_that_holds_replies_is_left_alone(tmp_path):
    (tmp_path / "replies.jsonl").write_text("kept\n")
    done = run("eval.py", "--out", tmp_path)
    assert done.returncode != 0 and "already holds" in done.stderr
    assert (tmp_path / "replies.jsonl").read_text() == "kept\n"
