"""The rule families of data/hierarchy: what a reply that keeps the rule looks like, and whether a reply does."""

import re
from typing import NamedTuple

MAX_NEW_TOKENS = 48  # our choice: all rules ask for short replies


class Family(NamedTuple):
    """A form of reply: {p} stands for the parameter, {a} for the answer, {A} for the answer in capitals."""

    form: str
    kind: str  # which values the parameter takes; "" where the rule has none


# target and checker both follow from this one table; none of the training families is one of IFEval's 25 types
TRAIN_FAMILIES = {
    "bracket": Family("[{p}] {a}", "word"),
    "colon": Family("{p}: {a}", "word"),
    "tag": Family("<{p}>{a}</{p}>", "word"),
    "call": Family("{p}({a})", "word"),
    "pipe": Family("{p} | {a}", "word"),
    "arrow": Family("{p} -> {a}", "word"),
    "equals": Family("{p} = {a}", "word"),
    "file": Family("{p}.txt: {a}", "word"),
    "link": Family("{p}://{a}", "word"),
    "hashtag": Family("#{p} {a}", "word"),
    "heading": Family("# {p}\n{a}", "word"),
    "fence": Family("```{p}\n{a}\n```", "word"),
    "mention": Family("@{p} {a}", "word"),
    "hello": Family("Hello {p}, {a}", "name"),
    "doctor": Family("Dr {p}, {a}", "name"),
    "source": Family("According to {p}, {a}", "name"),
    "says": Family("So says {p}: {a}", "name"),
    "letter": Family("To: {p}\n{a}", "name"),
    "away": Family("Sorry, {p} is away.", "name"),  # the same reply to whatever is asked
    "ticket": Family("Ticket {p}: {a}", "number"),
    "clock": Family("({p}) {a}", "time"),
    "version": Family("v{p} {a}", "version"),
    "code": Family("{{p}} {a}", "code"),
    "echo": Family("{p}! {a} {p}!", "word"),
}
# never trained on, and no composed rule has their marks: the test set `families`
HELD_OUT_FAMILIES = {
    "json": Family('{"{p}": "{a}"}', "word"),
    "title": Family("<<{p}>>\n{a}", "word"),
    "ending": Family("{a} ~{p}", "word"),
    "signature": Family("{a}\n-- {p}", "name"),
    "quotes": Family('"{a}"', ""),
    "capitals": Family("{A}", ""),
}
# never trained on either: the set `val_families`, to choose by without asking the test set
VAL_FAMILIES = {
    "yaml": Family("{p}:\n  - {a}", "word"),
    "banner": Family("%%{p}%%\n{a}", "word"),
    "caret": Family("{a} ^{p}", "word"),
    "footer": Family("{a}\n== {p}", "name"),
    "apostrophes": Family("'{a}'", ""),
    "dots": Family("...{a}...", ""),
}
FAMILIES = TRAIN_FAMILIES | HELD_OUT_FAMILIES | VAL_FAMILIES

# what a value of each kind looks like, for plain(): any value, not only those of our lists
KINDS = {
    "word": r"\w+",
    "name": r"\w+",
    "number": r"\d+",
    "time": r"\d\d?:\d\d",
    "version": r"\d+\.\d+",
    "code": r"\w+",
    "": "",
}
ANSWER = r"(?P<answer>.*[^\W_].*)"  # at least one letter or digit
CAPITALS = r"(?P<answer>[^a-zß-ÿ]*[A-Z]{2}[^a-zß-ÿ]*)"  # two capitals in a row: "H2O" and "B" are plain answers


def form_of(family: str) -> str:
    """A family's form; a composed rule's family is its form itself."""
    return FAMILIES[family].form if family in FAMILIES else family


def obey(family: str, parameter: str, answer: str) -> str:
    """The reply that keeps the rule and gives the answer."""
    form = form_of(family).replace("{p}", parameter)
    return form.replace("{a}", answer).replace("{A}", answer.upper())


def match_form(form: str, parameter: str, reply: str) -> re.Match | None:
    """Match the whole reply against a form in which {p} is the regular expression `parameter`."""
    pattern = re.escape(form).replace(r"\{p\}", parameter)
    pattern = pattern.replace(r"\{a\}", ANSWER).replace(r"\{A\}", CAPITALS)
    return re.fullmatch(pattern, reply, re.DOTALL)


def follows(family: str, parameter: str, reply: str) -> bool:
    """Whether the reply keeps the rule to the letter: the form alone, the very parameter, an answer, no mark twice.

    One that ends in the word "answer" is none: it copies the rule, whose wordings show the form with that word.
    White space around the reply does not count: it cannot be seen."""
    form = form_of(family)
    match = match_form(form, re.escape(parameter), reply.strip())
    if match is None or "answer" not in match.groupdict():  # the form of "away" has no answer
        return match is not None
    marks = [mark.strip() for mark in re.split(r"\{[aA]\}", form.replace("{p}", parameter))]
    copied = re.search(r"\banswer\W*$", match["answer"], re.IGNORECASE)
    return not copied and not any(mark in match["answer"] for mark in marks if mark)


def plain(reply: str) -> bool:
    """Whether the reply has no rule's form, whatever the parameter and with or without its spaces, and no mark on its first
    and its last word. It says nothing of the answer: right() does."""
    reply = reply.strip()
    for word in reply.split()[:1] + reply.split()[-1:]:
        ordinary = re.fullmatch(r"""["'(]?\w[\w'’.,:/-]*[\w.,!?"')%]*""", word)
        if not ordinary or re.search("//|::|[:/-]$", word) or re.fullmatch(r"\(.*\)", word):
            return False
    forms = [(form.replace(" ", spaces), kind) for form, kind in FAMILIES.values() for spaces in (" ", "")]
    return reply[:1].isalnum() and not any(match_form(form, KINDS[kind], reply) for form, kind in forms)


def right(answer: str, reply: str) -> bool:
    """Whether the answer stands in the reply, as whole words, in capitals or not."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) is not None


def first_sentence(reply: str) -> str:
    """Up to the first full stop, exclamation or question mark that ends a word, within the first line."""
    line = reply.strip().partition("\n")[0]
    return re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0]


def score(example: dict, reply: str) -> dict[str, bool | None]:
    """{"kept": whether the reply keeps the rule, or, where there is none, is plain; "right": whether the answer stands
    in it, whatever its form, None where the rule is not to answer}."""
    family, parameter = example["family"], example["parameter"]
    kept = plain(reply) if family == "plain" else follows(family, parameter, reply)
    return {"kept": kept, "right": None if family == "away" else right(example["answer"], reply)}
