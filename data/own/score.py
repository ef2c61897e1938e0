"""Whether a reply to a prompt of your own has what its "expect" says; without one the replies are kept, and not scored."""

import re

MAX_NEW_TOKENS = 256


def score(example: dict, reply: str) -> dict[str, bool | None]:
    """{"expected": whether the regular expression is found in the reply, . matching line ends; None where there is none}."""
    found = None if example["expect"] is None else re.search(example["expect"], reply, re.DOTALL) is not None
    return {"expected": found}
