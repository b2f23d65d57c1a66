"""What the contrasts come to. The processes are not there (tests/bench/test_anew.py has real ones), NCCL's logs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks, collectives, rank, subgroups
from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.base import Context
from seatrial.checks.fabric import nccl_settings as collectives_contrast
from seatrial.checks.fabric.nccl_settings import CHECK, SETTINGS, _nvlink, applicable_settings
from seatrial.discover import gpu
from seatrial.discover.gpu import Gpu, NvLink
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure
from tests.paths import FIXTURES

LOG = (FIXTURES / "nccl" / "h200-nvlink-2.28.9.log").read_text()
ONE_NODE = {"n0": (0, 1)}
TWO_NODES = {"n0": (0, 1), "n1": (2, 3)}
OPTIONS = {"size": "1GiB", "path_sizes": ["1MiB", "8GiB"]}


def told(size: int, algorithm: str) -> str:
    return (
        f"n0:9:9 [0] NCCL INFO AllReduce: {size} Bytes -> Algo {algorithm} proto SIMPLE channel{{Lo..Hi}}={{0..23}}\n"
    )


@dataclass(frozen=True)
class Made:
    """What the children of one contrast find."""

    busbw: float
    algorithm: str = "RING"
    inside: float | None = None
    wrong: int = 0
    problem: str = ""

    def answer(self, log: Path) -> ChildResult:
        if self.problem:
            return ChildResult(error=self.problem)
        ours, of_another_group = LOG + told(2**30, self.algorithm), told(2**30, "TREE")
        log.write_text(ours + of_another_group)
        groups = {"all": [[self.busbw] * 8]}
        if self.inside:
            groups["inside"] = [[self.inside] * 8, [self.inside / 2] * 8]
        value = {
            "busbw": groups,
            "wrong": self.wrong,
            "log": str(log),
            "log_bytes": len(ours),
            "not_allocated": [2**33],
        }
        return ChildResult(value)


GOOD = {"default": Made(363.0), "ring": Made(362.0), "no_p2p": Made(24.0)}


def a_place(out: Path, device: str = "cuda:0") -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


class Fabric:
    """The group, the driver and the children of one trial on GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: Mapping[str, Made] = GOOD
        self.nodes: Mapping[str, tuple[int, ...]] = ONE_NODE
        self.folder = folder
        path = {"backend": "nccl", "world_size": 2}
        monkeypatch.setattr(collectives, "describe_group", lambda: path)
        monkeypatch.setattr(subgroups, "ranks_by_node", lambda _node: self.nodes)
        monkeypatch.setattr(rank, "gather", lambda value: [value])
        monkeypatch.setattr(child_ranks, "run_child_ranks", self._ask)
        monkeypatch.setattr(collectives_contrast, "_nvlink", lambda _place: "yes")
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")

    def _ask(self, module: str, task: Mapping[str, Any], env: Mapping[str, str], **where: Any) -> list[ChildResult]:
        assert (module, where["device"], where["local_rank"]) == ("seatrial.bench.nccl_settings", "cuda:0", 0)
        self.asked.append({**task, "env": env})
        return [self.answers[where["out"].name].answer(self.folder / "nccl.log")] * 2

    def measured(self) -> Measurement:
        return measure(CHECK, a_place(self.folder), OPTIONS)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fabric:
    return Fabric(monkeypatch, tmp_path)


def outcomes(measured: Measurement) -> dict[str, Outcome]:
    return {one.metric: one.outcome for one in judge_check(CHECK, [measured], {}, "t")}


def test_a_good_fabric_passes_and_says_by_which_way(fabric: Fabric) -> None:
    measured = fabric.measured()
    assert set(outcomes(measured).values()) == {Outcome.PASS}
    values = {metric.name: metric.value for metric in measured.metrics}
    assert (values["busbw_default.1GiB"], values["busbw_ring.1GiB"], values["busbw_no_p2p.1GiB"]) == (363, 362, 24)
    assert values["p2p_gain"] == pytest.approx(363 / 24)
    how = str(measured.facts["how"])
    assert "by default RING, SIMPLE, 24 channels, over P2P/CUMEM; two ranks have no tree" in how


def test_the_way_stands_beside_every_size(fabric: Fabric) -> None:
    by_size = fabric.measured().facts["path_by_size"]
    assert isinstance(by_size, dict)
    assert set(by_size) == {"default", "ring", "no_p2p"}
    assert by_size["default"] == {
        "1MiB": {
            "algorithm": "not told",
            "protocol": "not told",
            "channels": "not told",
            "transport": "P2P/CUMEM",
        },
        "1GiB": {"algorithm": "RING", "protocol": "SIMPLE", "channels": 24, "transport": "P2P/CUMEM"},
        "8GiB": "not measured: no memory",
    }


def test_sums_of_the_switches_are_a_way_of_their_own(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": Made(480.0, algorithm="NVLS")}
    assert "over NVLS + P2P/CUMEM" in str(fabric.measured().facts["how"])


def test_nvlinks_that_make_nothing_faster_fail(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": Made(24.5), "ring": Made(24.4)}
    assert outcomes(fabric.measured())["p2p_gain"] is Outcome.FAIL


def test_a_ring_faster_than_the_default_warns(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "default": Made(300.0)}
    assert outcomes(fabric.measured())["default_vs_ring"] is Outcome.WARN


def test_wrong_sums_fail(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "ring": Made(362.0, wrong=1)}
    assert outcomes(fabric.measured())["wrong_elements"] is Outcome.FAIL


def test_peers_are_judged_inside_each_node_whatever_the_network_does(fabric: Fabric) -> None:
    fabric.nodes = TWO_NODES
    fabric.answers = {
        "default": Made(1.0, inside=360.0),
        "ring": Made(1.0, inside=360.0),
        "no_p2p": Made(1.0, inside=24.0),
    }
    measured = fabric.measured()
    assert {metric.subject for metric in measured.metrics if metric.name == "p2p_gain"} == {"n0", "n1"}
    assert {metric.subject: metric.value for metric in measured.metrics if metric.name == "busbw_default.1GiB"} == {
        "cluster": 1,
        "n0": 360,
        "n1": 180,
    }
    assert fabric.asked[0]["groups"] == {"all": [[0, 1, 2, 3]], "inside": [[0, 1], [2, 3]]}
    assert set(outcomes(measured).values()) == {Outcome.PASS}


def test_each_contrast_changes_one_thing_and_tells_its_way(fabric: Fabric) -> None:
    fabric.measured()
    for asked, name in zip(fabric.asked, ("default", "ring", "no_p2p"), strict=True):
        own = {key: value for key, value in asked["env"].items() if not key.startswith("NCCL_DEBUG")}
        assert own == SETTINGS[name].env
        assert "TUNING" in asked["env"]["NCCL_DEBUG_SUBSYS"]
        assert asked["env"]["NCCL_DEBUG_FILE"] == str(fabric.folder / f"nccl.{name}.%h.%p.log")


def test_one_that_could_not_be_measured_is_an_error_and_the_others_are_kept(fabric: Fabric) -> None:
    fabric.answers = {**GOOD, "no_p2p": Made(0, problem="ended by signal 9")}
    measured = fabric.measured()
    assert "no_p2p" in str(measured.error)
    assert "ended by signal 9" in str(measured.error)
    assert {metric.name for metric in measured.metrics} >= {"busbw_default.1GiB", "busbw_ring.1GiB"}
    assert "p2p_gain" not in outcomes(measured)


def test_nvls_is_never_switched_on_and_single_ranks_have_no_peers() -> None:
    assert not any(contrast.env.get("NCCL_NVLS_ENABLE", "0") != "0" for contrast in SETTINGS.values())
    names, left_out = applicable_settings(ONE_NODE, {"NCCL_NVLS_ENABLE": "0"})
    assert names == ["default", "ring", "no_p2p"]
    assert set(left_out) == {"no_nvls"}
    assert applicable_settings({"n0": (0,), "n1": (1,)}, {})[0] == ["default", "ring", "no_nvls"]


def test_without_nvlink_or_peers_nothing_is_asked_of_them(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric.answers = {**GOOD, "default": Made(24.5), "ring": Made(24.4)}
    for told_of in ("no", "unknown"):
        monkeypatch.setattr(collectives_contrast, "_nvlink", lambda _place, told_of=told_of: told_of)
        assert outcomes(fabric.measured())["p2p_gain"] is Outcome.SKIP
    fabric.nodes = {"n0": (0,), "n1": (1,)}
    assert outcomes(fabric.measured())["p2p_gain"] is Outcome.SKIP


@pytest.mark.parametrize(
    ("links", "told_of"), [((True, False), "yes"), ((False, False), "no"), ((), "no"), ((True, None), "unknown")]
)
def test_nvlinks_are_what_the_driver_says_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: tuple[bool | None, ...], told_of: str
) -> None:
    nvlinks = tuple(NvLink(link=index, active=active) for index, active in enumerate(links))
    monkeypatch.setattr(gpu, "read", lambda _root: gpu.GpuFacts(gpus=(Gpu(index=0, nvlinks=nvlinks),)))
    monkeypatch.setattr(rank, "gather", lambda value: [value, ("yes", False), ("yes", True)])
    assert _nvlink(a_place(tmp_path)) == told_of


def test_gloo_has_no_contrasts(tmp_path: Path) -> None:
    assert "NCCL" in str(measure(CHECK, a_place(tmp_path, "cpu"), {}).skipped)
