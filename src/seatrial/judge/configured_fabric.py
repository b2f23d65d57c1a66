"""Compares the network that the trial configures (``cluster.fabric``) with the one that NCCL uses. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.check import Check
from seatrial.config.schema import Config
from seatrial.hardware.fabric_model import TcpFabric
from seatrial.hardware.links import Links
from seatrial.model import CLUSTER, Basis, BasisKind, Outcome, Reason, Verdict


def tcp_fabric(config: Config) -> TcpFabric | None:
    """The TCP fabric of the trial; None if the trial is not configured for TCP."""
    fabric = config.cluster.fabric
    return TcpFabric(fabric.rate) if fabric else None


def unexpected_rdma(check: Check, config: Config, links: Links) -> Iterator[Verdict]:
    """A FAIL of the check that reads NCCL's transports, if NCCL uses RDMA although the trial is configured for TCP."""
    if "transports" not in check.fact_roles or not config.cluster.fabric or links.network not in ("rdma", "efa"):
        return
    yield Verdict(
        check.name,
        CLUSTER,
        Outcome.FAIL,
        reasons=(Reason.FABRIC_MISMATCH,),
        detail=f"the trial has cluster.fabric.kind tcp, and NCCL uses {links.fabric or links.network} between nodes",
        basis=Basis(BasisKind.TRIAL, config.name),
        meaning="The limits of TCP are far below those of RDMA: a slow RDMA network would pass.",
        fix="Remove cluster.fabric from the trial. If TCP is intended, set env.NCCL_NET=Socket and "
        f"checks.{check.name}.options.sockets_expected=true.",
    )
