"""pipeline/benchmark_hardware.py: options, the output, and where they contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.model import Outcome, UsageError
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from tests.pipeline.test_judge_nccl_tests import judged, only_result, table


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gpus": "0xH100"}, "--gpus"),
        ({"gpus": ""}, "--gpus"),
        ({"gpus": "8H100"}, "^--gpus 8H100: expected COUNTxMODEL, such as 8xH100; models with reference values: A100"),
        ({"gpus": "H100"}, "^--gpus H100: expected COUNTxMODEL"),
        ({"nics": "400x8"}, "^--nics 400x8: expected PORTSxGb/s of each port, such as 8x400"),
        ({"nics": "8x0.5"}, "--nics"),
        ({"nics": "16x4x100"}, "--nics"),
        ({"nics": "8x400000"}, "--nics"),
        ({"nics": "8x40000"}, "each of 1 to 3000 Gb/s"),
        ({"nodes": 0}, "--nodes"),
        ({"nics": "8"}, "--nics"),
        ({"nics": "8x0"}, "--nics"),
        ({"fabric": "wifi"}, "--fabric"),
        ({"algorithm": "fast"}, "--algorithm"),
    ],
)
def test_invalid_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        HardwareOptions(**options)


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        ("8xH200", ["NVIDIA H200 SXM"]),
        ("8 x NVIDIA H100 80GB HBM3", ["NVIDIA H100 SXM"]),
        ("8xh100", ["NVIDIA H100 SXM"]),
        ("8xH100 PCIe", ["NVIDIA H100 PCIe"]),
        ("8xA100 SXM 40GB", ["NVIDIA A100 SXM4 40GB"]),
        ("4xA100 SXM", ["NVIDIA A100 SXM4 40GB", "NVIDIA A100 SXM4 80GB"]),
        ("8xB300", ["NVIDIA B300"]),
        ("8xR200", ["R200"]),
    ],
)
def test_names_of_gpu_models(gpus: str, names: list[str]) -> None:
    assert [sku.name for sku in HardwareOptions(gpus).models] == names


def test_gpu_model_that_the_option_leaves_open() -> None:
    result = only_result(judged(table(230), gpus="8xA100", nodes=2, nics="8x200"))
    assert result.outcome is Outcome.UNJUDGED
    assert "can mean several GPU models" in result.problems[0]
    listed = "#  Rank  0 Group  0 Pid 1 on n0 device  0 [0x0f] NVIDIA A100-SXM4-40GB\n"
    assert judged(listed + table(230), gpus="8xA100", nodes=2, nics="8x200").outcome is Outcome.PASS


DEVICES = "".join(
    f"#  Rank {rank} Group  0 Pid {rank + 5} on n{rank // 8} device {rank % 8} [0x0f] NVIDIA H100 80GB HBM3\n"
    for rank in range(16)
)


@pytest.mark.parametrize(("address", "nodes"), [("0000:1{}:00", 2), ("0x0f", 1)])  # older versions list the bus only
def test_hosts_of_one_name_are_told_apart_by_the_addresses_of_their_gpus(address: str, nodes: int) -> None:
    lines = [
        f"#  Rank {rank} Group  0 Pid {rank + 5} on localhost device {rank % 8} [{address.format(rank % 8)}] NVIDIA"
        for rank in range(16)
    ]
    assert judged("\n".join([*lines, table(470)]), nics="8x400").hardware.nodes == nodes


@pytest.mark.parametrize(
    ("gpus", "nodes", "text"),
    [
        ("8xH100", 1, "are those of 16 ranks"),
        ("8xH100", 4, "are those of 16 ranks"),
        ("4xH100", 4, "16 GPUs on 2 hosts"),
    ],
)
def test_numbers_of_gpus_and_nodes_that_contradict_the_output(gpus: str, nodes: int, text: str) -> None:
    judgement = judged(DEVICES + table(470), gpus=gpus, nodes=nodes, nics="8x400")
    assert judgement.outcome is Outcome.UNJUDGED
    assert text in only_result(judgement).problems[0]


def test_gpu_model_that_contradicts_the_output() -> None:
    judgement = judged(DEVICES + table(470), gpus="8xH200", nics="8x400")
    assert "lists NVIDIA H100 80GB HBM3; judged as listed" in judgement.contradictions[0]
    assert (judgement.hardware.gpu, judgement.hardware.nodes) == ("NVIDIA H100 80GB HBM3", 2)
    assert judgement.outcome is Outcome.PASS


def test_unknown_gpu_model_that_contradicts_the_output() -> None:
    with pytest.raises(UsageError, match=r"^--gpus 8xH300: .* lists NVIDIA H100 80GB HBM3; .*H200 SXM"):
        judged(DEVICES + table(470), gpus="8xH300", nics="8x400")


def test_part_of_the_name_of_a_model_without_data() -> None:
    judgement = judged(DEVICES.replace("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB") + table(100), gpus="8xV100")
    assert judgement.contradictions == ()
    assert judgement.outcome is Outcome.UNJUDGED


def test_sockets() -> None:
    """The limits of TCP, not those of RDMA: a third of the bound is low, and no FAIL."""
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "1x100"}
    assert judged(table(8), **options, fabric="tcp").outcome is Outcome.WARN
    assert judged(table(8), **options, fabric="ib").outcome is Outcome.FAIL
    assert judged(table(8), **options | {"nics": "32x3000"}, fabric="tcp").outcome is Outcome.FAIL


def test_rows_of_different_numbers_of_ranks() -> None:
    row = table(470, ranks=8, size=2**34).splitlines()[1]
    result = only_result(judged(table(470).replace("# Out", f"{row}\n# Out"), gpus="8xH100", nodes=2, nics="8x400"))
    assert "different numbers of ranks" in result.problems[0]


def test_log_of_nccl_names_nodes_network_and_settings() -> None:
    log = (
        "n0:1:2 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0.\n"
        "n0:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
        "n0:1:2 [0] NCCL INFO Using network IB\n"
        "n0:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    )
    judgement = judged(log + table(380), gpus="8xH100", nics="8x400")
    assert (judgement.hardware.nodes, judgement.hardware.ranks, judgement.hardware.fabric) == (2, 16, "roce")
    assert "NCCL's log lists 2 RDMA ports" in judgement.contradictions[0]
    assert "set for this run: NCCL_NVLS_ENABLE=0" in judgement.notes
    sockets = log.replace("Using network IB", "Using network Socket")
    assert "sockets" in judged(sockets + table(380), gpus="8xH100", nics="8x400").contradictions[0]
    assert judged(sockets + table(380), gpus="8xH100", nics="8x400").hardware.fabric == "tcp"
    other = judged(log + table(380), gpus="8xH100", nics="8x400", nodes=3)
    assert "those of 16 ranks, but --gpus 8xH100 --nodes 3 are 24 GPUs" in only_result(other).problems[0]
    alone = judged(log.replace("nRanks 16 nNodes 2", "nRanks 8 nNodes 1") + table(470, ranks=8), gpus="8xH100", nodes=2)
    assert "MPI=1" in only_result(alone).problems[0]
