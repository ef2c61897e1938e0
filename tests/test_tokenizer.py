"""The tokenizer against `tokenizers` and tiktoken, on hard text and odd vocabularies, and every refusal of a file."""

import base64
import json
import random
import unicodedata

import pytest
import regex
import tiktoken
import tokenizers

from data.chat import Tokenizer, split_pattern
from tests.vocabularies import (
    ALPHABET,
    LLAMA3_ADDED,
    LLAMA3_SPLIT,
    QWEN_ADDED,
    added_tokens,
    byte_level_spec,
    hard_strings,
    llama3_model,
    llama3_spec,
    oracle,
    qwen_spec,
    read_ranks,
    split_steps,
    write,
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return hard_strings(6000, seed=1)


@pytest.fixture(scope="module")
def smol(smollm2) -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "tokenizer.model").write_bytes(llama3_model().read_bytes())
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_pretrained(write(qwen_spec(), tmp_path_factory.mktemp("qwen")))


def disagreements(tok: Tokenizer, published: dict | tokenizers.Tokenizer, texts: list[str]) -> list[str]:
    """The texts of which `tokenizers` makes other ids, given its tokenizer.json."""
    if isinstance(published, dict):
        published = oracle(published)
    expected = published.encode_batch(texts, add_special_tokens=False)
    return [text for text, encoding in zip(texts, expected, strict=True) if tok.encode(text) != encoding.ids]


# real vocabularies


def test_smollm2_gives_the_ids_of_tokenizers(smol, smollm2, texts):
    spec = json.loads((smollm2 / "tokenizer.json").read_text(encoding="utf-8"))
    assert disagreements(smol, spec, texts) == []


def test_smollm2_leaves_out_bytes_without_a_token_as_tokenizers_does(smol, smollm2):
    spec = json.loads((smollm2 / "tokenizer.json").read_text(encoding="utf-8"))
    rng = random.Random(2)
    # the control characters and the planes whose bytes have no token, between what could merge across them
    holes = ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d", "\U00040000", "\U00050041", "\U000a0000", "\U000fffff"]
    around = [" ", "  ", "a", "th", "e", "5", "'", "s", "\n", "é", "中", "!", "\U0010ffff"]
    texts = ["".join(rng.choices(holes + around, k=rng.randint(1, 9))) for _ in range(3000)]
    assert len(smol.missing) == 21
    assert disagreements(smol, spec, texts) == []


def test_llama3_gives_the_ids_of_tiktoken(llama, texts):
    ranks = read_ranks(llama3_model())
    published = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    assert [text for text in texts if llama.encode(text) != published.encode_ordinary(text)] == []


def test_llama3_gives_the_ids_of_tokenizers_from_either_file(llama, texts, tmp_path):
    from_json = Tokenizer.from_pretrained(write(llama3_spec(), tmp_path))
    published = oracle(llama3_spec())
    assert disagreements(llama, published, texts) == []
    assert disagreements(from_json, published, texts) == []
    assert from_json.special == llama.special


def test_qwen_gives_the_ids_of_tokenizers(qwen, texts):
    assert disagreements(qwen, qwen_spec(), texts) == []


@pytest.mark.parametrize("name", ["smol", "llama", "qwen"])
def test_decoding_gives_the_text_back(name, texts, request):
    tok = request.getfixturevalue(name)
    for text in texts:
        text = unicodedata.normalize("NFC", text) if name == "qwen" else text
        if not set(text.encode()) & set(tok.missing):
            assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("name", ["smol", "llama", "qwen"])
def test_text_never_becomes_an_added_token(name, request):
    tok = request.getfixturevalue(name)
    for token, i in tok.special.items():
        for text in (token, f"a {token}b", token * 2):
            assert not set(tok.encode(text)) & set(tok.special.values())
        assert tok.decode([i]) == token


def test_llama3_names_its_256_control_tokens(llama):
    assert llama.special == {token: 128000 + n for n, token in enumerate(LLAMA3_ADDED)}
    assert llama.vocab_size == 128256
    assert {llama.decode([i]) for i in llama.stop_ids} == {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}


def test_qwen_stops_at_the_end_of_a_turn_or_of_a_text(qwen):
    assert qwen.special == {token: 151643 + n for n, token in enumerate(QWEN_ADDED)}
    assert set(qwen.stop_ids) == {151643, 151645}
    assert qwen.vocab_size == 151669


@pytest.mark.parametrize("name", ["smol", "llama", "qwen"])
def test_a_lone_surrogate_is_refused(name, request):
    with pytest.raises(ValueError, match="lone surrogate.*position 2.*remove it"):
        request.getfixturevalue(name).encode("ab\ud83d")


def test_bytes_that_are_no_utf8_are_replaced(llama):
    half = [i for i, token in llama.vocabulary.items() if token == b"\xc3"]
    assert llama.decode([*half, *llama.encode("a")]) == "\ufffda"


def test_an_unknown_id_is_refused(llama):
    with pytest.raises(ValueError, match="id 128256 is not in the vocabulary of 128256 ids"):
        llama.decode([0, 128256])


# one pattern for the steps that cut text


@pytest.mark.parametrize("individual", [True, False])
def test_digits_and_bytelevel_become_one_pattern(individual, texts):
    steps = {"type": "Sequence", "pretokenizers": [{**DIGITS, "individual_digits": individual}, BYTE_LEVEL]}
    pattern = regex.compile(split_pattern(steps, "tokenizer.json"))
    published = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rng = random.Random(3)
    parts = ["'", "s", "'S", "'ll", "1", "23", "½", " ", "  ", "\n", "\t\n", "\xa0", "a", "é", "!", "_", "\u0301"]
    texts = texts + ["".join(rng.choices(parts, k=rng.randint(1, 10))) for _ in range(5000)]
    for text in texts:
        if "Cn" in map(unicodedata.category, text):
            continue  # not assigned: tables of different ages call it a letter or not
        expected = [span for _, span in published.pre_tokenize_str(text)]
        assert [match.span() for match in pattern.finditer(text)] == expected


def test_text_between_the_matches_of_a_split_is_a_piece(tmp_path):
    spec = trained(["abba abc ab12 cab"] * 9, split_steps(r"\d+|[ab]"))
    tok = Tokenizer.from_pretrained(write(spec, tmp_path))
    assert disagreements(tok, spec, ["cc  ca12", "abcabc", "zz9zzazz", "é c1"]) == []


# small vocabularies


def trained(corpus: list[str], pre_tokenizer: dict, size: int = 400) -> dict:
    """A tokenizer.json whose merges `tokenizers` learns from the corpus."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = list(ALPHABET.values())
    tokenizer.train_from_iterator(
        corpus, tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    return byte_level_spec(model["vocab"], model["merges"], pre_tokenizer, [])


@pytest.fixture(scope="module")
def small(texts) -> dict:
    return trained(texts, BYTE_LEVEL, size=2000)


def test_gpt2_style_gives_the_ids_of_tokenizers(small, texts, tmp_path):
    assert disagreements(Tokenizer.from_pretrained(write(small, tmp_path)), small, texts) == []


def test_ids_that_are_not_in_merge_order_are_ranked_anew(small, texts, tmp_path):
    ids = list(range(0, 6000, 3))  # with holes
    random.Random(4).shuffle(ids)
    spec = byte_level_spec(
        dict(zip(small["model"]["vocab"], ids, strict=True)),
        small["model"]["merges"],
        BYTE_LEVEL,
        added_tokens(["<x>"], 1),
    )
    tok = Tokenizer.from_pretrained(write(spec, tmp_path))
    assert disagreements(tok, spec, texts) == []
    assert (tok.vocab_size, tok.decode([1]), tok.decode(tok.encode("déjà vu"))) == (5998, "<x>", "déjà vu")


def test_merges_may_be_pairs_or_strings(small, texts, tmp_path):
    pairs = [tuple(merge) for merge in small["model"]["merges"]]
    of_pairs = byte_level_spec(small["model"]["vocab"], pairs, BYTE_LEVEL, [])
    of_strings = byte_level_spec(small["model"]["vocab"], [" ".join(pair) for pair in pairs], BYTE_LEVEL, [])
    one = Tokenizer.from_pretrained(write(of_pairs, tmp_path / "pairs"))
    other = Tokenizer.from_pretrained(write(of_strings, tmp_path / "strings"))
    assert [text for text in texts[:500] if one.encode(text) != other.encode(text)] == []


def tiny(merges: list[str], others: list[str] = (), **model) -> dict:
    """All bytes, what the merges make, and tokens that no merge makes."""
    made = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    tokens = dict.fromkeys([*ALPHABET.values(), *made, *others])
    return byte_level_spec({token: i for i, token in enumerate(tokens)}, merges, BYTE_LEVEL, [], **model)


@pytest.mark.parametrize(
    "spec",
    [
        tiny(["a b"], ["abc", "bc"]),  # tokens without a merge
        tiny(["b c", "a b", "ab c"]),  # abc has a merge, but b c goes first
        tiny(["a b", "a bc", "b c"]),  # and here its merge is listed before those that block it
        tiny(["a b", "b c", "ab cd", "c d"], ["bcd"]),
        tiny(["a a", "a aa", "aa a"]),  # the leftmost pair goes first
    ],
)
def test_tokens_that_no_merge_reaches_are_never_given(spec, tmp_path):
    tok = Tokenizer.from_pretrained(write(spec, tmp_path))
    rng = random.Random(5)
    texts = ["".join(rng.choices("abcd", k=rng.randint(1, 8))) for _ in range(300)]
    assert disagreements(tok, spec, texts) == []


def test_with_ignore_merges_a_whole_piece_is_taken_as_it_is(tmp_path):
    spec = tiny(["a b"], ["abcde", "xyz"], ignore_merges=True)
    tok = Tokenizer.from_pretrained(write(spec, tmp_path))
    assert disagreements(tok, spec, ["abcde", "abcdef", "xyz", "xyzxyz", "xy", "xyz abcde!"]) == []
    assert len(tok.encode("abcde")) == 1


def test_random_merges_give_the_ids_of_tokenizers_with_and_without_ignore_merges(tmp_path):
    rng = random.Random(6)
    refused = 0
    for n in range(400):
        tokens = list("abc")
        merges = []
        for _ in range(rng.randint(1, 8)):
            pair = rng.choice(tokens), rng.choice(tokens)
            if " ".join(pair) not in merges:
                merges.append(" ".join(pair))
                tokens.append("".join(pair))
        rng.shuffle(merges)
        spec = tiny(merges, ["cab"] * (n % 3), ignore_merges=n % 2 == 0)
        try:
            tok = Tokenizer.from_pretrained(write(spec, tmp_path))
        except ValueError:
            assert spec["model"]["ignore_merges"]
            refused += 1
            continue
        texts = ["".join(rng.choices("abc", k=rng.randint(1, 12))) for _ in range(60)]
        assert disagreements(tok, spec, texts) == [], merges
    assert 0 < refused < 200


# refusals


def broken(change: dict, **model) -> dict:
    return {**tiny(["a b"], **model), **change}


SPLIT = split_steps(r"\w+")["pretokenizers"]
REFUSED = [
    (broken({}, type="Unigram"), "no byte-level BPE.*Llama 2"),
    (broken({}, byte_fallback=True), "no byte-level BPE.*Llama 2"),
    (broken({"pre_tokenizer": None}), "no byte-level BPE.*Llama 2"),
    (broken({}, continuing_subword_prefix="##"), "continuing_subword_prefix = '##' is not supported"),
    (broken({}, dropout=0.1), "dropout = 0.1 is not supported"),
    (broken({}, novelty=True), "novelty = True is not supported"),
    (broken({"normalizer": {"type": "Lowercase"}}), "normalizer Lowercase is not supported"),
    (broken({"pre_tokenizer": {"type": "Whitespace"}}), "pre-tokenizer .*Whitespace.* is not supported"),
    (broken({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}}), 'pre-tokenizer .*"add_prefix_space": true'),
    (broken({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, DIGITS]}}), "pre-tokenizer .*Digits"),
    (
        broken({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT[0], "invert": True}, SPLIT[1]]}}),
        'pre-tokenizer .*"invert": true',
    ),
    (
        broken(
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT[0], "behavior": "Removed"}, SPLIT[1]]}}
        ),
        "pre-tokenizer .*Removed",
    ),
    (tiny(["a b"], ["abc", "bc"], ignore_merges=True), "ignore_merges with the token b'abc'"),
    (
        broken({"model": {"type": "BPE", "vocab": {"a": 0, "ab": 1}, "merges": ["a b"]}}),
        "a merge names 'b', which is not",
    ),
    (
        broken({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "a"}}),
        "unk_token = 'a' where bytes have no token is not supported",
    ),
]


@pytest.mark.parametrize(("spec", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_is_unknown_in_the_file_is_refused_by_name(spec, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.from_pretrained(write(spec, tmp_path))


def test_a_truncated_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny(["a b"]))[:500])
    with pytest.raises(ValueError, match="tokenizer.json is not valid JSON .*get that file again"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json or tokenizer.model"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_sentencepiece_model_is_refused(tmp_path):
    # the first pieces of Llama 2's file: protobuf messages with a string and a float
    pieces = [b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", b"\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(pieces))
    with pytest.raises(ValueError, match="not in tiktoken's format .Llama 2's SentencePiece.* use a Llama-3"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_model_that_is_not_llama3s_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(bytes([b])), b) for b in range(256))
    )
    with pytest.raises(ValueError, match="has 256 tokens where Llama-3 has 128000"):
        Tokenizer.from_pretrained(tmp_path)
