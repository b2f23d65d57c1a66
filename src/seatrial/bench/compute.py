"""Matrix products: how fast, how right, and always the same?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from seatrial.bench.timing import DeviceTiming, time_on_device

# How the inputs are held and multiplied; tf32 is float32 data through tensor cores that keep 10 bits of mantissa.
DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp32")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
SEED = 20_24
# Every so many rows one of the product is compared with float64. Libraries compute tiles of 64 rows or more, each on
# one multiprocessor: so every tile is looked at; and as 61 is prime, at another place within it each time.
CHECKED_ROW_STRIDE = 61
NON_FINITE_ERROR = 1e30  # stands for an error that is none: a figure must be finite to be judged

Multiply = Callable[[], torch.Tensor]


def unsupported_reason(kind: str, device: str) -> str | None:
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


def time_matmul(kind: str, size: int, device: str, seconds: float, least_s: float = 0.0) -> DeviceTiming:
    """Time products of two ``size`` × ``size`` matrices of normally distributed numbers, written into one buffer.

    fp8 sums as cuBLAS does without ``fast_accum``: as exactly as the hardware can, which is slower than the peak.
    The data is random because multiplying zeros, or one value, takes less power and so runs at higher clocks
    (Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data").
    """
    with _precision(kind):
        return time_on_device(_product(kind, *_inputs(kind, size, device)), device, seconds, min_seconds=least_s)


def relative_error(kind: str, size: int, device: str) -> float:
    """How far every 61st row of the product is from float64 at most, as a share of the largest exact value."""
    a, b = _inputs(kind, size, device)
    with _precision(kind):
        return _error(_product(kind, a, b)(), a, b)


def _error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    exact = a[::CHECKED_ROW_STRIDE].double() @ b.double()
    error = float((product[::CHECKED_ROW_STRIDE].double() - exact).abs().max() / exact.abs().max())
    return error if math.isfinite(error) else NON_FINITE_ERROR


@dataclass(frozen=True)
class BurnResult:
    """``changed``: windows whose last product was not, bit by bit, that of the first. ``error``: as relative_error."""

    timing: DeviceTiming
    changed_products: int
    error: float


def burn(kind: str, size: int, device: str, seconds: float) -> BurnResult:
    """Multiply the same two matrices for so long, and look after every window whether the product is the same still."""
    a, b = _inputs(kind, size, device)
    changed = 0
    with _precision(kind):
        multiply = _product(kind, a, b)
        first = multiply().clone()
        product = first

        def work() -> None:
            nonlocal product
            product = multiply()

        def compare() -> None:
            nonlocal changed
            changed += not torch.equal(_bits(product), _bits(first))

        timed = time_on_device(work, device, seconds, min_seconds=seconds, after_window=compare)
    return BurnResult(timed, changed, _error(product, a, b))


def chain_digest(kind: str, size: int, device: str, links: int) -> str:
    """SHA-256 over sums of the bits of ``links`` products in a row, each of the last one, scaled, and a fixed matrix.

    Identical devices with the same libraries must agree in every bit. The inputs come from integers, made on the CPU
    from one seed: its normal distribution depends on the CPU's vector instructions. Each product's bits are summed as
    integers, which is exact in any order, so that what a later product rounds away is not lost. A CPU computes on one
    thread: their number may decide in which order it sums.
    """
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-(2**20), 2**20, (size, size), generator=generator) / 2.0**20 for _ in range(2))
    a, b = a.to(device, _DTYPES[kind]), b.to(device, _DTYPES[kind])
    sums = []
    with _precision(kind), _one_thread():
        for _ in range(links):
            a = a @ b
            sums.append(_bits(a).sum(dtype=torch.int64))
            a = a / a.abs().max()
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def describe_arithmetic(device: str) -> str:
    """What must be the same for two devices of one model to agree in every bit: the libraries that multiply."""
    if device.startswith("cuda"):
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
