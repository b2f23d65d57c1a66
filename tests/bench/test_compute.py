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


def spoil(monkeypatch: pytest.MonkeyPatch, harm: Callable[[torch.Tensor], object], *calls: int) -> None:
    """Harm the product of these calls, counted from 0; of all where none is given."""
    real, made = compute._product, [0]

    def product(kind: str, a: torch.Tensor, b: torch.Tensor) -> Multiply:
        multiply = real(kind, a, b)

        def spoilt() -> torch.Tensor:
            out = multiply()
            if not calls or made[0] in calls:
                harm(out)
            made[0] += 1
            return out

        return spoilt

    monkeypatch.setattr(compute, "_product", product)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_a_right_product_is_right_to_within_its_type(kind: str) -> None:
    assert 0 < relative_error(kind, SIZE, "cpu") < MAX_RELATIVE_ERROR[kind] / 2


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", range(0, SIZE, compute.CHECKED_ROW_STRIDE))
def test_one_slightly_wrong_number_shows(kind: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two percent of the largest value, in any of the rows that are looked at."""

    def harm(out: torch.Tensor) -> None:
        out[row, SIZE - 1] += 0.02 * out.abs().max()

    spoil(monkeypatch, harm)
    assert MAX_RELATIVE_ERROR[kind] < relative_error(kind, SIZE, "cpu") < 0.03


@pytest.mark.parametrize("tile", [64, 128, 192, 256])
def test_every_tile_of_a_product_is_looked_at(tile: int) -> None:
    rows = range(0, 8192, compute.CHECKED_ROW_STRIDE)
    assert {row // tile for row in rows} == set(range(-(-8192 // tile)))
    assert len({row % 64 for row in rows}) == 64


def test_a_product_that_is_no_number_is_wrong_and_can_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda out: out[0, 0].fill_(float("nan")))
    assert relative_error("fp32", SIZE, "cpu") == NON_FINITE_ERROR


def test_lost_precision_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if float32 went through tensor cores that keep 10 bits."""
    spoil(monkeypatch, lambda out: out.view(torch.int32).bitwise_and_(~0x1FFF))
    assert relative_error("fp32", SIZE, "cpu") > MAX_RELATIVE_ERROR["fp32"]


def test_operations_of_a_product_are_counted_as_two_for_each_pair() -> None:
    assert flops(8192) == 2 * 8192**3
    assert time_matmul("fp32", 64, "cpu", 0.05).median > 0


def test_a_burn_counts_products_that_changed_by_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = burn("fp32", 64, "cpu", 0.1)
    assert (honest.changed_products, honest.error < MAX_RELATIVE_ERROR["fp32"]) == (0, True)
    # the last product of the second measured window, in which nothing but that one was harmed
    monkeypatch.setattr(compute, "time_on_device", windows_of_two(4))
    spoil(monkeypatch, lambda out: out.view(torch.int32)[63, 63].bitwise_xor_(1), 1 + 3)
    burned = burn("fp32", 64, "cpu", 0.1)
    assert burned.changed_products == 1


def windows_of_two(windows: int) -> Callable[..., object]:
    def time_alone(
        operation: Callable[[], object], device: str, seconds: float, *, least_s: float, between: Callable[[], object]
    ) -> object:
        assert least_s == seconds
        for _ in range(windows):
            operation()
            operation()
            between()
        return None

    return time_alone


def test_a_wrong_product_after_a_burn_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda out: out[61].mul_(1.01))
    assert burn("fp32", SIZE, "cpu", 0.05).error > MAX_RELATIVE_ERROR["fp32"]


def test_digests_agree_with_themselves_and_depend_on_all_that_goes_in() -> None:
    digests = [
        chain_digest("fp32", 64, "cpu", 4),
        chain_digest("fp32", 64, "cpu", 5),
        chain_digest("fp32", 80, "cpu", 4),
    ]
    assert len({*digests, chain_digest("bf16", 64, "cpu", 4)}) == 4
    assert chain_digest("fp32", 64, "cpu", 4) == digests[0]


def test_threads_do_not_change_a_digest_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, threads = torch.get_num_threads(), torch.Tensor.__matmul__, set[int]()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    try:
        torch.set_num_threads(2)
        two = chain_digest("fp32", 512, "cpu", 2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert chain_digest("fp32", 512, "cpu", 2) == two
        assert threads == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("link", [0, 9, 19])
def test_the_last_bit_of_one_number_in_any_product_changes_the_digest(
    kind: str, link: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = chain_digest(kind, 64, "cpu", 20)
    real, made = torch.Tensor.__matmul__, [0]

    def faulty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        if made[0] == link:
            compute._bits(out)[17, 5] ^= 1
        made[0] += 1
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    assert chain_digest(kind, 64, "cpu", 20) != honest


def test_full_precision_is_asked_for_and_given_back() -> None:
    before = torch.get_float32_matmul_precision()
    with compute._precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        with compute._precision("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("capability", "types"),
    [
        ((7, 0), {"fp16", "fp32"}),
        ((8, 0), {"bf16", "fp16", "tf32", "fp32"}),
        ((8, 9), set(compute.DTYPES)),
        ((9, 0), set(compute.DTYPES)),
        ((10, 0), set(compute.DTYPES)),
    ],
)
def test_types_that_a_gpu_has_hardware_for(
    capability: tuple[int, int], types: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {kind for kind in compute.DTYPES if unsupported_reason(kind, "cuda:1") is None} == types
    assert {kind for kind in compute.DTYPES if unsupported_reason(kind, "cpu") is None} == {"fp32"}
