"""RDMA between pairs of nodes below NCCL: ib_write_bw and ib_write_lat (linux-rdma/perftest) on each rail.

Nodes are paired in rounds as in collectives.pairs. In a round all pairs run concurrently. They measure the bandwidth in
one direction, then in the other, then the latency, on as many rails at a time as the ranks have CPUs for. Rail i
connects the compute port i of both nodes. The data is in the memory of the GPUs nearest to the ports if perftest can
use GPU memory on all nodes, else in host memory.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.checks.check import Check, Context, Needs, SkipIf, facts
from seatrial.checks.declare import Answers, Comparison, FindingTemplate, absent, metric, rule, value, warning
from seatrial.checks.fabric._compute_ports import NodePorts, read_node_ports, select_compute_ports
from seatrial.checks.fabric._rdma_results import MIN_SHARE, RailPath, results_of_paths
from seatrial.checks.fabric._rdma_runs import RdmaOptions, TransferRunner, rank_place
from seatrial.model import PORTS_USED, NotApplicable, Outcome, Phase, Scope
from seatrial.util import data_files, processes

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails

MAX_NODES_ALL_PAIRS = 4  # up to this number of nodes the rounds cover all pairs
MAX_ROUNDS = 3  # default number of rounds with more nodes
TOOL_TIMEOUT_S = 10.0  # limit for ib_write_bw --version and for ib_write_bw --help, each
_LIMITS = data_files.read("perftest.yaml")


@dataclass(frozen=True)
class NodeTools:
    """perftest on one node. ``problem``: why it cannot be used; ``is_missing``: since a tool is not installed.

    ``cuda_options``: options that make ib_write_bw use GPU memory. ``no_gpu_memory``: why GPU memory cannot be used.
    """

    version: str | None = None
    cuda_options: tuple[str, ...] = ()
    no_gpu_memory: str = ""
    problem: str = ""
    is_missing: bool = False


def measure(context: Context, options: RdmaOptions) -> Answers:
    """Yield bandwidths in Gb/s and latencies in us on rank 0.

    Raises NotApplicable on a single node, if no node has a usable port, and if all nodes lack perftest. Raises
    ParticipantError if the ports or the tools of a node cannot be read.
    """
    from seatrial.bench import one_rank_per_node, rank
    from seatrial.hardware.pair_search import round_robin

    participants = one_rank_per_node.select_participants(context.node)
    if not participants.several_nodes:
        raise NotApplicable("one node: no pairs of nodes")
    names = participants.names
    nodes = dict(zip(names, participants.run_on_all(lambda: read_node_ports(context.root)), strict=True))
    two_commands_s = 3 * TOOL_TIMEOUT_S
    tools = dict(zip(names, participants.run_on_all(lambda: read_tools(context), two_commands_s), strict=True))
    ports, unusable = usable_ports(nodes, tools)
    usable_nodes = [node for node in ports if node not in unusable]
    cuda_options, no_gpu_memory = gpu_memory_options(tools, usable_nodes, options, on_gpu=context.on_gpu)
    memory = f"host: {no_gpu_memory}" if no_gpu_memory else "GPU"
    places = rank.gather(rank_place(context))
    if context.rank == 0:
        names_of_ports = {node: [port.name for port in ports[node] if port] for node in usable_nodes}
        yield from facts({"memory": memory, PORTS_USED: names_of_ports, "architecture": platform.machine()})
        yield from compare_nodes(tools, unusable, usable_nodes)
    if len(usable_nodes) < 2:
        return
    runner = TransferRunner(context, options, nodes, ports, places, cuda_options)
    max_rounds = options.rounds or (len(usable_nodes) if len(usable_nodes) <= MAX_NODES_ALL_PAIRS else MAX_ROUNDS)
    rounds = round_robin(len(usable_nodes), max_rounds)
    paths: list[RailPath] = []
    for number, paired in enumerate(rounds, 1):
        context.progress(f"round {number} of {len(rounds)}")
        paths += runner.run_round([(usable_nodes[a], usable_nodes[b]) for a, b in paired])
    if context.rank == 0:
        yield from results_of_paths(paths, memory)


def read_tools(context: Context) -> NodeTools:
    """perftest on this node, from its output for ``--version`` and ``--help``. Raises OSError."""
    from seatrial.discover import fabric, perftest

    missing = [tool for tool in (perftest.BANDWIDTH_TOOL, perftest.LATENCY_TOOL) if not shutil.which(tool)]
    if missing:
        return NodeTools(problem=f"not installed: {', '.join(missing)}", is_missing=True)
    outputs = []
    for option in ("--version", "--help"):  # each exits with 0 or 1, depending on the version of perftest
        result = processes.run_command([perftest.BANDWIDTH_TOOL, option], TOOL_TIMEOUT_S)
        if result.code is None:
            return NodeTools(problem=f"{perftest.BANDWIDTH_TOOL} {option} did not end within {TOOL_TIMEOUT_S:g} s")
        outputs.append(result.out + result.err)
    version, usage = perftest.parse_version(outputs[0]), outputs[1]
    if version is None:
        printed = outputs[0].strip()[:200] or "no output"
        return NodeTools(problem=f"{perftest.BANDWIDTH_TOOL} --version printed no version: {printed}")
    if "--use_cuda=" not in usage:
        return NodeTools(version, no_gpu_memory="perftest is not built for CUDA")
    if fabric.read_rdma(context.root).peermem:
        return NodeTools(version, ("--use_cuda",))
    if "--use_cuda_dmabuf" in usage:
        return NodeTools(version, ("--use_cuda", "--use_cuda_dmabuf"))
    return NodeTools(version, no_gpu_memory="nvidia_peermem is not loaded, and perftest has no --use_cuda_dmabuf")


def usable_ports(
    nodes: Mapping[str, NodePorts], tools: Mapping[str, NodeTools]
) -> tuple[dict[str, tuple[PortDetails | None, ...]], dict[str, str]]:
    """Two mappings: node → its compute ports by rail, and node → why the node cannot be measured.

    None stands for a port that cannot be used. The first mapping has all nodes, the second only unusable ones.
    Raises NotApplicable if no node has a usable port, or if perftest is missing on all nodes.
    """
    ports: dict[str, tuple[PortDetails | None, ...]] = {}
    unusable: dict[str, str] = {}
    for node, node_ports in select_compute_ports(nodes).by_node.items():
        reasons = [_unusable_reason(port, nodes[node].gid_index) for port in node_ports]
        ports[node] = tuple(None if reason else port for port, reason in zip(node_ports, reasons, strict=True))
        if not any(ports[node]):
            unusable[node] = "; ".join(dict.fromkeys(reasons)) or "no compute port"
    if len(unusable) == len(nodes):
        reasons_by_node = "; ".join(f"{node}: {reason}" for node, reason in unusable.items())
        raise NotApplicable(f"no RDMA port that can be used: {reasons_by_node}")
    if all(node_tools.is_missing for node_tools in tools.values()):
        raise NotApplicable("perftest (ib_write_bw, ib_write_lat) is not installed on any node")
    return ports, unusable | {node: node_tools.problem for node, node_tools in tools.items() if node_tools.problem}


def _unusable_reason(port: PortDetails, gid_index: int | None) -> str:
    """Why perftest cannot use the port; empty if it can."""
    if not port.is_active:
        return f"{port.name} is {port.state or 'in an unknown state'}"
    if not port.rate_gbps:
        return f"{port.name} has no readable rate"
    if not port.verbs_accessible:
        return f"{port.name}: no access to /dev/infiniband/uverbs*"
    if port.link_layer not in ("InfiniBand", "Ethernet"):
        return f"{port.name}: link layer {port.link_layer} (EFA) has no reliable connections"
    if port.link_layer == "Ethernet" and not port.roce_gid(gid_index):
        return f"{port.name} has no usable RoCE v2 GID"
    return ""


def gpu_memory_options(
    tools: Mapping[str, NodeTools], usable_nodes: Sequence[str], options: RdmaOptions, *, on_gpu: bool
) -> tuple[tuple[str, ...], str]:
    """Two values: the options of ib_write_bw for GPU memory, and the reason if GPU memory cannot be used, else "".

    All nodes get the same options: if one node needs --use_cuda_dmabuf, all nodes get this option.
    """
    if not on_gpu or not options.gpu_memory:
        return (), "the option gpu_memory is false" if on_gpu else "this trial has no GPU"
    for node in usable_nodes:
        if reason := tools[node].no_gpu_memory:
            return (), f"{node}: {reason}"
    return max((tools[node].cuda_options for node in usable_nodes), key=len, default=()), ""


def compare_nodes(tools: Mapping[str, NodeTools], unusable: Mapping[str, str], usable_nodes: Sequence[str]) -> Answers:
    """Yield the number of unmeasured nodes and of versions of perftest, and whether a pair of nodes can be measured."""
    yield value("nodes_not_measured", len(unusable), evidence={"nodes_not_measured": unusable})
    if len(usable_nodes) > 1:
        versions = {node: tools[node].version for node in usable_nodes}
        yield value("perftest_versions", len(set(versions.values())), evidence={"perftest_versions": versions})
    else:
        yield absent("*", f"{len(usable_nodes)} of {len(tools)} nodes can be measured, a pair needs 2")


def _limit_and_source(name: str, key: str) -> tuple[float, str]:
    """A limit of data/perftest.yaml, and a text for the meaning of its rule that names the source of the limit."""
    limit = _LIMITS[name][key]
    return float(limit["value"]), f"source of the limit: {limit['source']}"


_SLOW_FIX = (
    "on the node run mlxlink -d DEVICE (rate, width, errors), lspci -vv -s ADDRESS | grep LnkSta (PCI link), "
    "nvidia-smi topo -m (GPU and NIC should share a switch) and check that ACS redirection and IOMMU translation are "
    "off. Repeat the test by hand: ib_write_bw -d DEVICE --report_gbits on one node, and the same command with the "
    "address of that node on the other; fact paths has all values"
)
_BELOW_RATE = "RDMA writes do not reach the share of the rate of the path's slower port that good ports reach;"
_FAIL_SHARE, _FAIL_SOURCE = _limit_and_source("bandwidth", "fail_below")
_WARN_SHARE, _WARN_SOURCE = _limit_and_source("bandwidth", "warn_below")
_MAX_LATENCY_US, _MAX_LATENCY_SOURCE = _limit_and_source("latency", "warn_above_us")
_MAX_GRACE_LATENCY_US, _GRACE_LATENCY_SOURCE = _limit_and_source("latency", "warn_above_us_grace")
_HIGH_LATENCY = "the median latency of ib_write_lat with the nearest partner is high;"
MAX_LATENCY_RATIO = 1.5  # two more switches on the path increase the latency by less than half
CHECK = Check(
    name="fabric.rdma",
    title="RDMA bandwidth and latency between nodes, without NCCL",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    declared=(
        metric(
            "write_bw",
            unit="Gb/s",
            meaning="ib_write_bw of the port with its fastest partner, in the slower direction",
            speed=True,
            key=True,
        ),
        metric(
            "rate_share",
            f">= {100 * _FAIL_SHARE:g} %",
            f"{_BELOW_RATE} {_FAIL_SOURCE}",
            _SLOW_FIX,
            also=(rule(f">= {100 * _WARN_SHARE:g} %", f"{_BELOW_RATE} {_WARN_SOURCE}", outcome=Outcome.WARN),),
            per="port",
            speed=True,
            finding=FindingTemplate(
                title="RDMA ports of a node are slow", first_command="on {node}: ibstat; mlxlink -d DEVICE -m -c"
            ),
        ),
        metric(
            "bw_vs_peers",
            f">= {MIN_SHARE} of the median",
            "the port is slower than the others of its kind with every partner, so the cause is in its node, its cable "
            "or its switch port",
            _SLOW_FIX,
            speed=True,
            comparison=Comparison(part="one RDMA port", inter_node=True),
        ),
        warning(
            "path_share",
            f">= {MIN_SHARE} of the best",
            "the slowest rail between two nodes is slow, and both its ports are faster with other nodes: the path "
            "between the nodes is slow, or shared with other pairs",
            "run ibtracert or traceroute between the two nodes; check the switch ports on the path for errors "
            "(ibqueryerrors) and uplinks that are down",
            # pairs run concurrently; collectives.pairs retries slow paths alone
            speed=True,
        ),
        warning(
            "write_latency",
            f"<= {_MAX_LATENCY_US:g} us",
            f"{_HIGH_LATENCY} {_MAX_LATENCY_SOURCE}",
            "cpupower frequency-info on the node; ibtracert or traceroute to the partner; for RoCE check PFC and ECN "
            "settings and pause counters (ethtool -S INTERFACE | grep pause)",
            when="architecture == x86_64",
            also=(
                rule(
                    f"<= {_MAX_GRACE_LATENCY_US:g} us",
                    f"{_HIGH_LATENCY} {_GRACE_LATENCY_SOURCE}",
                    outcome=Outcome.WARN,
                    when="architecture == aarch64",
                ),
            ),
            per="port",
            speed=True,
        ),
        warning(
            "latency_vs_peers",
            f"<= {MAX_LATENCY_RATIO} x",
            "the latency of the port is far above the median of all ports with every partner",
            "compare with a good node: CPU frequency governor and C-states (cpupower frequency-info), NUMA node of the "
            "NIC (/sys/class/infiniband/DEVICE/device/numa_node), and the number of switches on the path (ibtracert)",
            speed=True,
        ),
        metric(
            "failed_paths",
            "== 0 paths",
            "RDMA operations between these nodes end in an error, although the TCP connection of perftest works",
            "the evidence lists ports and errors. RoCE: show_gids on both nodes (RoCE v2 GIDs in one routable "
            "network), ping -I INTERFACE, MTU, UDP port 4791. InfiniBand: ibping, partition keys (P_Key), sminfo",
            finding=FindingTemplate(title="RDMA between two nodes fails", first_command="ibping between {pair}"),
        ),
        metric(
            "paths_not_measured",
            "== 0 paths",
            "perftest failed or did not end on these paths",
            "the evidence names node and error. Couldn't connect: a firewall must allow all TCP ports between nodes. "
            "Couldn't allocate MR: ulimit -l; for GPU memory nvidia_peermem, or options.gpu_memory: false",
            outcome=Outcome.ERROR,
        ),
        metric(
            "nodes_not_measured",
            "== 0 nodes",
            "these nodes cannot be measured, although others can",
            "the evidence has the reasons. Install perftest on all nodes (apt or dnf install perftest), or in the "
            "container; pass /dev/infiniband into the container; see fabric.ports for ports that are down",
            outcome=Outcome.ERROR,
        ),
        warning(
            "perftest_versions",
            "<= 1 count",
            "the nodes have different versions of perftest, which may be incompatible",
            "install the same version of perftest on all nodes; the evidence lists them",
        ),
    ),
    measure=measure,
    limit_s=300,
    needs=Needs(min_ranks=2),
    options=RdmaOptions,
    skip_if=(SkipIf.ONE_NODE, SkipIf.UNVERIFIED),
)
