"""Prompts of your own: `eval.py --tasks FILE.jsonl`.

A line is a conversation that ends with the user, {"messages": [{"role": …, "content": …}, …]}. Beside "messages" may stand
"expect": a regular expression that a good reply contains.
"""

import argparse
import re

from data.chat import check_messages
from data.files import json_lines


def load(args: argparse.Namespace) -> list[dict]:
    """The first --limit conversations of each file, {"id", "group", "messages", "expect"}. ValueError names a bad line."""
    examples = []
    if len({file.stem for file in args.own}) < len(args.own):
        raise ValueError(f"two of {', '.join(map(str, args.own))} have one name, and would be one group: rename one")
    for file in args.own:
        of_file = []
        for place, record in json_lines(file):
            try:
                check_messages(record["messages"])
                expect = record.get("expect")
                re.compile(expect or "")
                if record["messages"][-1]["role"] != "user":
                    raise ValueError("its last message is not the user's")
            except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
                raise ValueError(f"{place} can't be asked ({error!r}): python -m pydoc data.own.prepare says how") from None
            name = f"{file.stem}/{len(of_file)}"
            of_file.append({"id": name, "group": file.stem, "messages": record["messages"], "expect": expect})
        if not of_file:
            raise ValueError(f"{file} holds no conversation: give one a line")
        examples += of_file[: args.limit]
    return examples
