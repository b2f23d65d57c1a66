"""Cross-entropy over a large vocabulary, a part of the tokens at a time.

Logits of 8,192 tokens over 152,064 words are 5 GB in fp32, and autograd would keep them, and their softmax, until
backward. Here each part's gradient is computed at once, while its logits are there, in the three matrix products that
training needs, and none is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that is not learned, as torch and transformers have it


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, compiled: bool = False) -> Tensor:
    """The cross-entropy of ``hidden`` [T, H] @ ``weight`` [V, H]ᵀ against ``targets`` [T], summed: fp32, in nats.

    ``chunks`` parts are taken one after the other, in one ``compiled`` kernel each; IGNORED targets count nothing.
    """
    return cast(Tensor, _Loss.apply(hidden, weight, targets, chunks, compiled))  # type: ignore[no-untyped-call]


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss in fp32, and its gradient in the type of ``logits`` [T, V]: softmax minus one at the target."""
    wide = logits.float()
    normalizer = wide.logsumexp(dim=-1, keepdim=True)
    counted = (targets != IGNORE_INDEX).unsqueeze(-1)
    target = targets.clamp(min=0).unsqueeze(-1)
    loss = torch.where(counted, normalizer - wide.gather(-1, target), 0.0).sum()
    words = torch.arange(logits.shape[-1], device=logits.device)
    gradient = torch.where(counted, (wide - normalizer).exp() - (words == target).float(), 0.0)
    return loss, gradient.to(logits.dtype)


@cache
def _compiled() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """One kernel that keeps fp32 in registers, in place of ten that each pass over all logits in memory.

    Made at its first use: to name it imports the compiler, which is half of what a rank without a GPU took to start.
    """
    return torch.compile(loss_and_gradient, dynamic=False)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, compiled: bool) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        # summed in fp32, or later parts would be lost on what earlier ones left
        weight_gradient = torch.zeros_like(weight, dtype=torch.float) if of_weight else None
        both = _compiled() if compiled else loss_and_gradient
        size = -(-len(hidden) // chunks)
        for start in range(0, len(hidden), size):
            part = hidden[start : start + size]
            loss, gradient = both(part @ weight.t(), targets[start : start + size])
            total += loss
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[start : start + size])
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ part
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = gradients
        of_hidden, of_weight = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden * outer.to(of_hidden.dtype),
            None if of_weight is None else (of_weight * outer).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
