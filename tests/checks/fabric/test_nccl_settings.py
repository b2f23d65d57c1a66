"""Metrics of the NCCL settings from fake child processes and real NCCL logs; real children: tests/bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks, collectives, rank, subgroups
from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.check import Context
from seatrial.checks.fabric import nccl_settings
from seatrial.checks.fabric.nccl_settings import CHECK, SETTINGS, _nvlink, applicable_settings
from seatrial.discover import gpu
from seatrial.discover.nvml import Gpu, NvLink
from seatrial.hardware.network_time import TcpNetwork
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Why
from seatrial.worker import measure
from tests.paths import FIXTURES

LOG = (FIXTURES / "nccl" / "h200-nvlink-2.28.9.log").read_text()
ONE_NODE = {"n0": (0, 1)}
TWO_NODES = {"n0": (0, 1), "n1": (2, 3)}


def log_line(size: int, algorithm: str) -> str:
    return (
        f"n0:9:9 [0] NCCL INFO AllReduce: {size} Bytes -> Algo {algorithm} proto SIMPLE channel{{Lo..Hi}}={{0..23}}\n"
    )


@dataclass(frozen=True)
class ChildOutput:
    """Output of the child processes of one setting."""

    busbw: float
    algorithm: str = "RING"
    per_node: float | None = None
    wrong_elements: int = 0
    error: str = ""

    def answer(self, log: Path) -> ChildResult:
        if self.error:
            return ChildResult(error=self.error)
        own_group, other_group = LOG + log_line(2**30, self.algorithm), log_line(2**30, "TREE")
        log.write_text(own_group + other_group)
        groups = {"all_ranks": [[self.busbw] * 8]}
        if self.per_node:
            groups["per_node"] = [[self.per_node] * 8, [self.per_node / 2] * 8]
        value = {
            "busbw": groups,
            "wrong_elements": self.wrong_elements,
            "log": str(log),
            "log_bytes": len(own_group),
            "not_allocated": [2**33],
        }
        return ChildResult(value)


@dataclass
class FakeChildren:
    """The started children of one setting, which measure only after those of all settings are ready."""

    fabric: Fabric
    name: str

    def wait_until_ready(self) -> None:
        self.fabric.ready.append(self.name)

    def results(self) -> list[ChildResult]:
        assert len(self.fabric.ready) == len(self.fabric.tasks), "another setting still imports torch"
        return [self.fabric.answers[self.name].answer(self.fabric.folder / "nccl.log")] * 2


GOOD = {"default": ChildOutput(363.0), "ring": ChildOutput(362.0), "no_p2p": ChildOutput(24.0)}


def make_context(out: Path, device: str = "cuda:0") -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


class Fabric:
    """Fakes of process group, driver and child processes of a trial on GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.tasks: list[dict[str, Any]] = []
        self.ready: list[str] = []
        self.answers: Mapping[str, ChildOutput] = GOOD
        self.nodes: Mapping[str, tuple[int, ...]] = ONE_NODE
        self.folder = folder
        path = {"backend": "nccl", "world_size": 2}
        monkeypatch.setattr(collectives, "describe_group", lambda: path)
        monkeypatch.setattr(subgroups, "ranks_by_node", lambda _node: self.nodes)
        monkeypatch.setattr(rank, "gather", lambda value: [value])
        monkeypatch.setattr(child_ranks, "start_child_ranks", self._started_child_ranks)
        monkeypatch.setattr(nccl_settings, "_nvlink", lambda _context: "yes")
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")

    @contextmanager
    def _started_child_ranks(
        self, module: str, task: Mapping[str, Any], env: Mapping[str, str], **where: Any
    ) -> Iterator[FakeChildren]:
        assert (module, where["device"], where["local_rank"]) == ("seatrial.bench.nccl_settings", "cuda:0", 0)
        self.tasks.append({**task, "env": env})
        yield FakeChildren(self, where["file_prefix"].name)

    def measured(self) -> Measurement:
        return measure(CHECK, make_context(self.folder), {"size": "1GiB"})


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fabric:
    return Fabric(monkeypatch, tmp_path)


def outcomes(measured: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measured], {}, "t")}


def test_good_fabric_passes_and_records_the_default_path(fabric: Fabric) -> None:
    measured = fabric.measured()
    assert set(outcomes(measured).values()) == {Outcome.PASS}
    values = {metric.name: metric.value for metric in measured.metrics}
    assert (values["busbw_default.1GiB"], values["busbw_ring.1GiB"], values["busbw_no_p2p.1GiB"]) == (363, 362, 24)
    assert values["p2p_gain"] == pytest.approx(363 / 24)
    method = str(measured.facts["method"])
    for value in ("RING", "SIMPLE", "24 channels", "P2P/CUMEM", "no tree"):
        assert value in method


def test_path_is_recorded_for_every_size(fabric: Fabric) -> None:
    by_size = fabric.measured().facts["path_by_size"]
    assert isinstance(by_size, dict)
    assert set(by_size) == {"default", "ring", "no_p2p"}
    not_logged = dict.fromkeys(("algorithm", "protocol", "channels"), "not logged") | {"transport": "P2P/CUMEM"}
    assert by_size["default"] == {
        **dict.fromkeys(("1MiB", "10MiB", "100MiB"), not_logged),
        "1GiB": {"algorithm": "RING", "protocol": "SIMPLE", "channels": 24, "transport": "P2P/CUMEM"},
        "8GiB": "not measured: no memory",
    }


def test_nvls_is_part_of_the_transport(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": ChildOutput(480.0, algorithm="NVLS")}
    by_size: Any = fabric.measured().facts["path_by_size"]
    assert by_size["default"]["1GiB"]["transport"] == "NVLS + P2P/CUMEM"


def test_unused_nvlinks_fail(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": ChildOutput(24.5), "ring": ChildOutput(24.4)}
    measured = fabric.measured()
    assert outcomes(measured)["p2p_gain"] is Outcome.FAIL
    (evidence,) = (metric.evidence for metric in measured.metrics if metric.name == "p2p_gain")
    path = {"algorithm": "RING", "protocol": "SIMPLE", "channels": 24, "transport": "P2P/CUMEM"}
    assert evidence == {"default": path, "no_p2p": path}


def test_ring_faster_than_default_warns(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": ChildOutput(300.0)}
    assert outcomes(fabric.measured())["default_vs_ring"] is Outcome.WARN


def test_wrong_data_fails(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "ring": ChildOutput(362.0, wrong_elements=1)}
    assert outcomes(fabric.measured())["wrong_elements"] is Outcome.FAIL


def test_p2p_gain_is_judged_per_node(fabric: Fabric) -> None:
    fabric.nodes = TWO_NODES
    fabric.answers = {
        "default": ChildOutput(1.0, per_node=360.0),
        "ring": ChildOutput(1.0, per_node=360.0),
        "no_p2p": ChildOutput(1.0, per_node=24.0),
    }
    measured = fabric.measured()
    assert {metric.subject for metric in measured.metrics if metric.name == "p2p_gain"} == {"n0", "n1"}
    assert {metric.subject: metric.value for metric in measured.metrics if metric.name == "busbw_default.1GiB"} == {
        "cluster": 1,
        "n0": 360,
        "n1": 180,
    }
    assert fabric.tasks[0]["groups"] == {"all_ranks": [[0, 1, 2, 3]], "per_node": [[0, 1], [2, 3]]}
    assert set(outcomes(measured).values()) == {Outcome.PASS}


def test_each_setting_changes_its_variables_and_enables_the_log(fabric: Fabric) -> None:
    fabric.measured()
    for task, name in zip(fabric.tasks, ("default", "ring", "no_p2p"), strict=True):
        changed = {key: value for key, value in task["env"].items() if not key.startswith("NCCL_DEBUG")}
        assert changed == SETTINGS[name].env
        assert "TUNING" in task["env"]["NCCL_DEBUG_SUBSYS"]
        assert task["env"]["NCCL_DEBUG_FILE"] == str(fabric.folder / f"nccl.{name}.%h.%p.log")


def test_failed_setting_is_an_error_and_others_are_kept(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "no_p2p": ChildOutput(0, error="ended by signal 9")}
    measured = fabric.measured()
    assert "no_p2p" in str(measured.error)
    assert "ended by signal 9" in str(measured.error)
    assert {metric.name for metric in measured.metrics} >= {"busbw_default.1GiB", "busbw_ring.1GiB"}
    assert "p2p_gain" not in outcomes(measured)


def test_nvls_is_never_enabled_and_single_ranks_have_no_p2p() -> None:
    assert not any(setting.env.get("NCCL_NVLS_ENABLE", "0") != "0" for setting in SETTINGS.values())
    names, not_applicable = applicable_settings(ONE_NODE, {"NCCL_NVLS_ENABLE": "0"})
    assert names == ["default", "ring", "no_p2p"]
    assert set(not_applicable) == {"no_nvls"}
    assert applicable_settings({"n0": (0,), "n1": (1,)}, {})[0] == ["default", "ring", "no_nvls"]


def test_p2p_gain_is_skipped_without_nvlink_or_p2p(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.answers = {**GOOD, "default": ChildOutput(24.5), "ring": ChildOutput(24.4)}
    for state in ("no", "some", "unknown"):
        monkeypatch.setattr(nccl_settings, "_nvlink", lambda _context, state=state: state)
        assert outcomes(fabric.measured())["p2p_gain"] is Outcome.SKIP
    fabric.nodes = {"n0": (0,), "n1": (1,)}
    monkeypatch.setattr(nccl_settings, "_nvlink", lambda _context: "yes")
    measured = fabric.measured()
    assert outcomes(measured)["p2p_gain"] is Outcome.SKIP
    assert [(absent.metric, absent.why) for absent in measured.absent] == [("p2p_gain", Why.DOES_NOT_APPLY)]


@pytest.mark.parametrize(
    ("links", "state"), [((True, False), "yes"), ((False, False), "no"), ((), "no"), ((True, None), "unknown")]
)
def test_nvlink_state_is_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: tuple[bool | None, ...], state: str
) -> None:
    nvlinks = tuple(NvLink(link=index, active=active) for index, active in enumerate(links))
    monkeypatch.setattr(gpu, "read", lambda _root: gpu.GpuFacts(gpus=(Gpu(index=0, nvlinks=nvlinks),)))
    monkeypatch.setattr(rank, "gather", lambda value: [value, None, "yes"])
    assert _nvlink(make_context(tmp_path)) == state


def test_bridges_between_pairs_of_cards_do_not_connect_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = tuple(Gpu(index=index, nvlinks=(NvLink(link=0, active=True, remote="gpu"),)) for index in range(4))
    rows = ("X NV12 NODE NODE", "NV12 X NODE NODE", "NODE NODE X NV12", "NODE NODE NV12 X")
    monkeypatch.setattr(
        gpu, "read", lambda _root: gpu.GpuFacts(gpus=cards, topology=tuple(map(tuple, map(str.split, rows))))
    )
    monkeypatch.setattr(rank, "gather", lambda value: [value, None])
    assert _nvlink(make_context(tmp_path)) == "some"


def test_gloo_is_skipped(tmp_path: Path) -> None:
    assert "NCCL" in str(measure(CHECK, make_context(tmp_path, "cpu"), {}).skipped)


def test_a_slow_network_leaves_out_sizes_that_are_only_logged(tmp_path: Path) -> None:
    """8 GiB over 10 Gb/s takes 22 s for each setting."""

    def too_slow_sizes(gbps: float) -> list[int]:
        context = Context(
            node="n0",
            rank=0,
            world_size=32,
            local_rank=0,
            device="cuda:0",
            expected_gpus=None,
            artifacts_dir=tmp_path,
            run_dir=tmp_path,
            tcp_network=TcpNetwork(4, 8, gbps),
        )
        return [*nccl_settings._too_slow_sizes(context)]

    assert too_slow_sizes(10) == [2**33]
    assert too_slow_sizes(100) == []
