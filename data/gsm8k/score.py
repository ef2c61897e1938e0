"""GSM8K: the final number of a reply, compared with the right one as a number.

As usual for chains of thought (github.com/kojima-takeshi188/zero_shot_cot, utils.py): the number that follows the last
"the answer is", else the last number of all. Our choice is what counts as a number: see `numbers`.
"""

import re
from fractions import Fraction

MAX_NEW_TOKENS = 256  # lm-evaluation-harness: the default (max_gen_toks) under which its gsm8k_cot runs

# the data set ends its solutions in "#### 12"; "#### Step 2" is a heading
MARK = re.compile(r"\banswer is\b|####(?=[^\w\n]*\d)", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")
# int() refuses thousands of digits, and a model in a loop writes them
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?"  # a minus, but not the dash of "10-12"
    r"(?:(?:(?P<whole>\d{1,99}) )?(?P<top>\d{1,99})/(?P<bottom>[1-9]\d{0,98})"  # 3/4 and 1 1/2
    r"|(?P<decimal>\d{1,99}(?:\.\d{1,99})?|(?<![\w.])\.\d{1,99}))"  # 12 and 12.50 and .5
)


def numbers(text: str) -> list[Fraction]:
    """The numbers of a text. Currencies, units and percent signs are dropped: "$1,234.50", "50%" and "-3/4 cup" count
    as 1234.5, 50 and -0.75. Words are no numbers."""
    text = text.replace("−", "-")  # the minus sign of Unicode
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    text = re.sub(r"\\?[$€£]", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # thousands
    found = []
    for match in NUMBER.finditer(text):
        if match["decimal"]:
            value = Fraction(match["decimal"])
        else:
            value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
        found.append(-value if match["sign"] else value)
    return found


def final_number(reply: str) -> Fraction | None:
    """The number that a reply ends up with; None if it has none."""
    reply = reply.partition("Q:")[0]  # a base model goes on with a question of its own
    *before, after = MARK.split(reply)
    if before:
        for sentence in SENTENCE_END.split(after):
            # our choice: "3 + 4 = 7" states 7
            if stated := numbers(sentence.rpartition("=")[2]) or numbers(sentence):
                return stated[0]
    return (numbers(reply) or [None])[-1]


def score(example: dict, reply: str) -> dict[str, bool]:
    """Whether the reply's final number equals example["answer"]; a reply without a number is wrong."""
    return {"accuracy": final_number(reply) == Fraction(example["answer"])}
