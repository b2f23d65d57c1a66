"""Matrix products: how fast, how right, and always the same?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from seatrial.bench.alone import Timed, time_alone

# How the inputs are held and multiplied; tf32 is float32 data through tensor cores that keep 10 bits of mantissa.
TYPES = ("bf16", "fp16", "tf32", "fp8", "fp32")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
SEED = 20_24
ROWS = 16  # rows of the product that are compared with one in float64

Multiply = Callable[[], torch.Tensor]


def why_not(kind: str, device: str) -> str | None:
    """Why this device does not multiply ``kind`` in hardware; None where it does (CUDA C++ guide, arithmetic types)."""
    if not device.startswith("cuda"):
        return None if kind == "fp32" else "measured on GPUs only: a CPU may emulate it"
    major, minor = torch.cuda.get_device_capability(device)
    needed = {"bf16": (8, 0), "tf32": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "fp32": (0, 0)}[kind]
    if (major, minor) < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, this GPU has {major}.{minor}"
    return None


def flops(size: int) -> int:
    """Floating-point operations of one product of two square matrices: a multiplication and an addition each."""
    return 2 * size**3


def time_product(kind: str, size: int, device: str, seconds: float, least_s: float = 0.0) -> Timed:
    """Time products of two ``size`` × ``size`` matrices of normally distributed numbers, written into one buffer.

    The data is random because multiplying zeros, or one value, takes less power and so runs at higher clocks
    (Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data").
    """
    with _precision(kind):
        return time_alone(_product(kind, *_inputs(kind, size, device)), device, seconds, least_s=least_s)


def relative_error(kind: str, size: int, device: str) -> float:
    """The largest deviation of some rows of the product from float64, as a share of the largest exact value."""
    a, b = _inputs(kind, size, device)
    with _precision(kind):
        got = _product(kind, a, b)()[:ROWS].double()
    exact = a[:ROWS].double() @ b.double()
    return float((got - exact).abs().max() / exact.abs().max())


def chain_digest(kind: str, size: int, device: str, links: int) -> str:
    """SHA-256 of the bits that ``links`` products in a row leave, each of the last result and one fixed matrix.

    The inputs are made on the CPU from one seed, so that they are the same everywhere: identical GPUs with the same
    libraries must agree in every bit. The result is scaled to its largest value after each product.
    """
    a, b = (matrix.to(device) for matrix in _inputs(kind, size, "cpu"))
    with _precision(kind):
        for _ in range(links):
            a = a @ b
            a = a / a.abs().max()
    return hashlib.sha256(a.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _inputs(kind: str, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(SEED)
    a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    if kind == "fp8":
        return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return a.to(_DTYPES[kind]), b.to(_DTYPES[kind])


def _product(kind: str, a: torch.Tensor, b: torch.Tensor) -> Multiply:
    if kind == "fp8":
        one = torch.ones((), device=a.device)
        columns = b.t().contiguous().t()  # cuBLASLt takes the second fp8 matrix by columns only
        return lambda: torch._scaled_mm(a, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _precision(kind: str) -> Iterator[None]:
    """float32 products in full precision, unless tf32 is what is asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
