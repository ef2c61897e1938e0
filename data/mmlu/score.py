"""MMLU: whether the most likely of the four letters is the right one."""

MAX_NEW_TOKENS = 1  # the letter, as in the authors' evaluate.py (max_tokens=1)


def score(example: dict, reply: str) -> dict[str, bool]:
    """reply: the most likely of the example's "choices", " A" to " D" (white space around it does not count)."""
    return {"accuracy": reply.strip() == example["answer"]}
