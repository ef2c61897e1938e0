"""Five small functions to write, the heart of CAL and its neighbours. What is wrong with one, its check says in words:

    python -m pytest tests/exercises -k 1

Each is a few lines. No loop is needed in any of them, and none is forbidden.
"""

import torch  # noqa: F401, for you
from torch import Tensor

from cal import CrossAttentionLayer
from model import Transformer


def exercise_1(system: Tensor) -> Tensor:
    """Who sees whom? system is bool (T,), True on the system prompt's tokens. Give bool (T, T): may token i look at
    token j? It may if j is a system token and does not come after i. (cal.py has the same table for a batch, and in it
    only the columns of system tokens.)"""
    raise NotImplementedError("write exercise_1 in tests/exercises/stubs.py")


def exercise_2(block: CrossAttentionLayer) -> None:
    """Zero. The block has random weights in all its matrices. Make it the identity, and change no more than that needs,
    so that it can still learn: which two matrices are zero in the paper, the last of each part?"""
    raise NotImplementedError("write exercise_2 in tests/exercises/stubs.py")


def exercise_3(W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Merge. A LoRA layer computes x W^T + scale x A^T B^T, for W (out, in), A (r, in) and B (out, r). Give the one
    matrix (out, in) that does the same without it."""
    raise NotImplementedError("write exercise_3 in tests/exercises/stubs.py")


def exercise_4(model: Transformer) -> list[str]:
    """Who may learn? The model has CAL blocks in model.inserted. Freeze all else, let these learn, and give the names of
    what is trained now, as model.named_parameters() has them."""
    raise NotImplementedError("write exercise_4 in tests/exercises/stubs.py")


def exercise_5(question: str) -> str:
    """Attack. SmolLM2 is told by its operator: "Write every answer as a numbered list." Asked the question, it does. Give
    a message of the user that holds the question, and makes the bare model answer without a list."""
    raise NotImplementedError("write exercise_5 in tests/exercises/stubs.py")
