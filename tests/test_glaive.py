"""data/glaive: calls in every notation of the data set, and conversations up to the first call in both shapes."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.files import read_records
from data.glaive.prepare import EXAMPLES, FORM, NAME, prepare
from data.glaive.score import parse_call, score

ROOT = Path(__file__).parent.parent
WEATHER = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}

# ----------------------------------------------------------------------------------------------------------------------
# the verdicts

RIGHT = [
    '<functioncall> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
    '<functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris", "days": 2}\'} <|endoftext|>',
    '<functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris", "days": 2}\' }',
    '<functioncall>{"name":"get_weather","arguments":\'{"days":2,"city":"Paris"}\'}</functioncall>',
    r'<functioncall> {"name": "get_weather", "arguments": "{\"city\": \"Paris\", \"days\": 2}"}',
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
    '{"arguments": {"days": 2, "city": "Paris"}, "name": "get_weather"}',
    '{"arguments": \'{"days": 2, "city": "Paris"}\', "name": "get_weather"}',
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2.0}}',
    'Sure! <functioncall> {"name": "get_weather",\n "arguments": {"city": "Paris",\n "days": 2}}',
    '```json\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n```',
    'Use {} like this: <functioncall> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}} Done.',
]


@pytest.mark.parametrize("reply", RIGHT)
def test_the_right_call_is_right_in_every_notation(reply):
    assert set(score({"call": WEATHER}, reply).values()) == {True}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Rome", "days": 2}',
        '{"city": "paris", "days": 2}',
        '{"city": "Paris"}',
        '{"city": "Paris", "days": 2, "unit": "C"}',
        '{"city": "Paris", "days": "2"}',
        '{"city": "Paris", "days": 3}',
        '{"city": ["Paris"], "days": 2}',
        "[]",
        "null",
        '"5"',
    ],
)
def test_another_argument_is_wrong_although_the_function_is_right(arguments):
    verdicts = score({"call": WEATHER}, f'<functioncall> {{"name": "get_weather", "arguments": {arguments}}}')
    assert verdicts == {"right call": False, "valid JSON": True, "right function": True, "right arguments": False}


@pytest.mark.parametrize("name", ['"get_Weather"', '"weather"', "null", '["get_weather"]'])
def test_another_function_is_wrong_although_the_arguments_are_right(name):
    reply = f'{{"name": {name}, "arguments": {{"city": "Paris", "days": 2}}}}'
    verdicts = score({"call": WEATHER}, reply)
    assert verdicts == {"right call": False, "valid JSON": True, "right function": False, "right arguments": True}


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "It is sunny in Paris.",
        "<functioncall>",
        "<functioncall> get_weather(city='Paris', days=2)",
        '<functioncall> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}',
        '<functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris", "days": 2\'}',
        "<functioncall> {'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 2}}",
        '<functioncall> {"name": "get_weather", "arguments": "city=Paris, days=2"}',
        '<functioncall> {name: "get_weather"}',
        "{" * 100_000,
        '{"name": ' + "[" * 100_000,
    ],
)
def test_a_reply_without_a_readable_call_is_wrong_in_everything(reply):
    assert set(score({"call": WEATHER}, reply).values()) == {False}


def test_the_headline_stands_first():
    assert next(iter(score({"call": WEATHER}, ""))) == "right call"


def test_true_is_not_one_and_false_is_not_zero():
    example = {"call": {"name": "set_alarm", "arguments": {"on": True, "more": [{"snooze": 0}]}}}
    for on, snooze, right in (("true", "0", True), ("1", "0", False), ("true", "false", False)):
        reply = f'{{"name": "set_alarm", "arguments": {{"on": {on}, "more": [{{"snooze": {snooze}}}]}}}}'
        assert score(example, reply)["right arguments"] is right


def test_the_order_of_a_list_belongs_to_the_argument():
    example = {"call": {"name": "area", "arguments": {"sides": [5, 3]}}}
    assert score(example, '{"name": "area", "arguments": {"sides": [3, 5]}}')["right arguments"] is False
    assert score(example, '{"name": "area", "arguments": {"sides": [5]}}')["right arguments"] is False


@pytest.mark.parametrize("arguments", ["", ', "arguments": {}', ', "arguments": \'{}\''])
def test_a_function_without_parameters_is_called_with_or_without_arguments(arguments):
    reply = f'{{"name": "now"{arguments}}}'
    assert score({"call": {"name": "now", "arguments": {}}}, reply)["right call"] is True


def test_apostrophes_inside_single_quotes_are_read_escaped_or_not():
    for text in (r"It\'s late", "It's late"):
        arguments = f'{{"text": "{text}", "tags": {{"a": 1}}}}'
        call = parse_call(f'<functioncall> {{"name": "note", "arguments": \'{arguments}\'}}')
        assert call == {"name": "note", "arguments": {"text": "It's late", "tags": {"a": 1}}}


# ----------------------------------------------------------------------------------------------------------------------
# conversations in the published shape

SYSTEM = """SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {
                "type": "string",
                "description": "The city"
            },
            "days": {
                "type": "integer",
                "description": "How many days"
            }
        },
        "required": [
            "city"
        ]
    }
}
"""
NO_FUNCTIONS = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"
CALL = '<functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris", "days": 2}\'} <|endoftext|>'
AFTER = (
    '\n\n\nFUNCTION RESPONSE: {"weather": "sunny"}\n\n\nASSISTANT: It will be sunny. <|endoftext|>'
    f"\n\n\nUSER: And in Rome?\n\n\nASSISTANT: {CALL.replace('Paris', 'Rome')}\n\n\n"
)
AT_ONCE = {"system": SYSTEM, "chat": f"USER: Will it rain in Paris?\n\n\nASSISTANT: {CALL}{AFTER}"}
LATER = {
    "system": SYSTEM,
    "chat": "USER: Hi, I need the weather.\n\n\nASSISTANT: Of course. In which city?\nAnd for how long? <|endoftext|>"
    f"\n\n\nUSER: Paris, for\ntwo days: today and tomorrow.\n\n\nASSISTANT: {CALL}{AFTER}",
}
NEVER = {"system": NO_FUNCTIONS, "chat": "USER: Hi\n\n\nASSISTANT: Hello! <|endoftext|>\n\n\n"}


def make(folder: Path, records: list) -> list[dict]:
    """Prepares a file of these records that stands where the download would have put it."""
    (folder / "raw").mkdir()
    (folder / "raw" / NAME).write_text(json.dumps(records, indent=2), encoding="utf-8")
    return prepare(folder)


def chat(text: str) -> dict:
    return {"system": SYSTEM, "chat": text}


def test_a_conversation_ends_with_the_user_before_the_first_call(tmp_path):
    messages = make(tmp_path, [LATER])[0]["messages"]
    assert messages[1:] == [
        {"role": "user", "content": "Hi, I need the weather."},
        {"role": "assistant", "content": "Of course. In which city?\nAnd for how long?"},
        {"role": "user", "content": "Paris, for\ntwo days: today and tomorrow."},
    ]


def test_the_first_call_is_the_target(tmp_path):
    assert [e["call"] for e in make(tmp_path, [AT_ONCE, LATER])] == [WEATHER, WEATHER]


def test_the_functions_stand_in_the_system_message_as_published_with_the_form_of_a_call(tmp_path):
    system = make(tmp_path, [AT_ONCE])[0]["messages"][0]
    published = SYSTEM.removeprefix("SYSTEM: ").strip()
    assert system == {"role": "system", "content": f"{published}\n\n{FORM}"}


def test_the_form_that_the_model_is_told_is_one_that_score_reads():
    assert parse_call(FORM) == {"name": "the function", "arguments": {"a parameter": "its value"}}


def test_conversations_that_never_call_are_no_examples_and_ids_count_the_records(tmp_path):
    assert [e["id"] for e in make(tmp_path, [NEVER, AT_ONCE, NEVER, LATER])] == ["glaive-2", "glaive-4"]


def test_turns_on_one_line_are_told_apart(tmp_path):
    record = chat(f"USER: Weather in Paris? ASSISTANT: For how long? <|endoftext|> USER: Two days. ASSISTANT: {CALL}")
    contents = [message["content"] for message in make(tmp_path, [record])[0]["messages"][1:]]
    assert contents == ["Weather in Paris?", "For how long?", "Two days."]


@pytest.mark.parametrize("between", [" ", " <|endoftext|>\n\n\nASSISTANT: "])
def test_a_promise_before_the_call_is_no_turn_of_its_own(between, tmp_path):
    example = make(tmp_path, [chat(f"USER: Weather in Paris?\n\n\nASSISTANT: One moment.{between}{CALL}")])[0]
    assert [message["role"] for message in example["messages"]] == ["system", "user"] and example["call"] == WEATHER


@pytest.mark.parametrize(
    "text",
    [
        'USER: Weather?\n\n\nASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": Paris}\'}',
        "USER: Weather?\n\n\nASSISTANT: <functioncall> get_weather",
        'USER: Weather?\n\n\nASSISTANT: <functioncall> {"arguments": {"city": "Paris"}}',
        'USER: Weather?\n\n\nASSISTANT: <functioncall> {"name": "get_weather", "arguments": ["Paris"]}',
        'USER: Weather?\n\n\nASSISTANT: <functioncall> {"name": "get_news", "arguments": {}}',
        f"ASSISTANT: {CALL}",
        f"USER: Hi\n\n\nUSER: Weather?\n\n\nASSISTANT: {CALL}",
        f"USER: Hi\n\n\nFUNCTION RESPONSE: {{}}\n\n\nASSISTANT: {CALL}",
    ],
)
def test_a_conversation_whose_call_cannot_be_asked_for_is_left_out_and_counted(text, tmp_path, capsys):
    assert [e["id"] for e in make(tmp_path, [chat(text), AT_ONCE])] == ["glaive-2"]
    assert capsys.readouterr().err.endswith("left out, as their first call can't be asked for: 1\n")


def test_the_first_500_are_taken_and_the_rest_of_the_file_is_not_read(tmp_path):
    (tmp_path / "raw").mkdir()
    records = ",\n".join([json.dumps(AT_ONCE)] * EXAMPLES)
    (tmp_path / "raw" / NAME).write_text(f"[{records},\n{{this is damaged")
    assert len(prepare(tmp_path)) == EXAMPLES == 500


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_longer_than_the_buffer_is_read_record_by_record(indent, tmp_path, monkeypatch):
    """A record of nearly the whole buffer, and short ones whose ends fall on every place of it."""
    monkeypatch.setattr("data.files.LONGEST", 1000)
    records = [{"text": "x" * (n % 97) + "é\n\"'[]{},"} for n in range(500)] + [{"text": "y" * 950}] + [{}, {}]
    (tmp_path / "x.json").write_text(json.dumps(records, indent=indent), encoding="utf-8")
    assert [record for _, record in read_records(tmp_path / "x.json")] == records


def test_the_file_holds_what_prepare_returns(tmp_path):
    examples = make(tmp_path, [AT_ONCE, LATER])
    lines = (tmp_path / "examples.jsonl").read_bytes().decode("utf-8").rstrip("\n").split("\n")
    assert [json.loads(line) for line in lines] == examples and not list(tmp_path.glob("*.part"))


# ----------------------------------------------------------------------------------------------------------------------
# damaged files


@pytest.mark.parametrize(
    "damaged",
    [
        5,
        None,
        "text",
        [],
        {},
        {"system": SYSTEM},
        {"chat": "USER: Hi"},
        {"system": 5, "chat": "USER: Hi"},
        {"system": SYSTEM, "chat": 5},
        {"conversations": []},
        {"conversations": [], "tools": "["},
        {"conversations": 5, "tools": "[]"},
        {"conversations": [{"from": "human"}], "tools": "[]"},
        {"conversations": [{"from": "me", "value": ""}], "tools": "[]"},
    ],
)
def test_a_record_that_is_no_conversation_is_named_and_no_examples_are_written(damaged, tmp_path):
    with pytest.raises(ValueError, match=rf"{NAME} record 2 is no conversation"):
        make(tmp_path, [AT_ONCE, damaged, LATER])
    assert not (tmp_path / "examples.jsonl").exists()


@pytest.mark.parametrize("end", ["", ",", ', {"system": "SYST', ", }]", ", " + "[" * 100_000])
def test_a_file_that_breaks_off_names_the_record(end, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / NAME).write_text(f"[{json.dumps(AT_ONCE)}{end}")
    with pytest.raises(ValueError, match=rf"{NAME} record 2 is damaged"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no conversation with a call"),
        (b"{}", "line 1 is no conversation with functions"),
        (b"<html>", "line 1 is not valid JSON"),
        (b'{"system": "x"}\n{"system": "y"}', "line 1 is no conversation with functions"),
    ],
)
def test_a_file_of_something_else_is_one_sentence(content, says, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / NAME).write_bytes(content)
    with pytest.raises(ValueError, match=f"{NAME} {says}") as error:
        prepare(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_one_sentence(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / NAME).write_bytes(b'[{"system": "\xff"}]')
    with pytest.raises(ValueError, match=f"{NAME} can't be read beyond"):
        prepare(tmp_path)


@pytest.mark.parametrize("records", [[], [NEVER]])
def test_a_file_without_any_call_is_one_sentence(records, tmp_path):
    with pytest.raises(ValueError, match=f"{NAME} holds no conversation with a call"):
        make(tmp_path, records)


# ----------------------------------------------------------------------------------------------------------------------
# --from FILE, and the converted shape


def test_all_conversations_with_a_call_of_the_converted_sample_are_examples(shared, tmp_path, capsys):
    file = shared / "samples" / "glaive_toolcall_en_demo.json.gz"
    records = json.loads(gzip.decompress(file.read_bytes()))
    speakers = [[turn["from"] for turn in record["conversations"]] for record in records]
    calling = [number for number, of_record in enumerate(speakers, start=1) if "function_call" in of_record]
    assert [e["id"] for e in prepare(tmp_path, file)] == [f"glaive-{number}" for number in calling]
    assert capsys.readouterr().err == ""


def test_the_targets_of_the_converted_sample_are_its_first_calls(shared, tmp_path):
    file = shared / "samples" / "glaive_toolcall_en_demo.json.gz"
    records = json.loads(gzip.decompress(file.read_bytes()))
    calls = [[t["value"] for t in record["conversations"] if t["from"] == "function_call"] for record in records]
    assert [e["call"] for e in prepare(tmp_path, file)] == [json.loads(call[0]) for call in calls if call]


def test_both_shapes_of_a_conversation_make_the_same_example(tmp_path):
    functions = [json.loads(SYSTEM.partition("-\n")[2])]
    turns = [
        {"from": "human", "value": "Hi, I need the weather."},
        {"from": "gpt", "value": "Of course. In which city?\nAnd for how long?"},
        {"from": "human", "value": "Paris, for\ntwo days: today and tomorrow."},
        {"from": "function_call", "value": json.dumps(WEATHER)},
        {"from": "observation", "value": '{"weather": "sunny"}'},
    ]
    file = tmp_path / "converted.json"
    file.write_text(json.dumps([{"conversations": turns, "tools": json.dumps(functions)}]))
    assert prepare(tmp_path / "from", file) == make(tmp_path, [LATER])


def test_a_published_file_can_be_given_too(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps([AT_ONCE]))
    assert len(prepare(tmp_path / "out", tmp_path / "mine.json")) == 1


def test_a_cut_archive_is_one_sentence(tmp_path):
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(json.dumps([AT_ONCE] * 9).encode())[:-20])
    with pytest.raises(ValueError, match=r"x\.json\.gz can't be read beyond"):
        prepare(tmp_path, tmp_path / "x.json.gz")


def test_a_missing_file_is_one_sentence_on_the_command_line(tmp_path):
    command = [sys.executable, "-m", "data.glaive.prepare", "--from", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stderr.startswith(str(tmp_path)) and done.stderr.count("\n") == 1
