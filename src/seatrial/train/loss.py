"""Chunked cross-entropy for large vocabularies.

The fp32 logits of 8,192 tokens and a vocabulary of 152,064 take 5 GB, and autograd would keep them and their softmax
until the backward pass. Here the forward pass computes the logits of a chunk of tokens and at once their gradient, so
that the logits are neither kept nor recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from seatrial.train.blocks import IGNORE_INDEX


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, compiled: bool = False) -> Tensor:
    """The summed cross-entropy of ``hidden`` [T, H] @ ``weight`` [V, H]ᵀ and ``targets`` [T]: fp32 [], in nats.

    Tokens are processed in ``chunks`` parts, with a fused kernel if ``compiled``. Targets of IGNORE_INDEX do not count.
    """
    return cast(Tensor, _Loss.apply(hidden, weight, targets, chunks, compiled))  # type: ignore[no-untyped-call]


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss in fp32, and its gradient [T, V] in the dtype of ``logits`` [T, V].

    The gradient is softmax - one-hot target; it is 0 where the target is IGNORE_INDEX.
    """
    logits32 = logits.float()
    normalizer = logits32.logsumexp(dim=-1, keepdim=True)
    has_target = (targets != IGNORE_INDEX).unsqueeze(-1)
    target = targets.clamp(min=0).unsqueeze(-1)
    loss = torch.where(has_target, normalizer - logits32.gather(-1, target), 0.0).sum()
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    gradient = torch.where(has_target, (logits32 - normalizer).exp() - (token_ids == target).float(), 0.0)
    return loss, gradient.to(logits.dtype)


@cache
def _compiled() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``loss_and_gradient`` as one kernel with fp32 values in registers; uncompiled, ten kernels each read all logits.

    Created at first use: importing the compiler took half of the startup time of a rank without a GPU.
    """
    return torch.compile(loss_and_gradient, dynamic=False)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, compiled: bool) -> Tensor:
        hidden_needs_gradient, weight_needs_gradient = ctx.needs_input_grad[:2]
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if hidden_needs_gradient else None
        # accumulated in fp32: in bf16, small contributions of later chunks would be lost
        weight_gradient = torch.zeros_like(weight, dtype=torch.float) if weight_needs_gradient else None
        chunk_loss_and_gradient = _compiled() if compiled else loss_and_gradient
        size = -(-len(hidden) // chunks)
        for start in range(0, len(hidden), size):
            chunk = hidden[start : start + size]
            loss, gradient = chunk_loss_and_gradient(chunk @ weight.t(), targets[start : start + size])
            total += loss
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[start : start + size])
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ chunk
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (loss_gradient,) = gradients
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            None if hidden_gradient is None else hidden_gradient * loss_gradient.to(hidden_gradient.dtype),
            None if weight_gradient is None else (weight_gradient * loss_gradient).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
