"""Outputs of status commands in logs: the rules of discover decide what is a fault, for all states that Slurm has."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search, search_text
from seatrial.discover.slurm_output import parse_nodes
from seatrial.hardware import networks
from tests.processes import call

FILESYSTEMS = Path(__file__).parent.parent / "fixtures" / "filesystems"
TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\t{a}\t{b}\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t{a}\t{b}\tNODE\t0-47\t0\t\tN/A
GPU2\t{a}\t{a}\t X \t{c}\tSYS\t48-95\t1\t\tN/A
GPU3\t{b}\t{b}\t{c}\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
GIDS = """DEV     PORT    INDEX   GID                                     IPv4            VER     DEV
---     ----    -----   ---                                     ------------    ---     ---
mlx5_0  1       4       0000:0000:0000:0000:0000:ffff:0a0c:0015 10.12.0.21      v1      net1
mlx5_0  1       5       0000:0000:0000:0000:0000:ffff:0a0c:0015 10.12.0.21      v2      net1
mlx5_1  1       0       fe80:0000:0000:0000:9cbb:b7ff:feb3:937b                 v1      {netdev}
mlx5_1  1       1       fe80:0000:0000:0000:9cbb:b7ff:feb3:937b                 v{version}      {netdev}
n_gids_found=4
"""


def found(text: str) -> list[tuple[str, str]]:
    return [(match.signature.id, match.place) for match in search_text(text, "x")]


@pytest.mark.parametrize(
    ("state", "is_fault"),
    [
        ("IDLE", False),
        ("MIXED+CLOUD", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("IDLE~", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("ALLOCATED+MAINTENANCE+RESERVED", False),
        ("DOWN+DRAIN+NOT_RESPONDING", True),
        ("IDLE*+DRAIN", True),
        ("IDLE+DRAIN", True),
        ("IDLE*", True),
        ("FAILING", True),
        ("ERROR", True),
    ],
)
def test_node_record_is_judged_as_by_discover(state: str, is_fault: bool) -> None:
    record = f"NodeName=n003 Arch=x86_64\n   State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1\n"
    (node,) = parse_nodes(record)
    assert (not node.up or node.needs_administrator) is is_fault
    assert found(record) == ([("slurm.node_state", "node n003")] if is_fault else [])


@pytest.mark.parametrize("state", ["down", "down*", "fail", "failg*", "inval", "unk*", "idle*", "mix*", "maint*"])
def test_rows_of_sinfo_with_nodes_that_are_not_up(state: str) -> None:
    assert found(f"gpu*         up   infinite      1  {state} n003\n") == [("slurm.nodes_down", "node n003")]


@pytest.mark.parametrize("state", ["idle", "idle~", "alloc", "mix", "comp", "drain", "drng", "maint", "plnd", "resv"])
def test_rows_of_sinfo_with_nodes_that_are_up(state: str) -> None:
    assert found(f"gpu*         up   infinite      1  {state} n003\n") == []


@pytest.mark.parametrize(
    ("a", "b", "c", "gpu"),
    [
        ("NV18", "NV18", "NV18", ""),
        ("NV18", "SYS", "SYS", "GPU 3"),  # a GPU without links
        ("NV18", "NV17", "NV17", "GPU 3"),
        ("SYS", "SYS", "NV18", ""),  # pairs with a bridge
    ],
)
def test_topology_with_a_gpu_that_has_fewer_links(a: str, b: str, c: str, gpu: str) -> None:
    assert found(TOPOLOGY.format(a=a, b=b, c=c)) == ([("nvlink.topology", gpu)] if gpu else [])


@pytest.mark.parametrize(
    ("netdev", "version", "places"),
    [("net2", 2, ["mlx5_1/1"]), ("net2", 1, ["mlx5_1/1"]), ("", 1, [])],  # the last is an InfiniBand port
)
def test_roce_port_without_a_routable_gid(netdev: str, version: int, places: list[str]) -> None:
    matches = found(GIDS.format(netdev=netdev, version=version))
    assert matches == [("infiniband.no_roce_gid", place) for place in places]


def test_tables_that_are_cut_show_no_fault() -> None:
    for text in (TOPOLOGY.format(a="NV18", b="SYS", c="SYS"), GIDS.format(netdev="net2", version=2)):
        lines = text.splitlines()
        assert found("\n".join(lines[:4])) == []


def test_unknown_network_of_nccl_is_named(tmp_path: Path) -> None:
    assert networks.kind("HyperFabric_v3") is None
    info = "n0:1:2 [0] NCCL INFO Using network {}\n"
    error = "n0:1:2 [0] NCCL WARN odd thing\n"
    log = tmp_path / "x.log"
    for network, is_named in (("HyperFabric_v3", True), ("IBext_v8", False), ("AWS Libfabric", False)):
        log.write_text(info.format(network) + error)
        code, output, _ = call("explain", log)
        assert (code, network in output.partition("first errors are")[0]) == (4, is_named)
    log.write_text(
        info.format("HyperFabric_v3") + "n0:1:2 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-AbC to 9 bytes\n"
    )
    with log.open("rb") as file:
        (finding,) = explain(search(file, "x"))
    assert finding.signature == "nccl.shared_memory_full"
    assert "HyperFabric_v3" in finding.evidence


@pytest.mark.parametrize(("name", "titles"), [("lfs-df-full-ost.txt", ["testfs-OST0002"]), ("lfs-df-expanse.txt", [])])
def test_full_disks_of_lustre_are_named(name: str, titles: list[str]) -> None:
    matches = search_text((FILESYSTEMS / name).read_text(encoding="utf-8"), "x")
    assert [match.values["target"] for match in matches] == titles


@pytest.mark.parametrize(
    ("model", "links", "places"),
    [
        ("NVIDIA H100 80GB HBM3", ["26.562 GB/s", "<inactive>"], ["GPU 1"]),
        ("NVIDIA H100 80GB HBM3", ["<inactive>", "<inactive>"], ["GPU 1"]),
        ("NVIDIA A100-PCIE-40GB", ["25 GB/s", "<inactive>"], ["GPU 1"]),
        ("NVIDIA A100-PCIE-40GB", ["<inactive>", "<inactive>"], []),  # without a bridge
        ("NVIDIA H100 NVL", ["26.562 GB/s"] * 12 + ["<inactive>"] * 6, []),
        ("NVIDIA H100 NVL", ["26.562 GB/s"] * 11 + ["<inactive>"] * 7, ["GPU 1"]),
    ],
)
def test_inactive_nvlinks_are_judged_as_by_discover(model: str, links: list[str], places: list[str]) -> None:
    rows = [f"\t Link {number}: {state}" for number, state in enumerate(links)]
    output = "\n".join([f"GPU 0: {model} (UUID: GPU-0)", "\t Link 0: 25 GB/s", f"GPU 1: {model} (UUID: GPU-1)", *rows])
    if not places:
        output = output.replace("\t Link 0: 25 GB/s\n", "\t Link 0: <inactive>\n")
    assert [match.place for match in search(io.BytesIO(f"{output}\n".encode()), "x")] == places
