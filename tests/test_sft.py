"""data/sft: five sources in their published schemas, filters against independent ones, runs that stop anywhere."""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import data.ih_challenge.prepare
from data.chat import ASSISTANT, Tokenizer, check_messages, render
from data.files import claim, sources_of, write_made
from data.glaive.prepare import URL as GLAIVE
from data.hierarchy.prepare import SETS
from data.ifeval import prepare as ifeval
from data.sft import overlap
from data.sft import prepare as module
from data.sft.prepare import SOURCES, prepare
from tests import test_download

ROOT = Path(__file__).parent.parent
SYSTEMCHAT = "/datasets/abacusai/SystemChat-1.1/resolve/main/SystemConversations.jsonl"
DOLLY = "/datasets/databricks/databricks-dolly-15k/resolve/main/databricks-dolly-15k.jsonl"
SLIMORCA = "/datasets/Open-Orca/SlimOrca/resolve/main/oo-labeled_correct.gpt4.sharegpt.jsonl"
GSM8K = "raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl"
N = 100  # conversations, of which the sources give 20, 16, 10, 10 and 44
server = test_download.server

# ----------------------------------------------------------------------------------------------------------------------
# files in each source's schema


def prose(rng: random.Random, n: int) -> str:
    return " ".join(f"{rng.choice('bdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(1000)}" for _ in range(n))


def jsonl(records: list) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def systemchat(rng, i):
    turns = [{"from": ("human", "gpt")[t % 2], "value": prose(rng, 20)} for t in range(2 * rng.randint(1, 3))]
    return {"conversations": [{"from": "system", "value": f"You are {prose(rng, 15)}."}, *turns]}


def slimorca(rng, i):
    system = [{"from": "system", "value": f"You are an AI. {prose(rng, 5)}", "weight": None}] if i % 8 else []
    question = {"from": "human", "value": prose(rng, 40), "weight": 0.0}
    return {"conversations": [*system, question, {"from": "gpt", "value": prose(rng, 30), "weight": 1.0}]}


def dolly(rng, i):
    context = prose(rng, 30) if i % 3 == 0 else ""
    return {"instruction": prose(rng, 9), "context": context, "response": prose(rng, 12), "category": "closed_qa"}


def gsm8k(rng, i):
    answer = f"{prose(rng, 9)} is 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"
    return {"question": f"{prose(rng, 20)}?", "answer": answer}


def glaive(rng, i):
    functions = json.dumps({"name": "look_up", "description": prose(rng, 6), "parameters": {}}, indent=4)
    call = f'{{"name": "look_up", "arguments": \'{{"word": "{prose(rng, 1)}"}}\'}}'
    return {
        "system": f"SYSTEM: You are a helpful assistant with access to the following functions. -\n{functions}\n",
        "chat": f"USER: {prose(rng, 9)}\n\n\nASSISTANT: <functioncall> {call} <|endoftext|>\n\n\n"
        f'FUNCTION RESPONSE: {{"meaning": "{prose(rng, 3)}"}}\n\n\nASSISTANT: {prose(rng, 9)} <|endoftext|>\n\n\n',
    }


MAKERS = {"SystemChat-1.1": systemchat, "Dolly-15k": dolly, "GSM8K": gsm8k, "Glaive-v2": glaive, "SlimOrca": slimorca}


def make(name: str, n: int) -> list[dict]:
    rng = random.Random(name)
    return [MAKERS[name](rng, i) for i in range(n)]


@pytest.fixture
def folder(tmp_path):
    """The folder of the corpus. The benchmarks beside it are there, and have no prompts but one of gsm8k's."""
    return make_folder(tmp_path / "data")


PROMPT = "Seven green herons counted nineteen silver fish below the old mill before breakfast on Sunday"


def make_folder(root: Path) -> Path:
    for score in (ROOT / "data").glob("*/score.py"):
        (root / score.parent.name).mkdir(parents=True)
        for name in SETS if score.parent.name == "hierarchy" else ("examples",):
            (root / score.parent.name / f"{name}.jsonl").write_bytes(b"")
    write_made(root / "hierarchy", sources_of("hierarchy"))
    (root / "gsm8k/examples.jsonl").write_bytes(jsonl([{"messages": [{"role": "user", "content": PROMPT}]}]))
    return root / "sft"


@pytest.fixture
def sources(server, monkeypatch, tmp_path):
    """The server has all five, each with more than its share of N. GSM8K's comes from a mirror."""
    server.files = {
        SYSTEMCHAT: jsonl(make("SystemChat-1.1", 30)),
        DOLLY: jsonl(make("Dolly-15k", 30)),
        SLIMORCA: jsonl(make("SlimOrca", 400)),
        f"/datasets/{SOURCES['Glaive-v2'][2]}": json.dumps(make("Glaive-v2", 30), indent=1).encode(),
    }
    put_gsm8k(tmp_path, monkeypatch, jsonl(make("GSM8K", 30)))
    return server


def put_gsm8k(tmp_path, monkeypatch, content: bytes):
    file = tmp_path / "mirror" / GSM8K
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setitem(module.SHA256, "GSM8K", hashlib.sha256(content).hexdigest())


def read(folder: Path, *names: str) -> list[dict]:
    return [json.loads(line) for name in names or ("train", "val") for line in (folder / f"{name}.jsonl").open()]


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("train.jsonl", "val.jsonl", "sources.json")}


def given(tmp_path, records: list, name: str = "mine.jsonl") -> list[Path]:
    (tmp_path / name).write_bytes(jsonl(records))
    return [tmp_path / name]


def chat(*texts: str, system: str | None = None) -> dict:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


def fillers(n: int, seed: int = 0) -> list[dict]:
    """Conversations that nothing is wrong with."""
    rng = random.Random(seed)
    return [chat(prose(rng, 20), prose(rng, 20), system=prose(rng, 5)) for _ in range(n)]


# ----------------------------------------------------------------------------------------------------------------------
# the whole corpus


def test_five_sources_give_their_shares(sources, folder):
    report = prepare(folder, n=N)
    assert {name: row["kept"] for name, row in report["sources"].items()} == {
        "SystemChat-1.1": 20,
        "Dolly-15k": 16,
        "GSM8K": 10,
        "Glaive-v2": 10,
        "SlimOrca": 44,
    }
    assert (len(read(folder, "train")), len(read(folder, "val"))) == (99, 1)


def test_the_shares_are_50000_and_most_of_them_have_a_system_message():
    assert sum(share for share, _, _ in SOURCES.values()) == 50_000
    assert sum(SOURCES[name][0] for name in ("SystemChat-1.1", "Glaive-v2", "SlimOrca")) >= 37_000


def test_half_of_the_conversations_have_a_system_message(sources, folder):
    report = prepare(folder, n=N)
    with_system = sum(record["messages"][0]["role"] == "system" for record in read(folder))
    assert with_system >= N / 2
    assert with_system == sum(row["with system"] for row in report["sources"].values())


def test_every_line_is_a_conversation_that_a_model_can_learn_from(sources, folder):
    prepare(folder, n=N)
    for record in read(folder):
        check_messages(record["messages"])
        roles = [message["role"] for message in record["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert set(record) == {"messages", "source"}


def test_every_reply_can_be_rendered_and_learned(sources, folder, smollm2):
    prepare(folder, n=N)
    tok = Tokenizer.from_pretrained(smollm2)
    for record in read(folder):
        ids, roles = render(tok, record["messages"])
        text = tok.decode([i for i, role in zip(ids, roles) if role == ASSISTANT])
        assert all(m["content"] in text for m in record["messages"] if m["role"] == "assistant")


def test_the_last_source_fills_up_what_others_lack(sources, folder):
    sources.files[DOLLY] = jsonl(make("Dolly-15k", 5))
    report = prepare(folder, n=N)
    assert report["sources"]["SlimOrca"]["kept"] == 44 + 11


def test_the_same_seed_gives_the_same_bytes_and_another_one_another_order(sources, folder, tmp_path):
    prepare(folder, n=N)
    prepare(make_folder(tmp_path / "again"), n=N)
    report = prepare(make_folder(tmp_path / "other"), n=N, seed=1)
    assert content(folder) == content(tmp_path / "again/sft")
    one, other = read(folder), read(tmp_path / "other/sft")
    assert one != other
    assert sorted(map(json.dumps, one)) == sorted(map(json.dumps, other))
    assert report["seed"] == 1


def test_glaive_is_the_benchmarks_file_and_is_not_downloaded_twice(sources, folder):
    raw = folder.parent / "glaive/raw" / Path(GLAIVE).name
    raw.parent.mkdir()
    raw.write_text(json.dumps(make("Glaive-v2", 12)))
    prepare(folder, n=N)
    assert f"{module.net.HUB}/datasets/{SOURCES['Glaive-v2'][2]}".removeprefix(sources.url) in GLAIVE
    assert not any("glaive" in path for path in sources.paths())


def test_a_mirror_is_asked_before_the_network(sources, folder, tmp_path):
    file = tmp_path / "mirror/127.0.0.1" / SLIMORCA.strip("/")
    file.parent.mkdir(parents=True)
    file.write_bytes(sources.files[SLIMORCA])
    prepare(folder, n=N)
    assert SLIMORCA not in sources.paths()
    assert sum(record["source"] == "SlimOrca" for record in read(folder)) == 44


def test_the_table_is_markdown_with_all_counts(sources, folder):
    rows = [line.strip("| ").split(" | ") for line in module.table(prepare(folder, n=N)).splitlines()]
    assert rows[0][:5] == ["source", "licence", "read", "kept", "with system"]
    assert rows[3][:4] == ["Dolly-15k", "CC-BY-SA-3.0", "16", "16"]
    assert rows[-1][0] == "all"
    assert rows[-1][3] == str(N)
    assert {len(row) for row in rows} == {10}


# what the schemas become


def conversation(folder: Path, source: str) -> dict:
    return next(record for record in read(folder) if record["source"] == source)


def test_gsm8ks_annotations_go_and_its_last_line_is_a_sentence(tmp_path, folder):
    answer = "He sold 48/2 = <<48/2=24>>24 clips.\nIn all 1,000+24 = <<1000+24=1024>>1,024.\n#### 1,024"
    prepare(folder, given(tmp_path, [{"question": "How many?", "answer": answer}, *fillers(1)]))
    (record,) = [record for record in read(folder) if record["messages"][0]["content"] == "How many?"]
    said = "He sold 48/2 = 24 clips.\nIn all 1,000+24 = 1,024.\nThe answer is 1,024."
    assert record["messages"][1]["content"] == said


def test_a_call_is_clean_json_and_a_functions_response_is_no_more_than_a_user(sources, folder):
    prepare(folder, n=N)
    messages = conversation(folder, "Glaive-v2")["messages"]
    call = messages[2]["content"].removeprefix("<functioncall> ")
    assert json.loads(call)["arguments"].keys() == {"word"}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"].startswith('FUNCTION RESPONSE: {"meaning"')


def test_a_call_that_can_not_be_read_drops_the_conversation(tmp_path, folder):
    broken = chat("Look it up.", "<functioncall> {'name': oops}")
    report = prepare(folder, given(tmp_path, [broken, *fillers(2)]))
    assert report["sources"][str(tmp_path / "mine.jsonl")]["shape"] == 1


def test_an_instruction_takes_its_context_along(tmp_path, folder):
    records = [
        {"instruction": "Who?", "context": "A text.", "response": "He."},
        {"instruction": "What?", "input": "A word.", "output": "It."},
        {"instruction": "Why?", "input": "", "output": "So."},
    ]
    prepare(folder, given(tmp_path, records))
    asked = {record["messages"][0]["content"] for record in read(folder)}
    assert asked == {"Who?\n\nA text.", "What?\n\nA word.", "Why?"}


def test_system_text_and_tools_of_a_record_stand_in_one_system_message(tmp_path, folder):
    turns = [{"from": "user", "value": "Time?"}, {"from": "assistant", "value": "Noon."}]
    record = {"system": "Be brief.", "tools": '[{"name": "clock"}]', "conversations": turns}
    prepare(folder, given(tmp_path, [record, {"system": "", "tools": "", "conversations": turns}]))
    with_tools, without = sorted((record["messages"] for record in read(folder)), key=len, reverse=True)
    assert with_tools[0]["content"].startswith("Be brief.\nYou are a helpful assistant with access to")
    assert '"name": "clock"' in with_tools[0]["content"]
    assert without == [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "Noon."}]


def test_what_is_not_to_be_learned_stays_unlearned(tmp_path, folder):
    prepare(folder, given(tmp_path, [{**fillers(1)[0], "train_on": "last"}, *fillers(1, seed=1)]))
    assert sorted(record.get("train_on", "all") for record in read(folder)) == ["all", "last"]


@pytest.mark.parametrize("name", ["glaive_toolcall_en_demo.json.gz", "identity.json",
                                  "roleplay-simple-deduped-roleplay-instruct.json.gz"])  # fmt: skip
def test_real_samples_go_through(shared, folder, name):
    file = shared / "samples" / name
    text = (gzip.open if name.endswith(".gz") else open)(file, "rb").read()
    row = prepare(folder, [file])["sources"][str(file)]
    assert row["read"] == len(json.loads(text)) == row["kept"] + sum(row[drop] for drop in module.DROPS)
    assert row["kept"] > 0.85 * row["read"]
    assert row["shape"] == row["empty turn"] == 0
    for record in read(folder):
        check_messages(record["messages"])


def test_of_files_no_more_than_n_is_taken_in_their_order(tmp_path, folder):
    files = given(tmp_path, fillers(4)) + given(tmp_path, fillers(9, seed=1), "more.jsonl")
    report = prepare(folder, files, n=7)
    assert [row["kept"] for row in report["sources"].values()] == [4, 3]


WELL = json.dumps(fillers(1)[0])


@pytest.mark.parametrize(
    ("name", "lines", "place"),
    [
        ("a.jsonl", [WELL, "", '{"messages": '], "a.jsonl line 3 is not valid JSON"),
        ("a.jsonl", [WELL, '{"text": "?"}'], "a.jsonl line 2 is no conversation"),
        ("a.jsonl", ['{"messages": [{"role": "user", "content": 5}]}'], "a.jsonl line 1 is no conversation"),
        ("a.jsonl", ['{"messages": [{"role": ["user"], "content": "?"}]}'], "a.jsonl line 1 is no conversation"),
        ("a.jsonl", ['{"messages": ["Hello"]}'], "a.jsonl line 1 is no conversation"),
        ("a.jsonl", ['{"question": "How many?", "answer": "72"}'], "a.jsonl line 1 is no conversation"),
        ("a.jsonl", ["7"], "a.jsonl line 1 is no conversation"),
        ("a.json", ["[", WELL, ', {"text": "?"}]'], "a.json record 2 is no conversation"),
        ("a.json", ["[", WELL, ', {"text"'], "a.json record 2 is damaged"),
    ],
)
def test_a_record_of_another_schema_is_named_with_its_place(tmp_path, folder, name, lines, place):
    (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(ValueError, match=place):
        prepare(folder, [tmp_path / name])
    assert not (folder / "train.jsonl").exists()


def test_a_gzip_that_was_cut_is_said(tmp_path, folder):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(jsonl(fillers(500)))[:-2000])
    with pytest.raises(ValueError, match=r"can't be read beyond .*cut.jsonl.gz line \d+: get it anew"):
        prepare(folder, [tmp_path / "cut.jsonl.gz"])


# ----------------------------------------------------------------------------------------------------------------------
# filters


def drops(folder: Path, files: list[Path]) -> dict[str, int]:
    (row,) = prepare(folder, files)["sources"].values()
    return {name: row[name] for name in module.DROPS if row[name]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "shape"),
        (chat("A question without a reply"), "shape"),
        ({"messages": chat("Hello", "Hi")["messages"][::-1]}, "shape"),
        ({"messages": [*chat("Hello", "Hi")["messages"], {"role": "assistant", "content": "Hi again"}]}, "shape"),
        ({"messages": [*chat("Hello", "Hi")["messages"], {"role": "system", "content": "Stop"}]}, "shape"),
        ({"messages": [{"role": "tool", "content": "5"}, {"role": "assistant", "content": "Five"}]}, "shape"),
        (chat(" \n", "Hi"), "empty turn"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]}, "empty turn"),
        (chat("Hello", "a" * 7_996), "length"),
        (chat(PROMPT, "So they did"), "overlap"),
    ],
)
def test_what_can_not_stay_is_counted_by_its_reason(tmp_path, folder, record, reason):
    assert drops(folder, given(tmp_path, [record, *fillers(2)])) == {reason: 1}


@pytest.mark.parametrize("record", [chat("Hello", "a" * 7_995), chat("Hello", "Hi", "And then?"), chat("5", "2")])
def test_what_can_stay_stays(tmp_path, folder, record):
    assert drops(folder, given(tmp_path, [record, *fillers(2)])) == {}


def test_a_trailing_question_is_cut_off(tmp_path, folder):
    prepare(folder, given(tmp_path, [chat("Hello", "Hi", "And then?"), *fillers(1)]))
    assert chat("Hello", "Hi")["messages"] in [record["messages"] for record in read(folder)]


def test_the_same_words_are_a_duplicate_in_any_later_file_too(tmp_path, folder):
    files = given(tmp_path, [chat("What is IT?", "It is this: that."), *fillers(2)])
    files += given(tmp_path, [chat("what is it", "It is this - that!"), chat("What is it", "This.")], "second.jsonl")
    files += given(tmp_path, [chat("What is it?", "It: is this that?"), *fillers(2, seed=1)], "third.jsonl")
    report = prepare(folder, files)
    assert [row["duplicate"] for row in report["sources"].values()] == [0, 1, 1]
    assert len(read(folder)) == 6


def test_chinese_words_are_characters(tmp_path, folder):
    text = "你是一位阅历丰富的旅者,专门为用户提供建议"
    (folder.parent / "sysbench/examples.jsonl").write_bytes(jsonl([{"messages": [], "turns": [text]}]))
    records = [chat(f"请记住:{text[4:18]}", "好"), chat(text[:12], "好的"), *fillers(2)]  # 13 characters, and 11
    assert drops(folder, given(tmp_path, records)) == {"overlap": 1}


def tuples(text: str) -> set[tuple]:
    words = text.lower().split()
    return {tuple(words[i : i + 13]) for i in range(max(1, len(words) - 12))}


def test_overlap_is_that_of_sets_of_13_words(tmp_path, folder):
    """Against sets of tuples, on texts of six words, in which chance repeats parts of any length."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices("ABCDEF", k=rng.choice((5, 13, 40)))) for _ in range(150)]
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in texts[:60]]
    # what more than ten prompts begin with is scaffolding; what ten have is not, nor is a short text as a whole
    many, few, short = prose(rng, 16), prose(rng, 16), prose(rng, 12)
    prompts += [{"messages": [{"role": "system", "content": short}]} for _ in range(11)]
    prompts += [{"messages": [{"role": "user", "content": f"{many} {prose(rng, 20)}"}]} for _ in range(11)]
    prompts += [{"messages": [{"role": "system", "content": f"{few} {prose(rng, 20)}"}]} for _ in range(10)]
    (folder.parent / "gsm8k/examples.jsonl").write_bytes(jsonl(prompts))
    grams, _ = overlap.benchmark_grams(folder.parent)
    expected = set().union(*(tuples(text) for text in texts[:60]), tuples(few), tuples(short))
    pieces = [" ".join(text.split()[a:]) for text in texts for a in (0, 3, 20)]
    for text in [*texts, *pieces, many, few, short, f"{few} and more", f"so {many}", f"{short} it"]:
        assert overlap.overlaps(overlap.words_of(text), "user", grams) == bool(tuples(text) & expected), text
    assert not overlap.overlaps(overlap.words_of(many), "user", grams)
    assert overlap.overlaps(overlap.words_of(few), "user", grams)


def test_every_ifeval_prompt_is_found_and_its_neighbour_stays(tmp_path, folder, shared, monkeypatch):
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
    (folder.parent / "ifeval/examples.jsonl").unlink()
    file = shared / "mirror" / ifeval.URL.removeprefix("https://")
    prompts = [json.loads(line)["prompt"] for line in file.open()]
    planted = [chat(prompt, f"reply {number}") for number, prompt in enumerate(prompts)]
    # twelve words have no 13 in a row, and the number makes them another text than a prompt of twelve words
    beginnings = [" ".join(re.findall(r"[^\W\u4e00-\u9fff]+", prompt)[:12]) for prompt in prompts]
    neighbours = [chat(f"{number} {text}", f"answer {number}") for number, text in enumerate(beginnings)]
    report = prepare(folder, [*given(tmp_path, planted), *given(tmp_path, neighbours, "neighbours.jsonl")])
    assert [(row["read"], row["overlap"]) for row in report["sources"].values()] == [(541, 541), (541, 0)]


def test_a_short_prompt_counts_as_a_whole_and_not_as_a_reply(tmp_path, folder):
    (folder.parent / "sep/examples.jsonl").write_bytes(
        jsonl([{"asks": [[{"role": "system", "content": "Name a fruit."}, {"role": "user", "content": "Apple"}]]}])
    )
    records = [chat("Name a fruit!", "Pear"), chat("Name a fruit that is red.", "Cherry"), chat("A fruit?", "Apple")]
    assert drops(folder, given(tmp_path, records)) == {"overlap": 1}


def test_what_an_assistant_says_in_a_benchmark_is_no_prompt(tmp_path, folder):
    (folder.parent / "msj/examples.jsonl").write_bytes(jsonl([chat("Go on.", prose(random.Random(5), 30))]))
    assert drops(folder, given(tmp_path, [chat(prose(random.Random(5), 30), "Yes."), *fillers(2)])) == {}


@pytest.mark.parametrize(("name", "found"), [("attacks", True), ("shots8", True), ("train", False), ("val", False)])
def test_hierarchys_test_sets_are_a_benchmark_and_its_training_set_is_none(tmp_path, folder, name, found):
    (folder.parent / f"hierarchy/{name}.jsonl").write_bytes(jsonl([chat("What rhymes with cat?")]))
    records = [chat("What rhymes with cat?", "Hat"), *fillers(2)]
    assert drops(folder, given(tmp_path, records)) == ({"overlap": 1} if found else {})


def test_hierarchy_is_made_where_it_is_missing(tmp_path, folder):
    for file in (folder.parent / "hierarchy").iterdir():
        file.unlink()
    first = next(overlap.read_prompts("hierarchy", folder.parent / "hierarchy"))
    assert drops(folder, given(tmp_path, [chat(first[-1], "Yes."), *fillers(2)])) == {"overlap": 1}


def test_gsm8ks_training_questions_stay_but_for_near_copies(tmp_path, folder, shared, monkeypatch):
    """Its 1,319 test prompts share eight exemplars; four training questions have 13 words of a test question."""
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
    (folder.parent / "gsm8k/examples.jsonl").unlink()
    (row,) = prepare(folder, [shared / "mirror" / GSM8K])["sources"].values()
    assert (row["read"], row["shape"], row["duplicate"]) == (7473, 0, 0)
    assert row["overlap"] <= 10


def test_a_benchmark_that_can_not_be_had_is_named_and_the_run_goes_on(tmp_path, folder, server, monkeypatch):
    (folder.parent / "ih_challenge/examples.jsonl").unlink()
    monkeypatch.setattr(data.ih_challenge.prepare, "REPOSITORY", server.url)
    report = prepare(folder, given(tmp_path, fillers(3)))
    assert report["not checked"].keys() == {"ih_challenge"}
    assert "does not exist" in report["not checked"]["ih_challenge"]
    assert json.loads((folder / "sources.json").read_text()) == report


def test_a_corpus_elsewhere_is_checked_against_the_benchmarks_of_data_and_leaves_nothing_beside_it(tmp_path, folder):
    report = prepare(tmp_path / "own" / "corpus", given(tmp_path, [chat(PROMPT, "Yes."), *fillers(3)]), data=folder.parent)
    assert [row["overlap"] for row in report["sources"].values()] == [1] and not report["not checked"]
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["corpus"]


def test_benchmarks_that_are_there_are_not_made_again(tmp_path, folder):
    before = {file: file.stat().st_mtime_ns for file in folder.parent.glob("*/*.jsonl")}
    prepare(folder, given(tmp_path, fillers(3)))
    assert {file: file.stat().st_mtime_ns for file in before} == before


# ----------------------------------------------------------------------------------------------------------------------
# the network


def test_dropped_connections_change_nothing(sources, folder, tmp_path):
    prepare(make_folder(tmp_path / "smooth"), n=N)
    sources.drops = [1000, 700, 50_000, 3000, 2000, 50_000, 1, 4000, 17]
    prepare(folder, n=N)
    assert sources.drops == []
    assert content(folder) == content(tmp_path / "smooth/sft")


@pytest.mark.parametrize(
    ("status", "error", "advice"),
    [(401, PermissionError, "HF_TOKEN"), (403, PermissionError, "ask for access"), (404, FileNotFoundError, "exist")],
)
def test_a_source_that_is_refused_ends_in_a_sentence_and_what_was_done_stays(sources, folder, status, error, advice):
    sources.refusals[DOLLY] = (status, {})
    with pytest.raises(error, match=f"{advice}.*--from FILE"):
        prepare(folder, n=N)
    assert not (folder / "train.jsonl").exists()
    sources.refusals.clear()
    sources.requests.clear()
    prepare(folder, n=N)
    assert SYSTEMCHAT not in sources.paths()


def test_without_network_the_sentence_says_what_to_do(sources, folder, monkeypatch):
    monkeypatch.setattr(module.net, "HUB", test_download.closed_port())
    with pytest.raises(ConnectionError, match="check the network.*--from FILE"):
        prepare(folder, n=N)


def test_a_source_shorter_than_announced_is_refused(sources, folder):
    sources.surplus, sources.ranges = 10, False
    with pytest.raises(ConnectionError, match="bytes came"):
        prepare(folder, n=N)
    assert sorted(os.listdir(folder)) == ["raw"]
    assert not (folder / "raw" / Path(SYSTEMCHAT).name).exists()


def test_a_gsm8k_with_another_hash_is_refused(sources, folder, monkeypatch):
    monkeypatch.setitem(module.SHA256, "GSM8K", "0" * 64)
    with pytest.raises(ValueError, match="SHA-256 differs"):
        prepare(folder, n=N)
    assert not (folder / "train.jsonl").exists()
    assert not (folder / "raw/train.jsonl").exists()


def test_gsm8ks_hash_is_that_of_the_real_file(shared):
    real = hashlib.sha256((shared / "mirror" / GSM8K).read_bytes()).hexdigest()
    assert module.SHA256["GSM8K"] == real
    assert SOURCES["GSM8K"][2] == f"https://{GSM8K}"


# ----------------------------------------------------------------------------------------------------------------------
# runs that stop

CHILD = """
import os, signal, sys
from pathlib import Path
from data.sft import overlap
from data.sft import prepare as module
folder, n, where, countdown, digest = sys.argv[1:]
module.SHA256["GSM8K"], left = digest, int(countdown)
def dying(function):
    def call(*args):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call
target = Path if where == "replace" else module
setattr(target, where, dying(getattr(target, where)))
module.prepare(Path(folder), n=int(n))
"""


def killed(folder: Path, url: str, where: str, countdown: int, n: int = N) -> int:
    """Runs prepare() in a process that kills itself at the given call of a function. Returns its exit status."""
    environment = os.environ | {"HF_ENDPOINT": url}
    flags = [folder, n, where, countdown, module.SHA256["GSM8K"]]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, flags)], cwd=ROOT, env=environment, check=False, capture_output=True
    ).returncode


# the 30th conversation is Dolly's, the 60th SlimOrca's; the 6th file to get its final name is val.jsonl, then comes
# train.jsonl, then sources.json
@pytest.mark.parametrize(
    ("where", "countdown"),
    [
        ("make_messages", 1),
        ("make_messages", 30),
        ("make_messages", 60),
        ("deal", 1),
        ("replace", 5),
        ("replace", 7),
        ("replace", 8),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(sources, folder, tmp_path, where, countdown):
    prepare(make_folder(tmp_path / "smooth"), n=N)
    assert killed(folder, sources.url, where, countdown) == -9
    for name in ("train.jsonl", "val.jsonl"):
        left = folder / name
        assert not left.exists() or left.read_bytes() == (tmp_path / "smooth/sft" / name).read_bytes()
    prepare(folder, n=N)
    assert content(folder) == content(tmp_path / "smooth/sft")
    assert not list((folder / "raw").glob("kept-*"))


def test_what_a_run_with_another_n_has_completed_does_not_count(sources, folder, tmp_path):
    assert killed(folder, sources.url, "make_messages", 60) == -9
    prepare(folder, n=N // 2)
    prepare(make_folder(tmp_path / "clean"), n=N // 2)
    assert content(folder) == content(tmp_path / "clean/sft")


def test_what_was_completed_before_a_benchmark_could_be_had_does_not_count(tmp_path, folder, monkeypatch):
    files = given(tmp_path, [*fillers(5), chat("Name a fruit!", "Pear")])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "deal", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare(folder, files)
    (folder.parent / "sep/examples.jsonl").write_bytes(jsonl([chat("Name a fruit.")]))
    assert drops(folder, files) == {"overlap": 1}


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of so many KB and returns its folder, or makes it larger."""
    disk = tmp_path / "disk"

    def mount(size: int) -> Path:
        options = f"size={size}k" + (",remount" if disk.exists() else "")
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no small disk can be mounted here ({error})")
        return disk

    yield mount
    if disk.exists():
        subprocess.run(["umount", str(disk)], check=False, capture_output=True)


# the conversations have 257 KB: the first disk is full before they are all kept, the second and third when the final
# files are written
@pytest.mark.parametrize("size", [150, 350, 500])
def test_a_full_disk_is_said_and_a_larger_one_completes(tmp_path, small_disk, size):
    files = given(tmp_path, fillers(800))
    folder = make_folder(small_disk(size) / "data")
    with pytest.raises(OSError, match="the disk is full: make room"):
        prepare(folder, files)
    assert not list(folder.glob("*.jsonl"))
    small_disk(2000)
    prepare(folder, files)
    prepare(make_folder(tmp_path / "large"), files)
    assert content(folder) == content(tmp_path / "large/sft")


def test_a_disk_too_full_for_a_benchmark_does_not_leave_it_unchecked(tmp_path, small_disk, shared, monkeypatch):
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
    folder = make_folder(small_disk(100) / "data")
    (folder.parent / "ifeval/examples.jsonl").unlink()  # 200 KB to download
    with pytest.raises(OSError, match="the disk is full"):
        prepare(folder, given(tmp_path, fillers(3)))


# not getrusage's ru_maxrss, which a process takes over from the one that started it
MEASURE = """
import sys
from pathlib import Path
from data.sft.prepare import prepare
prepare(Path(sys.argv[1]), [Path(sys.argv[2])])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for megabytes in (2, 60):
        file = tmp_path / f"{megabytes}.jsonl"
        with file.open("w") as out:
            for i in range(megabytes * 100):
                out.write(json.dumps(chat(f"{i} question", f"{i} answer {'word ' * 1400}")) + "\n")  # 7 KB
                out.write(json.dumps(chat(f"{i} long", "word " * 600)) + "\n")  # 3 KB
        command = [sys.executable, "-c", MEASURE, str(make_folder(tmp_path / f"data{megabytes}")), str(file)]
        peaks.append(int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))
    # KB: of 58 MB more of text, what stays is 11,600 hashes, places and words, of half a KB each
    assert peaks[1] - peaks[0] < 8_000


# the command line


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--n", "1"], "--n is 1: it must be at least 2"),
        (["--from", "nowhere.jsonl"], "--from makes a corpus of your own: give --out"),
        (["--from", "nowhere.jsonl", "--out", "nowhere"], "nowhere.jsonl is no file: give --from files of conversations"),
    ],
)
def test_the_command_line_answers_in_a_sentence(flags, sentence):
    command = [sys.executable, "-m", "data.sft.prepare", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().startswith(sentence)
    assert "Traceback" not in run.stderr


def test_too_few_conversations_are_said(tmp_path, folder):
    with pytest.raises(ValueError, match="conversations that can stay: 1, too few"):
        prepare(folder, given(tmp_path, fillers(1)))


def test_two_runs_at_once_do_not_mix(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / "sft" / "raw").mkdir(parents=True)
    with claim(tmp_path / "sft"), pytest.raises(OSError, match="another run is at work"):
        prepare(tmp_path / "sft", files=[Path(__file__)], n=10)


@pytest.mark.parametrize("record", [{"chosen": "a", "conversations": []}, {"messages": [], "train_on": "first"}])
def test_a_record_that_can_not_be_learned_from_is_named(record, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([record]))
    with pytest.raises(ValueError, match="a.jsonl line 1"):
        prepare(tmp_path / "sft", files=[tmp_path / "a.jsonl"], n=10)
