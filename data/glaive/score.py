"""A function call out of a reply, and whether it is the right one."""

import json
import re

MAX_NEW_TOKENS = 256  # our choice: the data set has no protocol; its calls take about 30 tokens, seldom 100

TAG = "<functioncall>"
# most calls of the data set put their arguments, JSON themselves, between single quotes, which JSON has not
QUOTED = re.compile(r"""("arguments":\s*)'(\{.*?\})'(?=\s*[,}])""", re.DOTALL)


def parse_call(text: str) -> dict | None:
    """{"name", "arguments"} of the first call in a text; what isn't given is None, or {} for the arguments. None if the
    call is no JSON object. Our choice: the tag may be missing, and words may stand before and behind the call. The
    arguments may be an object, a string of JSON, or JSON between single quotes, as the data set has them."""
    call = text.partition(TAG)[2] or text
    call = QUOTED.sub(lambda match: match[1] + match[2].replace("\\'", "'"), call, count=1)
    try:
        call, _ = json.JSONDecoder().raw_decode(call, call.index("{"))
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return {"name": call.get("name"), "arguments": arguments}


def equal(a: object, b: object) -> bool:
    """Whether two JSON values are the same: 1 is 1.0, and true is not 1, whatever Python says."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def score(example: dict, reply: str) -> dict[str, bool]:
    """The reply's call against example["call"], {"name", "arguments"}. Our choice: arguments are right if they are all
    the same, texts letter by letter, in any order of the names; a call is right if its function and its arguments
    are."""
    call, target = parse_call(reply), example["call"]
    right_function = call is not None and call["name"] == target["name"]
    right_arguments = call is not None and equal(call["arguments"], target["arguments"])
    return {
        "right call": right_function and right_arguments,
        "valid JSON": call is not None,
        "right function": right_function,
        "right arguments": right_arguments,
    }
