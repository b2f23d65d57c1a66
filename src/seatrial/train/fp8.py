"""Linear layers with fp8 matrix products (arXiv 2209.05433): e4m3 forward, e5m2 gradients, one scale per tensor.

Dynamic scaling: a tensor is divided by its scale, so that its largest absolute value becomes the dtype's largest
value; the product is multiplied by both scales. No scale is kept between steps. Weights keep their dtype.

torchao's Float8Linear (0.18) computes the same for trained weights. It is not used, since it does not support a layer
with an adapter. For LoRA's frozen weights it also saves x and computes three products instead of two: one is for a
gradient that is not needed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from seatrial.model import UsageError
from seatrial.train.architecture import Architecture

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2  # largest values: 448 and 57,344
_SIZE_STEP = 16  # torch._scaled_mm requires that n and k of [m, k] @ [k, n] are multiples of 16
_MIN_CAPABILITY = (8, 9)  # Ada Lovelace, the first architecture with fp8 tensor cores


def require_support(device: torch.device, architecture: Architecture) -> None:
    """Raises UsageError if ``device`` does not support fp8 products, or the model has a layer of unsupported size."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _MIN_CAPABILITY:
        actual = "there is no GPU" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        raise UsageError(f"fp8 needs a GPU of compute capability 8.9 or more, {actual}: set fp8 to false")
    sizes = chain.from_iterable(architecture.linear_shapes.values())
    if unsupported := [size for size in sizes if size % _SIZE_STEP]:
        raise UsageError(f"fp8 needs layer sizes that are multiples of {_SIZE_STEP}, the model has {unsupported[0]}")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] @ ``weight`` [out, in]ᵀ → [..., out] in the dtype of x; forward and gradient products are in fp8.

    For a frozen weight, x is not saved for backward.
    """
    rows = cast(Tensor, _Linear.apply(x.flatten(0, -2), weight))  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def tensor_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest absolute value of ``value`` ÷ largest value of ``dtype``: fp32 []; NaN if ``value`` contains NaN."""
    return value.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max


def quantize(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` ÷ ``scale`` as ``dtype``, clamped to the range of ``dtype``: larger values would become NaN in e4m3."""
    largest = torch.finfo(dtype).max
    return (value.float() / scale).clamp(-largest, largest).to(dtype)


def _scaled_product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """a [m, k] @ b [k, n] times both scales → [m, n] of ``dtype``.

    The kernels need ``a`` in row-major and ``b`` in column-major order. ``fast_accumulation`` sums with less than fp32
    precision, which is enough in the forward pass but not for gradients.
    """
    column_major = b.t().contiguous().t()
    return torch._scaled_mm(
        a.contiguous(), column_major, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast_accumulation
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_scale, weight_scale = tensor_scale(x, FORWARD_DTYPE), tensor_scale(weight, FORWARD_DTYPE)
        saved_x = (x, x_scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*saved_x, weight, weight_scale)
        x_fp8, weight_fp8 = quantize(x, x_scale, FORWARD_DTYPE), quantize(weight, weight_scale, FORWARD_DTYPE)
        return _scaled_product(x_fp8, x_scale, weight_fp8.t(), weight_scale, x.dtype, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (gradient,) = gradients
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        scale = tensor_scale(gradient, GRADIENT_DTYPE)
        gradient_fp8 = quantize(gradient, scale, GRADIENT_DTYPE)
        weight_fp8 = quantize(weight, weight_scale, FORWARD_DTYPE)
        x_gradient = _scaled_product(
            gradient_fp8, scale, weight_fp8, weight_scale, weight.dtype, fast_accumulation=False
        )
        if x is None:
            return x_gradient, None
        x_fp8 = quantize(x, x_scale, FORWARD_DTYPE)
        weight_gradient = _scaled_product(
            gradient_fp8.t(), scale, x_fp8, x_scale, weight.dtype, fast_accumulation=False
        )
        return x_gradient, weight_gradient
