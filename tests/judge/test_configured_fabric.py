from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.links import Links
from seatrial.judge import judge, unexpected_rdma
from seatrial.model import Absent, Job, Measurement, Metric, Outcome, Reason, Verdict, Why
from seatrial.pipeline.rejudge import make_decision
from tests.report import samples

FACTS = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 2, "nodes": 2, "backend_environment": {}}


def config(*checks: str, fabric: dict[str, str] | None = None) -> Config:
    cluster = {"nodes": 2, "gpus_per_node": 1, "fabric": fabric}
    return Config.model_validate({"name": "t", "cluster": cluster, "checks": {name: {} for name in checks}})


def tcp_run(busbw: float, fabric: dict[str, str] | None, speed_mbit_s: int | None = 10_000) -> Verdict:
    """The verdict on an all-gather over sockets on two nodes of one H200."""
    nics = {"interfaces": [{"name": "eth0", "speed_mbit_s": speed_mbit_s}]}
    transport = {"transports": {"NET/Socket": 4}, "socket_interfaces": {"n0": ["eth0"], "n1": ["eth0"]}}
    measurements = [
        *(Measurement(check="host.inventory", subject=node, facts={"nics": nics}) for node in ("n0", "n1")),
        Measurement(check="collectives.transport", subject="n0/gpu0", facts=transport),
        *(
            Measurement(
                check="collectives.all_gather",
                subject=f"n{number}/gpu0",
                rank=number,
                facts=FACTS,
                metrics=() if number else (Metric(name="busbw.1GiB", value=busbw, unit="GB/s", subject="cluster"),),
            )
            for number in (0, 1)
        ),
    ]
    settings = config("collectives.all_gather", fabric=fabric)
    verdicts = judge(settings, (), measurements, catalog(), {}, retries=None)
    (found,) = (verdict for verdict in verdicts if verdict.metric == "busbw.1GiB")
    return found


@pytest.mark.parametrize(
    ("fabric", "speed", "busbw", "outcome"),
    [
        ({"kind": "tcp"}, 10_000, 1.1, Outcome.PASS),
        ({"kind": "tcp"}, 10_000, 0.5, Outcome.WARN),
        ({"kind": "tcp"}, 10_000, 0.3, Outcome.FAIL),
        ({"kind": "tcp", "rate": "40 Gb/s"}, None, 4.1, Outcome.PASS),
        ({"kind": "tcp"}, None, 4.1, Outcome.UNJUDGED),
        (None, 10_000, 1.1, Outcome.UNJUDGED),
    ],
)
def test_sockets_are_judged_where_the_trial_asks_for_them(
    fabric: dict[str, str] | None, speed: int | None, busbw: float, outcome: Outcome
) -> None:
    assert tcp_run(busbw, fabric, speed).outcome is outcome


def test_the_verdict_names_the_origin_of_the_rate() -> None:
    basis = tcp_run(1.1, {"kind": "tcp"}).basis
    assert basis
    assert "eth0, rate read from the interface" in basis.arithmetic


@pytest.mark.parametrize(("network", "count"), [("rdma", 1), ("efa", 1), ("tcp", 0), ("", 0)])
def test_rdma_in_use_contradicts_a_trial_that_asks_for_tcp(network: str, count: int) -> None:
    check, links = catalog()["collectives.transport"], Links(network=network)
    found = list(unexpected_rdma(check, config(fabric={"kind": "tcp"}), links))
    assert [(verdict.outcome, verdict.reasons) for verdict in found] == [
        (Outcome.FAIL, (Reason.FABRIC_MISMATCH,))
    ] * count
    assert not list(unexpected_rdma(check, config(), links))
    assert not list(unexpected_rdma(catalog()["collectives.all_reduce"], config(fabric={"kind": "tcp"}), links))


def all_reduce_run(metrics: dict[str, float], absent: tuple[Absent, ...] = (), **setting: Any) -> dict[str, Verdict]:
    """The verdicts by metric on an all-reduce over sockets of 10 Gb/s on two nodes of one H200."""
    nics: JsonValue = {"interfaces": [{"name": "eth0", "speed_mbit_s": 10_000}]}
    transport: dict[str, JsonValue] = {"transports": {"NET/Socket": 4}}
    transport["socket_interfaces"] = {"n0": ["eth0"], "n1": ["eth0"]}
    measured = tuple(Metric(name=name, value=value, unit="GB/s", subject="cluster") for name, value in metrics.items())
    not_timed = Absent(metric="p99_ratio.1GiB", why=Why.DOES_NOT_APPLY, reason="not timed")
    settings = config("collectives.all_reduce", fabric={"kind": "tcp", "rate": "10 Gb/s"})
    settings.checks["collectives.all_reduce"] = CheckSettings.model_validate(setting)
    measurements = [
        *(Measurement(check="host.inventory", subject=node, facts={"nics": nics}) for node in ("n0", "n1")),
        Measurement(check="collectives.transport", subject="n0/gpu0", facts=transport),
        Measurement(
            check="collectives.all_reduce",
            subject="n0/gpu0",
            facts=FACTS,
            metrics=measured,
            absent=(not_timed, *absent),
        ),
    ]
    verdicts = judge(settings, (), measurements, catalog(), {}, retries=None)
    return {verdict.metric: verdict for verdict in verdicts if verdict.check == "collectives.all_reduce"}


def left_out(size: str = "1GiB") -> tuple[Absent, ...]:
    """What the check says of 8 GiB if the network is too slow for it, and ``size`` is judged instead."""
    return tuple(
        Absent(
            metric=f"{name}.8GiB", why=Why.DOES_NOT_APPLY, reason="8 GiB takes about 111 s", instead=f"{name}.{size}"
        )
        for name in ("busbw", "busbw_ring")
    )


@pytest.mark.parametrize(("busbw", "outcome"), [(1.1, Outcome.PASS), (0.3, Outcome.FAIL)])
def test_a_size_that_the_network_is_too_slow_for_is_judged_at_the_smaller_one(busbw: float, outcome: Outcome) -> None:
    verdicts = all_reduce_run({"busbw.1GiB": busbw, "busbw_ring.1GiB": busbw}, left_out())
    for quantity in ("busbw", "busbw_ring"):
        assert verdicts[f"{quantity}.1GiB"].outcome is outcome
        not_timed = verdicts[f"{quantity}.8GiB"]
        assert (not_timed.outcome, not_timed.reasons) == (Outcome.SKIP, (Reason.NOT_APPLICABLE,))


def test_neither_size_measured_is_an_error() -> None:
    verdicts = all_reduce_run({"busbw_ring.1GiB": 1.1}, left_out())
    assert (verdicts["busbw.1GiB"].outcome, verdicts["busbw.8GiB"].outcome) == (Outcome.ERROR, Outcome.SKIP)


def test_without_a_reason_a_missing_size_is_an_error() -> None:
    verdicts = all_reduce_run({"busbw.1GiB": 1.1, "busbw_ring.1GiB": 1.1})
    assert verdicts["busbw.8GiB"].outcome is Outcome.ERROR


def test_a_threshold_on_a_size_that_was_not_measured_is_an_error() -> None:
    verdicts = all_reduce_run(
        {"busbw.1GiB": 1.1, "busbw_ring.1GiB": 1.1}, left_out(), expect={"busbw.8GiB": "> 1 GB/s"}
    )
    assert verdicts["busbw.8GiB"].outcome is Outcome.ERROR


def test_a_size_without_limits_does_not_pass() -> None:
    """An edited record cannot make a small size count for a large one."""
    verdicts = all_reduce_run({"busbw.1MiB": 100.0, "busbw_ring.1MiB": 100.0}, left_out("1MiB"))
    assert verdicts["busbw.1MiB"].outcome is Outcome.UNJUDGED


def test_the_decision_names_sizes_that_were_not_timed() -> None:
    job = Job.model_validate(
        {
            **dict.fromkeys(("name", "placement"), "ranks"),
            **{"device": "cuda", "nodes": 2, "ranks_per_node": 1, "checks": ["collectives.all_reduce"], "options": {}},
            **{"expected_gpus": 1, "limit_s": 60, "left_out": {"collectives.all_reduce": "8 GiB takes about 111 s"}},
        }
    )
    settings = config("collectives.all_reduce", fabric={"kind": "tcp", "rate": "10 Gb/s"})
    verdicts = [Verdict("collectives.all_reduce", "cluster", Outcome.PASS, "busbw.1GiB")]
    trial = samples.accepted().model_copy(update={"jobs": (job,), "measurements": (), "environment": {}})
    decision = make_decision(trial, settings, verdicts)
    assert "judged at a smaller size: collectives.all_reduce, since 8 GiB takes about 111 s" in decision.reason
