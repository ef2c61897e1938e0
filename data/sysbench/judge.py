"""Asks a judge model, over any OpenAI-compatible endpoint, for SysBench's verdicts, and keeps every one.

$OPENAI_BASE_URL is the endpoint (https://api.openai.com/v1 by default), $OPENAI_API_KEY its key, where it wants one.
The published numbers are of gpt-4o-2024-05-13; another judge gives other numbers.
"""

import contextlib
import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from data.files import end_with_a_line, json_lines
from data.sysbench.score import judge_messages, parse_verdict

TIMEOUT = 120.0  # seconds for one answer
TRIES = 6  # of one request, as long as the endpoint is busy, broken or away
BACKOFF = 1.0  # seconds before the second try, twice as many before each later one
LONGEST_WAIT = 300.0  # seconds, whatever Retry-After says
ATTEMPTS = 10  # questions for one verdict, as in the benchmark: the second half at temperature 0.5, the others at 0
WORKERS = 8  # our choice: requests under way at once


def ask_judge(messages: list[dict], model: str, temperature: float = 0.0) -> str:
    """The model's reply.

    Goes on asking through 429, 5xx and broken connections. Raises PermissionError (401, 403), ConnectionError (no
    answer after all tries), ValueError (no address, or the endpoint does not take the request)."""
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1").rstrip("/") + "/chat/completions"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no endpoint: OPENAI_BASE_URL must start with http:// or https://")
    body = json.dumps({"model": model, "messages": messages, "temperature": temperature}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # never follows to another host
    for attempt in range(TRIES):
        wait = BACKOFF * 2**attempt
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return json.load(response)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as error:
            reason = refusal(url, model, error)
            after = error.headers["Retry-After"] or ""
            wait = min(float(after), LONGEST_WAIT) if after.isdecimal() else wait
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            reason = "what it answers is no chat completion"
        if attempt + 1 < TRIES:
            time.sleep(wait)
    raise ConnectionError(
        f"the judge at {url} does not answer ({reason}): check OPENAI_BASE_URL and the endpoint, then run this again: "
        "the verdicts so far are kept"
    )


def refusal(url: str, model: str, error: urllib.error.HTTPError) -> str:
    """Why a request may be tried again; raises where trying again can't help."""
    said = ""
    with contextlib.suppress(OSError, http.client.HTTPException):  # the connection may break here too
        said = " ".join(error.read(300).decode(errors="replace").split())
    if error.code in (401, 403):
        raise PermissionError(
            f"the judge at {url} refuses the key ({error.code}): set OPENAI_API_KEY to a key that may use {model}"
        ) from None
    if error.code != 429 and error.code < 500:
        raise ValueError(
            f"the judge at {url} does not take the request ({error.code} {said}): check OPENAI_BASE_URL and the name of "
            f"the judge, {model}"
        ) from None
    return f"{error.code} {said}"


def judge(rows: list[dict], model: str, file: Path) -> list[list[dict[str, bool] | None]]:
    """The verdicts on every reply, one list a row: asks for those that `file` does not hold yet.

    rows: examples, each with its list of replies as "reply". file: JSONL, a line for each verdict the moment it is
    there, so that a run that broke off goes on. A judge that never gives a well-formed verdict leaves None, which is
    kept too. Raises what ask_judge() raises, and ValueError for a damaged file."""
    asked = []  # for each row its turns' (key, id, turn, messages, criteria)
    for row in rows:
        questions = [judge_messages(row, turn, row["reply"]) for turn in range(len(row["turns"]))]
        asked.append([(key_of(q, model), row["id"], t, q, row["criteria"][t]) for t, q in enumerate(questions)])
    kept = read_verdicts(file)
    missing = {turn[0]: turn for turns in asked for turn in turns if turn[0] not in kept}
    lock = threading.Lock()

    def settle(key: str, name: str, turn: int, messages: list[dict], criteria: dict[str, str]) -> None:
        text, verdict = verdict_of(messages, model, criteria)
        line = {"key": key, "id": name, "turn": turn, "model": model, "text": text, "verdict": verdict}
        with lock:
            out.write(json.dumps(line) + "\n")
            out.flush()
            kept[key] = verdict

    if missing:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8", newline="\n") as out, ThreadPoolExecutor(WORKERS) as pool:
            done = pool.map(settle, *zip(*missing.values()))
            list(tqdm(done, desc="verdicts", total=len(missing), leave=False))
    return [[kept[turn[0]] for turn in turns] for turns in asked]


def verdict_of(messages: list[dict], model: str, criteria: dict[str, str]) -> tuple[str, dict[str, bool] | None]:
    """The judge's last reply, and its verdict: None if none of ATTEMPTS replies decides exactly these criteria."""
    for attempt in range(ATTEMPTS):
        text = ask_judge(messages, model, 0.0 if attempt < ATTEMPTS / 2 else 0.5)
        verdict = parse_verdict(text)
        if verdict is not None and verdict.keys() == criteria.keys():
            return text, verdict
    return text, None


def key_of(messages: list[dict], model: str) -> str:
    """Names a verdict by all that it depends on: a verdict on another reply, or of another judge, is never taken."""
    return hashlib.sha256(json.dumps([model, messages]).encode()).hexdigest()[:32]


def read_verdicts(file: Path) -> dict[str, dict[str, bool] | None]:
    """The kept verdicts by key. A last line that was cut short, by a run that was killed, is taken off the file."""
    if not file.exists():
        return {}
    end_with_a_line(file)
    kept = {}
    for place, record in json_lines(file):
        try:
            kept[record["key"]] = record["verdict"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"{place} is no verdict ({error}): mend or delete it") from None
    return kept
