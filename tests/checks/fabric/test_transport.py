"""The path by NCCL's own word; the logs are real ones, the group is not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks, group, rank
from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.base import Context
from seatrial.checks.fabric import transport as collectives_path
from seatrial.checks.fabric._algorithms import requests
from seatrial.checks.fabric.transport import CHECK, RankTransport, TransportOptions
from seatrial.discover import nccl_log
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure
from tests.paths import FIXTURES

LOGS = FIXTURES / "nccl"


@pytest.fixture
def place(tmp_path: Path) -> Context:
    return Context(
        node="n0",
        rank=0,
        world_size=2,
        local_rank=0,
        device="cuda:0",
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
        root=tmp_path,
    )


def found(context: Context, monkeypatch: pytest.MonkeyPatch, log: Path, **options: bool) -> Measurement:
    monkeypatch.setattr(group, "connect_all_ranks", lambda _device: None)
    monkeypatch.setattr(group, "nccl_log_path", lambda: log)
    monkeypatch.setattr(rank, "gather", lambda value: [value, ("n0/gpu1", value[1])])
    return measure(CHECK, context, TransportOptions(**options).model_dump())


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    return {one.metric: one.outcome for one in judge_check(CHECK, [measurement], {}, "t")}


def active_port(root: Path) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")


def test_nvlink_is_a_good_path_and_told_of(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = found(context, monkeypatch, LOGS / "h200-nvlink-2.28.9.log")
    assert outcomes(measured) == {"socket_despite_rdma": Outcome.PASS, "rdma_without_gpudirect": Outcome.PASS}
    assert str(measured.facts["how"]).startswith("112 connections by P2P/CUMEM, as NCCL 2.28.9+cuda13.0 wrote")


def test_sockets_fail_where_a_port_for_rdma_is_up_and_only_there(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (context.root / "sys/class").mkdir(parents=True)
    assert outcomes(found(context, monkeypatch, log))["socket_despite_rdma"] is Outcome.PASS
    active_port(context.root)
    measured = found(context, monkeypatch, log)
    assert outcomes(measured)["socket_despite_rdma"] is Outcome.FAIL
    (verdict,) = [one for one in judge_check(CHECK, [measured], {}, "t") if one.outcome is Outcome.FAIL]
    assert "mlx5_0/1" in verdict.evidence
    assert outcomes(found(context, monkeypatch, log, sockets=True))["socket_despite_rdma"] is Outcome.SKIP


def test_sockets_are_an_error_where_no_port_can_be_read(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (context.root / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    measured = found(context, monkeypatch, log)
    assert "whether a port for RDMA is active cannot be read" in str(measured.error)
    assert "mlx5_0/1 state: " in str(measured.error)
    assert Outcome.PASS not in outcomes(measured).values()
    assert found(context, monkeypatch, log, sockets=True).error is None
    assert found(context, monkeypatch, LOGS / "h200-nvlink-2.28.9.log").error is None


def test_who_is_told_other_settings_is_named_and_ours_are_marked(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "set_by_seatrial", {"NCCL_SOCKET_IFNAME"})
    first = nccl_log.read(LOGS / "h200-nvlink-2.28.9.log")
    other = first.model_copy(update={"settings": {"NCCL_ALGO": "Ring"}})
    paths = {"n0/gpu0": first, "n0/gpu1": first, "n1/gpu0": other}
    ways = {subject: RankTransport(path, (), "", "") for subject, path in paths.items()}
    facts = collectives_path._paths(ways, TransportOptions())
    assert facts["settings"] == {"NCCL_SOCKET_IFNAME": "lo (set by seatrial)", "NCCL_NVLS_ENABLE": "0"}
    assert facts["differs_from_first_rank"] == {"n1/gpu0": {"settings": {"NCCL_ALGO": "Ring"}}}
    assert "the network that there would be between nodes is Socket" in str(facts["how"])


def test_a_log_that_tells_nothing_is_an_error(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    measured = found(context, monkeypatch, tmp_path / "empty")
    assert "no line on how it connected" in str(measured.error)
    assert "No such file" in str(found(context, monkeypatch, tmp_path / "gone").error)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks NCCL to tell anything; what is set goes with the test."""
    monkeypatch.setattr(group, "set_by_seatrial", set())
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", group.GRAPH_MIXING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("silent")
def test_nccl_is_made_to_tell_but_not_against_somebodys_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group.enable_nccl_log(tmp_path)
    assert group.nccl_log_path().parent == tmp_path
    assert group.nccl_log_path().name.endswith(".log")
    assert group.set_by_seatrial == {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
    monkeypatch.setattr(group, "set_by_seatrial", set())
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/elsewhere/%p")
    group.enable_nccl_log(tmp_path)
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("TRACE", "ALL")
    assert group.nccl_log_path() == Path(f"/elsewhere/{os.getpid()}")
    assert group.set_by_seatrial == set()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("named", ["/dev/stderr", "/dev/fd/%p", "stdout", "/scratch/nccl.log", "/scratch/nccl.%h.log"])
def test_a_log_that_is_a_pipe_or_that_of_all_ranks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", named)
    group.enable_nccl_log(tmp_path)
    assert group.nccl_log_path().parent == tmp_path
    assert "NCCL_DEBUG_FILE" in group.set_by_seatrial


@pytest.mark.usefixtures("silent")
def test_graph_mixing_is_ours_to_choose_only_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_by_seatrial) == ("0", {group.GRAPH_MIXING})
    monkeypatch.setattr(group, "set_by_seatrial", set())
    monkeypatch.setenv(group.GRAPH_MIXING, "1")
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_by_seatrial) == ("1", set())


CHOSEN = """\
n0:9:9 [0] NCCL INFO AllGather: 134217728 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
n0:9:9 [0] NCCL INFO AllGather: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
PLANNED: dict[str, dict[str, Any]] = {
    "collectives.transport": {},
    "collectives.all_gather": {
        "modes": ["parity", "device"],
        "sizes": ["64GiB", "1GiB"],
        "cuda_graph_sizes": ["8B"],
        "dtype": "bfloat16",
        "buffers": "nccl",
    },
    "collectives.send_receive": {"sizes": ["1MiB"]},
}


class Children:
    """The processes beside the ranks: what they are asked, and what that of rank 0 answers."""

    def __init__(self, log: Path, problem: str = "") -> None:
        self.log, self.problem = log, problem
        self.asked: list[dict[str, Any]] = []
        self.env: dict[str, str] = {}

    def __call__(
        self, module: str, task: Mapping[str, Any], env: Mapping[str, str], **_where: Any
    ) -> list[ChildResult]:
        assert module == "seatrial.bench.algorithms"
        self.asked, self.env = task["asks"], dict(env)
        if self.problem:
            return [
                ChildResult(error="another rank had failed", failure_order=2),
                ChildResult(error=self.problem, failure_order=1),
            ]
        first = CHOSEN.index("\n") + 1
        self.log.write_text(CHOSEN)
        told = [[2**36], [2**30, 0, first], [2**20, first, first], [8, first, len(CHOSEN)]]
        return [ChildResult({"log": str(self.log), "told": told})] * 2


def chosen(context: Context, monkeypatch: pytest.MonkeyPatch, children: Children) -> Any:
    monkeypatch.setattr(child_ranks, "run_child_ranks", children)
    return found(replace(context, options_by_check=PLANNED), monkeypatch, LOGS / "h200-nvlink-2.28.9.log").facts[
        "choices"
    ]


def test_each_operation_is_asked_for_as_the_trial_measures_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(context.artifacts_dir / "log")
    told = chosen(context, monkeypatch, children)
    shape = {"operation": "all_gather", "dtype": "bfloat16", "buffers": "nccl"}
    one = {"operation": "send_receive", "dtype": "float32", "buffers": "torch", "size": 2**20}
    assert children.asked == [{**shape, "size": 2**36}, {**shape, "size": 2**30}, one, {**shape, "size": 8}]
    assert "TUNING" in children.env["NCCL_DEBUG_SUBSYS"]
    assert told["all_gather"] == {
        "dtype": "bfloat16",
        "buffers": "NCCL's allocator (ncclMemAlloc)",
        "by_size": {
            "8B": {"bytes": 8, "algorithm": "RING", "protocol": "LL", "channels": 1},
            "1GiB": {"bytes": 2**30, "algorithm": "RING", "protocol": "SIMPLE", "channels": 24},
            "64GiB": {"bytes": 2**36, "algorithm": "not measured: no memory"},
        },
    }
    assert told["send_receive"]["by_size"] == {"1MiB": {"bytes": 2**20, "algorithm": "point to point"}}


def test_usual_sizes_of_all_modes_are_asked_for_and_nothing_of_other_checks() -> None:
    planned: dict[str, dict[str, Any]] = {
        "collectives.all_reduce": {"modes": ["device", "distribution"]},
        "train.ddp": {"x": 1},
    }
    sizes = [ask["size"] for ask in requests(planned, ["all_reduce", "reduce"])]
    assert sizes == [2**30, 2**20, 2**18, 2**16, 2**14, 2**10, 8]
    assert max(ask["size"] for ask in requests({"collectives.all_reduce": {}}, ["all_reduce"])) == 2**33


def test_choices_that_could_not_be_asked_for_are_told_and_the_path_is_judged(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = chosen(context, monkeypatch, Children(context.artifacts_dir / "log", problem="out of memory"))
    assert told == {"not_told": "rank 1: out of memory"}


def test_a_log_that_is_a_pipe_is_not_waited_for(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(context.artifacts_dir / "pipe")
    assert "not a regular file" in str(found(context, monkeypatch, context.artifacts_dir / "pipe").error)


def test_the_ports_that_nccl_uses_are_told_by_node(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = context.artifacts_dir / "ib.log"
    log.write_text(
        "n0:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:192.0.2.2<0>\n"
        "n0:9:9 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.17.1\n"
        "n0:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA\n"
    )
    measured = found(context, monkeypatch, log)
    assert measured.facts["hcas"] == {"n0": ["mlx5_0/1", "mlx5_1/1"]}
    assert measured.facts["net_plugin_version"] == "aws-ofi-nccl 1.17.1"
