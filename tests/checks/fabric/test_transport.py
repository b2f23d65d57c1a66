"""Transports from real NCCL logs with a fake process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks, group, rank
from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.check import Context
from seatrial.checks.declare import NoValue, Value
from seatrial.checks.fabric import transport
from seatrial.checks.fabric._algorithms import requests
from seatrial.checks.fabric.transport import CHECK, RankTransport, TransportOptions
from seatrial.discover import nccl_log
from seatrial.discover.fabric import RdmaDevice, RdmaFacts
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Why
from seatrial.worker import measure
from tests.paths import FIXTURES

LOGS = FIXTURES / "nccl"


@pytest.fixture
def context(tmp_path: Path) -> Context:
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


def run_check(context: Context, monkeypatch: pytest.MonkeyPatch, log: Path, **options: bool) -> Measurement:
    monkeypatch.setattr(group, "connect_all_ranks", lambda _device: None)
    monkeypatch.setattr(group, "nccl_log_path", lambda: log)
    monkeypatch.setattr(rank, "gather", lambda value: [value, ("n0/gpu1", value[1])])
    monkeypatch.setattr(rank, "describe_device", lambda _device: {"gpu": "NVIDIA H200"})
    return measure(CHECK, context, TransportOptions(**options).model_dump())


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}


def add_active_port(root: Path) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")


def test_nvlink_passes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = run_check(context, monkeypatch, LOGS / "h200-nvlink-2.28.9.log")
    assert outcomes(measurement) == {
        "socket_despite_rdma": Outcome.PASS,
        "rdma_without_gpudirect": Outcome.PASS,
        "nvls_missing": Outcome.SKIP,  # 2 GPUs
    }
    assert (measurement.facts["transports"], measurement.facts["nccl_version"]) == (
        {"P2P/CUMEM": 112},
        "2.28.9+cuda13.0",
    )


@pytest.mark.parametrize(
    ("gpu", "gpus", "channels", "reason", "missing"),
    [
        ("NVIDIA H200", 4, 16, "", 0),
        ("NVIDIA H200", 4, 0, "", 4),
        ("NVIDIA H200", 2, 0, "2 GPUs on a node", None),
        ("NVIDIA H200", 4, None, "the log of n0/gpu0 has no number of NVLS channels", None),
        ("NVIDIA A100-SXM4-80GB", 8, 0, "NVIDIA A100-SXM4-80GB: the switches do not reduce", None),
    ],
)
def test_nvls_is_missing_only_where_the_switches_reduce(
    gpu: str, gpus: int, channels: int | None, reason: str, missing: int | None
) -> None:
    log = nccl_log.NcclLog(nvls_channels=channels)
    ranks = {f"n0/gpu{index}": RankTransport(log, (), "", "", gpu) for index in range(gpus)}
    answer = transport._nvls_missing(ranks, {"NCCL_ALGO": "Ring"})
    if missing is None:
        assert isinstance(answer, NoValue)
        assert (answer.names, answer.why, answer.reason) == (("nvls_missing",), Why.DOES_NOT_APPLY, reason)
    else:
        evidence = {"ranks": [*ranks] if missing else [], "settings": {"NCCL_ALGO": "Ring"}}
        assert answer == Value("nvls_missing", missing, (), None, evidence)


def test_sockets_fail_only_with_an_active_rdma_port(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (context.root / "sys/class").mkdir(parents=True)
    assert outcomes(run_check(context, monkeypatch, log))["socket_despite_rdma"] is Outcome.PASS
    add_active_port(context.root)
    measurement = run_check(context, monkeypatch, log)
    assert outcomes(measurement)["socket_despite_rdma"] is Outcome.FAIL
    (verdict,) = [verdict for verdict in judge_check(CHECK, [measurement], {}, "t") if verdict.outcome is Outcome.FAIL]
    assert "mlx5_0/1" in verdict.evidence
    (evidence,) = (metric.evidence for metric in measurement.metrics if metric.name == "socket_despite_rdma")
    assert isinstance(evidence, dict)
    assert evidence["active_rdma_ports"] == {"n0/gpu0": ["mlx5_0/1"], "n0/gpu1": ["mlx5_0/1"]}
    assert outcomes(run_check(context, monkeypatch, log, sockets_expected=True))["socket_despite_rdma"] is Outcome.SKIP


@pytest.mark.parametrize("name", ["Foo", "AWS Libfabric (cxi)"])
def test_a_network_that_the_table_does_not_list_is_unjudged(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _, provider = name.partition(" (")
    log = context.artifacts_dir / "log"
    log.write_text(
        f"n0:9:9 [0] NCCL INFO NET/OFI Selected provider is {provider.strip(')')}, fabric is x (found 4 nics)\n"
        f"n0:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/{network}/0/GDRDMA\n"
    )
    add_active_port(context.root)
    measurement = run_check(context, monkeypatch, log)
    by_metric = outcomes(measurement)
    assert (by_metric["socket_despite_rdma"], by_metric["rdma_without_gpudirect"]) == (Outcome.UNJUDGED,) * 2
    assert all(name in each.reason for each in measurement.absent if each.why is Why.NOT_PERMITTED)
    with log.open("a") as file:
        file.write("n0:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[1] [send] via NET/FastSocket/0\n")
    assert outcomes(run_check(context, monkeypatch, log))["socket_despite_rdma"] is Outcome.FAIL


def test_libfabric_over_tcp_beside_an_active_port_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = context.artifacts_dir / "log"
    log.write_text(
        "n0:9:9 [0] NCCL INFO NET/OFI Selected provider is tcp, fabric is 172.31.32.0/20 (found 1 nics)\n"
        "n0:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Libfabric/0\n"
    )
    add_active_port(context.root)
    measurement = run_check(context, monkeypatch, log)
    assert measurement.facts["transports"] == {"NET/Libfabric (tcp)": 2}
    assert outcomes(measurement)["socket_despite_rdma"] is Outcome.FAIL


def test_sockets_are_an_error_where_ports_cannot_be_read(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (context.root / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    measurement = run_check(context, monkeypatch, log)
    assert "mlx5_0/1 state: " in str(measurement.error)
    assert outcomes(measurement) == {"": Outcome.ERROR, "nvls_missing": Outcome.SKIP}, "2 GPUs need no NVLS"
    assert run_check(context, monkeypatch, log, sockets_expected=True).error is None
    assert run_check(context, monkeypatch, LOGS / "h200-nvlink-2.28.9.log").error is None


def test_deviating_ranks_and_settings_by_seatrial_are_marked(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "set_by_seatrial", {"NCCL_SOCKET_IFNAME"})
    first = nccl_log.read(LOGS / "h200-nvlink-2.28.9.log")
    other = first.model_copy(update={"settings": {"NCCL_ALGO": "Ring"}})
    logs = {"n0/gpu0": first, "n0/gpu1": first, "n1/gpu0": other}
    ranks = {subject: RankTransport(log, (), "", "") for subject, log in logs.items()}
    facts = transport._transport_facts(ranks, TransportOptions())
    assert facts["settings"] == {"NCCL_SOCKET_IFNAME": "lo (set by seatrial)", "NCCL_NVLS_ENABLE": "0"}
    assert facts["differs_from_first_rank"] == {"n1/gpu0": {"settings": {"NCCL_ALGO": "Ring"}}}
    assert facts["network"] == "Socket"


def test_log_without_transport_is_an_error(context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    measurement = run_check(context, monkeypatch, tmp_path / "empty")
    assert "no line on a transport" in str(measurement.error)
    assert "No such file" in str(run_check(context, monkeypatch, tmp_path / "gone").error)


@pytest.fixture
def unset_nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset NCCL's logging variables; changes are undone after the test."""
    monkeypatch.setattr(group, "set_by_seatrial", set())
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", group.GRAPH_MIXING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset_nccl_variables")
def test_nccl_log_is_enabled_unless_the_environment_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("unset_nccl_variables")
@pytest.mark.parametrize(
    "log_file", ["/dev/stderr", "/dev/fd/%p", "stdout", "/scratch/nccl.log", "/scratch/nccl.%h.log"]
)
def test_log_file_that_is_a_pipe_or_shared_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: str
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", log_file)
    group.enable_nccl_log(tmp_path)
    assert group.nccl_log_path().parent == tmp_path
    assert "NCCL_DEBUG_FILE" in group.set_by_seatrial


@pytest.mark.usefixtures("unset_nccl_variables")
def test_graph_mixing_is_disabled_unless_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_by_seatrial) == ("0", {group.GRAPH_MIXING})
    monkeypatch.setattr(group, "set_by_seatrial", set())
    monkeypatch.setenv(group.GRAPH_MIXING, "1")
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_by_seatrial) == ("1", set())


CHOICE_LINES = """\
n0:9:9 [0] NCCL INFO AllGather: 134217728 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
n0:9:9 [0] NCCL INFO AllGather: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
OPTIONS_BY_CHECK: dict[str, dict[str, Any]] = {
    "collectives.transport": {},
    "collectives.all_gather": {
        "modes": ["back_to_back", "cuda_graph"],
        "sizes": ["64GiB", "1GiB"],
        "cuda_graph_sizes": ["8B"],
        "dtype": "bfloat16",
        "buffers": "nccl",
    },
    "collectives.send_receive": {"sizes": ["1MiB"]},
}


class FakeChildren:
    """Fake child processes: their requests, and the answer of rank 0's child."""

    def __init__(self, log: Path, error: str = "") -> None:
        self.log, self.error = log, error
        self.requests: list[dict[str, Any]] = []
        self.env: dict[str, str] = {}

    def __call__(
        self, module: str, task: Mapping[str, Any], env: Mapping[str, str], **_where: Any
    ) -> list[ChildResult]:
        assert module == "seatrial.bench.algorithms"
        self.requests, self.env = task["requests"], dict(env)
        if self.error:
            return [
                ChildResult(error="another rank had failed", failure_order=2),
                ChildResult(error=self.error, failure_order=1),
            ]
        first = CHOICE_LINES.index("\n") + 1
        self.log.write_text(CHOICE_LINES)
        log_ranges = [[2**36], [2**30, 0, first], [2**20, first, first], [8, first, len(CHOICE_LINES)]]
        return [ChildResult({"log": str(self.log), "log_ranges": log_ranges})] * 2


def measured_choices(context: Context, monkeypatch: pytest.MonkeyPatch, children: FakeChildren) -> Any:
    monkeypatch.setattr(child_ranks, "run_child_ranks", children)
    return run_check(
        replace(context, options_by_check=OPTIONS_BY_CHECK), monkeypatch, LOGS / "h200-nvlink-2.28.9.log"
    ).facts["nccl_choices"]


def test_each_operation_is_requested_as_the_trial_measures_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = FakeChildren(context.artifacts_dir / "log")
    choices = measured_choices(context, monkeypatch, children)
    shape = {"operation": "all_gather", "dtype": "bfloat16", "buffers": "nccl"}
    send_receive = {"operation": "send_receive", "dtype": "float32", "buffers": "torch", "size": 2**20}
    assert children.requests == [{**shape, "size": 2**36}, {**shape, "size": 2**30}, send_receive, {**shape, "size": 8}]
    assert "TUNING" in children.env["NCCL_DEBUG_SUBSYS"]
    assert choices["all_gather"] == {
        "dtype": "bfloat16",
        "buffers": "NCCL's allocator (ncclMemAlloc)",
        "by_size": {
            "8B": {"bytes": 8, "algorithm": "RING", "protocol": "LL", "channels": 1},
            "1GiB": {"bytes": 2**30, "algorithm": "RING", "protocol": "SIMPLE", "channels": 24},
            "64GiB": {"bytes": 2**36, "algorithm": "not measured: no memory"},
        },
    }
    assert choices["send_receive"]["by_size"] == {"1MiB": {"bytes": 2**20, "algorithm": "point to point"}}


def test_default_sizes_of_all_modes_are_requested() -> None:
    options_by_check: dict[str, dict[str, Any]] = {
        "collectives.all_reduce": {"modes": ["cuda_graph", "percentiles"]},
        "train.ddp": {"x": 1},
    }
    sizes = [request["size"] for request in requests(options_by_check, ["all_reduce", "reduce"])]
    assert sizes == [2**30, 2**20, 2**18, 2**16, 2**14, 2**10, 8]
    assert max(request["size"] for request in requests({"collectives.all_reduce": {}}, ["all_reduce"])) == 2**33


def test_failed_children_are_recorded_and_transports_are_judged(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = measured_choices(context, monkeypatch, FakeChildren(context.artifacts_dir / "log", error="out of memory"))
    assert choices == {"unavailable": "rank 1: out of memory"}


def test_log_that_is_a_pipe_is_an_error(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(context.artifacts_dir / "pipe")
    assert "not a regular file" in str(run_check(context, monkeypatch, context.artifacts_dir / "pipe").error)


def test_rdma_ports_are_recorded_by_node(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    log = context.artifacts_dir / "ib.log"
    log.write_text(
        "n0:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:192.0.2.2<0>\n"
        "n0:9:9 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.17.1\n"
        "n0:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA\n"
    )
    measurement = run_check(context, monkeypatch, log)
    assert measurement.facts["rdma_ports"] == {"n0": ["mlx5_0/1", "mlx5_1/1"]}
    assert measurement.facts["net_plugin_version"] == "aws-ofi-nccl 1.17.1"


def test_interfaces_of_sockets_are_recorded(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_check(context, monkeypatch, LOGS / "h200-sockets-2.28.9.log").facts["socket_interfaces"] == {
        "n0": ["lo"]
    }
    assert not run_check(context, monkeypatch, LOGS / "h200-nvlink-2.28.9.log").facts["socket_interfaces"]


def test_unreadable_access_to_a_device_is_named() -> None:
    device = RdmaDevice(
        name="mlx5_0",
        model=None,
        firmware=None,
        numa_node=None,
        verbs_accessible=None,
        ports=(),
        unreadable={"verbs_accessible": "denied"},
    )
    rdma = RdmaFacts(devices=(device,), peermem=False)
    assert transport._unreadable_states(rdma) == "mlx5_0 verbs_accessible: denied"
