"""data/sysbench: examples of both shapes, the judge's question and verdict, the three rates, and the judge's endpoint."""

import gzip
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from data.sysbench import judge as judging
from data.sysbench.judge import ask_judge, judge
from data.sysbench.prepare import URL, prepare
from data.sysbench.score import judge_messages, parse_verdict, score

ROOT = Path(__file__).parent.parent


# ----------------------------------------------------------------------------------------------------------------------
# examples


def published(**changes) -> dict:
    """A record of the published file's form."""
    criteria = {"1": {"criteria_id": 1, "criteria_content": "用中文回答", "criteria_type": "格式约束"}}
    more = {"2": {"criteria_id": 2, "criteria_content": "不提价格", "criteria_type": "内容约束"}}
    made = {
        "system_id": 7,
        "领域": "教育",
        "rounds_related": False,
        "system_prompt": "你是助教。",
        "messages": [
            {"role": "system", "content": "你是助教。"},
            {"role": "user", "content": "第一问"},
            {"role": "assistant", "content": "参考一"},
            {"role": "user", "content": "第二问"},
            {"role": "assistant", "content": "参考二"},
        ],
        "prompt_infos": {
            "第二问": {"alignment": "misalign", "criteria": criteria | more},
            "第一问": {"alignment": "align", "criteria": criteria},
        },
    }
    return made | changes


def rebuilt() -> dict:
    """The same conversation in the form of the tables of results."""
    one, two = "1. 用中文回答 | 格式约束", "1. 用中文回答 | 格式约束\n2. 不提价格 | 内容约束"
    turns = [{"round": 1, "user": "第一问", "criteria": one}, {"round": 2, "user": "第二问", "criteria": two}]
    return {"system_id": 7, "multi_rounds_related": False, "system_prompt": "你是助教。", "turns": turns}


EXAMPLE = {
    "id": "7",
    "messages": [{"role": "system", "content": "你是助教。"}],
    "turns": ["第一问", "第二问"],
    "criteria": [{"1": "用中文回答 | 格式约束"}, {"1": "用中文回答 | 格式约束", "2": "不提价格 | 内容约束"}],
    "group": "parallel turns",
}


def test_the_published_file_is_found_in_the_mirror_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    parts = urlsplit(URL)
    file = tmp_path / "mirror" / parts.hostname / parts.path.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([published(), published(system_id=3, rounds_related=True)], indent=2), encoding="utf-8")
    assert prepare(tmp_path / "out") == [EXAMPLE, EXAMPLE | {"id": "3", "group": "dependent turns"}]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("text", [json.dumps([published()]), json.dumps(published()), json.dumps(rebuilt()) + "\n"])
def test_a_local_file_of_either_shape_gives_the_same_example(text, pack, tmp_path):
    (tmp_path / "file").write_bytes(pack(text.encode()))
    assert prepare(tmp_path / "out", tmp_path / "file") == [EXAMPLE]


def test_the_examples_are_written_one_a_line(tmp_path, shared):
    """500 conversations of five turns, 2,500 questions, as the paper counts them."""
    examples = prepare(tmp_path, shared / "samples" / "sysbench_500.jsonl.gz")
    lines = (tmp_path / "examples.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == examples and lines[-1] == b""
    assert [example["id"] for example in examples] == [str(i) for i in range(1, 501)]
    assert Counter(len(example["turns"]) for example in examples) == {5: 500}


def test_the_six_types_of_criteria_are_those_of_the_paper(tmp_path, shared):
    examples = prepare(tmp_path, shared / "samples" / "sysbench_500.jsonl.gz")
    criteria = [text for e in examples for checklist in e["criteria"] for text in checklist.values()]
    types = {"动作约束", "内容约束", "背景约束", "角色约束", "格式约束", "风格约束"}
    assert {text.rpartition(" | ")[2] for text in criteria} == types


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{", "record 1 is damaged"),
        (json.dumps(rebuilt()) + "\n{", "line 2 is not valid JSON"),
        (json.dumps([published(), {"system_id": 8}]), "record 2 is damaged"),
        (json.dumps([published(prompt_infos={})]), "record 1 is damaged .*第一问"),
        (json.dumps([published(messages=[])]), "record 1 is damaged .*no user turn"),
        (json.dumps([published(system_prompt=None)]), "record 1 is damaged .*no text"),
        (json.dumps([5]), "record 1 is damaged"),
        (json.dumps(rebuilt() | {"turns": [{"user": "第一问", "criteria": "none"}]}), "line 1 is damaged"),
        (json.dumps([published(), published()]), "same system_id"),
        ("", "no records"),
    ],
)
def test_a_damaged_file_is_one_sentence_that_names_file_and_record(text, says, tmp_path):
    (tmp_path / "damaged.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"damaged\.json .*{says}|damaged\.json {says}") as error:
        prepare(tmp_path / "out", tmp_path / "damaged.json")
    assert "\n" not in str(error.value)


def test_a_gzip_file_that_was_cut_is_one_sentence(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps([published()]).encode())[:-20])
    with pytest.raises(ValueError, match=r"cut\.gz can't be read"):
        prepare(tmp_path / "out", tmp_path / "cut.gz")


def test_the_command_line_ends_with_one_sentence(tmp_path):
    command = [sys.executable, "-m", "data.sysbench.prepare", "--from", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "none.json" in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# question, verdict, rates

# get_eval_pattern() of the benchmark's utils.py, filled in by hand for the second turn of EXAMPLE
QUESTION = """
# 背景与目标
你现在是一个大模型结果评估专家。以下，你将会面对一个大模型system prompt遵循能力评估任务。
我将会给出你对应的system prompt、历史对话、当前轮次的问题、和当前轮次的回答
需要你准确判断当前轮次的回答是否合格。
为了让你的评判足够准确，我还将会给出评判细则，需要你准确判断并告知评判细则当中每一条约束的遵循情况。

# 对话信息
## system prompt
<system prompt>
你是助教。
</system prompt>

## 历史对话轮次


<round-1>
<role:>
user
</role>
<content>
第一问
</content>
<role:>assistant</role>
<content>
答{一}
</content>
</round-1>


## 当前待评估的对话轮次
<role:>
user
</role>
<content>
第二问
</content>

<role:>
assistant
</role>
<content>
答二
</content>

# 评判细则
<评判细则>
1. 用中文回答 | 格式约束
2. 不提价格 | 内容约束
</评判细则>

请你认真阅读上述system prompt设定与历史对话轮次，并严格以评判细则为评判标准，针对评判细则当中的逐条要求，判断当前对话轮次的回答是否遵循。
请以json格式回答，包含两个字段：评判理由、评判结果（评判结果为一个dict，dict的key评判细则的序号，value为对应的评判结果（是/否））
输出格式如下：
'''json
{
  "评判理由": "……",
  "评判结果": {
    1: "……",
    ……
  }
}
'''

"""


def test_the_judges_question_is_the_published_one_to_the_character():
    assert judge_messages(EXAMPLE, 1, ["答{一}", "答二"]) == [{"role": "user", "content": QUESTION}]


def test_the_question_about_the_first_turn_shows_no_round_and_no_later_reply():
    (message,) = judge_messages(EXAMPLE, 0, ["答一", "答二"])
    assert "<round-" not in message["content"] and "答二" not in message["content"]


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"评判理由": "都好", "评判结果": {"1": "是", "2": "否"}}\n```',
        '\'\'\'json\n{\n  "评判理由": "……",\n  "评判结果": {\n    1: "是",\n    2: "否"\n  }\n}\n\'\'\'',
        "{'评判理由': '好', '评判结果': {1: '是', 2: '否',}}",
        '{"评判理由": "他说"好"，\n{而且}不错", "评判结果": {"1": "是", "2": "否"}}',
        '{"评判结果": {"1": "否"}} 再想：{"评判结果": {"1": "是", "2": "否"}}',
    ],
)
def test_a_verdict_is_read_in_all_forms_that_judges_write(text):
    assert parse_verdict(text) == {"1": True, "2": False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "是",
        '{"评判理由": "好"}',
        '{"评判结果": {}}',
        '{"评判结果": "是"}',
        '{"评判结果": {"1": "部分"}}',
        '{"评判结果": {"1": "是", "2": }}',
        '{"评判结果": {"1": "是" "2": "否"}}',
        '{"评判结果": {"1": "是", ……}}',
        '{"评判结果": {"1": "是"',
    ],
)
def test_a_malformed_verdict_is_none(text):
    assert parse_verdict(text) is None


def conversation(*verdicts: dict | None) -> tuple[dict, list[str]]:
    """Arguments of score() for a conversation of as many turns, with two criteria in each."""
    n = len(verdicts)
    return {"criteria": [{"1": "a", "2": "b"}] * n, "verdicts": list(verdicts)}, [""] * n


KEPT, HALF = {"1": True, "2": True}, {"1": True, "2": False}


@pytest.mark.parametrize(
    ("verdicts", "ssr"),
    [
        ((KEPT, KEPT, KEPT, KEPT, KEPT), 1.0),
        ((HALF, KEPT, KEPT, KEPT, KEPT), 0.0),  # only turns from the first on count
        ((KEPT, KEPT, HALF, KEPT, KEPT), 0.4),
        ((KEPT, KEPT, KEPT, KEPT, HALF), 0.8),
        ((KEPT, HALF, None, KEPT, KEPT), 0.2),  # what comes after the break does not matter
        ((KEPT, None, KEPT, KEPT, KEPT), None),
    ],
)
def test_the_session_stability_rate_is_the_share_of_turns_before_the_first_break(verdicts, ssr):
    assert score(*conversation(*verdicts))["SSR"] == (ssr if ssr is None else pytest.approx(ssr))


def test_an_instruction_is_satisfied_when_all_of_its_criteria_are():
    assert score(*conversation(KEPT, HALF, None))["ISR"] == [True, False, None]


def test_every_criterion_counts_for_itself_and_those_without_a_verdict_are_left_open():
    assert score(*conversation(KEPT, HALF, None))["CSR"] == [True, True, True, False, None, None]


# ----------------------------------------------------------------------------------------------------------------------
# the judge's endpoint


class Judge:
    """An endpoint on loopback. script: what it does first, one entry a request: a status, (status, headers), the text
    of a reply or a function that makes it, "drop" (the connection breaks), "slow" (nothing comes for a second). Then it
    gives good verdicts.
    """

    def __init__(self):
        self.script, self.requests, self.headers = [], [], []
        judge, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    judge.requests.append(request | {"path": self.path})
                    judge.headers.append(self.headers)
                    step = judge.script.pop(0) if judge.script else good
                step = step(request) if callable(step) else step
                if step == "drop":
                    self.connection.close()
                    return
                if step == "slow":
                    time.sleep(1)
                status, headers = step if isinstance(step, tuple) else (step, {})
                message = {"choices": [{"message": {"role": "assistant", "content": step}}]}
                body = json.dumps(message if isinstance(status, str) else {"error": {"message": "not\nnow"}}).encode()
                self.send_response(200 if isinstance(status, str) else status)
                for name, value in ({"Content-Length": len(body)} | headers).items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def good(request: dict) -> str:
    """The verdict that all criteria of the question hold."""
    checklist = request["messages"][0]["content"].split("<评判细则>\n")[1].split("\n</评判细则>")[0]
    results = {line.split(". ")[0]: "是" for line in checklist.split("\n")}
    return json.dumps({"评判理由": "好", "评判结果": results}, ensure_ascii=False)


@pytest.fixture
def endpoint(monkeypatch):
    """A Judge that OPENAI_BASE_URL names, and waits that are short."""
    served = Judge()
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(judging, "BACKOFF", 0.001)
    monkeypatch.setattr(judging, "WORKERS", 1)  # a script is followed in the order of the questions
    yield served
    served.close()


ROWS = [EXAMPLE | {"id": str(i), "reply": [f"答{i}", f"再答{i}"]} for i in range(3)]
GOOD = [[{"1": True}, {"1": True, "2": True}]] * 3
ASK = [{"role": "user", "content": "<评判细则>\n1. a\n</评判细则>"}]


def test_a_request_has_the_form_of_the_api(endpoint):
    assert parse_verdict(ask_judge(ASK, "gpt-x")) == {"1": True}
    assert endpoint.requests == [
        {"model": "gpt-x", "messages": ASK, "temperature": 0.0, "path": "/v1/chat/completions"}
    ]
    assert endpoint.headers[0]["Authorization"] == "Bearer key"
    assert endpoint.headers[0]["Content-Type"] == "application/json"


def test_an_endpoint_without_a_key_is_asked_without_one(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    ask_judge(ASK, "gpt-x")
    assert endpoint.headers[0]["Authorization"] is None


@pytest.mark.parametrize("workers", [1, 8])
def test_every_reply_gets_its_verdict_and_every_verdict_is_kept(workers, endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "WORKERS", workers)
    assert judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl") == GOOD
    kept = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert sorted((line["id"], line["turn"]) for line in kept) == [(str(i), turn) for i in range(3) for turn in (0, 1)]
    assert all(parse_verdict(line["text"]) == line["verdict"] for line in kept)


def test_a_verdict_is_in_the_file_before_the_next_one_is_there(endpoint, tmp_path):
    seen = []
    endpoint.script = [good, lambda request: seen.append((tmp_path / "verdicts.jsonl").read_text()) or good(request)]
    judge(ROWS[:1], "gpt-x", tmp_path / "verdicts.jsonl")
    assert seen[0].count("\n") == 1


def test_verdicts_that_are_kept_are_not_asked_for_again(endpoint, tmp_path):
    judge(ROWS[:2], "gpt-x", tmp_path / "verdicts.jsonl")
    endpoint.requests.clear()
    assert judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl") == GOOD
    assert len(endpoint.requests) == 2 and "答2" in endpoint.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize("change", ["model", "reply", "earlier reply"])
def test_a_kept_verdict_serves_no_other_model_and_no_other_reply(change, endpoint, tmp_path):
    judge(ROWS[:1], "gpt-x", tmp_path / "verdicts.jsonl")
    endpoint.requests.clear()
    reply = {"model": ROWS[0]["reply"], "reply": ["答0", "另答"], "earlier reply": ["另答", "再答0"]}[change]
    judge([ROWS[0] | {"reply": reply}], "gpt-y" if change == "model" else "gpt-x", tmp_path / "verdicts.jsonl")
    assert len(endpoint.requests) == (1 if change == "reply" else 2)


@pytest.mark.parametrize("failure", [429, 500, 503, "drop", (500, {"Content-Length": 10**6})])
def test_a_busy_or_broken_endpoint_is_asked_again_and_nothing_is_lost(failure, endpoint, tmp_path):
    endpoint.script = [failure, failure, good, failure]
    assert judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl") == GOOD
    assert len(endpoint.requests) == 6 + 3


def test_an_endpoint_that_hangs_is_asked_again(endpoint, monkeypatch):
    monkeypatch.setattr(judging, "TIMEOUT", 0.2)
    endpoint.script = ["slow"]
    assert parse_verdict(ask_judge(ASK, "gpt-x")) == {"1": True}


def test_an_answer_that_is_no_chat_completion_is_asked_for_again(endpoint):
    endpoint.script = [(200, {})]  # the body of an error, as some proxies send it
    assert parse_verdict(ask_judge(ASK, "gpt-x")) == {"1": True}


def test_retry_after_is_honoured(endpoint, monkeypatch):
    waits = []
    monkeypatch.setattr(judging.time, "sleep", waits.append)
    monkeypatch.setattr(judging, "BACKOFF", 1.0)
    endpoint.script = [(429, {"Retry-After": "7"}), 429, (503, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})]
    ask_judge(ASK, "gpt-x")
    assert waits == [7.0, 2.0, 4.0]


def test_a_malformed_verdict_is_asked_for_again_and_warmer_in_the_second_half(endpoint, tmp_path):
    missing, surplus = '{"评判结果": {"2": "是"}}', '{"评判结果": {"1": "是", "2": "是"}}'
    endpoint.script = ["I can't say.", missing, surplus, "", "no"]
    assert judge([ROWS[0]], "gpt-x", tmp_path / "verdicts.jsonl") == GOOD[:1]
    assert [request["temperature"] for request in endpoint.requests] == [0.0] * 5 + [0.5, 0.0]


def test_a_verdict_that_stays_malformed_is_kept_as_none_and_not_asked_for_again(endpoint, tmp_path):
    endpoint.script = ["no"] * judging.ATTEMPTS
    verdicts = judge([ROWS[0]], "gpt-x", tmp_path / "verdicts.jsonl")
    assert verdicts == [[None, {"1": True, "2": True}]]
    endpoint.requests.clear()
    assert judge([ROWS[0]], "gpt-x", tmp_path / "verdicts.jsonl") == verdicts and endpoint.requests == []


def test_a_run_that_a_dead_endpoint_ended_goes_on_with_what_is_missing(endpoint, tmp_path, monkeypatch):
    endpoint.script = [good] + [500] * judging.TRIES
    with pytest.raises(ConnectionError, match=r"does not answer \(500 .*OPENAI_BASE_URL"):
        judge(ROWS[:1], "gpt-x", tmp_path / "verdicts.jsonl")
    endpoint.close()
    with pytest.raises(ConnectionError, match="refused"):
        judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl")
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 1
    revived = Judge()
    monkeypatch.setenv("OPENAI_BASE_URL", revived.url)
    assert judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl") == GOOD
    assert len(revived.requests) == 5
    revived.close()


def test_a_line_that_was_cut_when_the_run_was_killed_is_asked_for_again(endpoint, tmp_path):
    file = tmp_path / "verdicts.jsonl"
    judge(ROWS, "gpt-x", file)
    file.write_bytes(file.read_bytes()[:-30])
    endpoint.requests.clear()
    assert judge(ROWS, "gpt-x", file) == GOOD and len(endpoint.requests) == 1
    assert judge(ROWS, "gpt-x", file) == GOOD and len(endpoint.requests) == 1


def test_a_damaged_line_of_the_verdicts_is_named(endpoint, tmp_path):
    (tmp_path / "verdicts.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"verdicts\.jsonl line 1"):
        judge(ROWS, "gpt-x", tmp_path / "verdicts.jsonl")


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [(401, PermissionError, "OPENAI_API_KEY"), (403, PermissionError, "OPENAI_API_KEY"), (404, ValueError, "gpt-x")],
)
def test_a_refusal_is_one_sentence_and_not_tried_again(status, kind, says, endpoint):
    endpoint.script = [status]
    with pytest.raises(kind, match=says) as error:
        ask_judge(ASK, "gpt-x")
    assert "\n" not in str(error.value) and len(endpoint.requests) == 1


def test_an_address_that_is_none_is_one_sentence(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost:8000/v1")
    with pytest.raises(ValueError, match="OPENAI_BASE_URL"):
        ask_judge(ASK, "gpt-x")
