"""train.py: what is learned from, in which order, and what a run leaves behind."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from cal import attach
from data.chat import Tokenizer, render
from data.files import read_jsonl
from data.hierarchy.prepare import HERE, VALS, prepare_if_needed
from data.hierarchy.score import first_sentence, score
from data.sft.prepare import prepare as prepare_corpus
from data.tokens import Conversations, batches_of_step, collate, make_batches
from eval import validate
from model import Transformer
from tests.small import ROOT, TURNS, launch, run, write_data
from train import learning_rate


@pytest.fixture(scope="module")
def tok(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2)


SAMPLES = ("glaive_toolcall_en_demo.json.gz", "roleplay-simple-deduped-roleplay-instruct.json.gz")


def hierarchy_records(n: int) -> list[dict]:
    prepare_if_needed()
    return read_jsonl(ROOT / "data" / "hierarchy" / "train.jsonl")[:n]


def load(tok: Tokenizer, folder: Path, *records: dict) -> Conversations:
    return Conversations(write_data(folder, *records) / "train.jsonl", tok, 1024)


@pytest.fixture(scope="module")
def small_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SimpleNamespace]:
    """A run of four steps with its evaluations, three prompts a set."""
    out = tmp_path_factory.mktemp("run") / "cal"
    return out, run("train.py", "--base", tiny, "--out", out, "--steps", 4, "--eval_limit", 3, "--dtype", "fp32")


# ----------------------------------------------------------------------------------------------------------------------
# batches


def test_padding_is_no_token_no_system_and_no_target(tok, tmp_path):
    short, long = load(tok, tmp_path / "d", {"messages": TURNS[:3]}, {"messages": TURNS})
    _, system, targets = collate([short, long], "cpu")
    assert not system[0, len(short[0]) :].any() and (targets[0, len(short[0]) :] == -1).all()


def test_batches_hold_every_conversation_once_within_the_budget():
    lengths = torch.randint(5, 120, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = make_batches(lengths, 600, seed=1)
    assert Counter(i for b in batches for i in b) == Counter(range(500))
    assert all(max(lengths[i] for i in b) * len(b) <= 600 for b in batches)


def test_a_conversation_longer_than_the_budget_is_a_batch_of_its_own():
    assert sorted(map(len, make_batches([10, 10, 900], 100, seed=0))) == [1, 2]


def test_every_epoch_takes_each_batch_once_in_another_order():
    steps = [batches_of_step(s, n=12, accumulate=3, seed=5) for s in range(8)]
    first, second = ([b for step in part for b in step] for part in (steps[:4], steps[4:]))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


def test_learning_rate_warms_up_to_the_peak_and_ends_at_a_tenth_of_it():
    rates = [learning_rate(s, 150, 1e-3) for s in range(150)]  # ten steps of warm-up
    assert rates[0] == pytest.approx(1e-4) and max(rates) == pytest.approx(1e-3) and rates.index(max(rates)) in (9, 10)
    assert rates[-1] == pytest.approx(1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# a run


def test_a_run_prints_the_scores_that_a_recount_of_its_replies_gives(small_run):
    out, done = small_run
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out / "replies.jsonl")
    results = json.loads((out / "results.json").read_text())
    for when in ("before", "after"):
        for name, entry in results[when].items():
            counted = [score(r, r["reply"])["kept"] for r in rows if r["when"] == when and r["set"] == name]
            assert entry["n"] == len(counted) == 3 and entry["followed"] == pytest.approx(sum(counted) / 3)
            assert entry["low"] <= entry["followed"] <= entry["high"]
    for name in results["after"]:
        assert f"| {name} | 3 |" in done.stdout


def test_a_run_evaluates_all_seven_test_sets(small_run):
    results = json.loads((small_run[0] / "results.json").read_text())
    assert set(results["after"]) == {"rules", "attacks", "families", "shots2", "shots8", "shots24", "plain"}


def test_what_training_cost_without_a_rule_is_printed_and_kept_and_follows_from_the_replies(small_run):
    out, done = small_run
    results, rows = json.loads((out / "results.json").read_text()), read_jsonl(out / "replies.jsonl")
    before, after = ([r["reply"] for r in rows if (r["when"], r["set"]) == (when, "plain")] for when in ("before", "after"))
    same = [first_sentence(old) == first_sentence(new) for old, new in zip(before, after, strict=True)]
    assert results["same_sentence"] == pytest.approx(sum(same) / 3) and results["kl"] >= 0
    assert f"{results['same_sentence']:.0%} of the replies begin with the base's very sentence" in done.stdout
    assert f"KL(base || trained) is {results['kl']:.3f} nats a token" in done.stdout


def test_the_validation_sets_are_asked_instead_of_the_test_sets_on_request(tiny, tmp_path):
    flags = ("--base", tiny, "--steps", 1, "--ask", "val", "--eval_limit", 1, "--dtype", "fp32", "--out", tmp_path / "r")
    assert run("train.py", *flags).returncode == 0
    assert set(json.loads((tmp_path / "r" / "results.json").read_text())["after"]) == set(VALS)


def test_metrics_hold_a_line_a_step(small_run):
    rows = read_jsonl(small_run[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all({"loss", "lr", "tokens", "seconds"} <= row.keys() and math.isfinite(row["loss"]) for row in rows)


def test_results_say_which_weights_the_numbers_come_from(small_run, tiny):
    assert str(tiny) in json.loads((small_run[0] / "results.json").read_text())["weights"]


def test_a_finished_run_leaves_no_half_written_file(small_run):
    names = {file.name for file in small_run[0].iterdir()}
    assert names == {
        "flags.json", "metrics.jsonl", "replies.jsonl", "results.json", "adapter.safetensors", "adapter.json"
    }  # fmt: skip


def test_the_first_loss_is_the_bases_own(small_run, tiny, tok):
    """At step 0 the blocks are the identity, so the loss is the bare base's on that batch (1e-4: reordered sums)."""
    conversations = Conversations(ROOT / "data" / "hierarchy" / "train.jsonl", tok, 1024)
    batches = make_batches(conversations.lengths, 640, seed=0)
    (b,) = batches_of_step(0, len(batches), 1, seed=0)
    ids, _, targets = collate([conversations[i] for i in batches[b]], "cpu")
    model = Transformer.from_pretrained(tiny)
    logits = model.logits(model(ids))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert read_jsonl(small_run[0] / "metrics.jsonl")[0]["loss"] == pytest.approx(expected.item(), abs=1e-4)


def test_equal_seeds_give_equal_losses_and_other_seeds_others(small_run, tiny, tmp_path):
    def losses(name, seed):
        flags = ("--base", tiny, "--out", tmp_path / name, "--steps", 4, "--ask", "none", "--dtype", "fp32", "--seed", seed)
        assert run("train.py", *flags).returncode == 0
        return [row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")]

    assert losses("a", 0) == [row["loss"] for row in read_jsonl(small_run[0] / "metrics.jsonl")] != losses("b", 1)


def test_a_step_of_accumulated_batches_has_the_gradient_of_one_big_batch(tiny, tok, tmp_path):
    """Normalised by the targets of the whole step: 1e-6 allows for another order of fp32 sums."""
    long = [{**m, "content": m["content"] + " and so on" * i} for i, m in enumerate(TURNS)]
    conversations = load(tok, tmp_path / "d", *[{"messages": m} for m in (TURNS, TURNS[:3], long)])
    n = sum(int((c[2] >= 0).sum()) for c in conversations)
    torch.manual_seed(0)
    model = attach(Transformer.from_pretrained(tiny))
    gradients = []
    for parts in ([[0, 1, 2]], [[0], [1, 2]]):
        model.zero_grad()
        for part in parts:
            ids, system, targets = collate([conversations[i] for i in part], "cpu")
            loss, _ = model.loss(model(ids, system), targets)
            (loss / n).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.inserted.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_data_without_any_system_message_trains_nothing_and_does_not_fail(tiny, tmp_path):
    folder = write_data(tmp_path / "d", *[{"messages": TURNS[1:3]}] * 8)
    out = tmp_path / "out"
    flags = ("--base", tiny, "--data", folder, "--out", out, "--steps", 3, "--ask", "none", "--dtype", "fp32")
    done = run("train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert len({row["loss"] for row in read_jsonl(out / "metrics.jsonl")}) == 1  # the same batch, the same model


def test_the_cache_of_hidden_states_is_refused_where_the_first_layer_learns(tiny, tmp_path):
    flags = ("--base", tiny, "--method", "lora", "--cache_prefix", "--ask", "none", "--out", tmp_path / "o")
    assert "--cache_prefix is of --method cal and mlp" in run("train.py", *flags).stderr


def test_a_cache_that_other_batches_filled_changes_no_loss(tiny, tmp_path):
    folder = write_data(tmp_path / "d", *hierarchy_records(40))
    flags = ("--base", tiny, "--data", folder, "--ask", "none", "--dtype", "bf16", "--steps", 8)
    runs = {"other": ("--cache_prefix", "--batch_tokens", 150), "without": (), "with": ("--cache_prefix", "--seed", 0)}
    for name, more in runs.items():
        assert run("train.py", *flags, *more, "--out", tmp_path / name).returncode == 0
    without, cached = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("without", "with"))
    assert [row["loss"] for row in without] == [row["loss"] for row in cached]


def test_a_run_is_not_resumed_on_other_data_or_another_base(tiny, tmp_path):
    folder, base = write_data(tmp_path / "d", *hierarchy_records(40)), shutil.copytree(tiny, tmp_path / "base")
    flags = ("--base", base, "--data", folder, "--steps", 30, "--ask", "none", "--save_every", 2, "--out", tmp_path / "r")
    process = start(flags, tmp_path / "r" / "metrics.jsonl", lines=4)
    process.kill()
    process.communicate()
    stamp = (base / "model.safetensors").stat()
    (base / "model.safetensors").touch()
    done = run("train.py", *flags, "--resume")
    assert done.returncode != 0 and "the base has changed since the run in" in done.stderr
    os.utime(base / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in hierarchy_records(20)))
    done = run("train.py", *flags, "--resume")
    assert done.returncode != 0 and "the data has changed since the run in" in done.stderr


def test_a_run_of_cal_without_any_system_prompt_says_that_nothing_is_learned(tiny, tmp_path):
    folder = write_data(tmp_path / "d", *[{"messages": TURNS[1:3]}] * 8)
    done = run("train.py", "--base", tiny, "--data", folder, "--out", tmp_path / "o", "--steps", 1, "--ask", "none")
    assert "0 with a system prompt" in done.stdout and "it will stay the identity" in done.stdout


@pytest.mark.parametrize(("dtype", "method"), [("bf16", "cal"), ("bf16", "mlp"), ("fp32", "cal")])
def test_losses_with_cached_hidden_states_are_those_without_bit_for_bit(dtype, method, tiny, tmp_path):
    """Two epochs: the first fills the cache, the second reads it. The CPU's products do not depend on the batch."""
    folder = write_data(tmp_path / "d", *hierarchy_records(40))
    flags = ("--base", tiny, "--data", folder, "--steps", 14, "--ask", "none", "--dtype", dtype, "--method", method)
    for name, more in (("without", ()), ("with", ("--cache_prefix",))):
        done = run("train.py", *flags, *more, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    without, cached = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("without", "with"))
    assert [row["loss"] for row in without] == [row["loss"] for row in cached]


def test_grad_checkpoint_changes_no_loss(tiny, tmp_path):
    folder = write_data(tmp_path / "d", *hierarchy_records(20))
    flags = ("--base", tiny, "--data", folder, "--steps", 6, "--ask", "none", "--dtype", "fp32")
    for name, more in (("plain", ()), ("again", ("--grad_checkpoint",))):
        assert run("train.py", *flags, *more, "--out", tmp_path / name).returncode == 0
    plain, again = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("plain", "again"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in again]


# ----------------------------------------------------------------------------------------------------------------------
# stopping and going on


def batches_seen(monkeypatch: pytest.MonkeyPatch, *flags: object) -> list[tuple[Tensor, Tensor]]:
    """The ids and system masks that a run's model is given, in order."""
    seen, forward = [], Transformer.forward
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "forward", lambda m, ids, s, **_: seen.append((ids, s)) or forward(m, ids, s))
        assert run("train.py", *flags).returncode == 0
    return seen


@pytest.mark.parametrize("method", ["mlp", "lora", "full"])
def test_every_method_learns_from_the_batches_of_cal_in_the_same_order(method, tiny, tmp_path, monkeypatch):
    flags = ("--base", tiny, "--steps", 6, "--accumulate", 2, "--ask", "none", "--dtype", "fp32", "--val_every", 4)
    cal = batches_seen(monkeypatch, *flags, "--out", tmp_path / "cal")
    other = batches_seen(monkeypatch, *flags, "--method", method, "--out", tmp_path / method)
    assert len(cal) == len(other) > 12
    assert all(torch.equal(x, y) for a, b in zip(cal, other) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", ["cal", "mlp", "lora", "full", "none"])
def test_a_run_of_any_method_leaves_an_adapter_that_eval_loads(method, tiny, tmp_path):
    flags = ("--base", tiny, "--steps", 2, "--eval_limit", 1, "--dtype", "fp32", "--method", method)
    done = run("train.py", *flags, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    done = run("eval.py", "--adapter", tmp_path / "run", "--limit", 1, "--dtype", "fp32", "--out", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    trained, again = (read_jsonl(tmp_path / name) for name in ("run/replies.jsonl", "again/hierarchy.jsonl"))
    assert {r["id"]: r["reply"] for r in trained if r["when"] == "after"} == {r["id"]: r["reply"] for r in again}


def test_validation_sees_the_same_conversations_in_eval_mode_each_time(tiny, tmp_path, monkeypatch):
    modes, forward = [], Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda m, ids, s, **_: modes.append((m.training, ids)) or forward(m, ids, s))
    flags = ("--base", tiny, "--steps", 3, "--val_every", 1, "--ask", "none", "--dtype", "fp32", "--out", tmp_path / "r")
    assert run("train.py", *flags).returncode == 0
    n = (len(modes) - 3) // 3  # batches of a validation, after each step's one
    first, second, third = ([ids for _, ids in modes[i * (n + 1) + 1 : (i + 1) * (n + 1)]] for i in range(3))
    assert n > 1 and not any(training for training, _ in modes)
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, third, strict=True))


def test_the_validation_loss_is_a_mean_over_targets_not_over_batches(tiny, tok):
    """The same from the bare logits of each conversation alone (1e-5: fp32 sums in another order)."""
    conversations = Conversations(ROOT / "data" / "hierarchy" / "val.jsonl", tok, 1024)
    model = Transformer.from_pretrained(tiny)
    with torch.no_grad():
        losses = [cross_entropy(model.logits(model(i[None]))[0], t, ignore_index=-1, reduction="none")[t >= 0]
                  for i, _, t in conversations]  # fmt: skip
    assert validate(model, conversations, 640, "cpu") == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)


def start(flags: tuple, until: Path, lines: int) -> subprocess.Popen:
    """A run in the background, returned once metrics.jsonl has so many lines."""
    command = [sys.executable, "train.py", *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (until.exists() and until.read_text().count("\n") >= lines):
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("how", "method"),
    [(signal.SIGKILL, "cal"), (signal.SIGINT, "cal"), (signal.SIGKILL, "lora"), (signal.SIGKILL, "full")],
)
def test_a_run_that_was_stopped_resumes_to_the_very_losses_of_one_that_was_not(how, method, tiny, tmp_path):
    flags = ("--base", tiny, "--steps", 30, "--ask", "none", "--dtype", "fp32", "--save_every", 7, "--val_every", 9)
    flags += ("--method", method)
    assert run("train.py", *flags, "--out", tmp_path / "whole").returncode == 0
    process = start((*flags, "--out", tmp_path / "cut"), tmp_path / "cut" / "metrics.jsonl", lines=10)
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0
    done = run("train.py", *flags, "--out", tmp_path / "cut", "--resume")
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


def losses_of(out: Path) -> list[list]:
    """What a run's metrics say of each step, but for the time that it took."""
    return [[row.get(k) for k in ("step", "loss", "lr", "tokens", "val_loss")] for row in read_jsonl(out / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_killed_at_8_random_moments_has_the_very_losses_of_one_that_was_not(tiny, tmp_path):
    flags = ["--base", tiny, "--steps", 120, "--eval_limit", 1, "--dtype", "fp32", "--save_every", 3, "--val_every", 50]
    assert run("train.py", *flags, "--out", tmp_path / "whole").returncode == 0
    command = [sys.executable, "train.py", *map(str, flags), "--out", str(tmp_path / "cut"), "--resume"]
    kills, moments = 0, random.Random(0)
    while kills < 8:
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=ROOT, stderr=said, stdout=subprocess.DEVNULL)
        try:
            code = process.wait(moments.uniform(0, 1) * 8)  # it takes some four seconds until the first step
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert code in (0, -signal.SIGKILL), (tmp_path / "said").read_text()
        kills += code != 0
        # it came to its end, or was killed after its last file was written: the next one starts anew
        if (tmp_path / "cut" / "results.json").exists():
            assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
            shutil.rmtree(tmp_path / "cut")
    if not (tmp_path / "cut" / "results.json").exists():
        assert run("train.py", *flags, "--out", tmp_path / "cut", "--resume").returncode == 0
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


KILL_WHILE_WRITING = """
import os, pathlib, runpy, signal, sys
name, whole = sys.argv[1], pathlib.Path.write_bytes

def half(part, data):
    if not part.name.startswith(name + ".") or part.suffix != ".part":
        return whole(part, data)
    whole(part, bytes(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

pathlib.Path.write_bytes, sys.argv = half, ["train.py", *sys.argv[2:]]
runpy.run_path("train.py", run_name="__main__")
"""


NINE_STEPS = ("--steps", 9, "--eval_limit", 1, "--dtype", "fp32", "--save_every", 4)


@pytest.fixture(scope="module")
def nine_steps(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("nine") / "whole"
    assert run("train.py", "--base", tiny, *NINE_STEPS, "--out", out).returncode == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flags.json", "replies.jsonl", "metrics.jsonl", "checkpoint.pt",
                                  "adapter.safetensors", "adapter.json", "results.json"])  # fmt: skip
def test_a_run_killed_while_it_writes_a_file_resumes_to_the_same_end(name, tiny, nine_steps, tmp_path):
    flags, cut = ["--base", tiny, *NINE_STEPS], tmp_path / "cut"
    command = [sys.executable, "-c", KILL_WHILE_WRITING, name, *map(str, flags), "--out", str(cut)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert not (cut / name).exists() and list(cut.glob(f"{name}.*.part"))
    done = run("train.py", *flags, "--out", cut, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses_of(cut) == losses_of(nine_steps)
    for file in ("adapter.safetensors", "replies.jsonl"):
        assert (cut / file).read_bytes() == (nine_steps / file).read_bytes()
    assert {f.name for f in cut.iterdir()} == {f.name for f in nine_steps.iterdir()}


def test_an_output_directory_that_holds_a_run_is_left_alone(small_run, tiny):
    before = {file.name: file.read_bytes() for file in small_run[0].iterdir()}
    done = run("train.py", "--base", tiny, "--out", small_run[0], "--steps", 4)
    assert done.returncode != 0 and "already holds a run" in done.stderr
    assert before == {file.name: file.read_bytes() for file in small_run[0].iterdir()}


def test_resume_with_other_flags_names_them(tiny, tmp_path):
    flags = ("--base", tiny, "--ask", "none", "--dtype", "fp32", "--save_every", 1, "--out", tmp_path / "r")
    process = start((*flags, "--steps", 500), tmp_path / "r" / "metrics.jsonl", lines=3)
    process.kill()
    process.communicate()
    done = run("train.py", *flags, "--steps", 400, "--lr", 0.5, "--resume")
    assert done.returncode != 0 and "--steps" in done.stderr and "--lr" in done.stderr


def test_flags_are_compared_even_where_the_run_died_before_its_first_checkpoint(tiny, tmp_path):
    flags = ("--base", tiny, "--out", tmp_path / "r", "--eval_limit", 1, "--dtype", "fp32")
    process = start((*flags, "--seed", 1), tmp_path / "r" / "metrics.jsonl", lines=1)
    process.kill()
    process.communicate()
    done = run("train.py", *flags, "--seed", 2, "--resume")
    assert done.returncode != 0 and "--seed" in done.stderr


def test_resume_leaves_a_folder_alone_that_holds_no_run(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    done = run("train.py", "--base", tiny, "--out", tmp_path, "--resume")
    assert done.returncode != 0 and "which is of no run" in done.stderr
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("content", [b"", b"garbage", "cut"])
def test_a_damaged_checkpoint_is_one_sentence(content, tiny, tmp_path):
    flags = ("--base", tiny, "--ask", "none", "--dtype", "fp32", "--save_every", 1, "--steps", 500, "--out", tmp_path / "r")
    process = start(flags, tmp_path / "r" / "metrics.jsonl", lines=3)
    process.kill()
    process.communicate()
    file = tmp_path / "r" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-1000] if content == "cut" else content)
    done = run("train.py", *flags, "--resume")
    assert done.returncode != 0 and "checkpoint.pt is damaged" in done.stderr


def test_a_mistake_before_the_run_begins_leaves_no_directory_behind(tiny, tmp_path):
    assert run("train.py", "--base", tiny, "--out", tmp_path / "o", "--data", "no_such_data").returncode != 0
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_of_other_files_is_left_alone_and_nobody_is_told_to_delete_it(resume, tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    done = run("train.py", "--base", tiny, "--out", tmp_path, *resume)
    assert done.returncode != 0 and "thesis.txt" in done.stderr and "delete" not in done.stderr


def test_processes_that_do_not_see_the_same_checkpoint_stop_with_a_sentence(tiny, tmp_path):
    """Each process has its own --out, as on two nodes without a shared disk."""
    flags = ["--base", str(tiny), "--steps", "6", "--accumulate", "2", "--ask", "none", "--dtype", "fp32", "--save_every", "2"]
    process = start((*flags, "--out", tmp_path / "0"), tmp_path / "0" / "metrics.jsonl", lines=4)
    process.kill()
    process.communicate()
    (tmp_path / "1").mkdir()
    code = "import os, runpy, sys; sys.argv += [f'{sys.argv.pop()}/' + os.environ['RANK']]; sys.argv[0] = 'train.py'; "
    code += "runpy.run_path('train.py', run_name='__main__')"
    (tmp_path / "one.py").write_text(code)
    done = launch(2, *flags, "--resume", "--out", tmp_path, script=tmp_path / "one.py")
    assert done.returncode != 0 and "give all of them one shared --out" in done.stderr


def test_of_two_runs_in_one_directory_one_wins_and_the_other_says_why_not(tiny, tmp_path):
    flags = ("--base", tiny, "--steps", 40, "--ask", "none", "--dtype", "fp32", "--out", tmp_path / "r")
    both = [subprocess.Popen([sys.executable, "train.py", *map(str, flags), "--seed", str(seed)], cwd=ROOT,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for seed in (1, 2)]  # fmt: skip
    said = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 1]
    assert "another run is at work" in said[codes.index(1)]
    flags, results = (json.loads((tmp_path / "r" / name).read_text()) for name in ("flags.json", "results.json"))
    assert flags["seed"] == results["seed"] == (1, 2)[codes.index(0)]
    assert len(losses_of(tmp_path / "r")) == 40


# ----------------------------------------------------------------------------------------------------------------------
# several processes


@pytest.mark.parametrize("silent", [False, True], ids=["hierarchy", "one batch without a system message"])
def test_two_processes_give_the_losses_of_one_on_the_same_batches(silent, tok, tiny, tmp_path):
    """1e-5: the gradients of a step are added up in another order."""
    flags = ["--base", tiny, "--steps", 5, "--accumulate", 2, "--ask", "none", "--dtype", "fp32"]
    if silent:  # two batches, of one kind each, so that every step has one in either process
        records = [{"messages": TURNS[1:3]}] * 6 + [{"messages": TURNS}] * 6
        flags += ["--data", write_data(tmp_path / "d", *records), "--batch_tokens", 6 * len(render(tok, TURNS)[0])]
    assert run("train.py", *flags, "--out", tmp_path / "one").returncode == 0
    done = launch(2, *flags, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one, two = ([row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")] for name in ("one", "two"))
    assert len(two) == 5 and two == pytest.approx(one, abs=1e-5)
    assert len(set(one)) == 5  # something was learned, and summed


def test_processes_that_do_not_divide_the_batches_of_a_step_are_a_sentence(tiny, tmp_path):
    done = launch(2, "--base", tiny, "--accumulate", 3, "--out", tmp_path / "o")
    assert done.returncode != 0 and "must be a multiple of the 2 processes" in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# bad input: one sentence that names it


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--placement", "nowhere"], "late8th"),
        (["--steps", "0"], "--steps"),
        (["--clip", "-1"], "--clip"),
        (["--clip", "nan"], "--clip"),
        (["--lr", "inf"], "--lr"),
        (["--device", "meta"], "meta"),
        (["--cal_ffn", "0"], "--cal_ffn"),
        (["--device", "abacus"], "abacus"),
        (["--base", "no/such/directory/here"], "no/such/directory/here"),
        (["--data", "no_such_data"], "no_such_data"),
        (["--wordings", "x"], "--wordings"),
        (["--method", "lora", "--rank", "0"], "--rank is 0"),
        (["--method", "mlp", "--rank", "8"], "--rank is of --method lora"),
        (["--width", "8"], "--width is of --method mlp"),
        (["--method", "mlp", "--width", "-1"], "--width is -1"),
    ],
)
def test_a_bad_flag_is_one_sentence(flags, says, tiny, tmp_path):
    done = run("train.py", "--base", tiny, "--out", tmp_path / "o", "--ask", "none", *flags)
    assert done.returncode != 0 and says in done.stderr


@pytest.mark.parametrize(
    ("train", "val", "says"),
    [
        ([{"messages": TURNS[:2]}], None, "has no reply of the assistant"),
        ([{"messages": TURNS[:2] + [{"role": "assistant", "content": "so " * 3000}]}], None, "at most 2048 tokens"),
        ([{"messages": TURNS}], "", "val.jsonl has nothing within 2048 tokens"),
    ],
)
def test_data_that_has_nothing_to_learn_or_to_validate_says_why(train, val, says, tiny, tmp_path):
    folder = write_data(tmp_path / "d", *train)
    if val is not None:
        (folder / "val.jsonl").write_text(val)
    done = run("train.py", "--base", tiny, "--data", folder, "--out", tmp_path / "o", "--steps", 1, "--ask", "none")
    assert says in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_loss_that_is_not_finite_stops_with_a_sentence_and_leaves_no_adapter(tiny, tmp_path):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors")
    done = run("train.py", "--base", broken, "--out", tmp_path / "o", "--ask", "none", "--steps", 9)
    assert done.returncode != 0 and "lower --lr" in done.stderr
    assert not (tmp_path / "o" / "adapter.safetensors").exists()


# ----------------------------------------------------------------------------------------------------------------------
# the real model


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cal", "lora"])
def test_the_real_smollm2_halves_its_loss_in_12_steps(method, tmp_path):
    folder = tmp_path / "data"  # without a val.jsonl, whose loss takes as long as all the steps
    folder.mkdir()
    prepare_if_needed()
    shutil.copy(HERE / "train.jsonl", folder)
    done = run("train.py", "--method", method, "--data", folder, "--steps", 12, "--ask", "none", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert sum(losses[-3:]) / 3 < losses[0] / 2


@pytest.mark.slow
def test_20_steps_on_real_conversations_of_the_corpus_lower_the_real_smollm2s_loss(shared, tmp_path):
    samples = [shared / "samples" / name for name in SAMPLES]
    prepare_corpus(tmp_path / "sft", files=samples, n=400)
    (tmp_path / "sft" / "val.jsonl").unlink()
    flags = ("--data", tmp_path / "sft", "--steps", 20, "--max_tokens", 400, "--ask", "none")
    done = run("train.py", *flags, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    # a step's loss depends on its few conversations: five steps together fall, by a tenth and more where it learns
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_a_plain_one_and_compiles_a_bounded_number_of_times(tiny, tmp_path):
    folder = write_data(tmp_path / "d", *hierarchy_records(60))
    flags = ("--base", tiny, "--data", folder, "--steps", 16, "--ask", "none", "--dtype", "bf16", "--batch_tokens", 400)
    plain = run("train.py", *flags, "--out", tmp_path / "plain")
    counters.clear()
    compiled = run("train.py", *flags, "--compile", "--out", tmp_path / "compiled")
    assert plain.returncode == compiled.returncode == 0, compiled.stderr
    losses = [[row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")] for name in ("plain", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # fused kernels round to bf16 less often
    # a layer and a block, with and without gradients, of one row and of several: however many shapes there are
    assert 0 < counters["stats"]["unique_graphs"] <= 16
