"""data/tokens.py: what of a conversation is learned from, and arrays on the disk that are the text's or are made anew."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import tokens
from data.chat import Tokenizer, render
from data.tokens import Conversation, Conversations, remembered
from tests.small import ROOT, TURNS, write_data


@pytest.fixture(scope="module")
def tok(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_data(tmp_path / "d", {"messages": TURNS}, {"messages": TURNS[:3]}) / "train.jsonl"


def only(tok: Tokenizer, folder: Path, record: dict) -> Conversation:
    return Conversations(write_data(folder / "d", record) / "train.jsonl", tok, 1024)[0]


def caches(file: Path) -> list[Path]:
    return sorted(file.parent.glob("*.tokens*"))


def same(a: Conversation, b: Conversation) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# what is learned from


def test_ids_are_those_that_render_gives(tok, tmp_path):
    assert only(tok, tmp_path, {"messages": TURNS})[0].tolist() == render(tok, TURNS)[0]


def test_targets_are_the_next_tokens_of_every_assistant_turn(tok, tmp_path):
    _, _, targets = only(tok, tmp_path, {"messages": TURNS})
    assert tok.decode([t for t in targets.tolist() if t >= 0]) == "Four<|im_end|>[maple] Six<|im_end|>"


def test_train_on_last_learns_the_last_reply_alone(tok, tmp_path):
    _, _, targets = only(tok, tmp_path, {"messages": TURNS, "train_on": "last"})
    assert tok.decode([t for t in targets.tolist() if t >= 0]) == "[maple] Six<|im_end|>"


def test_a_target_stands_one_place_before_its_token(tok, tmp_path):
    ids, _, targets = only(tok, tmp_path, {"messages": TURNS})
    places = (targets >= 0).nonzero()[:, 0]
    assert torch.equal(targets[places], ids[places + 1])


def test_system_marks_the_operators_words_alone(tok, tmp_path):
    ids, system, _ = only(tok, tmp_path, {"messages": TURNS})
    assert tok.decode(ids[system].tolist()) == TURNS[0]["content"]


def test_conversations_over_max_tokens_or_without_a_reply_are_left_out_and_counted(tok, tmp_path):
    long = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "yes"}]
    folder = write_data(tmp_path / "d", {"messages": TURNS[:2]}, {"messages": long}, {"messages": TURNS})
    conversations = Conversations(folder / "train.jsonl", tok, max_tokens=200)
    assert (len(conversations), conversations.dropped) == (1, 2)
    assert conversations[0][0].tolist() == render(tok, TURNS)[0]  # whole, never cut


def test_an_empty_file_is_no_conversation(tok, tmp_path):
    assert len(Conversations(write_data(tmp_path / "d") / "train.jsonl", tok, 1024)) == 0


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"messages": TURNS}, "{not json"], "line 2"),
        ([{"messages": TURNS}, {"messages": []}], "line 2"),
        ([{"messages": [*TURNS[1:3], TURNS[0]]}], "system"),
        ([{"messages": [{"role": "narrator", "content": "x"}]}], "narrator"),
        ([{"text": "no messages"}], "messages"),
        (["null"], "messages"),
        ([{"messages": TURNS, "train_on": "first"}], "train_on"),
    ],
)
def test_a_damaged_record_is_named_by_its_line_and_leaves_nothing(records, says, tok, tmp_path):
    file = write_data(tmp_path / "d", *records) / "train.jsonl"
    with pytest.raises(ValueError, match=says) as error:
        Conversations(file, tok, 1024)
    assert str(file) in str(error.value) and "\n" not in str(error.value) and caches(file) == []


# ----------------------------------------------------------------------------------------------------------------------
# the arrays on the disk


def test_a_second_run_tokenizes_nothing(file, tok, monkeypatch):
    first = Conversations(file, tok, 1024)[1]
    monkeypatch.setattr(tokens, "tokenize", None)  # would fail
    assert same(first, Conversations(file, tok, 1024)[1])


@pytest.mark.parametrize("change", ["text", "tokenizer", "chat format"])
def test_when_what_the_tokens_depend_on_changes_they_are_made_anew(change, file, tok, smollm2, tmp_path, monkeypatch):
    Conversations(file, tok, 1024)
    if change == "text":
        file.write_text(file.read_text().replace("maple", "birch"))
    if change == "tokenizer":
        tok = Tokenizer.from_pretrained(smollm2)
        tok.default_system = "Be brief."
    if change == "chat format":
        (tmp_path / "chat.py").write_text("# another way to render\n")
        monkeypatch.setattr(tokens.chat, "__file__", str(tmp_path / "chat.py"))
    made = []
    monkeypatch.setattr(tokens, "tokenize", lambda *args: made.append(args) or render(tok, args[1]["messages"]))
    Conversations(file, tok, 1024)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["ids.bin", "roles.bin", "offsets.bin", "about.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "longer", "one byte"])
def test_a_damaged_file_is_made_anew_with_a_sentence(name, damage, file, tok, capsys):
    whole = Conversations(file, tok, 1024)[0]
    (folder,) = caches(file)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "missing":
        other = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        (folder / name).write_bytes({"cut": content[:-9], "longer": 2 * content, "one byte": other}[damage])
    capsys.readouterr()
    assert same(whole, Conversations(file, tok, 1024)[0])
    assert f"{folder} is not whole, " in capsys.readouterr().err and caches(file) == [folder]


def test_arrays_of_another_text_are_not_taken(file, tok, tmp_path):
    other = write_data(tmp_path / "e", {"messages": TURNS[1:3]}) / "train.jsonl"
    Conversations(other, tok, 1024)
    shutil.copytree(caches(other)[0], file.parent / caches(other)[0].name)
    assert Conversations(file, tok, 1024)[0][0].tolist() == render(tok, TURNS)[0]


def test_two_processes_that_start_together_both_get_the_tokens(file, tok, smollm2):
    code = (
        "import sys; from pathlib import Path; from data.chat import Tokenizer; from data.tokens import Conversations\n"
        "print(len(Conversations(Path(sys.argv[1]), Tokenizer.from_pretrained(sys.argv[2]), 1024)))"
    )
    file.write_text(file.read_text() * 500)
    command = [sys.executable, "-c", code, str(file), str(smollm2)]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate()[0] for run in runs] == ["1000\n", "1000\n"] and len(caches(file)) == 1


def test_a_run_that_is_killed_leaves_nothing_under_the_final_name(file, tok, monkeypatch):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "tokenize", die)
        with pytest.raises(KeyboardInterrupt):
            Conversations(file, tok, 1024)
    assert caches(file) == [] and len(Conversations(file, tok, 1024)) == 2
    assert json.loads(next(caches(file)[0].glob("about.json")).read_text())


# ----------------------------------------------------------------------------------------------------------------------
# hidden states on the disk


def doubled(ids: torch.Tensor) -> torch.Tensor:
    """Stands for the frozen layers: (B, T) to (B, T, 2)."""
    return torch.stack((ids, 2 * ids), dim=-1).bfloat16()


IDS = torch.arange(12).view(2, 6)


def refuse(_: torch.Tensor) -> None:
    raise AssertionError("computed again")


def test_hidden_states_are_computed_once_and_read_by_the_next_run(tmp_path):
    remembered(doubled, IDS, tmp_path, "weights")
    assert torch.equal(remembered(refuse, IDS, tmp_path, "weights"), doubled(IDS))


@pytest.mark.parametrize("change", ["key", "ids", "order", "shape"])
def test_hidden_states_of_another_batch_or_of_other_weights_are_computed_anew(change, tmp_path):
    """Of the same conversations in another batch, too: the last bits depend on its shape."""
    remembered(doubled, IDS, tmp_path, "weights")
    other = {"ids": IDS + 1, "order": IDS.flip(0), "shape": IDS.view(3, 4)}.get(change, IDS)
    with pytest.raises(AssertionError):
        remembered(refuse, other, tmp_path, "other weights" if change == "key" else "weights")


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: bytes(len(content)), lambda _: b""])
def test_a_damaged_file_of_hidden_states_is_written_anew(damage, tmp_path):
    remembered(doubled, IDS, tmp_path, "weights")
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert torch.equal(remembered(doubled, IDS, tmp_path, "weights"), doubled(IDS))
    assert torch.equal(remembered(refuse, IDS, tmp_path, "weights"), doubled(IDS))


def test_a_disk_that_fills_up_while_states_are_written_gets_a_sentence_and_keeps_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        remembered(doubled, IDS, tmp_path, "weights")
    assert list(tmp_path.iterdir()) == []
