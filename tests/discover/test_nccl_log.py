"""Logs of NCCL 2.28.9 on two H200: over NVLink, and as two nodes with sockets between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.discover.nccl_log import AlgorithmChoice, NcclLog, parse, read
from seatrial.hardware import networks
from tests.paths import FIXTURES

LOGS = FIXTURES / "nccl"


def test_nvlink_within_a_node() -> None:
    log = read(LOGS / "h200-nvlink-2.28.9.log")
    assert set(log.transports) == {"P2P/CUMEM"}
    assert log.transports["P2P/CUMEM"] >= 24
    assert (log.version, log.network, log.nodes) == ("2.28.9+cuda13.0", "Socket", 1)
    assert (log.channels, log.nvls_channels, log.plugin) == (24, 0, None)
    assert log.settings == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    assert not log.uses_sockets
    assert not log.rdma_without_gpudirect


def test_sockets_between_nodes() -> None:
    log = read(LOGS / "h200-sockets-2.28.9.log")
    assert set(log.transports) == {"NET/Socket"}
    assert log.nodes == 2
    assert log.uses_sockets
    assert log.socket_interfaces == ("lo",)


def test_interfaces_of_the_socket_transport() -> None:
    """NVIDIA/nccl#278."""
    line = "NCCL INFO NET/Socket : Using [0]enP1p1s0f0:10.30.0.127<0> [1]enP1p1s0f1:10.30.0.227<0>\n"
    assert parse(line).socket_interfaces == ("enP1p1s0f0", "enP1p1s0f1")
    assert parse("NCCL INFO NET/Socket : Using [0]eth0:fe80::1%eth0<0>\n").socket_interfaces == ("eth0",)


# Lines of the NCCL documentation and of public issues (NVIDIA/nccl), each with its transport
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
        ("NET/gIB/3/GDRDMA", "NET/gIB/GDRDMA"),
    ],
)
def test_transports_without_device_and_sharing(via: str, transport: str) -> None:
    log = parse(f"n1:9:9 [3] NCCL INFO Channel 02/0 : 3[3000] -> 8[1000] [send] via {via}\n" * 2)
    assert log.transports == {transport: 2}


def test_rdma_without_gpudirect() -> None:
    line = "n1:9:9 [3] NCCL INFO Channel 02/0 : 3[3] -> 8[0] [receive] via NET/IB/0{}"
    assert parse(line.format("")).rdma_without_gpudirect
    assert not parse(line.format("/GDRDMA")).rdma_without_gpudirect


def test_fields_that_are_not_logged_are_none() -> None:
    assert parse("nothing of interest\n") == NcclLog()
    with pytest.raises(OSError, match="nowhere"):
        read(Path("nowhere"))


# The formats of INFO(NCCL_TUNING, …) in src/enqueue.cc of NCCL 2.23 to 2.30, 2.20 to 2.22 (public issues
# NVIDIA/nccl#1595, #1453) and of symmetric kernels since 2.27
@pytest.mark.parametrize(
    ("line", "choice"),
    [
        (
            "AllReduce: 1073741824 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}",
            AlgorithmChoice(operation="AllReduce", size=2**30, algorithm="RING", protocol="SIMPLE", channels=24),
        ),
        (
            "AllReduce: 4096 Bytes -> Algo Tree proto LL channel{Lo..Hi}={0..1} cgaClusterSize 4",
            AlgorithmChoice(operation="AllReduce", size=4096, algorithm="TREE", protocol="LL", channels=2),
        ),
        (
            "AllReduce: 268435456 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}",
            AlgorithmChoice(operation="AllReduce", size=2**28, algorithm="NVLS_TREE", protocol="SIMPLE", channels=16),
        ),
        (
            "805306368 Bytes -> Algo 1 proto 2 time 3970.683594",
            AlgorithmChoice(operation=None, size=805306368, algorithm="RING", protocol="SIMPLE"),
        ),
        (
            "AllGather: 37756928 Bytes -> Algo 9 proto 1 time 2860.208008",
            AlgorithmChoice(operation="AllGather", size=37756928, algorithm="9", protocol="LL128"),
        ),
        (
            "AllReduce [Symmetric]: 1048576 Bytes -> Kernel AllReduce_RSxLDMC_AGxSTMC nchannels 16 nthreads 512",
            AlgorithmChoice(
                operation="AllReduce", size=2**20, algorithm="symmetric AllReduce_RSxLDMC_AGxSTMC", channels=16
            ),
        ),
    ],
)
def test_algorithm_choices(line: str, choice: AlgorithmChoice) -> None:
    log = parse(f"n1:9:9 [0] NCCL INFO {line}\n" * 2)
    assert log.choices == (choice,)
    assert log.find_choice(choice.operation or "AllReduce", choice.size) == choice
    assert log.find_choice("Broadcast", choice.size) == (None if choice.operation else choice)
    assert log.find_choice("AllReduce", 7) is None


def test_the_last_choice_for_a_size_counts() -> None:
    line = "n1:9:9 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo {} proto LL channel{{Lo..Hi}}={{0..1}}\n"
    choice = parse(line.format("TREE") + line.format("RING")).find_choice("AllReduce", 4096)
    assert choice
    assert choice.algorithm == "RING"


def test_a_log_without_tuning_has_no_choices() -> None:
    assert read(LOGS / "h200-nvlink-2.28.9.log").choices == ()


def test_a_log_with_tuning_has_choices() -> None:
    log = read(LOGS / "h200-nvlink-tuning-2.28.9.log")
    small, large = log.find_choice("AllReduce", 2**20), log.find_choice("AllReduce", 2**30)
    assert small == AlgorithmChoice(operation="AllReduce", size=2**20, algorithm="RING", protocol="LL", channels=24)
    assert large == AlgorithmChoice(operation="AllReduce", size=2**30, algorithm="RING", protocol="SIMPLE", channels=24)
    assert set(log.transports) == {"P2P/CUMEM"}


def test_shared_memory_logs_channels_without_a_second_number() -> None:
    """``Channel 00 : 0[0] -> 1[1] via SHM/direct/direct``, while P2P logs ``Channel 00/0``."""
    log = read(LOGS / "h200-shm-tuning-2.28.9.log")
    assert log.transports == {"SHM": 4}
    assert log.settings["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("used", "hcas"),
    [
        ("[0]mlx5_0:1/IB [1]mlx5_bond_0:2/RoCE [RO]; OOB eno1:192.0.2.9<0>", ("mlx5_0/1", "mlx5_bond_0/2")),
        ("[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [RO]; OOB eth0:192.0.2.9<0>", ("mlx5_0/1", "mlx5_1/1")),
        ("[0]rocep1s0f0-1:1/RoCE/SHARP ; OOB eth0:192.0.2.9<0>", ("rocep1s0f0-1/1",)),
        ("[RO]; OOB eth0:192.0.2.2<0>", ()),
        (" ; OOB eth0:192.0.2.2<0>", ()),
    ],
)
def test_rdma_ports_in_use(used: str, hcas: tuple[str, ...]) -> None:
    assert parse(f"n1:9:9 [3] NCCL INFO NET/IB : Using {used}\n").hcas == hcas


# Lines of public issues and manuals: aws-ofi-nccl, Google's gIB, and NVIDIA's nccl-rdma-sharp-plugins
@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NET/OFI Initializing aws-ofi-nccl 1.17.1", "aws-ofi-nccl 1.17.1"),
        ("NET/gIB : Initializing gIB v1.0.6", "gIB v1.0.6"),
        ("P2P plugin v8 IBext_v8", "P2P plugin v8 IBext_v8"),
        ("NET/Plugin: Loaded net plugin Libfabric (v10)", None),
    ],
)
def test_the_version_of_a_net_plugin(line: str, version: str | None) -> None:
    assert parse(f"n1:9:9 [3] NCCL INFO {line}\n").plugin_version == version


def test_read_a_part_of_a_log() -> None:
    file = LOGS / "h200-nvlink-tuning-2.28.9.log"
    start = file.read_bytes().index(b"AllReduce: 10485760 Bytes") - len("vm:2416:2416 [0] NCCL INFO ")
    (choice,) = read(file, 100, start).choices
    assert choice.size == 10485760


def test_gpudirect_over_pcie_is_gpudirect() -> None:
    """NCCL src/transport/net.cc writes GDRDMA(PCI) where the NIC also has a data-direct path."""
    log = parse("n1:9:9 [3] NCCL INFO Channel 02/0 : 3[3] -> 8[0] [send] via NET/IB/2/GDRDMA(PCI)/Shared\n")
    assert log.transports == {"NET/IB/GDRDMA": 1}
    assert not log.rdma_without_gpudirect


RINGS = "n1:9:9 [3] NCCL INFO Connected all rings, use ring PXN 0 GDR {}\n"


@pytest.mark.parametrize(
    ("network", "nodes", "rings", "transports"),
    [
        ("gIB", 2, RINGS.format(1), {"NET/gIB/GDRDMA": 1}),
        ("Foo", 2, "", {"NET/Foo": 1}),
        ("IB", 2, RINGS.format(0), {"NET/IB": 1}),
        ("IB", 2, "", {}),  # GPUDirect RDMA is not known
        ("Socket", 2, "", {"NET/Socket": 1}),
        ("FastSocket", 2, RINGS.format(0), {"NET/FastSocket": 1}),
        ("IB", 1, RINGS.format(1), {}),
    ],
)
def test_network_of_a_log_without_connections(network: str, nodes: int, rings: str, transports: dict[str, int]) -> None:
    text = f"n1:9:9 [3] NCCL INFO Using network {network}\n"
    text += f"n1:9:9 [3] NCCL INFO comm 0x1 rank 0 nRanks 16 nNodes {nodes} localRanks 8 localRank 0 MNNVL 0\n{rings}"
    assert parse(text).transports == transports


# The first lines are of public logs: aws-samples/aws-efa-eks (plugin 1.5), and issues of clusters with Slingshot,
# of EC2 instances without EFA (plugin 1.21), and of an InfiniBand cluster (plugin 1.6)
@pytest.mark.parametrize(
    ("line", "name", "kind"),
    [
        ("NET/OFI Selected Provider is efa (found 1 nics)", "AWS Libfabric", "efa"),
        ("NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)", "AWS Libfabric", "efa"),
        ("NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)", "AWS Libfabric (cxi)", None),
        ("NET/OFI Selected provider is tcp, fabric is 172.31.32.0/20 (found 1 nics)", "AWS Libfabric (tcp)", "tcp"),
        ("NET/OFI Selected Provider is verbs;ofi_rxm (found 58 nics)", "AWS Libfabric (verbs;ofi_rxm)", "rdma"),
        ("NET/OFI Using aws-ofi-nccl 1.5.0aws", "AWS Libfabric (provider not logged)", None),
    ],
)
def test_libfabric_is_efa_only_with_this_provider(line: str, name: str, kind: str | None) -> None:
    head = f"n1:9:9 [0] NCCL INFO {line}\nn1:9:9 [0] NCCL INFO Using network AWS Libfabric\n"
    connected = parse(f"{head}n1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA\n")
    assert (connected.network, connected.transports) == (name, {f"NET/{name}/GDRDMA": 1})
    nodes = "n1:9:9 [3] NCCL INFO comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    (transport,) = parse(head + nodes + RINGS.format(0)).transports
    assert (transport, networks.kind(transport)) == (f"NET/{name}", kind)


def test_lines_with_a_time_are_read_as_those_without() -> None:
    text = (LOGS / "h200-sockets-2.28.9.log").read_text()
    timed = "".join(f"[2026-05-05 06:16:47] {line}\n" for line in text.splitlines())
    assert parse(timed) == parse(text)


def test_only_rdma_can_lack_gpudirect_and_only_sockets_are_tcp() -> None:
    def log(*names: str) -> NcclLog:
        return NcclLog(transports=dict.fromkeys(names, 1))

    assert log("NET/FastSocket").uses_sockets
    assert not log("NET/FastSocket", "NET/FasTrak", "NET/Foo").rdma_without_gpudirect
    assert log("NET/AWS Libfabric").rdma_without_gpudirect
