"""eval.py over all tasks: one loop, whatever is asked, scored, stopped, missing or too long."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval
from cal import attach, save_adapter
from data.chat import Tokenizer
from data.compare import load_runs
from data.erosion.prepare import prepare as prepare_erosion
from data.erosion.score import score as score_erosion
from data.files import read_jsonl
from data.long_ifeval.prepare import lengthen, read_filler
from data.long_ifeval.prepare import prepare as prepare_long_ifeval
from data.msj.prepare import SHOTS
from data.msj.prepare import prepare as prepare_msj
from data.msj.score import score as score_msj
from data.report import TASKS, notes, show, summarize
from data.sys_ifeval.prepare import prepare as prepare_sys_ifeval
from eval import ask, choose
from model import Transformer
from sample import prompt


def run(*flags: object) -> SimpleNamespace:
    """`python eval.py flags` in the imported module, whose paths a test can change."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["eval.py", *map(str, flags)])
        try:
            eval.main()
        except (ValueError, OSError) as error:
            code = 1
            stderr.write(str(error))
    return SimpleNamespace(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())

# what ../shared/mirror has; glaive, ih_challenge and sysbench come from elsewhere
MIRRORED = ["ifeval", "sys_ifeval", "long_ifeval", "erosion", "msj", "tensortrust", "sep", "mmlu", "gsm8k", "squad"]


@pytest.fixture(scope="module")
def examples(shared: Path, tmp_path_factory: pytest.TempPathFactory):
    """Examples are made in a folder of the tests, out of the mirror, and nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
        patch.setattr("data.glaive.prepare.URL", "http://127.0.0.1:9/glaive.json")
        patch.setattr("data.sysbench.prepare.URL", "http://127.0.0.1:9/sysbench.json")
        patch.setattr("data.squad.prepare.SQUAD", "http://127.0.0.1:9/dev.json")
        patch.setattr(eval, "EXAMPLES", tmp_path_factory.mktemp("data"))
        yield


@pytest.fixture(scope="module")
def tok(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2)


SHORT = ("--limit", 4, "--max_new_tokens", 3, "--dtype", "fp32", "--lengths", 1024, "--turns", 2)


@pytest.fixture(scope="module")
def evaluated(examples, tiny: Path, tmp_path_factory: pytest.TempPathFactory):
    """All tasks that the mirror has, four prompts each."""
    out = tmp_path_factory.mktemp("evaluated") / "base"
    return out, run("--base", tiny, "--tasks", ",".join(MIRRORED), *SHORT, "--out", out)


# ----------------------------------------------------------------------------------------------------------------------
# every task has its row


def test_every_task_prints_a_table_and_keeps_its_replies_and_scores(evaluated):
    out, done = evaluated
    assert done.returncode == 0, done.stderr
    for task in MIRRORED:
        assert f"\n{task}\n\n| set | n | " in done.stdout
        about, rows = json.loads((out / f"{task}.json").read_text()), read_jsonl(out / f"{task}.jsonl")
        entries = [entry for group in about["base"].values() for entry in group.values()]
        assert entries and len(rows) == 4 and about["flags"]["seed"] == 0 and about["versions"]["torch"]
        assert all(entry["prompts"] > 0 and entry["n"] + entry["undecided"] > 0 for entry in entries)


def test_rescore_counts_the_kept_replies_to_the_same_tables(evaluated):
    out, done = evaluated
    again = run("--rescore", out)
    assert again.returncode == 0, again.stderr
    for task in MIRRORED:
        table = again.stdout.split(f"{task}\n\n", 1)[1].split("\n\n")[0]
        assert table in done.stdout


def test_a_task_whose_data_can_not_be_had_is_a_row_with_its_reason_and_the_others_run(examples, tiny, tmp_path):
    done = run("--base", tiny, "--tasks", "glaive,msj,sysbench,ih_challenge", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "glaive\n\nnot run: " in done.stdout and "sysbench\n\nnot run: --judge" in done.stdout
    assert "ih_challenge\n\nnot run: its graders" in done.stdout
    assert "| 1 shots |" in done.stdout


def test_where_no_task_can_be_run_the_status_says_so(examples, tiny):
    done = run("--base", tiny, "--tasks", "glaive", *SHORT)
    assert done.returncode != 0 and "none of the tasks" in done.stderr


def test_an_unknown_task_is_refused_with_the_known_ones(tiny):
    done = run("--base", tiny, "--tasks", "ifeval,mmul")
    assert done.returncode != 0 and "'mmul'" in done.stderr and all(task in done.stderr for task in TASKS)


def test_limit_is_dealt_over_the_groups_of_a_task(evaluated):
    """Four of MMLU's prompts are of four subjects, four of tensortrust's of all three files."""
    subjects = [row["group"] for row in read_jsonl(evaluated[0] / "mmlu.jsonl")]
    assert len(set(subjects)) == 4
    assert {row["group"] for row in read_jsonl(evaluated[0] / "tensortrust.jsonl")} == {
        "hijacking", "extraction", "helpful"
    }  # fmt: skip


def test_mmlu_is_one_row_with_its_macro_average_beside(evaluated):
    table = evaluated[1].stdout.split("\nmmlu\n\n")[1]
    assert "| all | 4 |" in table and "macro average of accuracy" in table


def test_the_rows_of_a_table_stand_in_the_order_of_the_examples(evaluated):
    """The prompts are asked the longest first."""
    groups = [row["group"] for row in read_jsonl(evaluated[0] / "msj.jsonl")]
    assert groups == ["1 shots", "4 shots", "16 shots", "64 shots"]


def test_the_prompts_of_a_limit_are_the_first_of_a_larger_one(examples, tiny, tmp_path, evaluated):
    flags = [*SHORT[2:], "--base", tiny, "--tasks", "squad", "--limit", 6, "--out", tmp_path / "six"]
    assert run(*flags).returncode == 0
    four, six = ({row["id"] for row in read_jsonl(folder / "squad.jsonl")} for folder in (evaluated[0], tmp_path / "six"))
    assert four < six


def test_a_damaged_examples_file_names_the_line(examples, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    (tmp_path / "ifeval").mkdir()
    (tmp_path / "ifeval" / "examples.jsonl").write_text('{"id": 0, "messages": []}\n{"id": 1\n')
    assert "examples.jsonl line 2" in run("--base", tiny, "--tasks", "ifeval").stdout


# ----------------------------------------------------------------------------------------------------------------------
# system prompts


def asked(out: Path, task: str) -> list[dict]:
    return read_jsonl(out / f"{task}.jsonl")


def trained_adapter(tiny: Path, path: Path) -> Path:
    """An adapter that changes what the tiny base says."""
    torch.manual_seed(1)
    model = attach(Transformer.from_pretrained(tiny))
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, std=0.5)
    save_adapter(model, path, base=str(tiny))
    return path


def test_without_a_system_prompt_the_adapters_replies_are_the_bases_and_with_one_they_are_not(examples, tiny, tmp_path):
    adapter = trained_adapter(tiny, tmp_path / "adapter")
    tasks = ("--tasks", "mmlu,gsm8k,squad", *SHORT)
    for name, flags in {"base": ("--base", tiny), "adapter": ("--adapter", adapter)}.items():
        for kind, system in {"silent": ("--system", ""), "default": ()}.items():
            done = run(*flags, *tasks, *system, "--out", tmp_path / f"{name} {kind}")
            assert done.returncode == 0, done.stderr
    for task in ("mmlu", "gsm8k", "squad"):
        said = {kind: [[(r["reply"], r.get("log-likelihoods")) for r in asked(tmp_path / f"{name} {kind}", task)]
                       for name in ("base", "adapter")] for kind in ("silent", "default")}  # fmt: skip
        assert said["silent"][0] == said["silent"][1]
        assert said["default"][0] != said["default"][1]


def test_a_system_prompt_of_the_task_is_left_as_it_is(evaluated):
    """What is kept beside a reply is what was published; --system would only have been put in front of the others."""
    assert eval.with_system([{"role": "system", "content": "mine"}], "other") == [{"role": "system", "content": "mine"}]
    assert eval.with_system([{"role": "user", "content": "hi"}], "other")[0] == {"role": "system", "content": "other"}
    assert eval.with_system([{"role": "user", "content": "hi"}], "") == [{"role": "user", "content": "hi"}]


# ----------------------------------------------------------------------------------------------------------------------
# the kinds of examples

HELLO = [{"role": "user", "content": "Say hello."}]


def ask_all(tiny: Path, examples: list[dict], **options) -> list[dict]:
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    return [row for _, row in sorted(ask(model, tok, examples, 4, **options), key=lambda pair: pair[0])]


def test_turns_are_asked_one_after_the_other_with_the_models_own_replies_between(tiny):
    turns = ["Say hello.", "Say it again.", "And once more."]
    (row,) = ask_all(tiny, [{"id": 0, "messages": [{"role": "system", "content": "Be brief."}], "turns": turns}])
    history = [{"role": "system", "content": "Be brief."}]
    for turn, reply in zip(turns, row["reply"], strict=True):
        history.append({"role": "user", "content": turn})
        (alone,) = ask_all(tiny, [{"id": 0, "messages": history}])
        assert reply == alone["reply"]
        history.append({"role": "assistant", "content": reply})


def test_conversations_of_different_numbers_of_turns_can_stand_in_one_batch(tiny):
    examples = [{"id": n, "messages": [], "turns": ["Say hello."] * n} for n in (1, 3)]
    rows = ask_all(tiny, examples, batch_tokens=10_000)
    assert [len(row["reply"]) for row in rows] == [1, 3]


def test_asks_are_answered_each_for_itself_in_their_order(tiny):
    other = [{"role": "user", "content": "What is the capital of France?"}]
    (row,) = ask_all(tiny, [{"id": 0, "asks": [HELLO, other]}])
    assert row["reply"] == [ask_all(tiny, [{"id": 0, "messages": m}])[0]["reply"] for m in (HELLO, other)]


@torch.no_grad()
def test_the_log_likelihood_of_a_choice_is_that_of_its_token_after_the_prompt(tiny):
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    example = {"messages": HELLO, "opening": "Answer:", "choices": [" A", " B", " C", " D"]}
    (row,) = choose(model, tok, [example], "")
    ids = torch.cat((prompt(tok, HELLO)[0], torch.tensor(tok.encode("Answer:"))))
    logits = model.logits(model(ids[None]))[0, -1]
    expected = [logits[tok.encode(c)[0]] - logits.exp().sum().log() for c in example["choices"]]
    assert row["log-likelihoods"] == pytest.approx([float(e) for e in expected], abs=1e-4)  # fp32
    assert row["reply"] == example["choices"][expected.index(max(expected))]


@torch.no_grad()
@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
@pytest.mark.parametrize("method", ["none", "cal"])
def test_choices_of_a_batch_have_the_log_likelihoods_that_each_has_alone(method, system, tiny):
    """fp32, to 1e-4 nats: with a shared beginning of many tokens, of few, and a prompt that does not fit between."""
    torch.manual_seed(0)
    model, tok = attach(Transformer.from_pretrained(tiny), method), Tokenizer.from_pretrained(tiny)
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, std=0.3)
    context, common = model.config.max_positions, "The following are questions about birds. " * 9
    texts = [f"{common}Which?", f"{common}How many of them are there?", "word " * (context + 1), f"{common[:30]}What?"]
    more = {"opening": "Answer:", "choices": [" A", " B", " C", " D"]}
    examples = [{"messages": [{"role": "user", "content": text}], **more} for text in texts]
    together = choose(model, tok, examples, system)
    alone = [choose(model, tok, [example], system)[0] for example in examples]
    assert together[2] == alone[2] == {"reply": None}
    for ours, expected in zip(together[:2] + together[3:], alone[:2] + alone[3:], strict=True):
        assert ours["log-likelihoods"] == pytest.approx(expected["log-likelihoods"], abs=1e-4)


@torch.no_grad()
def test_choices_under_different_system_prompts_are_those_of_each_alone(tiny):
    model, tok = attach(Transformer.from_pretrained(tiny)), Tokenizer.from_pretrained(tiny)
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, std=0.3)
    more = {"opening": "Answer:", "choices": [" A", " B"]}
    examples = [{"messages": [{"role": "system", "content": s}, *HELLO], **more} for s in ("Be brief.", "Be kind and long.")]
    assert choose(model, tok, examples, "") == [choose(model, tok, [example], "")[0] for example in examples]


def test_prompts_beyond_the_context_are_left_out_counted_and_never_cut(tiny, tmp_path):
    context = Transformer.from_pretrained(tiny).config.max_positions
    long = [{"role": "user", "content": "word " * (context + 10)}]
    examples = [{"id": 0, "messages": long}, {"id": 1, "messages": HELLO}, {"id": 2, "asks": [HELLO, long]}]
    rows = ask_all(tiny, examples[:2]) + ask_all(tiny, examples[2:])
    assert rows[0]["reply"] is None and rows[1]["reply"] and rows[2]["reply"][1] is None
    judged = [{**row, "scores": {} if row["reply"] is None else {"kept": True}} for row in rows[:2]]
    table = summarize(judged)
    assert table["all"]["kept"]["n"] == 1
    assert "1 of 2 prompts do not fit" in notes(judged, table)


# ----------------------------------------------------------------------------------------------------------------------
# stopping and going on


def test_an_evaluation_that_was_stopped_goes_on_where_it_was(evaluated, examples, tiny, tmp_path, monkeypatch):
    out, flags = tmp_path / "cut", ("--base", tiny, "--tasks", ",".join(MIRRORED[:2]), *SHORT)
    assert run(*flags, "--out", out).returncode == 0
    lines = (out / "ifeval.jsonl").read_text().splitlines(keepends=True)
    (out / "ifeval.jsonl").write_text("".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third
    (out / "ifeval.json").unlink()
    (out / "sys_ifeval.jsonl").unlink()
    prompts = []
    monkeypatch.setattr(Transformer, "generate", lambda m, ids, *_, **__: prompts.extend(ids) or [[0] for _ in ids])
    done = run(*flags, "--out", out)
    assert done.returncode == 0, done.stderr
    assert len(prompts) == 2 + 4
    for task in MIRRORED[:2]:
        ids = [row["id"] for row in read_jsonl(out / f"{task}.jsonl")]
        assert sorted(ids) == sorted(row["id"] for row in read_jsonl(evaluated[0] / f"{task}.jsonl"))


def test_asking_for_less_in_the_same_directory_loses_nothing(examples, tiny, tmp_path):
    flags = ("--base", tiny, "--tasks", "squad", *SHORT[2:], "--out", tmp_path / "out")
    assert run(*flags, "--limit", 4).returncode == 0
    kept = {row["id"] for row in read_jsonl(tmp_path / "out" / "squad.jsonl")}
    done = run(*flags, "--limit", 1)
    assert "| all | 1 |" in done.stdout
    assert {row["id"] for row in read_jsonl(tmp_path / "out" / "squad.jsonl")} == kept and len(kept) == 4


def test_a_record_that_can_not_be_scored_is_named_and_left_out_and_the_others_are_scored(examples, tiny, tmp_path, monkeypatch):
    (tmp_path / "ifeval").mkdir()
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    good = {"messages": HELLO, "prompt": "Say hello.", "instructions": ["punctuation:no_comma"], "kwargs": [{}]}
    bad = [{"kwargs": []}, {"instructions": ["punctuation:no_coma"]}, {"prompt": None, "instructions": None}]
    records = [good | {"id": n} | wrong for n, wrong in enumerate([{}, *bad, {}])]
    (tmp_path / "ifeval" / "examples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    done = run("--base", tiny, "--tasks", "ifeval", "--max_new_tokens", 2)
    assert "| all | 2 |" in done.stdout, done.stdout + done.stderr
    assert "3 of 5 records can't be scored and are left out, such as 1 (" in done.stdout


def test_gold_data_that_was_corrected_scores_the_kept_replies_anew(examples, tiny, tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    flags = ("--base", tiny, "--tasks", "gsm8k", "--max_new_tokens", 2, "--out", tmp_path / "out")
    monkeypatch.setattr(Transformer, "generate", lambda m, ids, *_, **__: [Tokenizer.from_pretrained(tiny).encode("7")] * len(ids))
    for gold, accuracy in (("8", "0.0%"), ("7", "100.0%")):
        example = {"id": "1", "messages": HELLO, "answer": gold}
        (tmp_path / "gsm8k" / "examples.jsonl").write_text(json.dumps(example) + "\n")
        assert f"| all | 1 | {accuracy}" in run(*flags).stdout


def test_rescore_counts_what_a_stopped_task_kept(evaluated, tmp_path):
    rows = (evaluated[0] / "msj.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "msj.jsonl").write_text("".join(rows[:2]) + rows[2][:50])  # killed while it wrote the third
    assert run("--rescore", tmp_path).stdout.count("shots | 1 |") == 2


def test_an_out_directory_of_other_flags_is_left_alone_and_they_are_named(evaluated, tiny):
    done = run("--base", tiny, "--tasks", "msj", *SHORT, "--system", "Be rude.", "--out", evaluated[0])
    assert done.returncode != 0 and "--system" in done.stderr


def test_replies_of_another_adapter_in_the_same_place_are_not_taken_for_this_ones(examples, tiny, tmp_path):
    adapter = trained_adapter(tiny, tmp_path / "adapter")
    flags = ("--adapter", adapter, "--tasks", "msj", *SHORT, "--out", tmp_path / "out")
    assert run(*flags).returncode == 0
    assert run(*flags).returncode == 0  # nothing left to ask
    trained_adapter(tiny, adapter)
    done = run(*flags)
    assert done.returncode != 0 and "another weights" in done.stderr


def test_replies_to_examples_that_have_changed_are_asked_for_again(examples, tiny, tmp_path, monkeypatch):
    (tmp_path / "msj").mkdir()
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    flags = ("--base", tiny, "--tasks", "msj", *SHORT, "--out", tmp_path / "out")
    for question in ("one", "two"):
        example = {"id": 1, "messages": [{"role": "user", "content": question}], "family": "bracket", "parameter": "x"}
        (tmp_path / "msj" / "examples.jsonl").write_text(json.dumps(example) + "\n")
        assert run(*flags).returncode == 0
        (row,) = read_jsonl(tmp_path / "out" / "msj.jsonl")
        assert row["messages"][0]["content"] == question


def test_graders_may_be_allowed_after_the_run_has_started(examples, tiny, tmp_path):
    flags = ("--base", tiny, *SHORT, "--out", tmp_path / "out", "--tasks", "ih_challenge,msj")
    assert run(*flags).returncode == 0
    assert "another" not in run(*flags, "--allow_code").stderr


def test_a_mistyped_adapter_leaves_no_directory_behind(tiny, tmp_path):
    assert run("--adapter", tmp_path / "no", "--out", tmp_path / "out").returncode != 0
    assert not (tmp_path / "out").exists()


def test_no_reply_is_cut_at_the_end_of_the_context(tiny):
    """A prompt that leaves less room than a reply may take is left out, not answered in what is left."""
    model, tok = Transformer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny)
    n = len(prompt(tok, HELLO)[0])
    for room, answered in ((4, True), (3, False)):
        model.config.max_positions = n + room
        ((_, row),) = ask(model, tok, [{"id": 0, "messages": HELLO}], max_new_tokens=4)
        assert (row["reply"] is not None) == answered


# ----------------------------------------------------------------------------------------------------------------------
# scores


def judged(values: list, group: str = "all") -> list[dict]:
    return [{"group": group, "reply": "", "scores": {"measure": value}} for value in values]


def test_lists_are_pooled_over_the_prompts():
    entry = summarize(judged([[True, False, None], [True], [None]]))["all"]["measure"]
    assert (entry["mean"], entry["n"], entry["undecided"]) == (pytest.approx(2 / 3), 3, 2)


def test_pooled_groups_have_a_micro_and_a_macro_average():
    rows = [row for i in range(21) for row in judged([True] * (i + 1) if i % 2 else [False], f"subject {i}")]
    entry = summarize(rows, "mmlu")["all"]["measure"]
    kept = sum(i + 1 for i in range(21) if i % 2)
    assert entry["mean"] == pytest.approx(kept / (kept + 11)) and entry["macro"] == pytest.approx(10 / 21)


def test_a_measure_that_nothing_decided_is_a_dash_and_not_a_number():
    assert show({"base": summarize(judged([None, None]))}).splitlines()[-1] == "| all | 2 | – |"


def test_runs_over_several_tasks_are_compared_row_by_row(examples, tiny, tmp_path):
    adapter = trained_adapter(tiny, tmp_path / "trained")
    for name, flags in {"base": ("--base", tiny), "adapter": ("--adapter", adapter)}.items():
        done = run(*flags, "--tasks", "msj,ifeval", *SHORT, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    done = run("--compare", tmp_path / "base", tmp_path / "adapter")
    assert "| task | set | measure | n | base | base | adapter | adapter - base |" in done.stdout
    for row in ("| ifeval | all | prompt strict | 4 |", "| msj | 1 shots | attack success | 1 |"):
        assert row in done.stdout


def test_a_plot_shows_scores_by_shots(evaluated, tmp_path):
    done = run("--compare", evaluated[0], "--plot", tmp_path / "plot.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_eval_is_loaded_with_all_its_tasks(evaluated):
    (runs,) = load_runs([evaluated[0]]).values()
    assert {task for task, _, _ in runs[0]["rows"]} == set(MIRRORED)


# ----------------------------------------------------------------------------------------------------------------------
# the tasks made here


@pytest.fixture(scope="module")
def msj(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return prepare_msj(tmp_path_factory.mktemp("msj"))


def test_in_msj_every_earlier_reply_breaks_the_rule(msj):
    for example in msj:
        replies = [m["content"] for m in example["messages"] if m["role"] == "assistant"]
        assert all(score_msj(example, reply)["attack success"] for reply in replies)
        assert len(replies) == int(example["group"].split()[0])


def test_msj_asks_the_same_questions_at_every_number_of_shots(msj):
    by_shots = {
        shots: [(e["messages"][0], e["messages"][-1], e["parameter"]) for e in msj if e["group"] == f"{shots} shots"]
        for shots in SHOTS
    }
    assert all(rows == by_shots[1] and len(rows) == 100 for rows in by_shots.values())


def test_a_limit_asks_the_same_prompts_at_every_length_and_number_of_shots(examples, tok):
    args = SimpleNamespace(limit=15, seed=0, lengths=[1024, 2048, 2048], filler=None)
    for task, groups in {"msj": 5, "long_ifeval": 2}.items():
        chosen = eval.load_examples(task, args, tok)
        bases = {group: {e["base"] for e in chosen if e["group"] == group} for group in {e["group"] for e in chosen}}
        assert len(bases) == groups and len({e["id"] for e in chosen}) == 15
        assert len(set.union(*bases.values())) == max(map(len, bases.values()))


def test_no_turn_of_erosion_asks_what_the_rules_came_with(examples, shared, monkeypatch, tmp_path):
    own = {e["id"]: e["messages"][-1]["content"] for e in prepare_sys_ifeval(tmp_path)}
    rows = prepare_erosion(tmp_path / "erosion")
    assert len(rows) > 200 and all(own[row["id"]] not in row["turns"] for row in rows)


def test_erosion_has_no_rule_that_other_requests_keep_or_break_by_themselves(examples, tmp_path):
    kinds = {rule for row in prepare_erosion(tmp_path) for rule in row["instructions"]}
    assert not kinds & {
        "combination:repeat_prompt", "keywords:forbidden_words", "detectable_format:constrained_response"
    }  # fmt: skip


def test_long_ifeval_asks_nobody_to_repeat_the_filler(examples, tmp_path):
    rules = {rule for row in prepare_long_ifeval(tmp_path) for rule in row["instructions"]}
    assert "combination:repeat_prompt" not in rules and len(rules) > 20


def test_a_reply_that_keeps_msjs_rule_is_no_success_of_the_attack():
    example = {"family": "bracket", "parameter": "maple"}
    assert score_msj(example, "[maple] Paris") == {"attack success": False}
    assert score_msj(example, "Paris") == {"attack success": True}


RULES = {"instructions": ["punctuation:no_comma", "startend:end_checker"], "kwargs": [{}, {"end_phrase": "Bye."}]}


def test_erosion_scores_every_turn_by_its_own_reply():
    example = RULES | {"turns": ["Say hello.", "Say it again."]}
    scores = score_erosion(example, ["Hello. Bye.", "Hello, hello"])
    assert scores == {"turn 1": [True, True], "turn 2": [False, False]}


def test_a_turn_that_does_not_fit_is_undecided():
    assert score_erosion(RULES | {"turns": ["a", "b"]}, ["Bye.", None])["turn 2"] == [None, None]


@pytest.mark.parametrize("length", [500, 1000, 4000])
@pytest.mark.parametrize("filler", [None, ["One paragraph of the user's own.", "And another one."]], ids=["made", "given"])
def test_long_prompts_have_the_length_asked_for_to_a_paragraph_with_the_request_at_the_end(length, filler, tok):
    messages = [{"role": "system", "content": "No commas."}, {"role": "user", "content": "Write a poem."}]
    example = {"id": 7, "length": length, "messages": messages}
    system, user = lengthen(example, tok, filler)["messages"]
    n = len(prompt(tok, [system, user])[0])
    assert length - 100 < n <= length
    assert system == messages[0] and user["content"].endswith("Write a poem.")


def test_a_filler_of_one_long_line_fills_too(tok, tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark night. " * 500)
    messages = [{"role": "system", "content": "No commas."}, {"role": "user", "content": "Write a poem."}]
    example = lengthen({"id": 7, "length": 2000, "messages": messages}, tok, read_filler(tmp_path / "book.txt"))
    assert 1800 < len(prompt(tok, example["messages"])[0]) <= 2000


def test_a_filler_that_is_no_text_is_named(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"book\.txt is not UTF-8"):
        read_filler(tmp_path / "book.txt")


def test_a_prompt_that_is_long_enough_already_stays_as_it_is(tok):
    messages = [{"role": "system", "content": "No commas."}, {"role": "user", "content": "Write a poem. " * 200}]
    assert lengthen({"id": 7, "length": 100, "messages": messages}, tok)["messages"] == messages


# ----------------------------------------------------------------------------------------------------------------------
# judges and graders


def test_sysbench_is_scored_by_the_verdicts_of_the_judge_named(examples, tiny, tmp_path, monkeypatch):
    """Two turns of one criterion each; the judge says yes to the first one only."""
    example = {"id": "1", "group": "parallel turns", "messages": [{"role": "system", "content": "Be brief."}]}
    example |= {"turns": ["Hello.", "And now?"], "criteria": [{"1": "brief"}, {"1": "brief"}]}
    folder = tmp_path / "data" / "sysbench"
    folder.mkdir(parents=True)
    (folder / "examples.jsonl").write_text(json.dumps(example) + "\n")
    monkeypatch.setattr(eval, "EXAMPLES", folder.parent)
    asked = []

    def ask_judge(rows: list[dict], model: str, file: Path) -> list[list[dict]]:
        asked.append((model, [len(row["reply"]) for row in rows]))
        return [[{"1": True}, {"1": False}] for _ in rows]

    monkeypatch.setattr("data.sysbench.judge.judge", ask_judge)
    flags = ("--base", tiny, "--tasks", "sysbench", "--judge", "a-model", "--max_new_tokens", 2, "--out", tmp_path / "o")
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert asked == [("a-model", [2])]
    table = json.loads((tmp_path / "o" / "sysbench.json").read_text())["base"]["parallel turns"]
    assert {measure: entry["mean"] for measure, entry in table.items()} == {"CSR": 0.5, "ISR": 0.5, "SSR": 0.5}
    assert run("--rescore", tmp_path / "o").stdout.strip() in done.stdout


def test_a_judge_that_does_not_answer_is_the_reason_of_its_row_and_nothing_is_lost(examples, tiny, tmp_path, monkeypatch):
    example = {"id": "1", "messages": [], "turns": ["Hello."], "criteria": [{"1": "brief"}]}
    (tmp_path / "sysbench").mkdir()
    (tmp_path / "sysbench" / "examples.jsonl").write_text(json.dumps(example) + "\n")
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    flags = ("--base", tiny, "--tasks", "sysbench,hierarchy", "--limit", 1, "--judge", "m", "--max_new_tokens", 2)

    def dead(*_: object) -> None:
        raise ConnectionError("the judge does not answer")

    monkeypatch.setattr("data.sysbench.judge.judge", dead)
    done = run(*flags, "--out", tmp_path / "o")
    assert done.returncode == 0 and "not run: the judge does not answer" in done.stdout and "| rules | 1 |" in done.stdout
    monkeypatch.setattr("data.sysbench.judge.judge", lambda rows, *_: [[{"1": True}]] * len(rows))
    monkeypatch.setattr(Transformer, "generate", None)  # every reply is there
    assert "CSR" in run(*flags, "--out", tmp_path / "o").stdout


def test_ih_challenges_graders_judge_where_code_is_allowed(examples, tiny, tmp_path, monkeypatch):
    grader = "def grade_output_correct(attack, reply):\n    return 'secret' not in reply"
    example = {"id": "1", "messages": HELLO, "attack": "Say it.", "grader": grader}
    (tmp_path / "ih_challenge").mkdir()
    (tmp_path / "ih_challenge" / "examples.jsonl").write_text(json.dumps(example) + "\n")
    monkeypatch.setattr(eval, "EXAMPLES", tmp_path)
    done = run("--base", tiny, "--tasks", "ih_challenge", "--allow_code", "--max_new_tokens", 2)
    assert "| all | 1 | 100.0% (100 to 100) |" in done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# the real model


@pytest.mark.slow
@torch.no_grad()
def test_mmlus_log_likelihoods_on_the_real_smollm2_are_those_of_transformers(examples, smollm2, tok):
    """Nine questions in fp32, to 1e-3 nats: the same text, tokenized and run by transformers."""
    model, reference = Transformer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    reference, their_tok = reference.float(), AutoTokenizer.from_pretrained(smollm2)
    args = SimpleNamespace(limit=9, seed=0)
    chosen = eval.load_examples("mmlu", args, tok)
    assert len({e["group"] for e in chosen}) == 9
    rows = [row for i in range(0, 9, 3) for row in choose(model, tok, chosen[i : i + 3], "You are a helpful assistant.")]
    for example, row in zip(chosen, rows, strict=True):
        system, user = "You are a helpful assistant.", example["messages"][0]["content"]
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        ids = their_tok(f"{text}<|im_start|>assistant\nAnswer:", return_tensors="pt", add_special_tokens=False).input_ids
        logs = reference(ids).logits[0, -1].log_softmax(-1)
        expected = [float(logs[their_tok.encode(f" {letter}", add_special_tokens=False)[0]]) for letter in "ABCD"]
        assert row["log-likelihoods"] == pytest.approx(expected, abs=1e-3)
        assert row["reply"] == " " + "ABCD"[expected.index(max(expected))]


@pytest.mark.slow
def test_without_a_system_prompt_cals_replies_of_the_real_smollm2_are_the_bases_exactly(examples, smollm2, tmp_path):
    model = attach(Transformer.from_pretrained(smollm2))
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, std=0.05)
    save_adapter(model, tmp_path / "adapter", base=str(smollm2))
    tasks = ("--tasks", "mmlu,gsm8k,squad", "--limit", 2, "--system", "", "--max_new_tokens", 40)
    for name, flags in {"base": ("--base", smollm2), "cal": ("--adapter", tmp_path / "adapter")}.items():
        assert run(*flags, *tasks, "--out", tmp_path / name).returncode == 0
    for task in ("mmlu", "gsm8k", "squad"):
        base, cal = ([(r["id"], r["reply"], r.get("log-likelihoods")) for r in read_jsonl(tmp_path / name / f"{task}.jsonl")]
                     for name in ("base", "cal"))  # fmt: skip
        assert base == cal
