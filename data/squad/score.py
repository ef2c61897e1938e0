"""SQuAD: exact match and F1 after the normalisation of the official script, evaluate-v1.1.py."""

import re
import string
from collections import Counter

MAX_NEW_TOKENS = 64  # our choice: the longest gold answer of XQuAD-en has 25 words


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an and the, single spaces between words."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(prediction: str, answer: str) -> float:
    """The harmonic mean of precision and recall over the words that two normalised texts share, as bags."""
    predicted, gold = prediction.split(), answer.split()
    shared = (Counter(predicted) & Counter(gold)).total()
    # 2 P R / (P + R) with P = shared / len(predicted), R = shared / len(gold); two empty texts have 0, as officially
    return 2 * shared / (len(predicted) + len(gold)) if shared else 0.0


def score(example: dict, reply: str) -> dict[str, bool | float]:
    """Exact match and F1 (0 to 1), each with the gold answer of example["answers"] that fits best."""
    first_line = reply.strip().partition("\n")[0]  # our choice, as lm-evaluation-harness stops SQuAD 2 at a new line
    prediction, answers = normalize(first_line), [normalize(answer) for answer in example["answers"]]
    return {"exact match": prediction in answers, "F1": max(f1(prediction, answer) for answer in answers)}
