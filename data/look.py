"""Where a reply looked, as a picture: shaded words in a terminal, or a page for a browser (look.html is its template)."""

import json
from itertools import pairwise
from pathlib import Path

from data.chat import Tokenizer
from data.files import write_whole


def words(tok: Tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text; of a character of several tokens, the last one brings it."""
    texts = [tok.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]
    return [longer[len(text) :] for text, longer in pairwise(texts)]


def shade(prompt: list[str], weights: list[float], color: bool) -> str:
    """The system prompt's tokens, in color the darker the more was looked at them, and the five most looked at."""
    shaded = "".join(
        f"\x1b[30;48;2;255;{255 - round(130 * w / max(weights))};{255 - round(255 * w / max(weights))}m{word}\x1b[0m"
        if color else word
        for word, w in zip(prompt, weights)
    )  # fmt: skip
    most = sorted(((w, word) for w, word in zip(weights, prompt) if word.strip()), reverse=True)[:5]
    return f"{shaded}\nlooked at most: {', '.join(f'{word.strip()!r} {w:.0%}' for w, word in most)}"


def write_page(file: Path, about: dict) -> None:
    """The page of one reply. about: "system" and "reply" (the texts of their tokens), "user" and "base" (texts), "blocks"
    (the layers after which they stand), "weights" (by block, head, token of the reply, and token of the system prompt)."""
    data = json.dumps(about).replace("<", "\\u003c")  # no text ends the script in which it stands
    write_whole(file, (Path(__file__).parent / "look.html").read_text(encoding="utf-8").replace("{{about}}", data))
