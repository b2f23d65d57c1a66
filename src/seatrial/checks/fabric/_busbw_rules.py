"""The rules on the bus bandwidth of collectives, at sizes that saturate the links."""

from __future__ import annotations

from seatrial.model import Rule

# On this number of nodes or more, 1 GiB measures the latency of the many steps instead of the bandwidth
# (data/network_limits.yaml)
MANY_NODES = 16
# Between nodes these operations use as many channels per peer as the NCCL variable CHANNELS_PER_PEER sets; one or two
# channels do not saturate fast ports (NVIDIA/nccl-tests#321)
POINT_TO_POINT_OPERATIONS = ("all_to_all", "send_receive")
CHANNELS_PER_PEER = "NCCL_NCHANNELS_PER_NET_PEER"
NET_PEER_CHANNELS = "net_peer_channels"  # fact with the value of CHANNELS_PER_PEER


def busbw_rules(name: str, *, reference_optional: bool = False) -> tuple[Rule, Rule]:
    """Two rules on the bus bandwidth: at 1 GiB on fewer than MANY_NODES nodes, at 8 GiB on MANY_NODES or more."""
    rule_at_1gib = busbw_rule(name, "1GiB", reference_optional=reference_optional)
    rule_at_8gib = busbw_rule(name, "8GiB", reference_optional=reference_optional)
    return (
        rule_at_1gib.model_copy(update={"max_nodes": MANY_NODES - 1}),
        rule_at_8gib.model_copy(update={"min_nodes": MANY_NODES}),
    )


def busbw_rule(name: str, size: str, *, reference_optional: bool = False) -> Rule:
    """The rule on the bus bandwidth at a size that saturates the links, against its reference value.

    ``reference_optional``: no reference value is required, since none is published and training rarely uses ``name``.
    """
    uses_peer_channels = name in POINT_TO_POINT_OPERATIONS
    channels_fix = (
        f"Between nodes, first measure again with --set env.{CHANNELS_PER_PEER}=4: if that is faster, the setting was "
        f"too low and nothing is broken (fact {NET_PEER_CHANNELS}). "
    )
    return Rule(
        metric=f"busbw.{size}",
        reference=f"{name}.busbw.{size}",
        fail_below=0.90,
        warn_below=0.95,
        applies_if={"backend": "nccl"},
        reference_optional=reference_optional,
        evidence_facts=(NET_PEER_CHANNELS,) if uses_peer_channels else (),
        meaning="This size saturates the links; communication of gradients, parameters or tokens is slower by the "
        "same factor.",
        fix=f"{channels_fix if uses_peer_channels else ''}"
        "Run `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: all links of every GPU must be up at full speed. "
        "Run `nvidia-smi -q -d PERFORMANCE,CLOCK` to find throttled GPUs. Across nodes, run again with "
        "NCCL_DEBUG=INFO: `NET/Socket` instead of `NET/IB` means that NCCL does not use RDMA; see `ibstat`.",
    )
