"""Matrix products: speed, accuracy and bitwise reproducibility."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from seatrial.bench.timing import DeviceTiming, time_on_device

# Types of the inputs; tf32 is float32 data, of which tensor cores use 10 bits of the mantissa.
DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp32")
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
SEED = 2024  # seed of the random matrices, which are the same on all devices of one kind
# Every 61st row of the product is compared with float64. Libraries compute tiles of 64 rows or more, each on one
# multiprocessor, so every tile is checked. 61 is prime, so that compared rows are at different places in their tiles.
CHECKED_ROW_STRIDE = 61
NON_FINITE_ERROR = 1e30  # replaces inf and NaN: a metric must be finite

Multiply = Callable[[], torch.Tensor]
T = TypeVar("T")


def unsupported_reason(dtype: str, device: str) -> str | None:
    """Why ``dtype`` has no hardware support on the device, else None (CUDA C++ guide, arithmetic types)."""
    if not device.startswith("cuda"):
        return None if dtype == "fp32" else "measured on GPUs only; a CPU may emulate it"
    major, minor = torch.cuda.get_device_capability(device)
    needed = {"bf16": (8, 0), "tf32": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "fp32": (0, 0)}[dtype]
    if (major, minor) < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, this GPU has {major}.{minor}"
    return None


def flops(size: int) -> int:
    """Floating-point operations of one product of two ``size`` × ``size`` matrices, additions included."""
    return 2 * size**3


def time_matmul(dtype: str, size: int, device: str, seconds: float, min_seconds: float = 0.0) -> DeviceTiming:
    """Time products of two ``size`` × ``size`` matrices of normally distributed numbers.

    fp8 runs without cuBLAS's ``fast_accum``: more accurate, but slower than the peak. The data is random, since
    products of zeros or of a single value take less power and run at higher clocks (Horace He, "Strangely, Matrix
    Multiplications on GPUs Run Faster When Given Predictable Data").
    """
    multiply = _product(dtype, *_inputs(dtype, size, device))
    with _precision(dtype):
        return time_on_device(multiply, device, seconds, min_seconds=min_seconds)


def relative_error(dtype: str, size: int, device: str) -> float:
    """Largest difference from the float64 product, divided by the largest value of that product.

    Only every CHECKED_ROW_STRIDE-th row is compared. NON_FINITE_ERROR if the result is not finite.
    """
    a, b = _inputs(dtype, size, device)
    multiply = _product(dtype, a, b)
    with _precision(dtype):
        return _error(multiply(), a, b)


def _error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The ``relative_error`` of ``product``, which was computed from ``a`` and ``b``."""
    exact = a[::CHECKED_ROW_STRIDE].double() @ b.double()
    error = float((product[::CHECKED_ROW_STRIDE].double() - exact).abs().max() / exact.abs().max())
    return error if math.isfinite(error) else NON_FINITE_ERROR


@dataclass(frozen=True)
class BurnResult:
    """``changed_products``: number of windows whose last product differs from the first product of the burn.

    ``error``: the ``relative_error`` of the last product.
    """

    timing: DeviceTiming
    changed_products: int
    error: float


def burn(dtype: str, size: int, device: str, seconds: float) -> BurnResult:
    """Multiply the same two matrices for ``seconds``; compare the product bit by bit after every window."""
    a, b = _inputs(dtype, size, device)
    changed_products = 0
    with _precision(dtype):
        multiply = _product(dtype, a, b)
        first_product = multiply().clone()
        product = first_product

        def work() -> None:
            nonlocal product
            product = multiply()

        def compare() -> None:
            nonlocal changed_products
            if not torch.equal(_bits(product), _bits(first_product)):
                changed_products += 1

        timing = time_on_device(work, device, seconds, min_seconds=seconds, after_window=compare)
    return BurnResult(timing, changed_products, _error(product, a, b))


def chain_digest(dtype: str, size: int, device: str, products: int) -> str:
    """SHA-256 of one checksum for each product of a chain: the sum of the bit patterns of its elements, as integers.

    Each product is the previous one, scaled, times a fixed matrix.

    Identical devices with the same libraries must agree in every bit. The inputs are random integers from the CPU's
    generator with a fixed seed: normally distributed numbers would depend on the CPU's vector instructions. The sums
    are exact in any order. Each product has its own sum, so that later rounding cannot hide a difference.
    A CPU uses one thread, since the number of threads may change the order of sums.
    """
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-(2**20), 2**20, (size, size), generator=generator) / 2.0**20 for _ in range(2))
    a, b = a.to(device, _TORCH_DTYPES[dtype]), b.to(device, _TORCH_DTYPES[dtype])
    sums = []
    with _precision(dtype), _setting(torch.get_num_threads, torch.set_num_threads, 1):
        for _ in range(products):
            a = a @ b
            sums.append(_bits(a).sum(dtype=torch.int64))
            a = a / a.abs().max()
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def describe_arithmetic(device: str) -> str:
    """Versions of the libraries that compute products: devices of one model agree bitwise only with equal versions."""
    if device.startswith("cuda"):
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


@contextmanager
def _setting(read: Callable[[], T], write: Callable[[T], None], value: T) -> Iterator[None]:
    """Context manager: a setting of torch has ``value``."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _inputs(dtype: str, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of normally distributed numbers, the same in each call."""
    generator = torch.Generator(device).manual_seed(SEED)
    a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    if dtype == "fp8":
        return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return a.to(_TORCH_DTYPES[dtype]), b.to(_TORCH_DTYPES[dtype])


def _product(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Multiply:
    """A function that computes and returns ``a @ b``; each call may overwrite the tensor that the last one returned."""
    if dtype == "fp8":
        scale = torch.ones((), device=a.device)
        columns = b.t().contiguous().t()  # cuBLASLt requires the second fp8 matrix in column-major order
        return lambda: torch._scaled_mm(a, columns, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _precision(dtype: str) -> AbstractContextManager[None]:
    """Context manager: torch's float32 matmul precision is TF32 for tf32, otherwise full float32."""
    precision = "high" if dtype == "tf32" else "highest"
    return _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision)
