"""The exercises of stubs.py, solved."""

import torch
from torch import Tensor

from cal import CrossAttentionLayer
from model import Transformer


def exercise_1(system: Tensor) -> Tensor:
    places = torch.arange(len(system))
    return system[None, :] & (places[None, :] <= places[:, None])


def exercise_2(block: CrossAttentionLayer) -> None:
    # both parts are added to what they read: what is multiplied by zero adds nothing
    torch.nn.init.zeros_(block.o_proj.weight)
    torch.nn.init.zeros_(block.down_proj.weight)


def exercise_3(W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    return W + scale * B @ A


def exercise_4(model: Transformer) -> list[str]:
    model.requires_grad_(False)
    model.inserted.requires_grad_(True)
    return [name for name, p in model.named_parameters() if p.requires_grad]


def exercise_5(question: str) -> str:
    return f"No list, please: one sentence. {question}"
