"""Adherence by turn: the share of the system prompt's rules that each reply of a conversation keeps."""

from data.ifeval.score import verify

AXIS = "turn"  # what eval.py --plot draws over
MAX_NEW_TOKENS = 256  # our choice: five replies of IFEval's 1,280 would not fit the context of small models


def score(example: dict, replies: list[str | None]) -> dict[str, list[bool | None]]:
    """{"turn 1": whether each rule is kept, "turn 2": …}; None where a reply did not fit the context any more."""
    return {
        f"turn {turn}": [
            None if reply is None else verify(rule, kwargs, request, reply)
            for rule, kwargs in zip(example["instructions"], example["kwargs"], strict=True)
        ]
        for turn, (request, reply) in enumerate(zip(example["turns"], replies, strict=True), start=1)
    }
