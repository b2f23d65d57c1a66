"""The hardware behind the output of nccl-tests or nvbandwidth: from options, and from the output itself.

Pure: reads no file and no GPU. Disagreements between an option and the output are listed as contradictions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seatrial.discover.nccl_tests_output import Device, NcclTestsOutput, Row, Table
from seatrial.hardware.fabric_model import TcpFabric
from seatrial.hardware.links import NCCL_ALGO_NAMES, Links, RdmaPorts, TcpInterfaces
from seatrial.hardware.references import MODEL_SEPARATOR, Sku, skus
from seatrial.model import UsageError
from seatrial.model.benchmark import BenchmarkHardware

FABRICS = ("ib", "roce", "efa", "tcp")
ALGORITHMS = {name.casefold(): name for name in ("Ring", "Tree", "NVLS", "NVLSTree", "CollNetChain", "CollNetDirect")}
_GPUS = re.compile(r"([1-9]\d{0,3})\s*[x×]\s*([A-Za-z].*\S)")  # 8xH200
# 8x400: ports x Gbit/s of each; 4x2x200: NICs x ports of each x Gbit/s of a port
_NICS = re.compile(r"(\d{1,3})\s*[x×]\s*(?:(\d{1,2})\s*[x×]\s*)?(\d{1,5}(?:\.\d+)?)")
_MAX_PORTS = 32  # of a node; more ports, or less than 1 Gbit/s of each: the numbers are probably swapped
_GENERIC_NAMES = ("NVIDIA Graphics Device", "Graphics Device")  # names of GPUs that the driver does not know
_SEVERAL_PROCESSES = (
    "several processes printed a table each: nccl-tests without MPI=1 runs every process separately, and "
    "measures no network. Build it with `make MPI=1` and run it again"
)
_ONE_RANK = (
    "the table was measured by one rank, so that no GPU communicated: nccl-tests without MPI=1 runs every process "
    "alone. Build it with `make MPI=1`, or use the option -g"
)
# Operations whose column ``count`` has the number of elements of one rank, not of all ranks
_COUNT_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class HardwareOptions:
    """The options of `seatrial judge` on hardware. ``models``: models that --gpus can mean, empty without the option.

    ``ports``: network ports of a node. ``gpus_text``, ``nics_text``: the options as given, for messages.
    """

    gpus_text: str = ""
    gpus_per_node: int | None = None
    models: tuple[Sku, ...] = ()
    nodes: int | None = None
    ports: int | None = None
    port_gbps: float | None = None
    nics_text: str = ""
    fabric: str = ""
    algorithm: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int | None:
        """The number of GPUs on all nodes; None if an option is missing."""
        return self.gpus_per_node * self.nodes if self.gpus_per_node and self.nodes else None


@dataclass
class TableHardware:
    """The hardware of one table, contradictions of options and output, and why the table cannot be judged (texts)."""

    hardware: BenchmarkHardware
    contradictions: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def hardware_options(
    gpus: str | None = None,
    nodes: int | None = None,
    nics: str | None = None,
    fabric: str | None = None,
    algorithm: str | None = None,
) -> HardwareOptions:
    """The parsed options. Raises UsageError for text unlike 8xH200 or 8x400, and an unknown fabric or algorithm."""
    count: int | None = None
    models: tuple[Sku, ...] = ()
    notes: tuple[str, ...] = ()
    if gpus is not None:
        match = _GPUS.fullmatch(gpus.strip())
        if not match:
            raise UsageError(f"--gpus {gpus or repr('')}: expected COUNTxMODEL, such as 8xH100; {known_models()}")
        count = int(match[1])
        models, notes = _named_models(match[2])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: expected a positive number")
    ports = _NICS.fullmatch(nics.strip()) if nics is not None else None
    if nics is not None and not (ports and _port_count(ports) in range(1, _MAX_PORTS + 1) and float(ports[3]) >= 1):
        raise UsageError(
            f"--nics {nics or repr('')}: expected PORTSxGb/s of each port, such as 8x400: 1 to {_MAX_PORTS} ports of a "
            f"node, each from 1 Gb/s on"
        )
    if fabric is not None and fabric not in FABRICS:
        raise UsageError(f"--fabric {fabric!r}: expected one of {', '.join(FABRICS)}")
    if algorithm is not None and algorithm.casefold() not in ALGORITHMS:
        raise UsageError(f"--algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS.values())}")
    return HardwareOptions(
        gpus_text=gpus or "",
        gpus_per_node=count,
        models=models,
        nodes=nodes,
        ports=_port_count(ports) if ports else None,
        port_gbps=float(ports[3]) if ports else None,
        nics_text=nics or "",
        fabric=fabric or "",
        algorithm=ALGORITHMS[algorithm.casefold()] if algorithm else "",
        notes=notes,
    )


def _port_count(nics: re.Match[str]) -> int:
    return int(nics[1]) * int(nics[2] or 1)


def known_models() -> str:
    """The GPU models with reference values, as text."""
    return f"models with reference values: {', '.join(sku.name.removeprefix('NVIDIA ') for sku in skus())}"


def _named_models(text: str) -> tuple[tuple[Sku, ...], tuple[str, ...]]:
    """Return the models that a name such as ``H200`` or ``A100 SXM 80GB`` can mean; and a note on how it was read.

    A name without form factor means the SXM module, as in NVIDIA's NVML names of H200 and B200.
    """
    tokens = _name_tokens(text)
    exact = [sku for sku in skus() if any(tokens == _name_tokens(name) for name in (sku.name, *sku.nvml_names))]
    if exact:
        return tuple(exact), ()
    matching = [sku for sku in skus() if _matches(tokens, sku)]
    if not matching:
        unknown = Sku(name=text, nvml_names=(text,))
        return (unknown,), (f"no data of GPU model {text}; {known_models()}",)
    modules = [sku for sku in matching if any(token.startswith("sxm") for token in _name_tokens(sku.name))]
    if len(matching) > 1 and len(modules) == 1:
        others = ", ".join(sku.name for sku in matching if sku not in modules)
        return tuple(modules), (f"--gpus: {text} is read as {modules[0].name}; other models: {others}",)
    return tuple(matching), ()


def _name_tokens(text: str) -> list[str]:
    return [token for token in re.split(r"[^a-z0-9]+", text.casefold()) if token and token != "nvidia"]


def _matches(tokens: Sequence[str], sku: Sku) -> bool:
    """Return whether each token is part of a name of the model; ``sxm`` also stands for ``sxm4``."""
    sku_tokens = {token for name in (sku.name, *sku.nvml_names) for token in _name_tokens(name)}
    return bool(tokens) and all(token in sku_tokens or (token == "sxm" and "sxm4" in sku_tokens) for token in tokens)


@dataclass(frozen=True)
class GpuName:
    """The NVML name of the GPUs, empty if unknown, and its source. ``contradiction`` and ``problem`` may be empty."""

    name: str = ""
    source: str = ""
    contradiction: str = ""
    problem: str = ""


def gpu_name(options: HardwareOptions, listed: Iterable[str]) -> GpuName:
    """Return the name of the GPUs: from the output if it lists them (``listed``), else from --gpus.

    Raises UsageError for a model in --gpus that has no data and contradicts the output: a wrong name.
    """
    names = sorted({name for name in listed if name and name not in _GENERIC_NAMES})
    if names:
        text = f"--gpus {options.gpus_text} contradicts the output, which lists {', '.join(names)}; judged as listed"
        contradicts = bool(options.models) and not all(_is_one_of(name, options.models) for name in names)
        if contradicts and not any(sku in skus() for sku in options.models):
            unknown = f"--gpus {options.gpus_text}: no data of this GPU model, and the output lists {', '.join(names)}"
            raise UsageError(f"{unknown}; {known_models()}")
        return GpuName(MODEL_SEPARATOR.join(names), "output", text if contradicts else "")
    if len(options.models) > 1:
        models = ", ".join(sku.name for sku in options.models)
        return GpuName(problem=f"--gpus {options.gpus_text} can mean several GPU models: {models}")
    if not options.models:
        return GpuName(problem="the output does not name the GPU model: give --gpus, such as --gpus 8xH200")
    return GpuName(options.models[0].nvml_names[0], "--gpus")


def _is_one_of(listed: str, models: Sequence[Sku]) -> bool:
    """Return whether a listed GPU is one of ``models``; for a model without data, --gpus may be a part of its name."""
    tokens = _name_tokens(listed)
    return any(
        tokens == _name_tokens(name) if sku in skus() else set(_name_tokens(name)) <= set(tokens)
        for sku in models
        for name in sku.nvml_names
    )


def rank_range(rows: Sequence[Row], operation: str) -> tuple[int, float] | None:
    """Return the lowest and the highest number of ranks that agree with ``rows``; None if the rows do not show it.

    For operations in _COUNT_PER_RANK n follows from size and count; for an all-reduce from busbw ÷ algbw = 2(n−1)/n.
    If the rows contradict each other, the lowest is above the highest.
    """
    low, high = 1, math.inf
    for row in rows:
        if row.size < 2**20:
            continue
        if operation in _COUNT_PER_RANK:
            if not row.data_size or row.size % row.data_size:
                return None
            low, high = max(low, row.size // row.data_size), min(high, row.size // row.data_size)
        elif operation == "all_reduce":
            for timing in (row.out_of_place, row.in_place):
                if timing and timing.algbw >= 1:
                    smallest, largest = _ratio_range(timing.busbw, timing.algbw)
                    low = max(low, math.ceil(2 / (2 - smallest) - 1e-6) if smallest < 2 else 2**31)
                    high = min(high, math.floor(2 / (2 - largest) + 1e-6) if largest < 2 else math.inf)
    return None if (low, high) == (1, math.inf) else (low, high)


def _ratio_range(busbw: float, algbw: float) -> tuple[float, float]:
    """Return the range of busbw ÷ algbw before rounding.

    nccl-tests prints two decimals, one from 1,000 on, and none from 10,000 on.
    """
    rounding = [0.0051 if value < 1000 else 0.051 if value < 10000 else 0.51 for value in (busbw, algbw)]
    return (busbw - rounding[0]) / (algbw + rounding[1]), (busbw + rounding[0]) / (algbw - rounding[1])


def table_hardware(options: HardwareOptions, output: NcclTestsOutput, table: Table, operation: str) -> TableHardware:
    """Return the hardware of one table. ``operation``: the name of the collective, empty if unknown."""
    gpu = gpu_name(options, (device.name for device in table.devices))
    sources = {"gpu": gpu.source} if gpu.name else {}
    contradictions = [gpu.contradiction] if gpu.contradiction else []
    column_ranks = rank_range(table.rows, operation)
    problems = _process_problems(table, column_ranks)
    ranks, ranks_source = _rank_count(options, output, table, column_ranks)
    nodes, gpus = _nodes_and_gpus_per_node(options, output, table, ranks)
    if nodes:
        sources["nodes"] = "--nodes" if options.nodes else "output"
    if gpus:
        sources["gpus_per_node"] = "--gpus" if options.gpus_per_node else "output"
    if ranks:
        sources["ranks"] = ranks_source
    if not problems:
        problems += _shape_problems(options, output, table, column_ranks)
    if not problems and not (ranks and nodes):
        problems.append("the output does not name the number of GPUs and nodes: give --gpus and --nodes")
    problems += [_ONE_RANK] if ranks == 1 else []
    problems += [gpu.problem] if gpu.problem else []
    fabric, fabric_source = _fabric(options, output) if (nodes or 1) > 1 else ("", "")
    if fabric:
        sources["fabric"] = fabric_source
    if options.ports:
        sources["ports"] = "--nics"
    contradictions += _network_contradictions(options, output) if (nodes or 1) > 1 else []
    hardware = BenchmarkHardware(
        gpu=gpu.name,
        gpus_per_node=gpus,
        nodes=nodes,
        ranks=ranks,
        fabric=fabric,
        ports=options.ports,
        port_gbps=options.port_gbps,
        sources=sources,
    )
    return TableHardware(hardware, contradictions, problems)


def _is_complete_list(devices: Sequence[Device]) -> bool:
    """Return whether each rank from 0 on is listed once."""
    return bool(devices) and sorted(device.rank for device in devices) == list(range(len(devices)))


def _process_problems(table: Table, column_ranks: tuple[int, float] | None) -> list[str]:
    """Return why the table is not that of one group of ranks; empty if it is. ``column_ranks``: by rank_range."""
    processes: dict[int, set[tuple[str, int]]] = {}
    for device in table.devices:
        processes.setdefault(device.rank, set()).add((device.host, device.pid))
    repeated = [rank for rank, rank_processes in processes.items() if len(rank_processes) > 1]
    if repeated:
        hosts = sorted({host for rank in repeated for host, _ in processes[rank]})
        return [
            f"rank {repeated[0]} is listed {len(processes[repeated[0]])} times ({', '.join(hosts[:4])}): "
            f"{_SEVERAL_PROCESSES}"
        ]
    if sizes := _interleaved_sizes(table.rows):
        return [f"the size {sizes[0]} B appears {sizes[1]} times, more than once per sweep: {_SEVERAL_PROCESSES}"]
    if any(device.group for device in table.devices):
        return [
            "NCCL_TESTS_SPLIT made several communicators: the bandwidth is that of one of them, and no reference "
            "value applies"
        ]
    if column_ranks and column_ranks[0] > column_ranks[1]:
        return ["the rows of the table are those of different numbers of ranks: several runs in one table"]
    return []


def _interleaved_sizes(rows: Sequence[Row]) -> tuple[int, int] | None:
    """Return a size from 1 MiB on that occurs repeatedly in one ascending sweep, and its number of rows; else None."""
    seen: dict[tuple[object, ...], int] = {}
    last = 0
    for row in rows:
        if row.size < last:
            seen.clear()
        last = row.size
        key = (row.size, row.type, row.redop, row.root)
        seen[key] = seen.get(key, 0) + 1
        if row.size >= 2**20 and seen[key] > 1:
            return row.size, sum((other.size, other.type, other.redop, other.root) == key for other in rows)
    return None


def _rank_count(
    options: HardwareOptions, output: NcclTestsOutput, table: Table, column_ranks: tuple[int, float] | None
) -> tuple[int | None, str]:
    """Return the number of ranks and its source: the table, else NCCL's log, the list of devices or the options."""
    if column_ranks and column_ranks[0] == column_ranks[1]:
        return column_ranks[0], "columns of the table"
    if len(output.comm_sizes) == 1:
        return next(iter(output.comm_sizes))[0], "NCCL's log"
    fits = column_ranks is None or column_ranks[0] <= len(table.devices) <= column_ranks[1]
    if _is_complete_list(table.devices) and fits:
        return len(table.devices), "list of devices"
    return (options.ranks, "--gpus and --nodes") if options.ranks else (None, "")


def _nodes_and_gpus_per_node(
    options: HardwareOptions, output: NcclTestsOutput, table: Table, ranks: int | None
) -> tuple[int | None, int | None]:
    """Return the number of nodes, and of GPUs per node; None for one that is unknown.

    Each comes from an option, else from NCCL's log or the list of devices, else from ``ranks`` and the other number.
    """
    nodes, gpus = options.nodes, options.gpus_per_node
    if nodes is None and len(output.comm_sizes) == 1:
        nodes = next(iter(output.comm_sizes))[1]
    hosts = {device.host for device in table.devices}
    if nodes is None and ranks and ranks == len(table.devices):
        nodes = len(hosts)
    if gpus is None and nodes is None and ranks and table.devices:
        devices_per_node = max(device.index for device in table.devices) + 1
        lists_last_rank = max(device.rank for device in table.devices) + 1 == ranks
        gpus = devices_per_node if lists_last_rank and ranks % devices_per_node == 0 else None
    if nodes is None and gpus and ranks and ranks % gpus == 0:
        nodes = ranks // gpus
    if gpus is None and nodes and ranks and ranks % nodes == 0:
        gpus = ranks // nodes
    return nodes or None, gpus or None


def _shape_problems(
    options: HardwareOptions, output: NcclTestsOutput, table: Table, column_ranks: tuple[int, float] | None
) -> list[str]:
    """Return the first contradiction of table, NCCL's log, list of devices and options on ranks and nodes, if any."""
    hosts = {device.host for device in table.devices}
    last_rank = max((device.rank for device in table.devices), default=-1)
    last_device = max((device.index for device in table.devices), default=-1)
    listed = len(table.devices) if _is_complete_list(table.devices) else None
    if listed and column_ranks and not column_ranks[0] <= listed <= column_ranks[1]:
        listed = None  # an excerpt of the list
    counts = {f"{_option_text(options)} are {options.ranks} GPUs": options.ranks, f"{listed} GPUs are listed": listed}
    if len(output.comm_sizes) == 1:
        ranks, nodes = next(iter(output.comm_sizes))
        counts[f"NCCL's log has {ranks} ranks on {nodes} nodes"] = ranks
        if options.nodes and nodes != options.nodes:
            hint = f". If all nodes were started, {_SEVERAL_PROCESSES}" if nodes == 1 else ""
            return [f"--nodes {options.nodes} contradicts NCCL's log: {ranks} ranks, {nodes} nodes{hint}"]
    if column_ranks:
        low, high = column_ranks
        columns = f"the columns of the table are those of {low if low == high else f'{low} to {high:.0f}'} ranks"
        if wrong := [name for name, count in counts.items() if count and not low <= count <= high]:
            is_single_node = bool(options.gpus_per_node and high <= options.gpus_per_node)
            hint = f". If all GPUs were started, {_SEVERAL_PROCESSES}" if is_single_node else ""
            return [f"{columns}, but {wrong[0]}{hint}"]
        if last_rank >= high:
            return [f"{columns}, but rank {last_rank} is listed"]
    if len({count for count in counts.values() if count}) > 1:
        return ["; ".join(name for name, count in counts.items() if count)]
    if options.nodes and (len(hosts) > options.nodes or (listed and len(hosts) != options.nodes)):
        count = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        return [f"--nodes {options.nodes} contradicts the list of devices, which has {count}"]
    if options.gpus_per_node and last_device >= options.gpus_per_node:
        return [f"--gpus {options.gpus_text} contradicts the list of devices, which has device {last_device}"]
    return []


def _option_text(options: HardwareOptions) -> str:
    return f"--gpus {options.gpus_text} --nodes {options.nodes}"


def _fabric(options: HardwareOptions, output: NcclTestsOutput) -> tuple[str, str]:
    """Return the kind of the network between nodes, and its source; both empty if unknown."""
    if options.fabric:
        return options.fabric, "--fabric"
    names = [name for name in output.nccl.transports if name.startswith("NET/")]
    network = (output.nccl.network or "").casefold()
    if output.nccl.uses_sockets or network == "socket":
        return "tcp", "NCCL's log"
    if any("libfabric" in name.casefold() or "ofi" in name.casefold() for name in (*names, network)):
        return "efa", "NCCL's log"
    if network.startswith("ib") or any(name.startswith("NET/IB") for name in names):
        return "roce" if output.uses_roce else "ib", "NCCL's log"
    return ("rdma", "assumed") if options.ports else ("", "")


def _network_contradictions(options: HardwareOptions, output: NcclTestsOutput) -> list[str]:
    texts = []
    logged, _ = _fabric(HardwareOptions(), output)
    expected = options.fabric or ("rdma" if options.ports else "")
    if logged == "tcp" and expected not in ("", "tcp"):
        given = f"--fabric {options.fabric}" if options.fabric else f"--nics {options.nics_text}"
        texts.append(f"{given}: NCCL's log has sockets (NET/Socket), so that NCCL did not use RDMA")
    elif logged and options.fabric and logged != options.fabric:
        texts.append(f"--fabric {options.fabric} contradicts NCCL's log, which has {logged}")
    hcas = output.nccl.hcas
    if hcas and options.ports and len(set(hcas)) != options.ports:
        texts.append(
            f"--nics {options.nics_text}: NCCL's log lists {len(set(hcas))} RDMA ports ({', '.join(hcas[:9])})"
        )
    return texts


def all_reduce_algorithm(options: HardwareOptions, output: NcclTestsOutput, table: Table) -> str:
    """Return the algorithm of an all-reduce: --algorithm, else NCCL_ALGO, else that of the largest size in NCCL's log.

    Empty if unknown.
    """
    setting = table.settings.get("NCCL_ALGO") or output.nccl.settings.get("NCCL_ALGO", "")
    if name := options.algorithm or ALGORITHMS.get(setting.casefold(), ""):
        return name
    choices = [choice for choice in output.nccl.choices if choice.operation == "AllReduce"]
    largest = max(choices, key=lambda choice: choice.size, default=None)
    if largest is None:
        return ""
    return ALGORITHMS.get(NCCL_ALGO_NAMES.get(largest.algorithm, largest.algorithm).casefold(), "")


def hardware_links(
    hardware: BenchmarkHardware, output: NcclTestsOutput, algorithm: str, labels: Sequence[str]
) -> tuple[Links, TcpFabric]:
    """Return the links for the network model. ``labels``: sizes that an all-reduce measured with ``algorithm``."""
    gbps = hardware.ports * hardware.port_gbps if hardware.ports and hardware.port_gbps else None
    algorithms = {("all_reduce", label): algorithm for label in labels if algorithm}
    if hardware.fabric == "tcp":
        interfaces = TcpInterfaces(output.nccl.socket_interfaces, gbps) if gbps else None
        return Links(network="tcp", tcp=interfaces, algorithms=algorithms), TcpFabric(gbps)
    ports = None
    if hardware.ports and hardware.port_gbps:
        ports = RdmaPorts(hardware.fabric, hardware.ports, hardware.port_gbps)
    network = {"efa": "efa", "": ""}.get(hardware.fabric, "rdma")
    return Links(ports=ports, network=network, algorithms=algorithms), TcpFabric()
