"""Strict accuracy of IFEval's rules, whatever stands between them and the reply."""

from data.ifeval.score import MAX_NEW_TOKENS, every, verify

__all__ = ["AXIS", "MAX_NEW_TOKENS", "score"]

AXIS = "tokens"  # what eval.py --plot draws over


def score(example: dict, reply: str) -> dict[str, bool | None | list[bool | None]]:
    """{"prompt strict": whether all rules are kept, "instruction strict": whether each is}; None: can't be decided."""
    kept = [
        verify(rule, kwargs, example["prompt"], reply)
        for rule, kwargs in zip(example["instructions"], example["kwargs"], strict=True)
    ]
    return {"prompt strict": every(kept), "instruction strict": kept}
