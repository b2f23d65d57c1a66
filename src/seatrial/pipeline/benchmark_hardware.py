"""The hardware behind the output of nccl-tests or nvbandwidth: from options, and from the output itself.

Pure: reads no file and no GPU. Disagreements between an option and the output are listed as contradictions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seatrial.discover.nccl_tests_output import Device, NcclTestsOutput, Table
from seatrial.hardware import networks
from seatrial.hardware.links import NCCL_ALGO_NAMES
from seatrial.hardware.references import MODEL_SEPARATOR, Sku, skus
from seatrial.model import UsageError
from seatrial.model.benchmark import BenchmarkHardware
from seatrial.pipeline.nccl_tests_table import rank_range, split_series
from seatrial.util.text import plural

FABRICS = {  # value of --fabric → transport in NCCL's log
    "ib": "NET/IB",
    "roce": "NET/IB",
    "efa": "NET/Libfabric",
    "tcp": "NET/Socket",
    "tcpx": "NET/GPUDirectTCPX",
    "tcpxo": "NET/FasTrak",
    "mnnvl": networks.MNNVL,
}
# Value of NCCL_ALGO in lower case → name in NCCL's log
ALGORITHMS = {"nvls": "NVLS"} | {name.casefold(): logged for logged, name in NCCL_ALGO_NAMES.items()}
_MAX_RANKS = 2**17
_GPUS = re.compile(r"\s*([1-9]\d{0,3})\s*[x×]\s*([A-Za-z].*\S)\s*")  # 8xH200
# 8x400: ports x Gbit/s of each; 4x2x200: NICs x ports of each x Gbit/s of a port
_NICS = re.compile(r"\s*(\d{1,3})\s*[x×]\s*(?:(\d{1,2})\s*[x×]\s*)?(\d{1,5}(?:\.\d+)?)\s*")
# Ports of a node, and Gbit/s of each; beyond, and below 1 Gbit/s, the two numbers of --nics are probably swapped
_MAX_PORTS, _MAX_GBPS = 32, 3000
_GENERIC_NAMES = ("NVIDIA Graphics Device", "Graphics Device")  # names of GPUs that the driver does not know
_WITHOUT_MPI = (
    "nccl-tests without MPI=1 runs every process separately: each prints a table, and none measures the network. Build "
    "it with `make MPI=1` and run it again"
)


class HardwareOptions:
    """The options of `seatrial judge` on hardware; those that are not given are empty or None.

    ``gpus``, ``nics``: as given. ``models``: all models that ``gpus`` can mean. ``ports``: network ports of a node.
    ``algorithm``: its name in NCCL's log. Raises UsageError if the value of an option is invalid or unknown.
    """

    def __init__(
        self,
        gpus: str | None = None,
        nodes: int | None = None,
        nics: str | None = None,
        fabric: str | None = None,
        algorithm: str | None = None,
    ) -> None:
        if nodes is not None and nodes < 1:
            raise UsageError(f"--nodes {nodes}: expected a positive number")
        if fabric is not None and fabric not in FABRICS:
            raise UsageError(f"--fabric {fabric!r}: expected one of {', '.join(FABRICS)}")
        if algorithm is not None and algorithm.casefold() not in ALGORITHMS:
            expected = ", ".join(("NVLS", *NCCL_ALGO_NAMES.values()))
            raise UsageError(f"--algorithm {algorithm!r}: expected one of {expected}")
        self.gpus, self.nodes, self.nics, self.fabric = gpus, nodes, nics, fabric or ""
        self.gpus_per_node, self.models, self.notes = _gpus(gpus)
        self.ports, self.port_gbps = _ports(nics)
        self.algorithm = ALGORITHMS[algorithm.casefold()] if algorithm else ""
        # the number of GPUs on all nodes
        self.ranks = self.gpus_per_node * nodes if self.gpus_per_node and nodes else None


def _gpus(gpus: str | None) -> tuple[int | None, tuple[Sku, ...], tuple[str, ...]]:
    """The number of GPUs of a node, the models that their name can mean, and a note on how it was read.

    A name without form factor means the SXM module, as in NVIDIA's NVML names of H200 and B200. Raises UsageError.
    """
    if gpus is None:
        return None, (), ()
    match = _GPUS.fullmatch(gpus)
    if not match:
        raise UsageError(f"--gpus {gpus or repr('')}: expected COUNTxMODEL, such as 8xH100; {known_models()}")
    count, name = int(match[1]), match[2]
    words = _words(name)
    matching = [sku for sku in skus() if words in _names(sku)]
    matching = matching or [sku for sku in skus() if words and set(words) <= set().union(*_names(sku))]
    if not matching:
        return count, (Sku(name=name, nvml_names=(name,)),), (f"no data of GPU model {name}; {known_models()}",)
    modules = [sku for sku in matching if "sxm" in _words(sku.name)]
    if len(matching) > 1 and len(modules) == 1:
        others = ", ".join(sku.name for sku in matching if sku not in modules)
        return count, tuple(modules), (f"--gpus: {name} is read as {modules[0].name}; other models: {others}",)
    return count, tuple(matching), ()


def _ports(nics: str | None) -> tuple[int | None, float | None]:
    """Return the number of ports of a node and the Gbit/s of each. Raises UsageError."""
    if nics is None:
        return None, None
    match = _NICS.fullmatch(nics)
    ports, port_gbps = (int(match[1]) * int(match[2] or 1), float(match[3])) if match else (0, 0.0)
    if not 1 <= ports <= _MAX_PORTS or not 1 <= port_gbps <= _MAX_GBPS:
        raise UsageError(
            f"--nics {nics or repr('')}: expected PORTSxGb/s of each port, such as 8x400: 1 to {_MAX_PORTS} ports of a "
            f"node, each of 1 to {_MAX_GBPS} Gb/s"
        )
    return ports, port_gbps


def known_models() -> str:
    """The GPU models with reference values, as text."""
    return f"models with reference values: {', '.join(sku.name.removeprefix('NVIDIA ') for sku in skus())}"


def _words(name: str) -> tuple[str, ...]:
    """The words of the name of a GPU model, without NVIDIA; sxm stands for sxm4 and sxm5."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return tuple(re.sub(r"^sxm\d$", "sxm", word) for word in words if word != "nvidia")


def _names(sku: Sku) -> list[tuple[str, ...]]:
    return [_words(name) for name in (sku.name, *sku.nvml_names)]


def gpu_name(options: HardwareOptions, listed: Iterable[str]) -> tuple[str, str, str]:
    """The name of the GPUs, its source, and a message: from the output if it lists them (``listed``), else from --gpus.

    The message says how --gpus contradicts the output, or why the name is unknown, which is then empty. Raises
    UsageError if --gpus contradicts the output and names a model without data: the name is probably misspelt.
    """
    models, option = options.models, f"--gpus {options.gpus}"
    if names := sorted({name for name in listed if name and name not in _GENERIC_NAMES}):
        name, listed_names = MODEL_SEPARATOR.join(names), ", ".join(names)
        if not models or all(_is_one_of(name, models) for name in names):
            return name, "output", ""
        if not any(sku in skus() for sku in models):
            text = f"{option}: no data of this GPU model, and the output lists {listed_names}"
            raise UsageError(f"{text}; {known_models()}")
        return name, "output", f"{option} contradicts the output, which lists {listed_names}; judged as listed"
    if len(models) == 1:
        return models[0].nvml_names[0], "--gpus", ""
    if models:
        return "", "", f"{option} can mean several GPU models: {', '.join(sku.name for sku in models)}"
    return "", "", "the output does not name the GPU model: give --gpus, such as --gpus 8xH200"


def _is_one_of(listed: str, models: Sequence[Sku]) -> bool:
    """Return whether a listed GPU is one of ``models``; of a model without data it must have all words of --gpus."""
    words = _words(listed)
    return any(words in _names(sku) if sku in skus() else set(_words(sku.name)) <= set(words) for sku in models)


class TableHardware(NamedTuple):
    """The hardware of one table. ``contradictions``: texts that say where options and output contradict each other.

    ``problems``: texts that say why the table cannot be judged. ``transports``: NCCL's, over the network between nodes.
    """

    hardware: BenchmarkHardware
    contradictions: list[str]
    problems: list[str]
    transports: Sequence[str]


class _Shape(NamedTuple):
    """The numbers of ranks and of nodes that a part of the output allows, and the text that says so."""

    source: str
    text: str
    low: int
    high: float
    min_nodes: int = 1
    max_nodes: float = math.inf


def table_hardware(options: HardwareOptions, output: NcclTestsOutput, table: Table, operation: str) -> TableHardware:
    """The hardware of one table. ``operation``: the name of the collective, empty if unknown."""
    gpu, gpu_source, message = gpu_name(options, (device.name for device in table.devices))
    columns = rank_range(table.rows, operation)
    shapes = _shapes(output, table, columns)
    by_source = {shape.source: shape.low for shape in shapes if 0 < shape.low == shape.high}
    by_source |= {"--gpus and --nodes": options.ranks} if options.ranks else {}
    ranks_source, ranks = next(iter(by_source.items()), ("", None))
    nodes, gpus = _nodes_and_gpus_per_node(options, shapes, table, ranks)
    problem = _process_problem(table, columns) or _contradiction(options, shapes, table)
    if not problem and not (ranks and nodes):
        problem = "the output does not name the number of GPUs and nodes: give --gpus and --nodes"
    elif not problem and ranks and nodes and (ranks % nodes or ranks > _MAX_RANKS):
        expected = f"expected the same number on each node, and at most {_MAX_RANKS}"
        problem = f"{plural(ranks, 'GPU')} on {plural(nodes, 'node')}: {expected}"
    problems = [problem] if problem else []
    if ranks == 1:
        problems.append(f"the table was measured by one rank, so that no GPU communicated (option -g): {_WITHOUT_MPI}")
    problems += [message] if message and not gpu else []
    network = _network(options, output) if (nodes or 1) > 1 else ("", "", (), [])
    fabric, fabric_source, transports, contradictions = network
    sources = {
        "gpu": gpu_source,
        "nodes": "--nodes" if options.nodes else "output" if nodes else "",
        "gpus_per_node": "--gpus" if options.gpus_per_node else "output" if gpus else "",
        "ranks": ranks_source,
        "fabric": fabric_source,
        "ports": "--nics" if options.ports else "",
    }
    hardware = BenchmarkHardware(
        gpu=gpu,
        gpus_per_node=gpus,
        nodes=nodes,
        ranks=ranks,
        fabric=fabric,
        ports=options.ports,
        port_gbps=options.port_gbps,
        sources={name: source for name, source in sources.items() if source},
    )
    return TableHardware(hardware, [*([message] if gpu and message else ()), *contradictions], problems, transports)


def _shapes(output: NcclTestsOutput, table: Table, columns: tuple[int, float] | None) -> list[_Shape]:
    """What the columns, NCCL's log and the list of devices say of ranks and nodes. ``columns``: from rank_range."""
    shapes, devices = [], table.devices
    if columns:
        low, high = columns
        text = f"the columns of the table are those of {low if low == high else f'{low} to {high:.0f}'} ranks"
        shapes.append(_Shape("columns of the table", text, low, high))
    if len(output.comm_sizes) == 1:
        ((ranks, nodes),) = output.comm_sizes
        text = f"NCCL's log has {ranks} ranks on {nodes} nodes"
        shapes.append(_Shape("NCCL's log", text, ranks, ranks, nodes, nodes))
    if devices:
        listed, hosts = max(device.rank for device in devices) + 1, _host_count(devices)
        is_whole = sorted(device.rank for device in devices) == list(range(listed))
        text = (
            f"the list of devices has {plural(len(devices), 'GPU')} on {plural(hosts, 'host')}, up to rank {listed - 1}"
        )
        is_whole &= not columns or columns[0] <= listed <= columns[1]  # else it is an excerpt
        highest, max_hosts = (listed, hosts) if is_whole else (math.inf, math.inf)
        shapes.append(_Shape("list of devices", text, listed, highest, hosts, max_hosts))
    return shapes


def _host_count(devices: Sequence[Device]) -> int:
    """The number of hosts; of hosts with the same name, such as localhost, the number of GPUs at one PCI address."""
    gpus_at: dict[str, Counter[str]] = {}  # name of the host → PCI address → GPUs
    for device in devices:
        gpus_at.setdefault(device.host, Counter()).update([device.address] if device.address else ())
    return sum(max(counts.values(), default=1) for counts in gpus_at.values())


def _nodes_and_gpus_per_node(
    options: HardwareOptions, shapes: Sequence[_Shape], table: Table, ranks: int | None
) -> tuple[int | None, int | None]:
    """The number of nodes and the number of GPUs per node. A number that is unknown is None.

    Each comes from an option, else from NCCL's log or the list of devices, else from ``ranks`` and the other number.
    """
    counted = (shape.min_nodes for shape in shapes if 0 < shape.min_nodes == shape.max_nodes)
    nodes, gpus, devices = options.nodes or next(counted, None), options.gpus_per_node, table.devices
    if gpus is None and nodes is None and ranks and devices:
        devices_per_node = max(device.index for device in devices) + 1
        lists_last_rank = max(device.rank for device in devices) + 1 == ranks
        gpus = devices_per_node if lists_last_rank and ranks % devices_per_node == 0 else None
    if nodes is None and gpus and ranks and ranks % gpus == 0:
        nodes = ranks // gpus
    if gpus is None and nodes and ranks and ranks % nodes == 0:
        gpus = ranks // nodes
    return nodes, gpus


def _process_problem(table: Table, columns: tuple[int, float] | None) -> str:
    """Why the rows are not from one group of ranks; empty if they are. ``columns``: from rank_range."""
    processes = {(device.rank, device.host, device.pid) for device in table.devices}
    for rank, count in Counter(rank for rank, _, _ in processes).items():
        if count > 1:
            hosts = ", ".join(sorted({host for each, host, _ in processes if each == rank})[:4])
            return f"rank {rank} is listed {count} times ({hosts}): {_WITHOUT_MPI}"
    for series in split_series(table):
        sizes = [row.size for row in series.rows]
        if repeated := [size for size, following in itertools.pairwise(sizes) if size == following >= 2**20]:
            text = f"the size {repeated[0]} B appears {sizes.count(repeated[0])} times, more than once per sweep"
            return f"{text}: {_WITHOUT_MPI}"
    if any(device.group for device in table.devices):
        return (
            "NCCL_TESTS_SPLIT made several communicators: the bandwidth is that of one of them, and no reference "
            "value applies"
        )
    if table.has_second_header:
        return f"a second table begins before the first one ends: the first run ended early, or {_WITHOUT_MPI}"
    if columns and columns[0] > columns[1]:
        return "the rows of the table are those of different numbers of ranks: several runs in one table"
    return ""


def _contradiction(options: HardwareOptions, shapes: Sequence[_Shape], table: Table) -> str:
    """The first contradiction between the options and the output, or between two parts of the output."""
    ranks, nodes, gpus = options.ranks, options.nodes, options.gpus_per_node
    for shape in shapes:
        has_ranks = shape.low <= (ranks or shape.low) <= shape.high
        has_nodes = shape.min_nodes <= (nodes or shape.min_nodes) <= shape.max_nodes
        if not has_ranks or not has_nodes:
            given = f"--gpus {options.gpus} --nodes {nodes} are {ranks} GPUs" if ranks else f"--nodes {nodes} is given"
            is_one_node = shape.max_nodes == 1 or bool(gpus and shape.high <= gpus)
            hint = f". If all GPUs were started, {_WITHOUT_MPI}" if is_one_node else ""
            return f"{shape.text}, but {given}{hint}"
    for first, second in itertools.combinations(shapes, 2):
        if first.low > second.high or second.low > first.high:
            return f"{first.text}, but {second.text}"
    last_device = max((device.index for device in table.devices), default=-1)
    if gpus and last_device >= gpus:
        return f"--gpus {options.gpus} contradicts the list of devices, which has device {last_device}"
    return ""


def _network(options: HardwareOptions, output: NcclTestsOutput) -> tuple[str, str, Sequence[str], list[str]]:
    """The network between nodes, its source, transports over it, and where --fabric or --nics contradict NCCL's log.

    The network is a kind, else the name that has no row in data/networks.yaml; empty if unknown.
    """
    nccl, contradictions = output.nccl, []
    transports = [*nccl.transports, *([f"{networks.PREFIX}{nccl.network}"] if nccl.network else ())]
    kind, unknown = networks.slowest(transports)
    logged = ("roce" if output.uses_roce else "ib") if kind == "rdma" else kind or unknown
    option = f"--fabric {options.fabric}" if options.fabric else f"--nics {options.nics}"
    if logged == "tcp" and (options.fabric or options.ports) and options.fabric != "tcp":
        names = ", ".join(dict.fromkeys(transports))
        contradictions.append(f"{option}: NCCL's log has sockets ({names}), so that NCCL did not use RDMA")
    elif logged and options.fabric and logged != options.fabric:
        contradictions.append(f"{option} contradicts NCCL's log, which has {logged}")
    if nccl.hcas and options.ports and len(set(nccl.hcas)) != options.ports:
        ports = f"{len(set(nccl.hcas))} RDMA ports ({', '.join(nccl.hcas[:9])})"
        contradictions.append(f"--nics {options.nics}: NCCL's log lists {ports}")
    if options.fabric:
        return options.fabric, "--fabric", (FABRICS[options.fabric],), contradictions
    if logged or not options.ports:
        return logged, "NCCL's log" if logged else "", transports if logged else (), contradictions
    return "rdma", "assumed", (FABRICS["ib"],), contradictions
