"""Names of networks in NCCL's log, and what kind of network they are."""

from __future__ import annotations

import pytest

from seatrial.hardware import networks


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("IB", "rdma"),
        ("NET/IB/GDRDMA", "rdma"),
        ("IBext_v8", "rdma"),
        ("gIB", "rdma"),
        ("Socket", "tcp"),
        ("FastSocket", "tcp"),
        ("NET/AWS Libfabric/GDRDMA", "efa"),
        ("Libfabric", "efa"),
        ("OFI", "efa"),
        ("NET/AWS Libfabric (tcp)", "tcp"),
        ("NET/OFI (tcp;ofi_rxm)", "tcp"),
        ("NET/AWS Libfabric (verbs;ofi_rxm)/GDRDMA", "rdma"),
        ("Libfabric (cxi)", None),
        ("Libfabric (provider not logged)", None),
        ("GPUDirectTCPX_v7", "tcpx"),
        ("FasTrak", "tcpxo"),
        ("UCX", None),
        ("IBnew", None),
    ],
)
def test_kind_of_a_network_by_its_name(name: str, kind: str | None) -> None:
    assert networks.kind(name) == kind


@pytest.mark.parametrize(
    ("transports", "slowest"),
    [
        (["P2P/CUMEM", "P2P/MNNVL"], ("mnnvl", "")),
        (["P2P/MNNVL", "NET/IB/GDRDMA"], ("rdma", "")),  # several NVLink domains
        (["P2P/CUMEM", "NET/IB/GDRDMA", "NET/IB"], ("rdma", "")),
        (["NET/IB/GDRDMA", "NET/FastSocket"], ("tcp", "")),
        (["NET/IB/GDRDMA", "NET/FasTrak"], ("", "FasTrak, IB")),
        (["NET/IB", "NET/Foo", "NET/Bar"], ("", "Bar, Foo")),
        (["NET/Foo/GDRDMA", "NET/Foo"], ("", "Foo")),
        (["NET/Foo", "NET/Socket"], ("tcp", "Foo")),
        (["P2P/CUMEM", "SHM"], ("", "")),
    ],
)
def test_slowest_network_and_unknown_names(transports: list[str], slowest: tuple[str, str]) -> None:
    assert networks.slowest(transports) == slowest
