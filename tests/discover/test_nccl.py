"""Logs of real NCCL 2.28.9 on two H200: over NVLink, and as two nodes that have only sockets between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.discover.nccl import NcclPath, parse, read

LOGS = Path(__file__).parent.parent / "fixtures" / "nccl"


def test_nvlink_within_a_node() -> None:
    path = read(LOGS / "h200-nvlink-2.28.9.log")
    assert set(path.transports) == {"P2P/CUMEM"}
    assert path.transports["P2P/CUMEM"] >= 24
    assert (path.version, path.network, path.nodes) == ("2.28.9+cuda13.0", "Socket", 1)
    assert (path.channels, path.nvls_channels, path.plugin) == (24, 0, None)
    assert path.settings == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    assert not path.over_sockets
    assert not path.without_gdr


def test_sockets_between_nodes() -> None:
    path = read(LOGS / "h200-sockets-2.28.9.log")
    assert set(path.transports) == {"NET/Socket"}
    assert path.nodes == 2
    assert path.over_sockets


# Lines of the NCCL documentation and of public issues (NVIDIA/nccl), each with the path that it tells of
@pytest.mark.parametrize(
    ("via", "transport"),
    [
        ("P2P/IPC/read", "P2P/IPC"),
        ("P2P/CUMEM/read", "P2P/CUMEM"),
        ("P2P/direct pointer/read", "P2P/direct pointer"),
        ("SHM/direct/direct", "SHM"),
        ("NET/IB/0", "NET/IB"),
        ("NET/IB/2(1)/GDRDMA/Shared", "NET/IB/GDRDMA"),
        ("NET/Socket/0/Shared", "NET/Socket"),
        ("NET/AWS Libfabric/3/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
    ],
)
def test_which_device_it_is_makes_no_other_path(via: str, transport: str) -> None:
    path = parse(f"n1:9:9 [3] NCCL INFO Channel 02/0 : 3[3000] -> 8[1000] [send] via {via}\n" * 2)
    assert path.transports == {transport: 2}


def test_rdma_without_gdr_is_told_apart() -> None:
    line = "n1:9:9 [3] NCCL INFO Channel 02/0 : 3[3] -> 8[0] [receive] via NET/IB/0{}"
    assert parse(line.format("")).without_gdr
    assert not parse(line.format("/GDRDMA")).without_gdr


def test_what_the_log_does_not_say_stays_unknown() -> None:
    assert parse("nothing of interest\n") == NcclPath()
    with pytest.raises(OSError, match="nowhere"):
        read(Path("nowhere"))
