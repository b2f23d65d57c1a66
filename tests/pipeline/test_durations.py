from __future__ import annotations

import pytest
from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import Cluster, Config
from seatrial.hardware.network_time import TcpNetwork
from seatrial.pipeline.durations import (
    UNKNOWN_RATE,
    Network,
    configured_network,
    typical_duration,
    typical_seconds,
    uses_network,
)
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.pipeline.planned_jobs import resolve
from seatrial.util.input_files import read_json

WITHOUT_DURATION = {"train.command"}  # the user's own training


def config(nodes: int = 1, launcher: str = "auto") -> Config:
    return Config.model_validate({"name": "t", "launcher": launcher, "cluster": Cluster(nodes=nodes), "checks": {}})


def seconds(check: str, options: dict[str, JsonValue] | None = None, nodes: int = 1, gpus: int = 2) -> float:
    typical = typical_duration(catalog()[check], options or {}, config(nodes), gpus)
    assert typical is not None
    return typical


def test_every_check_declares_its_typical_duration() -> None:
    assert typical_seconds().checks.keys() == catalog().keys() - WITHOUT_DURATION
    assert typical_duration(catalog()["train.command"], {}, config(), 8) is None


def test_declared_options_exist() -> None:
    for name, duration in typical_seconds().checks.items():
        assert duration.options.keys() <= catalog()[name].options.model_fields.keys(), name


@pytest.mark.parametrize("check", ["transfer.host", "transfer.peers", "collectives.gpu_pairs"])
def test_checks_of_each_gpu_take_longer_with_more_gpus(check: str) -> None:
    assert seconds(check, gpus=8) > 2 * seconds(check, gpus=2)


def test_pairs_of_nodes_take_time_with_several_nodes_only() -> None:
    assert seconds("collectives.rails") == 0
    assert seconds("collectives.pairs", nodes=4) > 1


def test_seconds_in_options_count() -> None:
    assert seconds("device.burn", {"seconds": 600}) == pytest.approx(seconds("device.burn") + 590)
    assert seconds("train.ddp", {"min_seconds": 1200}) > 1200


def test_slurm_checks_take_time_under_slurm_only() -> None:
    check = catalog()["slurm.jobs"]
    assert typical_duration(check, {}, config(), 8) == 0
    assert (typical_duration(check, {}, config(launcher="slurm"), 8) or 0) > 60


def test_typical_durations_are_near_those_of_the_latest_record() -> None:
    """On 2 H200, without the checks that became faster since that record."""
    changed = {"train.fsdp", "train.throughput", "train.checkpoint", "train.failure", "train.parity"}
    changed |= {name for name, check in catalog().items() if check.operation}  # and collectives.transport
    changed |= {"collectives.transport"}
    record = read_json(record_path("2026-11-23-2xh200/acceptance"))
    timings = {timing["name"]: timing["seconds"] for timing in record["timings"] if timing["kind"] == "check"}
    compared = {name: s for name, s in timings.items() if s > 1 and name in catalog().keys() - changed}
    assert len(compared) > 8
    for name, measured_s in compared.items():
        assert seconds(name) == pytest.approx(measured_s, rel=0.7), name
    assert sum(map(seconds, compared)) == pytest.approx(sum(compared.values()), rel=0.1)


@pytest.mark.parametrize(("gpus", "limit_s"), [(1, 170), (2, 290), (4, 302)])
def test_acceptance_takes_about_five_minutes_on_one_node(gpus: int, limit_s: float) -> None:
    """The goal is 300 s."""
    trial = resolve("acceptance", [("test", "cluster.gpus_per_node", gpus)]).config
    assert sum(job.expected_s for job in make_plan(trial, catalog(), NodeGpus(gpus)).jobs) < limit_s


def tcp_seconds(check: str, gbps: float, options: dict[str, JsonValue] | None = None) -> float:
    typical = typical_duration(catalog()[check], options or {}, config(4), 8, TcpNetwork(4, 8, gbps))
    assert typical is not None
    return typical - seconds(check, options, nodes=4, gpus=8)


@pytest.mark.parametrize("check", [name for name, check in catalog().items() if uses_network(check)])
def test_a_slow_network_adds_the_time_of_its_transfers(check: str) -> None:
    slow, fast = tcp_seconds(check, 1), tcp_seconds(check, 1000)
    assert slow > 60
    assert fast < 12
    assert slow > 20 * fast


def test_each_requested_size_adds_time() -> None:
    """The all-reduce of 8 GiB over 10 Gb/s, at 60 % of the bound, takes 22 s; five operations are the least."""
    options: dict[str, JsonValue] = {"sizes": ["1GiB", "8GiB"]}
    both = tcp_seconds("collectives.all_reduce", 10, options)
    assert both - tcp_seconds("collectives.all_reduce", 10, {"sizes": ["1GiB"]}) == pytest.approx(5 * 22.2, rel=0.01)


def test_transfers_between_nodes_are_declared() -> None:
    inside_a_node = {"collectives.each_node", "collectives.gpu_pairs", "collectives.one_gpu"}
    of_equal_duration = {"collectives.localization"}  # sends less on a slow network
    checks = {name for name, check in catalog().items() if name.startswith("collectives.")}
    assert checks - inside_a_node - of_equal_duration == {name for name in checks if uses_network(catalog()[name])}


@pytest.mark.parametrize(
    ("fabric", "nodes", "on_gpus", "expected"),
    [
        ({"kind": "tcp", "rate": "10 Gb/s"}, 4, True, TcpNetwork(4, 8, 10)),
        ({"kind": "tcp"}, 4, True, UNKNOWN_RATE),
        ({"kind": "tcp", "rate": "10 Gb/s"}, 4, False, None),
        ({"kind": "tcp", "rate": "10 Gb/s"}, 1, True, None),
        (None, 4, True, None),
    ],
)
def test_network_of_a_trial(fabric: JsonValue, nodes: int, on_gpus: bool, expected: Network) -> None:
    settings = Config.model_validate({"name": "t", "cluster": {"nodes": nodes, "fabric": fabric}, "checks": {}})
    assert configured_network(settings, nodes, 8, on_gpus=on_gpus) == expected


def test_over_a_network_of_unknown_rate_the_duration_is_unknown() -> None:
    assert typical_duration(catalog()["collectives.all_reduce"], {}, config(4), 8, UNKNOWN_RATE) is None
    assert typical_duration(catalog()["device.gemm"], {}, config(4), 8, UNKNOWN_RATE) is not None
