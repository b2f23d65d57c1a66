"""Linear layers whose products are in 8 bits (arXiv 2209.05433): e4m3 forward, e5m2 for gradients, one scale a tensor.

A tensor is divided by its scale, so that its largest number is the type's largest, and the product is multiplied by
both scales. They are taken anew from every tensor: nothing is remembered from step to step. Weights stay as they were.

torchao's Float8Linear (0.18) computes the same for weights that train. For LoRA's frozen ones it keeps x and takes
three products in place of two, as it computes a gradient that nobody needs; and a layer with an adapter cannot be one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from seatrial.model import UsageError
from seatrial.train.architecture import Architecture

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2  # precise, up to 448; coarse, up to 57,344
_MULTIPLE = 16  # torch._scaled_mm: of the second matrix's sides, and of what is summed over
_CAPABILITY = (8, 9)  # Ada; before it, tensor cores know no 8-bit floats


def require_support(device: torch.device, shape: Architecture) -> None:
    """Raises UsageError where ``device`` or the model's sizes do not let products be in 8 bits."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        found = "there is no GPU" if device.type != "cuda" else f"this GPU has {capability[0]}.{capability[1]}"
        raise UsageError(f"fp8 needs a GPU of compute capability 8.9 or more, and {found}: set fp8 to false")
    pairs = shape.num_key_value_heads * shape.head_dim
    sizes = (shape.hidden_size, shape.num_attention_heads * shape.head_dim, pairs, shape.intermediate_size)
    if odd := [size for size in sizes if size % _MULTIPLE]:
        raise UsageError(f"fp8 needs layers whose sizes are multiples of {_MULTIPLE}, and one has {odd[0]}")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] @ ``weight`` [out, in]ᵀ, in the type of x. The gradients' products are in 8 bits as well.

    A frozen weight has no gradient, and for it x is not kept.
    """
    rows = cast(Tensor, _Linear.apply(x.flatten(0, -2), weight))  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def tensor_scale(value: Tensor, kind: torch.dtype) -> Tensor:
    """What ``value`` is to be divided by, fp32 []. Of a value that is no number it is none, and so is the product."""
    return value.abs().amax().float().clamp(min=1e-12) / torch.finfo(kind).max


def quantize(value: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """``value`` over ``scale`` as ``kind``; beyond its largest number, which rounding may reach, e4m3 has only NaN."""
    most = torch.finfo(kind).max
    return (value.float() / scale).clamp(-most, most).to(kind)


def _product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [m, k] @ b [k, n] with their scales. The kernels want a by rows and b by columns.

    ``fast`` sums in fewer bits than fp32: good enough for values, and not for gradients, which vary more in size.
    """
    columns = b.t().contiguous().t()
    return torch._scaled_mm(a.contiguous(), columns, of_a, of_b, out_dtype=dtype, use_fast_accum=fast)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = tensor_scale(x, FORWARD_DTYPE), tensor_scale(weight, FORWARD_DTYPE)
        kept = (x, of_x) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight, of_weight)
        narrow_x, narrow_weight = quantize(x, of_x, FORWARD_DTYPE), quantize(weight, of_weight, FORWARD_DTYPE)
        return _product(narrow_x, of_x, narrow_weight.t(), of_weight, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (gradient,) = gradients
        x, of_x, weight, of_weight = ctx.saved_tensors
        of_gradient = tensor_scale(gradient, GRADIENT_DTYPE)
        narrow_gradient, narrow_weight = (
            quantize(gradient, of_gradient, GRADIENT_DTYPE),
            quantize(weight, of_weight, FORWARD_DTYPE),
        )
        to_x = _product(narrow_gradient, of_gradient, narrow_weight, of_weight, weight.dtype, fast=False)
        if x is None:
            return to_x, None
        narrow_x = quantize(x, of_x, FORWARD_DTYPE)
        return to_x, _product(narrow_gradient.t(), of_gradient, narrow_x, of_x, weight.dtype, fast=False)
