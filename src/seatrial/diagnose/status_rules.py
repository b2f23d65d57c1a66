"""Whether the output of a status command in a log shows a fault: the readers and rules of discover, for text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from seatrial.discover.slurm_output import parse_nodes
from seatrial.hardware import networks
from seatrial.util.grouping import grouped

Rule = Literal[
    "node_gets_no_job", "node_not_up", "no_roce_gid", "fewer_nvlinks", "nvlinks_down", "unknown_network", "target_full"
]
Values = dict[str, str]
_GID_ROW = re.compile(
    r"^(?P<device>\S{1,40})\s+(?P<port>\d{1,3})\s+(?P<index>\d{1,3})\s+(?P<address>[0-9a-f:]{39})\s"
    r"(?:.*\s)?v(?P<version>[12])(?:\s+(?P<netdev>\S+))?\s*$"
)
_TOPOLOGY_ROW = re.compile(r"^GPU(?P<gpu>\d{1,3})\s+(?P<cells>\S.*)")
_NVLINKS = re.compile(r"NV(\d{1,3})")
_NVLINK_GPU = re.compile(r"^GPU (?P<gpu>\d{1,3}): (?P<name>[^(]{1,80}?)\s{0,3}(?:\(|$)")
_NVLINK = re.compile(r"^\s{0,12}Link (?P<link>\d{1,2}): (?P<inactive><inactive>)?")


def fault(rule: Rule, values: Mapping[str, str], lines: Sequence[str]) -> Values | None:
    """Values that name the fault; None if there is none.

    ``values``: of the groups of the line; ``lines``: those above it, and the line itself.
    """
    if rule == "no_roce_gid":
        return _port_without_gid(lines)
    if rule == "fewer_nvlinks":
        return _gpu_with_fewer_nvlinks(lines)
    if rule == "nvlinks_down":
        return _nvlinks_down(lines)
    if rule == "target_full":
        return _full_target(lines[-1])
    if rule == "unknown_network":
        return {} if networks.kind(values["network"]) is None else None
    (node,) = parse_nodes(f"NodeName=? State={values['state']}")
    return {} if not node.up or (rule == "node_gets_no_job" and node.needs_administrator) else None


def _full_target(line: str) -> Values | None:
    """The server disk in a line of lfs df that is too full."""
    from seatrial.discover.filesystem_quota import MAX_TARGET_USED_PERCENT, parse_lfs_df

    try:
        targets = parse_lfs_df(line)
    except ValueError:  # a label of another program before the line
        return None
    return {"target": targets.fullest} if targets.used_percent > MAX_TARGET_USED_PERCENT else None


def _port_without_gid(lines: Sequence[str]) -> Values | None:
    """The first port in a table of show_gids with a network interface and without a GID that NCCL accepts."""
    from seatrial.discover.rdma_ports import Gid, usable_roce_gid  # reads interfaces by psutil, which few logs need

    kinds = {"1": "IB/RoCE v1", "2": "RoCE v2"}
    rows_by_port = grouped((f"{row['device']}/{row['port']}", row) for row in filter(None, map(_GID_ROW.match, lines)))
    gids_by_port = {
        port: [Gid(index=int(row["index"]), address=row["address"], type=kinds[row["version"]]) for row in rows]
        for port, rows in rows_by_port.items()
        if any(row["netdev"] for row in rows)
    }
    ports = (port for port, gids in gids_by_port.items() if not usable_roce_gid(gids))
    return next(({"hca": port} for port in ports), None)


def _gpu_with_fewer_nvlinks(lines: Sequence[str]) -> Values | None:
    """The first GPU in a table of nvidia-smi topo -m with fewer NVLinks to one peer than other GPUs have."""
    from seatrial.discover.nvlinks import links_missing
    from seatrial.discover.nvml import Gpu, NvLink

    gpus = []
    for row in filter(None, map(_TOPOLOGY_ROW.match, lines)):
        count = max(map(int, _NVLINKS.findall(row["cells"])), default=0)
        links = tuple(NvLink(link=number, active=True) for number in range(count))
        gpus.append(Gpu(index=int(row["gpu"]), nvlinks=links))
    missing = ((gpu.index, links_missing(gpu, gpus)) for gpu in gpus)
    return next(({"gpu": str(index), "missing": str(count)} for index, count in missing if count), None)


def _nvlinks_down(lines: Sequence[str]) -> Values | None:
    """No values; None if the last GPU in an output of nvidia-smi nvlink -s needs no more links, as a PCIe card."""
    from seatrial.discover.nvlinks import links_down
    from seatrial.discover.nvml import Gpu, NvLink

    rows: list[tuple[str | None, list[NvLink]]] = [(None, [])]  # name and links of each GPU
    for line in lines:
        if header := _NVLINK_GPU.match(line):
            rows.append((header["name"], []))
        elif link := _NVLINK.match(line):
            rows[-1][1].append(NvLink(link=int(link["link"]), active=not link["inactive"]))
    gpus = [Gpu(index=number, name=name, nvlinks=tuple(links)) for number, (name, links) in enumerate(rows)]
    last = gpus[-1]  # without a name, the output is cut, and other GPUs may be missing
    return None if last.name and links_down(last, [gpu for gpu in gpus if gpu.name == last.name]) == 0 else {}
