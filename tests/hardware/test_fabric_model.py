"""The expected bandwidth of collectives between nodes, from links, GPU data and the trial's fabric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seatrial.config.schema import Fabric
from seatrial.hardware.fabric_model import ModelValue, model_value
from seatrial.hardware.links import Links, RdmaPorts, TcpInterfaces
from seatrial.hardware.references import Sku, skus

IB = Links(network="rdma", ports=RdmaPorts("ib", 8, 400.0))
TCP_25 = Fabric.model_validate({"kind": "tcp", "rate": "25 Gb/s"})
TCP = Links(network="tcp", tcp=TcpInterfaces(("eth0",), 100.0))


def sku(name: str) -> Sku:
    return next(each for each in skus() if name in each.nvml_names)


H200, GB200 = sku("NVIDIA H200"), sku("NVIDIA GB200")


def value(key: str, nodes: int = 2, links: Links = IB, tcp: Fabric | None = None, **more: Any) -> ModelValue | str:
    model = more.pop("sku", H200)
    facts = {"world_size": 8 * nodes, "nodes": nodes, "backend_environment": {}, **more}
    return model_value(key, facts, [model], links, tcp)


def bound(*args: Any, **more: Any) -> float:
    model = value(*args, **more)
    assert isinstance(model, ModelValue), model
    return model.bound.value


def test_the_logged_algorithm_decides() -> None:
    assert bound("all_reduce.busbw.8GiB") == 480
    logged = replace(IB, algorithms={("all_reduce", "8GiB"): "Ring"})
    assert bound("all_reduce.busbw.8GiB", links=logged) == 400
    model = value("all_reduce.busbw.8GiB")
    assert isinstance(model, ModelValue)
    assert "assumed" in model.name


def test_the_forced_ring_is_bounded_by_the_ports() -> None:
    model = value("all_reduce.busbw_ring.8GiB")
    assert isinstance(model, ModelValue)
    assert (model.bound.value, model.limit.fail_below) == (400, 0.76)
    assert ", Ring" in model.name
    assert "assumed" not in model.name


def test_nvls_that_is_switched_off_is_not_assumed() -> None:
    off = {"NCCL_NVLS_ENABLE": "0"}
    assert bound("all_reduce.busbw.8GiB", backend_environment=off) == pytest.approx(370.8 * 15 / 16)


@pytest.mark.parametrize(
    ("key", "changes", "reason"),
    [
        ("all_gather.busbw.1GiB", {"links": Links(network="rdma")}, "rate of the RDMA ports is not known"),
        ("all_gather.busbw.1GiB", {"links": Links()}, "network between nodes is unknown"),
        ("all_gather.busbw.1GiB", {"links": TCP}, "cluster.fabric: {kind: tcp}"),
        ("all_gather.busbw.1GiB", {"nodes": 16}, "limits from 8 GiB on"),
        ("all_gather.busbw.64MiB", {}, "limits from 1 GiB on"),
        ("all_gather.busbw.1GiB", {"world_size": 15}, "different numbers of GPUs"),
        ("reduce.busbw.1GiB", {}, "no published share"),
        ("broadcast.busbw.1GiB", {"nodes": 8}, "no published share"),
        ("all_gather.latency.1GiB", {}, "no model"),
        ("all_gather.busbw.1GiB", {"nodes": 1, "world_size": 8}, "no model"),
        ("all_gather.busbw.1GiB", {"sku": GB200, "world_size": 8}, "NVLink can connect the nodes"),
        ("all_reduce.busbw_ring.8GiB", {"world_size": 4}, "PCIe limits all_reduce"),
    ],
)
def test_unknown_values_have_a_reason(key: str, changes: dict[str, Any], reason: str) -> None:
    model = value(key, **changes)
    assert isinstance(model, str)
    assert reason in model


def test_gb200_without_nvlink_between_nodes() -> None:
    four = replace(IB, ports=RdmaPorts("roce", 4, 400.0))
    off = {"NCCL_MNNVL_ENABLE": "0"}
    assert bound("all_gather.busbw.1GiB", 4, four, sku=GB200, world_size=16, backend_environment=off) == 200


@pytest.mark.parametrize(
    ("interfaces", "asked", "gigabits", "basis"),
    [
        (TcpInterfaces(("eth0",), 100.0), Fabric(kind="tcp"), 100, "read from the interface"),
        (TcpInterfaces(("eth0",), 100.0), TCP_25, 100, "read from the interface"),
        (TcpInterfaces(("eth0",), 10.0), TCP_25, 25, "the interface reports 10 Gb/s"),
        (TcpInterfaces(("eth0",), 25.0), TCP_25, 25, "rate from cluster.fabric.rate"),
        (TcpInterfaces(("lo",), None), TCP_25, 25, "cluster.fabric.rate"),
        (None, TCP_25, 25, "cluster.fabric.rate"),
    ],
)
def test_sockets_are_judged_by_the_higher_rate_of_trial_and_interface(
    interfaces: TcpInterfaces | None, asked: Fabric, gigabits: float, basis: str
) -> None:
    links = Links(network="tcp", tcp=interfaces)
    model = value("all_gather.busbw.1GiB", links=links, tcp=asked)
    assert isinstance(model, ModelValue)
    assert model.bound.value == gigabits / 8
    assert basis in model.bound.arithmetic
    assert model.limit.fabric == "tcp"


def test_sockets_without_any_rate_have_no_value() -> None:
    model = value("all_gather.busbw.1GiB", links=Links(network="tcp"), tcp=Fabric(kind="tcp"))
    assert isinstance(model, str)
    assert "cluster.fabric.rate" in model


def test_the_lowest_of_mixed_models_counts() -> None:
    facts = {"world_size": 16, "nodes": 2}
    model = model_value("all_reduce.busbw.8GiB", facts, [sku("NVIDIA B200"), H200], IB, None)
    assert isinstance(model, ModelValue)
    assert model.bound.value == 480


@pytest.mark.parametrize("environment", [None, 5, ["x"]])
def test_malformed_environment_is_ignored(environment: Any) -> None:
    assert bound("all_reduce.busbw.8GiB", backend_environment=environment) == 480
