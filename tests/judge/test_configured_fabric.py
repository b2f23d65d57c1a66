from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.hardware.fabric_model import TcpFabric
from seatrial.hardware.links import Links
from seatrial.judge import judge
from seatrial.judge.configured_fabric import tcp_fabric, unexpected_rdma
from seatrial.model import Measurement, Metric, Outcome, Reason, Verdict

FACTS = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 2, "nodes": 2, "backend_environment": {}}


def config(*checks: str, fabric: dict[str, str] | None = None) -> Config:
    cluster = {"nodes": 2, "gpus_per_node": 1, "fabric": fabric}
    return Config.model_validate({"name": "t", "cluster": cluster, "checks": {name: {} for name in checks}})


def tcp_run(busbw: float, fabric: dict[str, str] | None, speed_mbps: int | None = 10_000) -> Verdict:
    """The verdict on an all-gather over sockets on two nodes of one H200."""
    nics = {"interfaces": [{"name": "eth0", "speed_mbps": speed_mbps}]}
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


def test_tcp_fabric_of_a_trial() -> None:
    assert tcp_fabric(config()) is None
    assert tcp_fabric(config(fabric={"kind": "tcp", "rate": "100 Gb/s"})) == TcpFabric(100.0)


@pytest.mark.parametrize(("network", "count"), [("rdma", 1), ("efa", 1), ("tcp", 0), ("", 0)])
def test_rdma_in_use_contradicts_a_trial_that_asks_for_tcp(network: str, count: int) -> None:
    check, links = catalog()["collectives.transport"], Links(network=network)
    found = list(unexpected_rdma(check, config(fabric={"kind": "tcp"}), links))
    assert [(verdict.outcome, verdict.reasons) for verdict in found] == [
        (Outcome.FAIL, (Reason.FABRIC_MISMATCH,))
    ] * count
    assert not list(unexpected_rdma(check, config(), links))
    assert not list(unexpected_rdma(catalog()["collectives.all_reduce"], config(fabric={"kind": "tcp"}), links))
