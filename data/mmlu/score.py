"""MMLU: whether the most likely of the four letters is the right one."""

POOLED = True  # 57 subjects are one row of the table, with the mean of their means beside
MAX_NEW_TOKENS = 1  # the letter, as in the authors' evaluate.py (max_tokens=1)


def score(example: dict, reply: str) -> dict[str, bool]:
    """reply: the most likely of the example's "choices", " A" to " D" (white space around it does not count)."""
    return {"accuracy": reply.strip() == example["answer"]}
