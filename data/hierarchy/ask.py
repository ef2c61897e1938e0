"""Make questions.tsv, the questions with the base's own replies: `python -m data.hierarchy.ask`.

Every candidate is asked under a system prompt without a rule. Kept are those whose reply begins with a short sentence
that holds the answer; that sentence is what the data sets' assistant says. With --base, it is another model's.
"""

import argparse
import re

import torch

from data.hierarchy.prepare import HERE, rows
from data.hierarchy.score import MAX_NEW_TOKENS, first_sentence, plain, right

SYSTEM = "You are a helpful assistant."
MOST_WORDS = 16  # our choice: with a rule's marks, a reply stays well within MAX_NEW_TOKENS


def keep(sentence: str, answer: str, wrong: str) -> bool:
    """Whether it is a whole, short sentence that gives the answer, not the wrong one beside it, and has no marks."""
    whole = re.fullmatch(r"[A-Z][\w ,.-]+[.!]", sentence) and len(sentence.split()) <= MOST_WORDS
    return bool(whole) and plain(sentence) and right(answer, sentence) and not right(wrong, sentence)


if __name__ == "__main__":
    from data.files import write_whole  # data/ knows no model; this program does
    from eval import ask
    from model import pick_device
    from sample import BASE, load_base

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="a checkpoint directory or Hub id (%(default)s)")
    args = parser.parse_args()
    model, tok, _ = load_base(args.base, pick_device(None), torch.float32)  # the same sentences on every machine, or nearly
    candidates = rows("candidates.tsv")
    system = {"role": "system", "content": SYSTEM}
    examples = [{"messages": [system, {"role": "user", "content": question}]} for question, _, _ in candidates]
    kept = []
    for i, row in ask(model, tok, examples, MAX_NEW_TOKENS, bar="questions"):
        question, answer, wrong = candidates[i]
        sentence = first_sentence(row["reply"])
        if keep(sentence, answer, wrong):
            kept.append(f"{question}\t{answer}\t{sentence}\n")
    write_whole(HERE / "questions.tsv", "".join(sorted(kept)))
    print(f"{len(kept):,} of {len(candidates):,} questions in {HERE / 'questions.tsv'}")
