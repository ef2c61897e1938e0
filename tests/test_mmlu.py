"""data/mmlu: the prompt against one typed from the raw rows, the real archive, and damaged ones."""

import csv
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from data.mmlu.prepare import URL, prepare
from data.mmlu.score import score

ROOT = Path(__file__).parent.parent
# computer_security's five dev rows and its first test row, typed by hand from data/dev/computer_security_dev.csv and
# data/test/computer_security_test.csv of data.tar in the form of the authors' github.com/hendrycks/test, evaluate.py
# (format_subject puts a space before every word, so that two stand after "about")
GOLDEN = ROOT / "tests" / "golden" / "mmlu_prompt.txt"


@pytest.fixture(scope="module")
def prepared(shared, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder and the examples of the real archive."""
    folder = tmp_path_factory.mktemp("mmlu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCAL_MIRROR", str(shared / "mirror"))
        return folder, prepare(folder)


def prompt(example: dict) -> str:
    """The whole prompt: the user's message, and the line that opens the reply."""
    (message,) = example["messages"]
    assert message["role"] == "user"
    return f"{message['content']}\n{example['opening']}"


def test_the_prompt_is_that_of_the_authors_to_the_character(prepared):
    (example,) = (e for e in prepared[1] if e["id"] == "computer_security/0")
    assert prompt(example) == GOLDEN.read_text(encoding="utf-8")


def test_every_word_of_a_subject_has_a_space_before_it(prepared):
    headings = {prompt(e).partition("\n")[0] for e in prepared[1] if e["group"] == "high_school_us_history"}
    assert headings == {"The following are multiple choice questions (with answers) about  high school us history."}


def test_there_are_14042_questions_of_57_subjects_in_alphabetical_order(prepared):
    """The count is the paper's (arXiv 2009.03300: 15,908 questions, 1,540 for validation, 285 + 41 for few-shot)."""
    groups = [example["group"] for example in prepared[1]]
    assert len(groups) == 14042 and len(set(groups)) == 57 and groups == sorted(groups)


def test_every_id_is_unique_and_is_its_subject_and_number(prepared):
    ids = [example["id"] for example in prepared[1]]
    assert len(set(ids)) == len(ids) and ids[:2] == ["abstract_algebra/0", "abstract_algebra/1"]


def test_every_prompt_has_six_questions_and_ends_unanswered(prepared):
    counts = {(prompt(e).count("\nAnswer:"), prompt(e).endswith("\nAnswer:")) for e in prepared[1]}
    assert counts == {(6, True)}


def test_the_choices_are_the_letters_after_a_space(prepared):
    assert {tuple(example["choices"]) for example in prepared[1]} == {(" A", " B", " C", " D")}


def test_the_answer_is_the_letter_of_the_raw_row(prepared, shared):
    archive = shared / "mirror" / "people.eecs.berkeley.edu" / "~hendrycks" / "data.tar"
    with tarfile.open(archive) as tar:
        raw = tar.extractfile("data/test/anatomy_test.csv").read().decode()
    letters = [row[-1] for row in csv.reader(io.StringIO(raw, newline=""))]
    assert [e["answer"] for e in prepared[1] if e["group"] == "anatomy"] == letters


def test_the_file_holds_the_examples_one_a_line(prepared):
    folder, examples = prepared
    lines = (folder / "examples.jsonl").read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == examples
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("reply", [" C", "C"])
def test_the_right_letter_counts(reply):
    assert score({"answer": "C"}, reply) == {"accuracy": True}


@pytest.mark.parametrize("reply", [" A", "", "c", " C.", "CC"])
def test_any_other_reply_does_not(reply):
    assert score({"answer": "C"}, reply) == {"accuracy": False}


# ----------------------------------------------------------------------------------------------------------------------
# archives that are not as they should be

ROW = b"What?,one,two,three,four,B\r\n"


def whole() -> dict[str, bytes]:
    """The members of a small archive of 57 subjects."""
    subjects = [f"subject_{i}" for i in range(57)]
    dev = {f"data/dev/{subject}_dev.csv": 5 * ROW for subject in subjects}
    return dev | {f"data/test/{subject}_test.csv": ROW for subject in subjects}


def prepare_from(members: dict[str, bytes], tmp_path: Path, monkeypatch, cut: int | None = None) -> list[dict]:
    """prepare() of an archive with these members, or of its first `cut` bytes."""
    file = tmp_path / "mirror" / URL.removeprefix("https://")
    file.parent.mkdir(parents=True)
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    if cut is not None:
        file.write_bytes(file.read_bytes()[:cut])
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    return prepare(tmp_path / "out")


def test_a_whole_archive_is_read(tmp_path, monkeypatch):
    assert len(prepare_from(whole(), tmp_path, monkeypatch)) == 57


def test_no_member_of_the_archive_is_written_to_disk(tmp_path, monkeypatch):
    strangers = {"../../evil_dev.csv": ROW, "data/dev/../../evil.csv": ROW, "/tmp/evil_test.csv": ROW}
    prepare_from(strangers | whole(), tmp_path, monkeypatch)
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {"data.tar", "examples.jsonl"}


@pytest.mark.parametrize(
    "row", [b"What?,one,two,three,B\r\n", b"What?,one,two,three,four,E\r\n", b"\xff?,one,two,three,four,B\r\n", b"\r\n"]
)
def test_a_damaged_row_is_named(row, tmp_path, monkeypatch):
    members = whole() | {"data/test/subject_8_test.csv": row}
    with pytest.raises(ValueError, match=r"data\.tar: data/test/subject_8_test\.csv is damaged in row 1 .*delete"):
        prepare_from(members, tmp_path, monkeypatch)
    assert not (tmp_path / "out" / "examples.jsonl").exists()


@pytest.mark.parametrize("cut", [100, 40_700, 60_000])
def test_an_archive_that_is_cut_off_is_one_sentence(cut, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.tar.*delete") as error:
        prepare_from(whole(), tmp_path, monkeypatch, cut)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["dev", "test"])
def test_a_missing_subject_is_noticed(part, tmp_path, monkeypatch):
    members = whole()
    del members[f"data/{part}/subject_3_{part}.csv"]
    with pytest.raises(ValueError, match=r"data\.tar has 56 whole subjects of 57"):
        prepare_from(members, tmp_path, monkeypatch)


def test_a_subject_with_too_few_dev_questions_is_noticed(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.tar has 56 whole subjects of 57"):
        prepare_from(whole() | {"data/dev/subject_3_dev.csv": 4 * ROW}, tmp_path, monkeypatch)


def test_the_command_explains_itself():
    command = [sys.executable, "-m", "data.mmlu.prepare", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "14,042 test questions" in done.stdout
