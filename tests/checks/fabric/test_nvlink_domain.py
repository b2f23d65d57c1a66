from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pynvml as real
import pytest

from seatrial.bench import rank
from seatrial.checks.check import Context
from seatrial.checks.fabric.nvlink_domain import CHECK, compare
from seatrial.judge.rules import judge_check
from seatrial.model import Outcome, Verdict
from seatrial.worker import measure
from tests.checks.fabric.verdicts import measurement
from tests.fakes.nvml import FakeNvml, fabric, h200

RACK, OTHER_RACK = "8f7d1a6e-5c3b-4d2f-9a01-b2c3d4e5f607.32766", "0e1d2c3b-4d2f-9a01-5c3b-b2c3d4e5f607.32766"


def gpus(nodes: int, domain: str = RACK) -> dict[str, str]:
    return {f"n{node}/gpu{gpu}": domain for node in range(nodes) for gpu in range(4)}


def warnings(domains: Mapping[str, str]) -> dict[str, float | None]:
    """Metric → value of the WARNs."""
    assert outcomes(domains) <= {Outcome.PASS, Outcome.WARN}
    return {verdict.metric: verdict.value for verdict in judge(domains) if verdict.outcome is Outcome.WARN}


def outcomes(domains: Mapping[str, str]) -> set[Outcome]:
    return {verdict.outcome for verdict in judge(domains)}


def judge(domains: Mapping[str, str]) -> list[Verdict]:
    return judge_check(CHECK, [measurement(CHECK, compare(domains), "n0/gpu0")], {}, "test")


@pytest.mark.parametrize("nodes", [1, 2, 18])
def test_all_nodes_of_one_domain(nodes: int) -> None:
    assert warnings(gpus(nodes)) == {}


def test_a_gpu_without_domain() -> None:
    assert warnings(gpus(4) | {"n2/gpu1": ""}) == {"gpus_without_domain": 1}


def test_a_node_in_another_clique() -> None:
    other = RACK.replace("32766", "1")
    assert warnings(gpus(4) | {f"n3/gpu{gpu}": other for gpu in range(4)}) == {"additional_domains": 1}


def test_a_split_node() -> None:
    assert warnings(gpus(4) | {"n1/gpu3": OTHER_RACK}) == {"split_nodes": 1, "additional_domains": 1}


@pytest.mark.parametrize("domain_of", [lambda _node: "", lambda node: f"domain {node}"])
def test_nodes_without_nvlink_between_them_are_skipped(domain_of: Callable[[int], str]) -> None:
    assert outcomes({f"n{node}/gpu{gpu}": domain_of(node) for node in range(4) for gpu in range(8)}) == {Outcome.SKIP}


def test_two_full_racks_need_two_domains() -> None:
    racks = gpus(18) | {f"m{subject}": OTHER_RACK for subject in gpus(18)}
    assert warnings(racks) == {}
    assert warnings(racks | {"n0/gpu0": "third"})["additional_domains"] == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED), Outcome.SKIP),  # HGX H200: NVSwitches inside the node
        (fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, uuid=bytes(range(16)), clique=1), Outcome.PASS),
    ],
)
def test_fabric_of_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: object, outcome: Outcome) -> None:
    FakeNvml(h200(0), h200(1, nvmlDeviceGetGpuFabricInfoV=answer)).install(monkeypatch)
    monkeypatch.setattr(rank, "gather", lambda value: [value])
    context = Context(
        node="n0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cuda:0",
        nvml_index=1,
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )
    verdicts = judge_check(CHECK, [measure(CHECK, context, {})], {}, "test")
    assert {verdict.outcome for verdict in verdicts} == {outcome}
