"""data/squad: the official normalisation on cases made by hand, both sources, and damaged files."""

import json
from pathlib import Path

import pytest

from data.squad.prepare import SQUAD, XQUAD, prepare
from data.squad.score import normalize, score


def put(tmp_path: Path, url: str, content: str) -> None:
    """Lets the mirror of this test serve content for url."""
    file = tmp_path / "mirror" / url.removeprefix("https://")
    file.parent.mkdir(parents=True)
    file.write_text(content, encoding="utf-8")


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    """What the mirror lacks can't be had."""

    def fetch(url, part):
        raise ConnectionError(f"{url} can't be downloaded")

    monkeypatch.setattr("data.download.fetch", fetch)
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))


@pytest.fixture
def xquad(shared, tmp_path, monkeypatch) -> list[dict]:
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
    return prepare(tmp_path / "out")


def squad(**changes) -> str:
    """A file in the shape of SQuAD with one question, parts of which may be changed."""
    qa = {
        "id": "q1",
        "question": "Who won?",
        "answers": [{"text": "Denver", "answer_start": 0}, {"text": "the Broncos"}],
    }
    qa |= {key: value for key, value in changes.items() if key in qa}
    paragraph = {"context": changes.get("context", "Denver won."), "qas": [qa]}
    return json.dumps({"version": "1.1", "data": [{"title": "Bowl", "paragraphs": [paragraph]}]})


def test_squad_itself_comes_first(tmp_path):
    put(tmp_path, SQUAD, squad())
    put(tmp_path, XQUAD, squad(question="Why?"))
    (example,) = prepare(tmp_path / "out")
    assert example["source"] == "SQuAD v1.1 dev" and example["answers"] == ["Denver", "the Broncos"]


def test_where_squad_cannot_be_had_it_is_xquad(xquad):
    assert {example["source"] for example in xquad} == {"XQuAD-en"}


def test_where_neither_can_be_had_an_error_says_so(tmp_path):
    with pytest.raises(ConnectionError, match=r"xquad\.en\.json can't be downloaded"):
        prepare(tmp_path / "out")


def test_xquad_has_1190_questions_each_with_its_own_id(xquad):
    """The count of arXiv 1910.11856: 240 paragraphs and 1,190 question-answer pairs."""
    assert len(xquad) == len({example["id"] for example in xquad}) == 1190


def test_examples_keep_the_order_of_the_file(xquad):
    """The first question, read in the file."""
    assert xquad[0]["id"] == "56beb4343aeaaa14008c925b" and xquad[0]["answers"] == ["308"]
    assert "How many points did the Panthers defense surrender?" in xquad[0]["messages"][0]["content"]


def test_the_prompt_is_the_paragraph_the_question_and_the_request(tmp_path):
    put(tmp_path, SQUAD, squad(context="In {year} Denver won.", question="Who {won}?"))
    (example,) = prepare(tmp_path / "out")
    request = "Answer with a few words copied from the text above, and write nothing else."
    assert example["messages"] == [
        {"role": "user", "content": f"In {{year}} Denver won.\n\nQuestion: Who {{won}}?\n\n{request}"}
    ]


def test_a_gold_answer_is_right_as_a_reply(xquad):
    assert [e["id"] for e in xquad if score(e, e["answers"][0]) != {"exact match": True, "F1": 1.0}] == []


def test_the_file_holds_the_examples_one_a_line(xquad, tmp_path):
    lines = (tmp_path / "out" / "examples.jsonl").read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == xquad
    assert not list((tmp_path / "out").glob("*.part"))


# by the rules of evaluate-v1.1.py: lower case, no ASCII punctuation, no articles, single spaces, in this order
NORMALIZED = {
    "Denver Broncos": "denver broncos",
    "The Denver Broncos.": "denver broncos",
    "  a   quick\t\nbrown  fox ": "quick brown fox",
    "An apple, a day": "apple day",
    "the": "",
    "A": "",
    "another theory": "another theory",  # articles only as whole words
    "U.S.A.": "usa",  # punctuation goes without leaving a space
    "well-known": "wellknown",
    "a-b": "ab",  # and before the articles do
    "the-best": "thebest",
    "$1,234.50": "123450",
    "50%": "50",
    "rock'n'roll": "rocknroll",
    "don’t": "don’t",  # this apostrophe is not ASCII
    "the “Bowl”": "“bowl”",
    "5–3": "5–3",
    "ÉCOLE": "école",
    "!?": "",
    "": "",
}


@pytest.mark.parametrize("text", NORMALIZED)
def test_texts_are_normalised_as_officially(text):
    assert normalize(text) == NORMALIZED[text]


def test_an_exact_match_is_one_after_normalisation():
    example = {"answers": ["the Denver Broncos"]}
    assert score(example, "Denver Broncos!") == {"exact match": True, "F1": 1.0}


def test_f1_weighs_precision_against_recall():
    """Two of the three words said are among the four wanted: P = 2/3, R = 1/2, F1 = 2 P R / (P + R) = 4/7."""
    example = {"answers": ["red green blue white"]}
    assert score(example, "red green black") == {"exact match": False, "F1": pytest.approx(4 / 7)}


def test_f1_counts_a_repeated_word_as_often_as_both_have_it():
    """P = 1/3, R = 1/2: 0.4."""
    assert score({"answers": ["red blue"]}, "red red red")["F1"] == pytest.approx(0.4)


def test_f1_does_not_mind_the_order():
    assert score({"answers": ["blue red"]}, "red blue") == {"exact match": False, "F1": 1.0}


def test_the_best_gold_answer_counts_for_each_measure():
    example = {"answers": ["Denver", "the Denver Broncos of Colorado", "Broncos"]}
    assert score(example, "broncos") == {"exact match": True, "F1": 1.0}
    assert score(example, "Denver Broncos Colorado")["F1"] == pytest.approx(6 / 7)


@pytest.mark.parametrize("reply", ["", "   ", "the", "Seattle"])
def test_nothing_in_common_is_zero(reply):
    assert score({"answers": ["Denver"]}, reply) == {"exact match": False, "F1": 0.0}


def test_a_text_of_articles_alone_matches_another_and_has_no_f1():
    """As the official script of v1.1 has it: equal empty texts match, and share no word."""
    assert score({"answers": ["the"]}, "a") == {"exact match": True, "F1": 0.0}


def test_the_first_line_of_a_reply_is_the_answer():
    reply = "\n Denver \n\nThe text says that Denver won."
    assert score({"answers": ["Denver"]}, reply) == {"exact match": True, "F1": 1.0}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "5", "[" * 100_000, "{}", '{"data": 5}', '{"data": [{}]}', '{"data": [5]}', '{"data": []}'],
)
def test_a_damaged_file_is_one_sentence(content, tmp_path):
    put(tmp_path, SQUAD, content)
    with pytest.raises(ValueError, match=r"dev-v1\.1\.json .*delete"):
        prepare(tmp_path / "out")
    assert not (tmp_path / "out" / "examples.jsonl").exists()


@pytest.mark.parametrize(
    "changes", [{"answers": []}, {"answers": 5}, {"answers": [{}]}, {"answers": [{"text": None}]}, {"question": None},
                {"context": 5}]
)  # fmt: skip
def test_a_damaged_record_is_named(changes, tmp_path):
    put(tmp_path, SQUAD, squad(**changes))
    with pytest.raises(ValueError, match=r"dev-v1\.1\.json .*article 1, paragraph 1, question 1"):
        prepare(tmp_path / "out")
