"""data/gsm8k: the prompt against the published one, the real questions, and how replies may end."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from data.gsm8k.prepare import URL, prepare
from data.gsm8k.score import final_number, score

# the eight exemplars of arXiv 2201.11903 as they stand in lm_eval/tasks/gsm8k/gsm8k-cot.yaml of
# github.com/EleutherAI/lm-evaluation-harness (commit b8d1d4f), put together by that file's own doc_to_text, with the
# first question of openai/grade-school-math's test.jsonl; the words are those of github.com/kojima-takeshi188/zero_shot_cot
GOLDEN = Path(__file__).parent / "golden" / "gsm8k_prompt.txt"


@pytest.fixture(scope="module")
def prepared(shared, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder and the examples of the real file."""
    folder = tmp_path_factory.mktemp("gsm8k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
        return folder, prepare(folder)


def test_the_prompt_is_the_published_one_to_the_character(prepared):
    (message,) = prepared[1][0]["messages"]
    assert message == {"role": "user", "content": GOLDEN.read_text(encoding="utf-8")}


def test_every_prompt_is_the_eight_exemplars_and_its_own_question(prepared, shared):
    file = shared / "mirror" / URL.removeprefix("https://")
    questions = [json.loads(line)["question"] for line in file.read_bytes().splitlines()]
    exemplars = GOLDEN.read_text(encoding="utf-8").partition("Q: Janet")[0]
    prompts = [example["messages"][0]["content"] for example in prepared[1]]
    assert prompts == [f"{exemplars}Q: {question}\nA:" for question in questions]


def test_there_are_1319_questions_each_with_its_own_id(prepared):
    assert len(prepared[1]) == len({example["id"] for example in prepared[1]}) == 1319


def test_answers_are_the_published_numbers_without_thousands_separators(prepared):
    """Read in test.jsonl: its first three, its two negative ones, and one of "#### 1,450,000"."""
    answers = [example["answer"] for example in prepared[1]]
    assert answers[:3] == ["18", "3", "70000"]
    assert [answer for answer in answers if answer.startswith("-")] == ["-10", "-3"]
    assert answers.count("1450000") == 1


def test_every_published_solution_is_right_as_a_reply(prepared, shared):
    file = shared / "mirror" / URL.removeprefix("https://")
    solutions = [json.loads(line)["answer"] for line in file.read_bytes().splitlines()]
    wrong = [s for e, s in zip(prepared[1], solutions, strict=True) if not score(e, s)["accuracy"]]
    assert wrong == []


def test_the_file_holds_the_examples_one_a_line(prepared):
    folder, examples = prepared
    lines = (folder / "examples.jsonl").read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == examples
    assert not list(folder.glob("*.part"))


# what a reply ends in: the number that a person would read in it
ENDINGS = {
    # the form of the exemplars
    " 16 - 3 - 4 = 9. 9 * 2 = 18. The answer is 18.": 18,
    "The answer is 18": 18,
    "the answer is 18.": 18,
    "The final answer is 18.": 18,
    "So the answer is: 18": 18,
    "The answer is:\n\n18": 18,
    "The answer is **18**.": 18,
    "**The answer is 18.**": 18,
    "The answer is \\boxed{18}.": 18,
    "The answer is $18$.": 18,
    "The answer is approx. 18.": 18,
    "The answer is 18 apples for 3 friends.": 18,
    "The answer is 18. This took 3 steps.": 18,
    "The answer is 18\nI hope that helps 100 %!": 18,
    "The answer is 17. No, wait: the answer is 18.": 18,
    "The answer is 6 + 12 = 18.": 18,
    "The answer is x = 18.": 18,
    # another question that a base model makes up
    "The answer is 18.\n\nQ: Tom has 5 pens. How many?\nA: The answer is 5.": 18,
    "He has 18.\n\nQ: There are 3 cars.": 18,
    "The answer is 18.Q: And 7?": 18,
    # the form of the data set
    "2 * 9 = <<2*9=18>>18\n#### 18": 18,
    "####18": 18,
    "#### $18": 18,
    "#### -18": -18,
    "#### 1,234": 1234,
    "#### 18 apples": 18,
    "#### Step 2\nHe has 6 + 12 = 18 apples": 18,
    # neither: the last number
    "12 apples": 12,
    "It is 12, since 3 * 4 = 12": 12,
    "She pays $1,234.50": "1234.5",
    "She pays $1,234.50.": "1234.5",
    "1,000": 1000,
    "1,234,567 people": 1234567,
    "7, 8, 9": 9,
    "(12)": 12,
    "12!": 12,
    "12 m/s": 12,
    "USD12": 12,
    "£12": 12,
    "12€": 12,
    "\\$12": 12,
    "It is 012": 12,
    # negative
    "The answer is -5.": -5,
    "The answer is −5.": -5,
    "The answer is -$5.": -5,
    "The answer is $-5.": -5,
    "x=-5": -5,
    "between 10-12": 12,
    "7 - 5": 5,
    # fractions, decimals, percent
    "The answer is 3/4.": "3/4",
    "The answer is 1 1/2 cups.": "3/2",
    "The answer is -1 1/2.": "-3/2",
    "The answer is \\frac{3}{4}.": "3/4",
    "The answer is $\\dfrac{3}{4}$.": "3/4",
    "The answer is 12/3 = 4.": 4,
    "The answer is 0.5.": "1/2",
    "The answer is .5": "1/2",
    "He waits...5": 5,
    "12.0": 12,
    "12.": 12,
    "50%": 50,
    "The answer is 12.5%.": "25/2",
    # no number where one should be
    "6 + 12 = 18. The answer is eighteen.": 18,
    "The answer is none.": None,
    "None of them.": None,
    "twelve": None,
    "": None,
    "Q: 12": None,
    "\n\n": None,
}


@pytest.mark.parametrize("reply", ENDINGS)
def test_the_final_number_is_the_one_that_a_person_reads(reply):
    number = ENDINGS[reply]
    assert final_number(reply) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(("answer", "reply"), [("18", "18.00"), ("1234.5", "$1,234.50"), ("-3", "−3"), ("18", "36/2")])
def test_numbers_are_compared_as_numbers(answer, reply):
    assert score({"answer": answer}, reply) == {"accuracy": True}


@pytest.mark.parametrize(
    ("answer", "reply"), [("18", "18.01"), ("18", "-18"), ("18", "180"), ("18", "none"), ("0", "")]
)
def test_another_number_or_none_is_wrong(answer, reply):
    assert score({"answer": answer}, reply) == {"accuracy": False}


def test_a_reply_of_ten_thousand_digits_is_only_wrong():
    assert score({"answer": "18"}, "The answer is 1." + "3" * 10_000) == {"accuracy": False}


GOOD = '{"question": "How many?", "answer": "Two.\\n#### 2"}\n'


@pytest.mark.parametrize(
    "line", ['{"question": "How', "[]", "5", "[" * 100_000, '{"question": "How many?", "answer": "Two."}',
             '{"answer": "#### 2"}', '{"question": 5, "answer": "#### 2"}', '{"question": "How many?", "answer": 2}']
)  # fmt: skip
def test_a_damaged_line_is_named(line, tmp_path, monkeypatch):
    file = tmp_path / "mirror" / URL.removeprefix("https://")
    file.parent.mkdir(parents=True)
    file.write_text(f"{GOOD}{line}\n{GOOD}")
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(ValueError, match=r"test\.jsonl line 2 is .*delete"):
        prepare(tmp_path / "out")
    assert not (tmp_path / "out" / "examples.jsonl").exists()


def test_an_empty_file_is_one_sentence(tmp_path, monkeypatch):
    file = tmp_path / "mirror" / URL.removeprefix("https://")
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(ValueError, match=r"test\.jsonl is empty"):
        prepare(tmp_path / "out")
