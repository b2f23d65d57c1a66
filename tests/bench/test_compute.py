from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seatrial.bench import compute
from seatrial.bench.compute import (
    NON_FINITE_ERROR,
    burn,
    chain_digest,
    flops,
    relative_error,
    time_matmul,
    unsupported_reason,
)
from seatrial.checks.gpu.gemm import MAX_RELATIVE_ERROR

SIZE = 256
Multiply = Callable[[], torch.Tensor]


def corrupt_product(monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[torch.Tensor], object], *calls: int) -> None:
    """Corrupt the products of these calls, counted from 0; by default of all calls."""
    real, made = compute._product, [0]

    def product(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Multiply:
        multiply = real(dtype, a, b)

        def corrupted() -> torch.Tensor:
            out = multiply()
            if not calls or made[0] in calls:
                corrupt(out)
            made[0] += 1
            return out

        return corrupted

    monkeypatch.setattr(compute, "_product", product)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_correct_product_has_a_small_error(dtype: str) -> None:
    assert 0 < relative_error(dtype, SIZE, "cpu") < MAX_RELATIVE_ERROR[dtype] / 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", range(0, SIZE, compute.CHECKED_ROW_STRIDE))
def test_one_slightly_wrong_element_exceeds_the_limit(dtype: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong by 2 % of the largest value, in any of the checked rows."""

    def corrupt(out: torch.Tensor) -> None:
        out[row, SIZE - 1] += 0.02 * out.abs().max()

    corrupt_product(monkeypatch, corrupt)
    assert MAX_RELATIVE_ERROR[dtype] < relative_error(dtype, SIZE, "cpu") < 0.03


@pytest.mark.parametrize("tile", [64, 128, 192, 256])
def test_every_tile_of_a_product_is_checked(tile: int) -> None:
    rows = range(0, 8192, compute.CHECKED_ROW_STRIDE)
    assert {row // tile for row in rows} == set(range(-(-8192 // tile)))
    assert len({row % 64 for row in rows}) == 64


def test_nan_in_a_product_gives_a_finite_error(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt_product(monkeypatch, lambda out: out[0, 0].fill_(float("nan")))
    assert relative_error("fp32", SIZE, "cpu") == NON_FINITE_ERROR


def test_reduced_precision_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if float32 ran on tensor cores that keep 10 bits."""
    corrupt_product(monkeypatch, lambda out: out.view(torch.int32).bitwise_and_(~0x1FFF))
    assert relative_error("fp32", SIZE, "cpu") > MAX_RELATIVE_ERROR["fp32"]


def test_flops_of_a_product() -> None:
    assert flops(8192) == 2 * 8192**3
    assert time_matmul("fp32", 64, "cpu", 0.05).median > 0


def test_burn_counts_changed_products(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = burn("fp32", 64, "cpu", 0.1)
    assert (correct.changed_products, correct.error < MAX_RELATIVE_ERROR["fp32"]) == (0, True)
    # Corrupt only the last product of the second timed window
    monkeypatch.setattr(compute, "time_on_device", windows_of_two(4))
    corrupt_product(monkeypatch, lambda out: out.view(torch.int32)[63, 63].bitwise_xor_(1), 1 + 3)
    result = burn("fp32", 64, "cpu", 0.1)
    assert result.changed_products == 1


def windows_of_two(windows: int) -> Callable[..., object]:
    def time_on_device(
        operation: Callable[[], object],
        device: str,
        seconds: float,
        *,
        min_seconds: float,
        after_window: Callable[[], object],
    ) -> object:
        assert min_seconds == seconds
        for _ in range(windows):
            operation()
            operation()
            after_window()
        return None

    return time_on_device


def test_wrong_product_after_a_burn_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt_product(monkeypatch, lambda out: out[61].mul_(1.01))
    assert burn("fp32", SIZE, "cpu", 0.05).error > MAX_RELATIVE_ERROR["fp32"]


def test_digest_is_reproducible_and_depends_on_all_arguments() -> None:
    digests = [
        chain_digest("fp32", 64, "cpu", 4),
        chain_digest("fp32", 64, "cpu", 5),
        chain_digest("fp32", 80, "cpu", 4),
    ]
    assert len({*digests, chain_digest("bf16", 64, "cpu", 4)}) == 4
    assert chain_digest("fp32", 64, "cpu", 4) == digests[0]


def test_digest_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, threads = torch.get_num_threads(), torch.Tensor.__matmul__, set[int]()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    try:
        torch.set_num_threads(2)
        with_two_threads = chain_digest("fp32", 512, "cpu", 2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert chain_digest("fp32", 512, "cpu", 2) == with_two_threads
        assert threads == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("product", [0, 9, 19])
def test_one_bit_in_any_product_changes_the_digest(dtype: str, product: int, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = chain_digest(dtype, 64, "cpu", 20)
    real, made = torch.Tensor.__matmul__, [0]

    def faulty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        if made[0] == product:
            compute._bits(out)[17, 5] ^= 1
        made[0] += 1
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    assert chain_digest(dtype, 64, "cpu", 20) != correct


def test_matmul_precision_is_set_and_restored() -> None:
    before = torch.get_float32_matmul_precision()
    with compute._precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        with compute._precision("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), {"fp16", "fp32"}),
        ((8, 0), {"bf16", "fp16", "tf32", "fp32"}),
        ((8, 9), set(compute.DTYPES)),
        ((9, 0), set(compute.DTYPES)),
        ((10, 0), set(compute.DTYPES)),
    ],
)
def test_dtypes_supported_by_a_compute_capability(
    capability: tuple[int, int], dtypes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {dtype for dtype in compute.DTYPES if unsupported_reason(dtype, "cuda:1") is None} == dtypes
    assert {dtype for dtype in compute.DTYPES if unsupported_reason(dtype, "cpu") is None} == {"fp32"}
