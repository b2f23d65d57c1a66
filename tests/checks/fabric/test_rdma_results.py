"""Metrics from the output of perftest; real programs: test_ports_real_group.py."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.bench.perftest import ProgramResult, TransferResult
from seatrial.checks.declare import NoValue, Value
from seatrial.checks.fabric._rdma_results import RailPath, results_of_paths
from tests.checks.fabric.port_details import port
from tests.paths import FIXTURES

HDR = "200 Gb/sec (4X HDR)"
GOOD = ProgramResult((FIXTURES / "perftest" / "write_bw-6.x-ndr-gbits.txt").read_text(), "", 0)
FAILED = ProgramResult("", (FIXTURES / "perftest" / "write_bw-error-status-4.txt").read_text(), 1)
NO_DEVICE = ProgramResult("", (FIXTURES / "perftest" / "write_bw-6.06-no-device.txt").read_text(), 1)
WAITING = ProgramResult(error="did not end within 20 s")


def path(
    source: str, target: str, value: float | None = 392.0, rates: tuple[str, str] = ("", ""), **changes: Any
) -> RailPath:
    ports = [port("mlx5_0", rate) if rate else port("mlx5_0") for rate in rates]
    return RailPath("ib_write_bw", source, target, 0, ports[0], ports[1], value=value, **changes)


def both(a: str, b: str, value: float | None = 392.0, **changes: Any) -> list[RailPath]:
    return [path(a, b, value, **changes), path(b, a, value, **changes)]


def latency(source: str, target: str, value: float) -> RailPath:
    return RailPath("ib_write_lat", source, target, 0, port("mlx5_0"), port("mlx5_0"), value=value)


LATENCIES = (latency("a", "b", 1.2), latency("b", "c", 1.2))  # three ports with latencies are compared


def results(paths: list[RailPath], name: str) -> dict[str, Value]:
    return {
        str(item.subject).removesuffix("/mlx5_0"): item
        for item in results_of_paths(paths, "GPU")
        if isinstance(item, Value) and item.name == name
    }


def values(paths: list[RailPath], name: str) -> dict[str, float]:
    return {subject: item.value for subject, item in results(paths, name).items()}


@pytest.mark.parametrize(
    ("client", "server", "field", "text"),
    [
        (GOOD, ProgramResult("", "", 0), "value", 392.34),
        (FAILED, ProgramResult("", "", 1), "failure", "a: Failed status 4: wr_id 0 syndrom 0x51"),
        (WAITING, FAILED, "failure", "b: Failed status 4: wr_id 0 syndrom 0x51"),
        (
            ProgramResult("", "Couldn't connect to b:1", 1),
            WAITING,
            "not_measured",
            "a: exit code 1; Couldn't connect to b:1",
        ),
        (ProgramResult(error="not started"), NO_DEVICE, "not_measured", "b: exit code 1; Did not detect devices"),
        (ProgramResult("", "", 0), ProgramResult("", "", 0), "not_measured", "a: no table of results"),
        (ProgramResult(GOOD.out.replace("392.34", "-1"), "", 0), GOOD, "not_measured", "a: BW average[Gb/sec] is -1"),
    ],
)
def test_outcome_of_a_transfer(client: ProgramResult, server: ProgramResult, field: str, text: Any) -> None:
    result = path("a", "b", None).with_result(TransferResult(server, client))
    found = getattr(result, field)
    assert found == text if isinstance(text, float) else str(found).startswith(text) or f"; {text}" in str(found)
    assert [result.value is not None, bool(result.failure), bool(result.not_measured)].count(True) == 1


def test_a_port_has_the_slower_direction_with_its_best_partner() -> None:
    paths = [
        *both("a", "b"),
        path("a", "c", 392.0),
        path("c", "a", 200.0),
        path("b", "c", 392.0),
        path("c", "b", 210.0),
        *LATENCIES,
    ]
    assert values(paths, "write_bw") == {"a": 392.0, "b": 392.0, "c": 210.0}
    assert values(paths, "rate_share")["c"] == pytest.approx(52.5)
    assert values(paths, "path_share") == {"a->b": 1.0, "a->c": pytest.approx(200 / 210), "b->c": 1.0}
    assert all(item.evidence == {"memory": "GPU"} for item in results(paths, "rate_share").values())


def test_slow_paths_are_evidence_of_their_pair() -> None:
    paths = [*both("a", "b"), *both("b", "c"), path("a", "c", 100.0), path("c", "a", 392.0), *LATENCIES]
    shares = results(paths, "path_share")
    assert shares["a->c"].evidence == {"slow_paths": {"a/mlx5_0->c/mlx5_0": "100 of 392 Gb/s"}}
    assert shares["a->b"].evidence == {"slow_paths": {}}


def test_a_slower_partner_does_not_count_against_a_port() -> None:
    paths = [path("a", "b", 196.0, ("", HDR)), path("b", "a", 196.0, (HDR, ""))]
    assert values(paths, "rate_share") == {"a": 98.0, "b": 98.0}
    paths += [*both("a", "c", 384.0), *LATENCIES]
    assert values(paths, "write_bw") == {"a": 384.0, "b": 196.0, "c": 384.0}
    assert values(paths, "bw_vs_peers") == {"a": 1.0, "b": pytest.approx(196 / 384), "c": 1.0}


def test_rdma_that_always_fails_is_zero_and_a_tool_that_fails_is_missing() -> None:
    paths = [*both("a", "b"), *both("a", "c", None, failure="x"), *both("b", "c", None, failure="x")]
    assert values(paths, "write_bw") == {"a": 392.0, "b": 392.0, "c": 0.0}
    assert values(paths, "failed_paths") == {"a->b": 0, "a->c": 2, "b->c": 2}
    named = {f"ib_write_bw {path}": "x" for path in ("a/mlx5_0->c/mlx5_0", "c/mlx5_0->a/mlx5_0")}
    assert results(paths, "failed_paths")["a->c"].evidence == {"failed_paths": named}
    paths = [
        *both("a", "b"),
        *both("a", "c", None, not_measured="x"),
        path("b", "c"),
        path("c", "b", None, not_measured="x"),
    ]
    assert values(paths, "write_bw") == {"a": 392.0, "b": 392.0}
    assert values(paths, "paths_not_measured") == {"a->b": 0, "a->c": 2, "b->c": 1}


def test_latency_is_that_with_the_best_partner() -> None:
    paths = [*both("a", "b"), *both("b", "c"), latency("a", "b", 1.2), latency("a", "c", 3.0), latency("b", "c", 3.1)]
    assert values(paths, "write_latency") == {"a": 1.2, "b": 1.2, "c": 3.0}
    assert values(paths, "latency_vs_peers")["c"] == 2.5


@pytest.mark.parametrize(("nodes", "comparable"), [("ab", False), ("abc", True)])
def test_two_ports_are_not_compared(nodes: str, comparable: bool) -> None:
    paths = [one for a in nodes for b in nodes if a < b for one in (*both(a, b), latency(a, b, 1.2))]
    answers = list(results_of_paths(paths, ""))
    measured = {item.name for item in answers if isinstance(item, Value)}
    not_compared = {name for item in answers if isinstance(item, NoValue) for name in item.names}
    comparisons = {"bw_vs_peers", "path_share", "latency_vs_peers"}
    assert (measured & comparisons, not_compared) == ((comparisons, set()) if comparable else (set(), comparisons))
