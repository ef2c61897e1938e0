"""IFEval's 25 instruction types: whether a reply follows an instruction, as the benchmark decides it.

The protocol is that of Zhou et al. 2023 (arXiv 2311.07911) and of their instruction_following_eval, odd corners
included: a number beside published ones is worth more than a better checker.
"""

import functools
import json
import re
import warnings
from collections.abc import Callable

# max_gen_toks of the task `ifeval` in EleutherAI's lm-evaluation-harness; Google's own code does not generate
MAX_NEW_TOKENS = 1280

# --- words, sentences and languages -----------------------------------------------------------------------------------


def compare(count: int, relation: str, bound: int) -> bool:
    """Whether a count keeps to "less than" or "at least" a bound, the two relations that IFEval knows."""
    return count < bound if relation == "less than" else count >= bound


# The official count of sentences is NLTK's, whose Punkt (Kiss & Strunk 2006) ends a sentence at every mark, unless the
# word before it is an abbreviation, an initial or a number. These are the more frequent abbreviations that its English
# model has learned ("etc", "e.g" and "i.e" are none of them), and the words that it takes for a beginning after one.
ABBREVIATION = re.compile(
    r"""[c-hk-npr-tvw]|a\.[acdm]|adm|ala|ariz|aug|ave|bros|calif|cie|co|col|colo|conn|corp|cos|ct|c\.v|dec|dr|d\.c|feb|
    fla|fri|ft|ga|gen|ill|inc|jan|jr|j\.k|kan|ky|lt|ltd|l\.a|m\.b\.a|maj|messrs|mg|mich|minn|mrs?|ms|n\.[cdhjmvy]|nev|
    nov|oct|ok|okla|ore|p\.m|pa|ph\.d|prof|reps?|s\.[acg]|sen|sept?|sr|st|sw|tenn|tues|u\.[kn]|u\.s(\.a|\.s\.r)?|va|vs|
    vt|wash|wed|wis|yr""",
    re.VERBOSE,
)
STARTER = re.compile(
    r"""according|although|among|both|but|despite|even|he|however|i|if|in|indeed|instead|it|many|meanwhile|moreover|
    most|nevertheless|nonetheless|nor|similarly|since|so|some|the|there|these|they|this|though|thus|under|when|while|
    yet""",
    re.VERBOSE,
)
# per run without white space: its last mark that stands before other punctuation, or before white space and a word
END = re.compile(r"""(?<!\S)(?P<word>\S*[.?!])(?=(?P<next>[?!)";}\]*:@'({\[]|\s+(?P<start>\S+)))""")
CLOSING = re.compile(r"""["')\]}]*\s*""")  # belongs to the sentence before


def ends_sentence(word: str, following: str) -> bool:
    """Whether a word with a mark at its end ends a sentence, given what follows: a word, or one punctuation mark."""
    if "?" in word or "!" in word:
        return True
    token = re.split(r"""[)";}\]*:@({\[`&#]""", word.lower())[-1]
    if token.endswith("..") or ABBREVIATION.fullmatch(token.split("-")[-1][:-1]):
        first = re.match(r"\w*", following)[0]
        starts = first[:1].isupper() and STARTER.fullmatch(first.lower()) is not None
        return starts and len(token) > 2  # a single letter is an initial, whatever follows
    if re.fullmatch(r"[^\W\d]\.|-?[.,]?\d[\d,.-]*", token):  # "A." or "1."
        return not following[0].islower() and following[0] not in ";:,.!?"
    return True


def count_sentences(text: str) -> int:
    """The number of sentences; as for Punkt, a lone "**" behind the last full stop is one too."""
    pieces, start = [], 0
    for match in END.finditer(text):
        if ends_sentence(match["word"], match["start"] or match["next"]):
            pieces.append(text[start : match.end()])
            start = match.start("start") if match["start"] else match.end()
    pieces.append(text[start:])
    return sum(not CLOSING.fullmatch(piece) for piece in pieces)


def count_capital_words(text: str) -> int:
    """The number of words in capitals alone, among the words that NLTK's Treebank tokenizer makes: "I'M" is two of
    them, "well-KNOWN" none, and "A/B" one."""
    text = re.sub(r"""[;@#$%&?!*`"<>()\[\]{}«»“”‘’„‒–—―]|--|''|[:,](?!\d)|\.{2,}|\.(?=['\s]|$)""", " ", text)
    text = re.sub(r"(?<=[^' ])('[sSmMdD]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)(?=\s|$)", r" \1", text)
    text = re.sub(r"(?i)\b(can(?=not\b)|gim(?=me\b)|gon(?=na\b)|got(?=ta\b)|lem(?=me\b)|wan(?=na\b))", r"\1 ", text)
    return sum(word.isupper() for word in text.split())


@functools.lru_cache(maxsize=256)  # strict and loose ask about the same reply
def is_language(text: str, code: str) -> bool | None:
    """Whether langdetect takes the text for this language (ISO 639-1); None where it is not installed."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        warnings.warn("IFEval's language rules are left out, for langdetect is missing: pip install langdetect==1.0.9")
        return None
    DetectorFactory.seed = 0  # it samples; the official checker leaves it unseeded
    try:
        return detect(text) == code
    except LangDetectException:  # there is no letter in it: the official checker lets it pass
        return True


# ----------------------------------------------------------------------------------------------------------------------
# the instructions: a function (reply, kwargs) each. Keywords and splitters are regular expressions, as officially


def divide(reply: str, divider: str) -> list[str]:
    """The parts between dividers. Blank ones at the ends don't count; a blank one elsewhere leaves no valid part."""
    parts = [part.strip() for part in reply.split(divider)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def capital_word_frequency(reply: str, kwargs: dict) -> bool:
    return compare(count_capital_words(reply), kwargs["capital_relation"], kwargs["capital_frequency"])


def english_capital(reply: str, kwargs: dict) -> bool | None:
    return reply.isupper() and is_language(reply, "en")


def english_lowercase(reply: str, kwargs: dict) -> bool | None:
    return reply.islower() and is_language(reply, "en")


def repeat_prompt(reply: str, kwargs: dict) -> bool:
    return reply.strip().lower().startswith(kwargs["prompt_to_repeat"].strip().lower())


def two_responses(reply: str, kwargs: dict) -> bool:
    parts = divide(reply, "******")
    return len(parts) == 2 and parts[0] != parts[1]


def number_placeholders(reply: str, kwargs: dict) -> bool:
    return len(re.findall(r"\[.*?\]", reply)) >= kwargs["num_placeholders"]


def postscript(reply: str, kwargs: dict) -> bool:
    marker = kwargs["postscript_marker"].strip()
    pattern = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, marker.lower())
    return re.search(pattern, reply.lower()) is not None


def constrained_response(reply: str, kwargs: dict) -> bool:
    return any(f"My answer is {answer}." in reply for answer in ("yes", "no", "maybe"))


def json_format(reply: str, kwargs: dict) -> bool:
    text = reply.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):  # one after the other: nested fences all go
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def multiple_sections(reply: str, kwargs: dict) -> bool:
    return len(re.findall(kwargs["section_spliter"].strip() + r"\s?\d+", reply)) >= kwargs["num_sections"]


def number_bullet_lists(reply: str, kwargs: dict) -> bool:
    stars = re.findall(r"^\s*\*[^*].*", reply, re.MULTILINE)
    dashes = re.findall(r"^\s*-", reply, re.MULTILINE)  # a ruler "---" too
    return len(stars) + len(dashes) == kwargs["num_bullets"]


def number_highlighted_sections(reply: str, kwargs: dict) -> bool:
    found = re.findall(r"\*([^*\n]*)\*", reply) + re.findall(r"\*\*([^*\n]*)\*\*", reply)
    return sum(bool(text.strip()) for text in found) >= kwargs["num_highlights"]


def title(reply: str, kwargs: dict) -> bool:
    return any(text.lstrip("<").rstrip(">").strip() for text in re.findall(r"<<[^\n]+>>", reply))


def existence(reply: str, kwargs: dict) -> bool:
    return all(re.search(keyword, reply, re.IGNORECASE) for keyword in kwargs["keywords"])


def forbidden_words(reply: str, kwargs: dict) -> bool:
    return not any(re.search(rf"\b{word}\b", reply, re.IGNORECASE) for word in kwargs["forbidden_words"])


def frequency(reply: str, kwargs: dict) -> bool:
    found = re.findall(kwargs["keyword"].strip(), reply, re.IGNORECASE)  # inside longer words too
    return compare(len(found), kwargs["relation"], kwargs["frequency"])


def letter_frequency(reply: str, kwargs: dict) -> bool:
    # "#" and "!" are counted like letters, as by the present official checker; older ones drew a random letter instead
    count = reply.lower().count(kwargs["letter"].strip().lower())
    return compare(count, kwargs["let_relation"], kwargs["let_frequency"])


def response_language(reply: str, kwargs: dict) -> bool | None:
    return is_language(reply, kwargs["language"])


def nth_paragraph_first_word(reply: str, kwargs: dict) -> bool:
    paragraphs = [paragraph.strip() for paragraph in reply.split("\n\n")]
    count, n = sum(map(bool, paragraphs)), kwargs["nth_paragraph"]
    if count != kwargs["num_paragraphs"] or n > count or not paragraphs[n - 1]:  # blank ones shift the n-th
        return False
    word = paragraphs[n - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word)[0].lower() == kwargs["first_word"].lower()


def number_paragraphs(reply: str, kwargs: dict) -> bool:
    return len(divide(reply, "***")) == kwargs["num_paragraphs"]


def number_sentences(reply: str, kwargs: dict) -> bool:
    return compare(count_sentences(reply), kwargs["relation"], kwargs["num_sentences"])


def number_words(reply: str, kwargs: dict) -> bool:
    return compare(len(re.findall(r"\w+", reply)), kwargs["relation"], kwargs["num_words"])


def no_comma(reply: str, kwargs: dict) -> bool:
    return "," not in reply


def end_checker(reply: str, kwargs: dict) -> bool:
    return reply.strip().strip('"').lower().endswith(kwargs["end_phrase"].strip().lower())


def quotation(reply: str, kwargs: dict) -> bool:
    text = reply.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKERS: dict[str, Callable[[str, dict], bool | None]] = {
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "combination:repeat_prompt": repeat_prompt,
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:json_format": json_format,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:title": title,
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "punctuation:no_comma": no_comma,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
}

# --- verdicts ---------------------------------------------------------------------------------------------------------


def variants(reply: str) -> list[str]:
    """The eight forms of a reply that loose scoring tries: without first line, last line or both, and without "*"."""
    lines = reply.split("\n")
    cut = [reply] + ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return cut + [text.replace("*", "") for text in cut]


def verify(instruction_id: str, kwargs: dict, prompt: str, reply: str, loose: bool = False) -> bool | None:
    """Whether the reply follows an instruction: as it is, or, loosely, in any of its eight variants. A blank one never
    does. None: it can't be decided here. The id may carry the prefix "en:". Raises ValueError for an unknown
    instruction, and for one whose kwargs lack something. prompt: the user's, repeated where kwargs name no other
    text."""
    name = instruction_id.removeprefix("en:")
    if name not in CHECKERS:
        raise ValueError(f"{instruction_id} is none of IFEval's 25 instructions: prepare the examples again")
    kwargs = {key: value for key, value in kwargs.items() if value is not None}  # some copies name all, most as null
    kwargs.setdefault("prompt_to_repeat", prompt)
    verdict: bool | None = False
    for text in variants(reply) if loose else [reply]:
        try:
            found = bool(text.strip()) and CHECKERS[name](text, kwargs)
        except KeyError as error:
            raise ValueError(f"{instruction_id} lacks its argument {error}: prepare the examples again") from None
        if found:
            return True
        verdict = None if found is None else verdict
    return verdict


def every(verdicts: list[bool | None]) -> bool | None:
    """Whether all hold: False as soon as one does not, None if that hangs on one that can't be decided."""
    if False in verdicts:
        return False
    return None if None in verdicts else True


def score(example: dict, reply: str) -> dict[str, bool | None | list[bool | None]]:
    """The four accuracies of the paper: by prompt (all its instructions hold) and by instruction, strict and loose."""
    measures = {}
    for mode in ("strict", "loose"):
        verdicts = [
            verify(name, kwargs, example["prompt"], reply, loose=mode == "loose")
            for name, kwargs in zip(example["instructions"], example["kwargs"], strict=True)
        ]
        measures |= {f"prompt {mode}": every(verdicts), f"instruction {mode}": verdicts}
    return measures
