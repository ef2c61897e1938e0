"""eval.py: the loop over prompts, the scores and their intervals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval
from cal import attach, trainable
from data import files
from data.chat import ASSISTANT, SYSTEM, Tokenizer, render
from data.compare import compare, load_runs
from data.files import read_jsonl, write_jsonl
from data.hierarchy.prepare import TESTS, VALS
from data.hierarchy.prepare import examples as load
from data.report import corrected, judge, show, summarize
from eval import ask, ask_base, divergence
from model import Transformer
from tests.small import run


@pytest.fixture(autouse=True)
def made_up_prompts_are_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.report.corrected", lambda task, rows: rows)


def verdicts(name: str, kept: int, n: int) -> list[dict]:
    return [{"set": name, "reply": "", "scores": {"kept": i < kept, "right": i % 4 == 0}} for i in range(n)]


def test_summarize_counts_each_set_by_itself():
    table = summarize(verdicts("rules", 30, 40) + verdicts("plain", 5, 5))
    assert (table["rules"]["kept"]["mean"], table["rules"]["kept"]["n"]) == (0.75, 40)
    assert (table["plain"]["kept"]["mean"], table["plain"]["kept"]["n"]) == (1.0, 5)


def test_the_bootstrap_interval_agrees_with_the_binomial_one():
    """Resampling 0/1 verdicts is a binomial draw: the quantiles of Binomial(200, 0.7) / 200, to its steps of 0.005 and
    the noise of 2,000 resamples (together under 0.02)."""
    entry = summarize(verdicts("rules", 140, 200))["rules"]["kept"]
    draws = np.random.default_rng(7).binomial(200, 0.7, 200_000) / 200
    assert np.allclose([entry["low"], entry["high"]], np.quantile(draws, (0.025, 0.975)), atol=0.02)


def test_replies_come_back_in_the_order_of_the_prompts_whatever_the_batches(tiny):
    """fp32: a batch gives the tokens that single prompts give."""
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    examples = [e for e in load(2) if e["set"] != "shots24"]
    together = dict(ask(model, tok, examples, max_new_tokens=5))
    alone = dict(ask(model, tok, examples, max_new_tokens=5, batch_tokens=1))
    assert together == alone
    assert [together[i]["messages"] for i in range(len(examples))] == [e["messages"] for e in examples]


@torch.no_grad()
@pytest.mark.parametrize("method", ["cal", "mlp", "lora"])
def test_the_divergence_from_the_base_is_torchs_kl_over_the_replys_tokens_and_0_before_training(method, tiny):
    base, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    model = attach(Transformer.from_pretrained(tiny), method)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a city."}]
    rows = [{"messages": turns, "reply": "Paris."}, {"messages": turns, "reply": "It is Rome, I think."}]
    assert divergence(model, tok, rows) == 0
    for p in trainable(model).values():
        torch.nn.init.normal_(p, std=0.5)  # far from the base: fp32 leaves few digits of a small divergence
    values = []
    for row in rows:
        asked, _ = render(tok, turns, add_generation_prompt=True)
        reply = tok.encode(row["reply"])
        ids = torch.tensor([asked + reply])
        _, roles = render(tok, turns, add_generation_prompt=True)
        system = torch.tensor([roles + [ASSISTANT] * len(reply)]) == SYSTEM
        p, q = (m.logits(m(ids, system)).log_softmax(-1)[0, len(asked) - 1 : -1] for m in (base, model))
        values += F.kl_div(q, p, reduction="none", log_target=True).sum(-1).tolist()
    assert divergence(model, tok, rows) == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_load_sets_takes_the_first_prompts_of_every_set():
    names = [e["set"] for e in load(3)]
    assert names == [name for name in TESTS for _ in range(3)]


def test_an_evaluation_keeps_replies_that_rescore_recounts_to_the_same_table(tiny, tmp_path):
    done = run("eval.py", "--base", tiny, "--limit", 1, "--max_new_tokens", 3, "--out", tmp_path / "base")
    assert done.returncode == 0, done.stderr
    again = run("eval.py", "--rescore", tmp_path / "base")
    assert again.stdout.strip() and again.stdout.strip() in done.stdout


def test_rescore_judges_the_replies_and_does_not_trust_the_kept_verdicts(tmp_path):
    row = {"when": "base", "set": "rules", "family": "bracket", "parameter": "maple", "answer": "Paris"}
    row |= {"messages": [], "reply": "[maple] Paris", "scores": {"kept": False, "right": False}}
    (tmp_path / "replies.jsonl").write_text(json.dumps(row) + "\n")
    expected = "| rules | 1 | 100.0% (100 to 100) | 100.0% (100 to 100) |"
    assert expected in run("eval.py", "--rescore", tmp_path).stdout


def test_a_kept_reply_is_scored_by_todays_example_and_not_by_the_copy_beside_it():
    examples = load(2)
    rows = [{**e, "when": "base", "reply": e["answer"], "answer": "what the lists said before"} for e in examples]
    assert [row["answer"] for row in corrected("hierarchy", rows)] == [e["answer"] for e in examples]


def test_replies_to_the_validation_sets_are_todays_too():
    rows = [{**e, "when": "base", "reply": "Paris"} for e in load(1, VALS)]
    assert len(corrected("hierarchy", rows)) == len(VALS)


def test_replies_to_prompts_that_are_gone_are_counted_and_left_out(capsys):
    rows = [{**e, "when": "base", "reply": "Paris"} for e in load(1)]
    gone = {**rows[0], "messages": [{"role": "user", "content": "Which question was struck off?"}]}
    assert len(corrected("hierarchy", [*rows, gone])) == len(rows)
    assert f"hierarchy: 1 of {len(rows) + 1} replies are to prompts that are gone: left out" in capsys.readouterr().err


def test_show_puts_every_table_into_one_row_a_set():
    table = show({"before": summarize(verdicts("rules", 1, 4)), "after": summarize(verdicts("rules", 3, 4))})
    assert table.splitlines()[0] == "| set | n | kept, before | kept, after | right, before | right, after |"
    cells = table.splitlines()[2].split(" | ")
    assert cells[:2] == ["| rules", "4"] and cells[2].startswith("25.0% (") and cells[3].startswith("75.0% (")


def test_a_rule_not_to_answer_does_not_count_among_the_right_answers():
    rows = [{"reply": "", "scores": {"kept": True, "right": right}} for right in (True, False, None, None)]
    entry = summarize(rows)["all"]["right"]
    assert (entry["mean"], entry["n"], entry["undecided"]) == (0.5, 2, 2)


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


# ----------------------------------------------------------------------------------------------------------------------
# the base is asked once


def test_the_base_is_asked_once_for_the_same_weights_and_prompts(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: asked.append(1) or answered(examples))
    model, tok, examples = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny), load(1)
    first, again = (ask_base(model, tok, examples, tiny) for _ in range(2))
    assert first == again and len(asked) == 1


def answered(examples: list[dict]) -> list[dict]:
    return judge("hierarchy", [{**example, "reply": "Paris"} for example in examples])


@pytest.mark.parametrize("content", ["", "[1]\n", "garbage", "cut"])
def test_damaged_replies_of_the_base_are_asked_for_again(content, tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: asked.append(1) or answered(examples))
    model, tok, examples = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny), load(2)
    expected = ask_base(model, tok, examples, tiny)
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) if content == "cut" else content)
    assert ask_base(model, tok, examples, tiny) == expected and len(asked) == 2


def test_kept_replies_of_the_base_are_judged_by_the_score_of_today(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: answered(examples))
    model, tok, examples = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny), load(1)
    ask_base(model, tok, examples, tiny)
    monkeypatch.setattr("data.hierarchy.score.score", lambda example, reply: {"kept": True, "right": None})
    assert all(row["scores"] == {"kept": True, "right": None} for row in ask_base(model, tok, examples, tiny))


def test_other_code_asks_the_base_again_and_rewording_does_not(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: asked.append(1) or answered(examples))
    model, tok, examples = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny), load(1)
    for code in ("a", "a", "b"):
        monkeypatch.setattr(files, "code_of_results", lambda code=code: {"cal.py": code})
        ask_base(model, tok, examples, tiny)
    assert len(asked) == 2


def test_without_a_place_for_the_cache_the_base_is_asked_every_time(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(files, "CACHE", tmp_path / "file")  # no directory can be made there
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: answered(examples))
    model, tok, examples = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny), load(1)
    assert ask_base(model, tok, examples, tiny) == answered(examples)


@pytest.mark.parametrize("change", ["weights", "prompts", "dtype"])
def test_the_base_is_asked_again_when_anything_that_its_replies_depend_on_changed(change, tiny, tmp_path, monkeypatch):
    asked, folder = [], shutil.copytree(tiny, tmp_path / "base")
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(eval, "ask_in_order", lambda model, tok, examples, whose: asked.append(examples) or [])
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    ask_base(model, tok, load(1), folder)
    if change == "weights":
        shutil.copyfile(tiny / "model.safetensors", folder / "model.safetensors")  # written again: perhaps others
    if change == "dtype":
        model = model.to(torch.bfloat16)
    ask_base(model, tok, load(2 if change == "prompts" else 1), folder)
    assert len(asked) == 2


# ----------------------------------------------------------------------------------------------------------------------
# runs side by side


def make_run(folder: Path, kept: list[bool], seed: int = 0, rows: list[int] | None = None, **results) -> Path:
    """A complete run with one reply a prompt of the set "rules"; kept says which of them keep the rule."""
    folder.mkdir(parents=True)
    lines = []
    for i in rows or range(len(kept)):
        example = {"set": "rules", "messages": [{"role": "user", "content": f"question {i}"}], "answer": "Paris"}
        example |= {"family": "bracket", "parameter": "maple"}
        for when, reply in (("before", "Paris"), ("after", "[maple] Paris" if kept[i] else "Rome")):
            lines.append({"when": when, **example, "reply": reply})
    write_jsonl(folder / "replies.jsonl", lines)
    results = {"flags": {"seed": seed, "method": folder.name.split("-")[0]}, "seed": seed, "parameters": 5} | results
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_compare_counts_the_kept_replies_and_pairs_them_by_prompt(tmp_path):
    a = make_run(tmp_path / "a", [True, True, False, False])
    b = make_run(tmp_path / "b", [True, False, True, True], rows=[3, 1, 0, 2])  # the same prompts in another order
    table = compare(load_runs([a, b]))
    row, right = table["hierarchy", "rules", "kept"], table["hierarchy", "rules", "right"]
    assert (row["n"], row["base"], row["groups"]["a"]["mean"], row["groups"]["b"]["mean"]) == (4, 0.0, 0.5, 0.75)
    assert row["groups"]["b"]["difference"] == 0.25 and row["groups"]["a"]["difference"] == 0.0
    assert right["base"] == 1.0 and right["groups"]["b"]["mean"] == 0.75


def test_runs_with_equal_verdicts_have_a_paired_interval_of_nothing(tmp_path):
    """Each alone has an interval of some 0.2; what matters is that no prompt has another verdict."""
    kept = [i % 3 == 0 for i in range(90)]
    table = compare(load_runs([make_run(tmp_path / name, kept) for name in ("a", "b")]))
    entry = table["hierarchy", "rules", "kept"]["groups"]["b"]
    assert (entry["low"], entry["high"]) == (0.0, 0.0)


def test_the_paired_interval_agrees_with_draws_of_the_prompts(tmp_path):
    """Of 200 prompts 50 are gained and 20 lost: the interval of (gained - lost) / 200 under a multinomial draw, to the
    noise of 2,000 resamples and the steps of 1 / 200 (together under 0.02)."""
    first = [i < 100 for i in range(200)]
    second = [20 <= i < 150 for i in range(200)]
    runs = load_runs([make_run(tmp_path / "a", first), make_run(tmp_path / "b", second)])
    entry = compare(runs)["hierarchy", "rules", "kept"]["groups"]["b"]
    draws = np.random.default_rng(3).multinomial(200, [0.25, 0.10, 0.65], 200_000)
    expected = np.quantile((draws[:, 0] - draws[:, 1]) / 200, (0.025, 0.975))
    assert entry["difference"] == pytest.approx(0.15)
    assert np.allclose([entry["low"], entry["high"]], expected, atol=0.02)


def test_runs_that_differ_in_the_seed_alone_share_a_column_with_mean_and_spread(tmp_path):
    folders = [make_run(tmp_path / f"{name}-s{seed}", [True] * n + [False] * (4 - n), seed=seed)
               for name, n, seed in (("cal", 3, 0), ("cal", 4, 1), ("lora", 2, 0), ("lora", 1, 1))]  # fmt: skip
    done = run("eval.py", "--compare", *folders)
    assert "| task | set | measure | n | base | cal | lora | lora - cal |" in done.stdout
    assert "| hierarchy | rules | kept | 4 | 0% | 88% (75 to 100) | 38% (25 to 50) | -50 (" in done.stdout
    assert "| cal | 0, 1 | 5 |" in done.stdout


def test_runs_of_other_code_or_other_lists_are_other_runs_and_not_other_seeds(tmp_path):
    folders = [make_run(tmp_path / f"cal-s{seed}", [True] * 4, flags={"seed": seed, "code": {"cal.py": code}})
               for seed, code in ((0, "a"), (1, "a"), (2, "b"))]  # fmt: skip
    groups = load_runs(folders)
    assert sorted(len(runs) for runs in groups.values()) == [1, 2] and "cal-s2" in groups


def test_the_same_seed_twice_is_no_second_seed(tmp_path):
    flags = {"seed": 0, "method": "cal"}
    a, b = (make_run(tmp_path / name, [True] * 4, flags=flags) for name in ("a", "b"))
    assert list(load_runs([a, b])) == ["a", "b"]


def test_prompts_that_not_all_runs_have_are_left_out(tmp_path):
    a, b = make_run(tmp_path / "a", [True] * 6), make_run(tmp_path / "b", [False] * 6, rows=[0, 1, 2])
    row = compare(load_runs([a, b]))["hierarchy", "rules", "kept"]
    assert row["n"] == 3 and row["groups"]["b"]["difference"] == -1.0


def test_compare_writes_its_numbers_beside_the_runs_and_skips_what_is_no_complete_run(tmp_path):
    a, unfinished = make_run(tmp_path / "out" / "a", [True, False]), tmp_path / "out" / "unfinished"
    unfinished.mkdir()
    assert run("eval.py", "--compare", a, unfinished).returncode == 0
    done = run("eval.py", "--compare", *sorted((tmp_path / "out").iterdir()))  # as the shell expands out/*
    assert done.returncode == 0 and "unfinished" in done.stderr and "compare.json is" not in done.stderr
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert numbers["table"][0]["groups"]["a"]["mean"] == 0.5 and numbers["runs"]["a"][0]["parameters"] == 5


def test_real_runs_of_two_methods_are_compared(tiny, tmp_path):
    flags = ("--base", tiny, "--steps", 3, "--eval_limit", 2, "--dtype", "fp32")
    for method in ("cal", "lora"):
        done = run("train.py", *flags, "--method", method, "--out", tmp_path / method)
        assert done.returncode == 0, done.stderr
    done = run("eval.py", "--compare", tmp_path / "cal", tmp_path / "lora")
    assert done.returncode == 0, done.stderr
    for name in TESTS:
        assert f"| hierarchy | {name} | kept | 2 |" in done.stdout


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    a = make_run(tmp_path / "a" / "run", [True, False], flags={"method": "cal"})
    b = make_run(tmp_path / "b" / "run", [True, True], flags={"method": "lora"})
    assert list(load_runs([a, b])) == [str(a), str(b)]


def test_runs_that_share_no_prompt_are_a_sentence(tmp_path):
    a, b = make_run(tmp_path / "a", [True] * 4, rows=[0, 1]), make_run(tmp_path / "b", [True] * 4, rows=[2, 3])
    done = run("eval.py", "--compare", a, b)
    assert done.returncode != 0 and "share no prompt" in done.stderr


def test_prompts_that_one_run_left_undecided_are_in_no_difference(tmp_path):
    """Where both decide they agree; a difference could only come from the prompts that b left open."""
    groups = load_runs([make_run(tmp_path / name, [i < 5 for i in range(10)]) for name in ("a", "b")])
    for key in list(groups["b"][0]["rows"])[5:]:
        groups["b"][0]["rows"][key]["scores"]["kept"] = None
    row = compare(groups)["hierarchy", "rules", "kept"]
    assert row["n"] == 5 and row["groups"]["b"]["difference"] == 0.0


def test_runs_of_different_bases_have_no_base_in_common(tmp_path):
    a, b = make_run(tmp_path / "a", [True] * 3), make_run(tmp_path / "b", [True] * 3)
    text = (b / "replies.jsonl").read_text()
    (b / "replies.jsonl").write_text(text.replace('"reply": "Paris"', '"reply": "Lyon"'))
    assert compare(load_runs([a, b]))["hierarchy", "rules", "kept"]["base"] is None


@pytest.mark.parametrize("left", ["--ask none", "missing", "flags alone", "before alone", "unfinished tasks"])
def test_a_directory_without_a_complete_run_is_named_and_left_out(left, tmp_path):
    a, other = make_run(tmp_path / "a", [True, False]), tmp_path / "other"
    if left != "missing":
        other.mkdir()
        (other / "flags.json").write_text("{}")
    if left in ("--ask none", "before alone"):
        rows = [r for r in read_jsonl(a / "replies.jsonl") if r["when"] == "before"]
        write_jsonl(other / "replies.jsonl", [] if left == "--ask none" else rows)
    if left == "unfinished tasks":
        write_jsonl(other / "ifeval.jsonl", [{"when": "base", "reply": "x"}])
    done = run("eval.py", "--compare", a, other)
    why = "does not exist" if left == "missing" else "holds no complete run"
    assert done.returncode == 0 and f"{other} is left out: it {why}" in done.stderr and "| rules |" in done.stdout


def test_nothing_to_compare_is_a_sentence(tmp_path):
    done = run("eval.py", "--compare", tmp_path)
    assert done.returncode != 0 and "complete run" in done.stderr


def test_a_set_without_right_answers_to_count_has_none():
    assert summarize([{"reply": "", "scores": {"right": None}}])["all"]["right"]["mean"] is None


# ----------------------------------------------------------------------------------------------------------------------
# prompts of one's own


def write_own(file: Path, *records: object) -> Path:
    write_jsonl(file, [r if isinstance(r, dict) else {"messages": [{"role": "user", "content": r}]} for r in records])
    return file


def test_prompts_of_ones_own_are_asked_kept_scored_and_rescored(tiny, tmp_path):
    rule = [{"role": "system", "content": "Say maple."}, {"role": "user", "content": "Hi"}]
    a = write_own(tmp_path / "a.jsonl", {"messages": rule, "expect": "."}, {"messages": rule[1:], "expect": "no such word"})
    b = write_own(tmp_path / "b.jsonl", "Hello")
    flags = ("--tasks", f"{a},{b}", "--max_new_tokens", 3, "--out", tmp_path / "o")
    done = run("eval.py", "--base", tiny, *flags)
    assert done.returncode == 0, done.stderr
    assert "| a | 2 | 50.0% (0 to 100) |" in done.stdout and "| b | 1 | – |" in done.stdout
    assert [row["id"] for row in read_jsonl(tmp_path / "o" / "own.jsonl")] == ["a/0", "a/1", "b/0"]
    assert run("eval.py", "--rescore", tmp_path / "o").stdout.strip() in done.stdout


def test_runs_on_prompts_of_ones_own_are_compared(tiny, tmp_path):
    record = {"messages": [{"role": "user", "content": "Hi"}], "expect": "."}
    file = write_own(tmp_path / "mine.jsonl", record)
    for name in ("x", "y"):
        more = ("--max_new_tokens", 2 if name == "x" else 3, "--out", tmp_path / name)
        assert run("eval.py", "--base", tiny, "--tasks", file, *more).returncode == 0
    assert "| own | mine | expected | 1 |" in run("eval.py", "--compare", tmp_path / "x", tmp_path / "y").stdout


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": []}, "the conversation is empty"),
        ({"message": "Hi"}, "line 1 can't be asked"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "last message is not the user's"),
        ({"messages": [{"role": "user", "content": "Hi"}], "expect": "("}, "line 1 can't be asked"),
    ],
)
def test_a_prompt_of_ones_own_that_can_not_be_asked_is_named(record, says, tiny, tmp_path):
    done = run("eval.py", "--base", tiny, "--tasks", write_own(tmp_path / "x.jsonl", record))
    assert done.returncode != 0 and says in done.stdout + done.stderr and "x.jsonl line 1" in done.stdout


def test_two_files_of_one_name_are_refused(tiny, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_own(tmp_path / name / "x.jsonl", "Hi")
    done = run("eval.py", "--base", tiny, "--tasks", f"{tmp_path}/a/x.jsonl,{tmp_path}/b/x.jsonl")
    assert done.returncode != 0 and "have one name" in done.stdout


def test_a_file_of_prompts_that_is_missing_is_said(tiny, tmp_path):
    done = run("eval.py", "--base", tiny, "--tasks", tmp_path / "none.jsonl")
    assert done.returncode != 0 and "none.jsonl" in done.stdout
