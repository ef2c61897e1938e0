"""data/ifeval and data/sys_ifeval: the checkers against the official verdicts and against replies made by hand."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import langdetect
import pytest

from data.ifeval import prepare as ifeval
from data.ifeval import score as module
from data.ifeval.score import CHECKERS, count_capital_words, count_sentences, every, is_language, score, verify
from data.sys_ifeval import prepare as sys_ifeval
from data.sys_ifeval import score as sys_score

# ----------------------------------------------------------------------------------------------------------------------
# the official checker's verdicts

LLAMA, QWEN = "llama31_8b_instruct_eval_results", "Qwen__Qwen2.5-1.5B-Instruct-GPTQ-Int4"
MODELS = (LLAMA, QWEN, "gpt-4o-mini-2024-07-18")
LANGUAGE = ("change_case:english_capital", "change_case:english_lowercase", "language:response_language")


def read(file: Path) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def official(shared: Path, model: str, mode: str) -> dict[str, tuple[str, list[bool]]]:
    """By prompt (Llama's files) or by key (the others'): a model's reply and the official verdicts."""
    if model == LLAMA:
        rows = read(shared / "ifeval_verdicts" / f"{model}_{mode}.jsonl.gz")
        return {row["prompt"]: (row["response"], row["follow_instruction_list"]) for row in rows}
    return {row["key"]: (row["response"], row[mode]) for row in read(shared / "ifeval_verdicts" / f"{model}.jsonl.gz")}


def is_noise(model: str, example: dict, name: str, kwargs: dict, reply: str, mode: str, verdict: bool) -> bool:
    """Whether shared/README.md explains a disagreement. For the language: whether langdetect with another seed does."""
    if name == "keywords:letter_frequency":
        return example["id"] in (1122, 1129)
    if name == "detectable_content:number_placeholders":
        return model != LLAMA
    if name not in LANGUAGE:
        return False

    def detect(seed: int):
        langdetect.DetectorFactory.seed = seed
        return lambda text, code: langdetect.detect(text) == code

    with pytest.MonkeyPatch.context() as patch:
        for seed in range(1, 50):
            patch.setattr(module, "is_language", detect(seed))
            if verify(name, kwargs, example["prompt"], reply, mode == "loose") == verdict:
                return True
    return False


@pytest.mark.parametrize("model", MODELS)
def test_verdicts_agree_with_the_official_ones(model, shared, tmp_path, monkeypatch, capsys):
    """At least 99.5 % over all; of no type, noise apart, do more than 2 % (sentences: 5 %) or two verdicts differ."""
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
    examples = ifeval.prepare(tmp_path)
    count, differ, lines = Counter(), Counter(), []
    for mode in ("strict", "loose"):
        verdicts = official(shared, model, mode)
        for example in examples:
            reply, expected = verdicts[example["prompt" if model == LLAMA else "id"]]
            ours = score(example, reply)[f"instruction {mode}"]
            rows = zip(example["instructions"], example["kwargs"], expected, ours, strict=True)
            for name, kwargs, verdict, own in rows:
                count[name] += 1
                if own != verdict:
                    noise = is_noise(model, example, name, kwargs, reply, mode, verdict)
                    differ[name] += not noise
                    why = "  (noise)" if noise else ""
                    lines.append(f"{model} {example['id']} {name} {mode}: {own}, officially {verdict}{why}")
    with capsys.disabled():
        print("", *lines, f"{model}: {len(lines)} of {count.total()} verdicts differ", sep="\n")
    assert count.total() == 2 * 834
    assert len(lines) <= 0.005 * count.total()
    for name, n in count.items():
        share = 0.05 if name == "length_constraints:number_sentences" else 0.02
        assert differ[name] <= max(2, share * n), name


# ----------------------------------------------------------------------------------------------------------------------
# each instruction by hand: arguments, replies that follow it, replies that don't; those at the edge say why

ENGLISH = "the quick brown fox jumps over the lazy dog while the children are watching from the window"
AT_LEAST, LESS_THAN = {"relation": "at least"}, {"relation": "less than"}
CASES = [
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 3},
     ["NASA and ESA met at NATO.", "I'M here, said I.",  # at the bound; "I'M" is I and 'M
      "COVID-19, U.S. and A/B."],  # a hyphen, full stops or a slash do not divide
     ["NASA and ESA met.", "Nasa And Esa Met NATO", "well-KNOWN A/b aB AB CD"]),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 2},
     ["No word at all.", "Only ONE."], ["ONE and TWO.", "**ONE**,TWO"]),
    ("change_case:english_capital", {}, [ENGLISH.upper(), ENGLISH.upper() + " 12!"],
     [ENGLISH, ENGLISH.capitalize(), "DIE KINDER SPIELEN HEUTE NACHMITTAG MIT IHREN FREUNDEN IM GARTEN", "12"]),
    ("change_case:english_lowercase", {}, [ENGLISH, f"{ENGLISH} 12!"],
     [ENGLISH.upper(), ENGLISH.capitalize(), "die kinder spielen heute nachmittag mit ihren freunden im garten", "12"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a dog. "},
     ["Name a dog. Rex", "  name a DOG.\nRex", "Name a dog."],
     ["Rex", "Sure: Name a dog. Rex", "Name a  dog. Rex", "Name"]),
    ("combination:two_responses", {},
     ["Yes.\n******\nNo.", "******Yes.******No.******", "a*******b"],  # "b" is "*b": the seventh star is text
     ["Yes.", "Yes.\n***\nNo.", "Yes.\n******\n Yes. ", "a******b******c", "a******\n******b", "******"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] [address]", "[a][a][b]", "[] []", "[[x] y] [z]"],  # at the bound, empty, nested
     ["[name]", "(name) {address}", "[na\nme] [x]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye. P.S. I care", "p. s. x", "Bye\nP.S.", "stop.s."],  # it need not begin a line, nor a word
     ["PS: x", "P.S x", "Bye", "P.  S. x"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["P.P.S x", "p. p. s x", "P.P.S. x"], ["P.S. x", "PPS x"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "Well: My answer is maybe. Or so."], ["My answer is yes", "my answer is no.", "Yes."]),
    ("detectable_format:json_format", {},
     ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "```Json\n3```", '```json```\n"nested"```',
      '```JSON\n{"code": "```x```"}\n```'],  # a fence inside a string
     ["{'a': 1}", 'Here: {"a": 1}',
      '```json\n{"a": 1}\n```\nDone.', '```python\n{"a": 1}\n```', '{"a": 1', "```json```",
      '```\n```json\n{"a": 1}\n```\n```']),  # of nested fences, only those in a row at the beginning go
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb", "Section1 Section 2", "Section 1 Section 2 Section 3"],  # more is fine
     ["Section 1\na", "SECTION 1\na\nSECTION 2\nb", "Section one\nSection two", "Section  1 Section  2"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "- a\n- b", "text\n  * a\n\n- b", "*a\n-b", "- a\n---"],  # a ruler counts
     ["* a", "* a\n* b\n* c", "1. a\n2. b", "**a**\n**b**", "x * a\nx - b", "• a\n• b", "*\n* b"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and *b*", "**a** and **b**", "*a* **b** *c*", "*a*\n**b**", "*a**b*"],
     ["*a*", "**a**", "* *  ** ** *a*", "*a\nb* *c*", "_a_ _b_"]),
    ("detectable_format:title", {},
     ["<<A>>\ntext", "text <<A title>> text", "<<<A>>>"], ["<A>", "<< >>", "<<>>", "<<A\nB>>", "A"]),
    ("keywords:existence", {"keywords": ["cat", "Dog"]},
     ["The CAT and the dog.", "concatenate dogma"], ["The cat.", "dog", "c-a-t dog"]),  # inside longer words too
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "dog"]},
     ["A mouse.", "concatenate dogma", "cat_food"], ["The Cat.", "hot-dog", "mouse,dog,bird"]),  # whole words alone
    ("keywords:frequency", AT_LEAST | {"keyword": "cat", "frequency": 2},
     ["Cat and CAT", "concatenate cats", "catcatcat"], ["a cat", "dog dog"]),
    ("keywords:frequency", LESS_THAN | {"keyword": "cat", "frequency": 2}, ["a cat", "none"], ["cat cat", "catcat"]),
    ("keywords:letter_frequency", {"letter": "q", "let_relation": "at least", "let_frequency": 2},
     ["Quick quiz", "qq"], ["Quick", "none"]),
    ("keywords:letter_frequency", {"letter": "Q", "let_relation": "less than", "let_frequency": 2},
     ["Quick", "none"], ["Quick quiz"]),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": "at least", "let_frequency": 2},
     ["# a\n# b", "##"], ["#"]),
    ("language:response_language", {"language": "de"},
     ["Die Kinder spielen heute Nachmittag mit ihren Freunden im Garten.", "12345"],  # without letters it passes
     [ENGLISH, "Les enfants jouent cet après-midi dans le jardin avec leurs amis."]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
     ["A.\n\nThen b.", "A.\n\n'then' b", 'A.\n\n"Then, b"', "A.\n\nThen!", "A\nx\n\nthen's", "A.\n\nThen b.\n\n"],
     ["A.\n\nThenceforth b.", "A.\nThen b.", "A.\n\nb Then.", "A.\n\nThen b.\n\nc", "A.\n\n\n\nThen b.", "Then",
      "A.\n\n*Then* b", "A.\n\n“Then b"]),  # a blank paragraph shifts the second; other marks belong to the word
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na\n***\nb\n***", "a***b", "a\n\nx\n***\nb"],
     ["a", "a\n\nb", "a\n---\nb", "a\n***\nb\n***\nc", "a\n***\n\n***\nb", "a\n******\nb"]),
    ("length_constraints:number_sentences", AT_LEAST | {"num_sentences": 3},
     ["One. Two! Three?", "One. Two. Three. Four."], ["One. Two.", "Mr. Poe met Dr. Who. Fine."]),
    ("length_constraints:number_sentences", LESS_THAN | {"num_sentences": 3},
     ["One. Two.", "None"], ["One. Two. Three."]),
    ("length_constraints:number_words", AT_LEAST | {"num_words": 4},
     ["one two three four", "don't well-known", "a, b; c_d 5"], ["one two three", "a_b ... - !"]),
    ("length_constraints:number_words", LESS_THAN | {"num_words": 4},
     ["one two three"], ["one two three four", "it's you're"]),
    ("punctuation:no_comma", {}, ["a; b. c", "a、b，c"], ["a, b", "1,000"]),
    ("startend:end_checker", {"end_phrase": "Is that all? "},
     ["x. Is that all?", 'x. "IS THAT ALL?"\n', "Is that all?"],
     ["Is that all? Yes.", "x", "Is that all", "*Is that all?*"]),
    ("startend:quotation", {}, ['"a"', ' "a" and "b"\n', '""'], ["a", '"a', 'a"', '"', "“a”", "'a'", '*"a"*']),
]


def cases(which: int) -> list:
    return [pytest.param(case[0], case[1], reply, id=f"{case[0]}-{reply}") for case in CASES for reply in case[which]]


def test_there_are_cases_for_all_25_instructions():
    assert {case[0] for case in CASES} == set(CHECKERS) and len(CHECKERS) == 25


@pytest.mark.parametrize(("name", "kwargs", "reply"), cases(2))
def test_a_reply_that_follows_passes(name, kwargs, reply):
    assert verify(name, kwargs, "", reply) is True


@pytest.mark.parametrize(("name", "kwargs", "reply"), cases(3))
def test_a_reply_that_does_not_follow_fails(name, kwargs, reply):
    assert verify(name, kwargs, "", reply) is False


@pytest.mark.parametrize("reply", ["", " \n\t"])
@pytest.mark.parametrize(("name", "kwargs"), [case[:2] for case in CASES])
def test_a_blank_reply_follows_nothing(name, kwargs, reply):
    assert verify(name, kwargs, "", reply) is False and verify(name, kwargs, "", reply, loose=True) is False


# the count of NLTK's Punkt with its English model
SENTENCES = {
    "": 0,
    "No mark": 1,
    "One. Two.": 2,
    "one. two.": 2,  # capitals don't matter after an ordinary word
    "Wow!!! Really?! Yes.": 3,
    'He said "Stop." She did.': 2,  # closing quotes belong to the sentence
    "(One.) [Two.] Three.": 3,
    "Mr. Smith met Mrs. Jones on Jan. 5.": 1,
    "We were in the U.S. The trip was long.": 2,  # an abbreviation before a word that often begins a sentence
    "We were in the U.S. Capitol.": 1,
    "Use apples, pears, etc. and more.": 2,  # Punkt's model does not know "etc."
    "At 5 p.m. we left.": 1,
    "John F. Kennedy spoke.": 1,
    "Take vitamin C. The end.": 1,  # a single letter is an initial, whatever follows
    "Pi is 3.14 or so.": 1,
    "1. Wash it.\n2. Rinse.": 4,  # the number of a list is a sentence before a capital
    "1. wash\n2. rinse": 1,
    "Well... maybe.": 1,
    "Well... The end.": 2,
    "**Bold.** Next.": 2,
    "*The end.*": 2,  # the lone star behind the mark is one
    "See example.com for more.": 1,
    "Java's. Next.": 2,
}


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_are_counted_as_punkt_does(text):
    assert count_sentences(text) == SENTENCES[text]


# how many of the tokens of NLTK's word_tokenize are upper case
CAPITALS = {
    "I'm sure I'll go.": 2,  # I, 'm, sure, I, 'll
    "DON'T STOP": 3,  # DO, N'T
    "WE CANNOT": 3,  # CAN, NOT
    "IT’S": 2,  # IT, ’, S
    "A,B and C:D": 4,
    "10:30 AM": 1,
    "“YES”—NO... OK?": 3,
    "*A* _B_ <C>": 3,
    "WELL-KNOWN": 1,
    "iPhone A1 1 !": 1,
}


@pytest.mark.parametrize("text", CAPITALS)
def test_words_in_capitals_are_counted_as_treebank_tokens(text):
    assert count_capital_words(text) == CAPITALS[text]


# ----------------------------------------------------------------------------------------------------------------------
# loose, undecided, wrong


@pytest.mark.parametrize(
    ("name", "kwargs", "reply"),
    [
        ("startend:quotation", {}, 'Sure:\n"text"'),  # without the first line
        ("startend:quotation", {}, '"text"\nBye'),  # without the last
        ("startend:quotation", {}, 'Sure:\n\n"text"\n\nBye'),  # without both, and stripped
        ("startend:quotation", {}, '**"text"**'),  # without stars
        ("startend:quotation", {}, 'Sure:\n*"text"*\nBye'),  # without all of them
    ],
)
def test_loose_scoring_forgives_first_and_last_lines_and_stars(name, kwargs, reply):
    assert verify(name, kwargs, "", reply) is False and verify(name, kwargs, "", reply, loose=True) is True


def test_loose_scoring_does_not_drop_two_lines_at_one_end():
    assert verify("startend:quotation", {}, "", 'Sure:\nHere:\n"text"', loose=True) is False


def test_a_blank_variant_does_not_follow():
    """Without its only line a reply is empty, and an empty one has no comma."""
    assert verify("punctuation:no_comma", {}, "", "a, b", loose=True) is False


@pytest.fixture
def no_langdetect(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    is_language.cache_clear()
    yield
    is_language.cache_clear()


@pytest.mark.filterwarnings("ignore:IFEval's language rules")
def test_without_langdetect_only_what_hangs_on_it_is_undecided(no_langdetect):
    assert verify("language:response_language", {"language": "de"}, "", ENGLISH) is None
    assert verify("change_case:english_lowercase", {}, "", ENGLISH) is None
    assert verify("change_case:english_lowercase", {}, "", ENGLISH, loose=True) is None
    assert verify("change_case:english_capital", {}, "", ENGLISH) is False
    assert verify("punctuation:no_comma", {}, "", ENGLISH) is True


def test_a_missing_langdetect_is_told_in_a_sentence(no_langdetect):
    with pytest.warns(UserWarning, match="pip install langdetect"):
        is_language(ENGLISH, "en")


def test_the_language_of_a_doubtful_text_is_always_the_same():
    """This one is English for some seeds, and Dutch for most."""
    verdicts = set()
    for seed in range(30):
        langdetect.DetectorFactory.seed = seed  # what another user of the library may have left
        is_language.cache_clear()
        verdicts.add(is_language("hello world hallo welt", "en"))
    assert len(verdicts) == 1


def test_the_prefix_of_other_copies_and_their_null_arguments_are_ignored():
    kwargs = {"keywords": ["cat"], "num_words": None, "prompt_to_repeat": None}
    assert verify("en:keywords:existence", kwargs, "", "a cat") is True


def test_where_no_text_to_repeat_is_named_it_is_the_prompt():
    assert verify("combination:repeat_prompt", {}, "Name a dog.", "Name a dog. Rex") is True


def test_an_unknown_instruction_is_named():
    with pytest.raises(ValueError, match="keywords:rhyme is none of IFEval's 25"):
        verify("keywords:rhyme", {}, "", "a")


def test_a_missing_argument_is_named():
    with pytest.raises(ValueError, match="keywords:existence lacks its argument 'keywords'"):
        verify("keywords:existence", {"keywords": None}, "", "a")


def test_a_prompt_is_followed_if_all_its_instructions_are():
    example = {"prompt": "", "instructions": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert score(example, 'Sure:\n"a"') == {
        "prompt strict": False,
        "instruction strict": [True, False],
        "prompt loose": True,
        "instruction loose": [True, True],
    }
    assert next(iter(score(example, ""))) == "prompt strict"


def test_a_prompt_is_undecided_only_where_nothing_else_failed():
    assert (every([True, True]), every([True, None]), every([None, False])) == (True, None, False)


# ----------------------------------------------------------------------------------------------------------------------
# the examples


@pytest.fixture
def mirror(shared, monkeypatch):
    monkeypatch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))


@pytest.mark.parametrize("task", [ifeval, sys_ifeval])
def test_prepare_writes_the_541_prompts_that_it_returns(task, mirror, tmp_path):
    examples = task.prepare(tmp_path)
    lines = (tmp_path / "examples.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == examples
    assert len({example["id"] for example in examples}) == len(examples) == 541
    assert sum(len(example["instructions"]) for example in examples) == 834
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_the_prompt_of_ifeval_is_the_users_only_message(mirror, tmp_path):
    first = ifeval.prepare(tmp_path)[0]
    assert first["id"] == 1000 and first["messages"] == [{"role": "user", "content": first["prompt"]}]
    assert first["prompt"].startswith("Write a 300+ word summary") and first["kwargs"][1] == {"num_highlights": 3}


def test_the_instructions_of_sys_ifeval_are_in_the_system_message(mirror, tmp_path):
    first = sys_ifeval.prepare(tmp_path)[0]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][0]["content"].startswith("Do not use any commas.")
    assert first["messages"][1]["content"].startswith("Write a summary of the Wikipedia page")


def test_every_published_instruction_can_be_scored(mirror, tmp_path):
    for example in ifeval.prepare(tmp_path / "ifeval") + sys_ifeval.prepare(tmp_path / "sys_ifeval"):
        measures = sys_score.score(example, "Hello there.")
        assert None not in measures["instruction strict"] + measures["instruction loose"]


LINE = '{"key": 1, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'


@pytest.mark.parametrize(
    "damaged",
    [
        LINE[:40],
        "[]",
        LINE.replace("kwargs", "args"),
        LINE.replace("no_comma", "no_dot"),
        LINE.replace("[{}]", "[]"),
        LINE.replace('"p"', "5"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(damaged, tmp_path):
    raw = tmp_path / "raw" / "input_data.jsonl"
    raw.parent.mkdir()
    raw.write_text(f"{LINE}\n{damaged}\n{LINE}\n")
    with pytest.raises(ValueError, match=r"input_data\.jsonl line 2 is .*delete") as error:
        ifeval.prepare(tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "examples.jsonl").exists()
