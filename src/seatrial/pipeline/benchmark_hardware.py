"""The hardware behind the output of nccl-tests or nvbandwidth: from options, and from the output itself.

Pure: reads no file and no GPU. Disagreements between an option and the output are listed as contradictions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from seatrial.discover.nccl_tests_output import Device, NcclTestsOutput, Row, Table
from seatrial.hardware import networks
from seatrial.hardware.fabric_model import TcpFabric
from seatrial.hardware.links import NCCL_ALGO_NAMES, Links, RdmaPorts, TcpInterfaces
from seatrial.hardware.references import MODEL_SEPARATOR, Sku, skus
from seatrial.model import UsageError
from seatrial.model.benchmark import BenchmarkHardware
from seatrial.pipeline.nccl_tests_table import RankRange, rank_range

FABRICS = ("ib", "roce", "efa", "tcp", "tcpx", "tcpxo", "mnnvl")
ALGORITHMS = {name.casefold(): name for name in ("Ring", "Tree", "NVLS", "NVLSTree", "CollNetChain", "CollNetDirect")}
_GPUS = re.compile(r"([1-9]\d{0,3})\s*[x×]\s*([A-Za-z].*\S)")  # 8xH200
# 8x400: ports x Gbit/s of each; 4x2x200: NICs x ports of each x Gbit/s of a port
_NICS = re.compile(r"(\d{1,3})\s*[x×]\s*(?:(\d{1,2})\s*[x×]\s*)?(\d{1,5}(?:\.\d+)?)")
_MAX_PORTS = 32  # of a node; with more ports, or below 1 Gbit/s, the two numbers of --nics are probably swapped
_GENERIC_NAMES = ("NVIDIA Graphics Device", "Graphics Device")  # names of GPUs that the driver does not know
_SEVERAL_PROCESSES = (
    "several processes printed a table each: nccl-tests without MPI=1 runs every process separately, and "
    "measures no network. Build it with `make MPI=1` and run it again"
)
_ONE_RANK = (
    "the table was measured by one rank, so that no GPU communicated: nccl-tests without MPI=1 runs every process "
    "alone. Build it with `make MPI=1`, or use the option -g"
)


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
    """The hardware of one table. ``contradictions``: texts that say where options and output contradict each other.

    ``problems``: texts that say why the table cannot be judged.
    """

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
    """Return the parsed options. Raises UsageError if the value of an option is invalid or unknown."""
    gpus_per_node: int | None = None
    models: tuple[Sku, ...] = ()
    notes: tuple[str, ...] = ()
    if gpus is not None:
        gpus_match = _GPUS.fullmatch(gpus.strip())
        if not gpus_match:
            raise UsageError(f"--gpus {gpus or repr('')}: expected COUNTxMODEL, such as 8xH100; {known_models()}")
        gpus_per_node = int(gpus_match[1])
        models, notes = _named_models(gpus_match[2])
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: expected a positive number")
    ports, port_gbps = _ports(nics) if nics is not None else (None, None)
    if fabric is not None and fabric not in FABRICS:
        raise UsageError(f"--fabric {fabric!r}: expected one of {', '.join(FABRICS)}")
    if algorithm is not None and algorithm.casefold() not in ALGORITHMS:
        raise UsageError(f"--algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS.values())}")
    return HardwareOptions(
        gpus_text=gpus or "",
        gpus_per_node=gpus_per_node,
        models=models,
        nodes=nodes,
        ports=ports,
        port_gbps=port_gbps,
        nics_text=nics or "",
        fabric=fabric or "",
        algorithm=ALGORITHMS[algorithm.casefold()] if algorithm else "",
        notes=notes,
    )


def _ports(nics: str) -> tuple[int, float]:
    """Return the number of ports of a node and the Gbit/s of each. Raises UsageError."""
    match = _NICS.fullmatch(nics.strip())
    ports, port_gbps = (int(match[1]) * int(match[2] or 1), float(match[3])) if match else (0, 0.0)
    if not 1 <= ports <= _MAX_PORTS or port_gbps < 1:
        raise UsageError(
            f"--nics {nics or repr('')}: expected PORTSxGb/s of each port, such as 8x400: 1 to {_MAX_PORTS} ports of a "
            f"node, each from 1 Gb/s on"
        )
    return ports, port_gbps


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
    """The NVML name of the GPUs, empty if unknown, and its source.

    ``contradiction``: how --gpus contradicts the output, empty if it does not; ``problem``: why the name is unknown.
    """

    name: str = ""
    source: str = ""
    contradiction: str = ""
    problem: str = ""


def gpu_name(options: HardwareOptions, listed: Iterable[str]) -> GpuName:
    """Return the name of the GPUs: from the output if it lists them (``listed``), else from --gpus.

    Raises UsageError if --gpus contradicts the output and names a model without data: the name is probably misspelt.
    """
    names = sorted({name for name in listed if name and name not in _GENERIC_NAMES})
    if names:
        listed_names, contradiction = ", ".join(names), ""
        if options.models and not all(_is_one_of(name, options.models) for name in names):
            if not any(sku in skus() for sku in options.models):
                text = f"--gpus {options.gpus_text}: no data of this GPU model, and the output lists {listed_names}"
                raise UsageError(f"{text}; {known_models()}")
            contradiction = f"--gpus {options.gpus_text} contradicts the output, which lists {listed_names}"
            contradiction += "; judged as listed"
        return GpuName(MODEL_SEPARATOR.join(names), "output", contradiction)
    if len(options.models) > 1:
        models = ", ".join(sku.name for sku in options.models)
        return GpuName(problem=f"--gpus {options.gpus_text} can mean several GPU models: {models}")
    if not options.models:
        return GpuName(problem="the output does not name the GPU model: give --gpus, such as --gpus 8xH200")
    return GpuName(options.models[0].nvml_names[0], "--gpus")


def _is_one_of(listed: str, models: Sequence[Sku]) -> bool:
    """Return whether a listed GPU is one of ``models``.

    The names must be equal. For a model without data, it is enough that the listed name has all words of --gpus.
    """
    tokens = _name_tokens(listed)
    return any(
        tokens == _name_tokens(name) if sku in skus() else set(_name_tokens(name)) <= set(tokens)
        for sku in models
        for name in sku.nvml_names
    )


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
    """Return whether each rank from 0 on is listed exactly once."""
    return bool(devices) and sorted(device.rank for device in devices) == list(range(len(devices)))


def _process_problems(table: Table, column_ranks: RankRange | None) -> list[str]:
    """Return why the rows are not from one group of ranks; empty if they are. ``column_ranks``: from rank_range."""
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
    if interleaved := _interleaved_size(table.rows):
        size, row_count = interleaved
        return [f"the size {size} B appears {row_count} times, more than once per sweep: {_SEVERAL_PROCESSES}"]
    if any(device.group for device in table.devices):
        return [
            "NCCL_TESTS_SPLIT made several communicators: the bandwidth is that of one of them, and no reference "
            "value applies"
        ]
    if column_ranks and column_ranks.low > column_ranks.high:
        return ["the rows of the table are those of different numbers of ranks: several runs in one table"]
    return []


def _interleaved_size(rows: Sequence[Row]) -> tuple[int, int] | None:
    """Return a size of at least 1 MiB with several rows in one ascending sweep, and its number of rows; else None."""
    keys = [(row.size, row.type, row.redop, row.root) for row in rows]
    keys_of_sweep: set[tuple[object, ...]] = set()
    last_size = 0
    for row, key in zip(rows, keys, strict=True):
        if row.size < last_size:  # the next sweep begins
            keys_of_sweep.clear()
        last_size = row.size
        if row.size >= 2**20 and key in keys_of_sweep:
            return row.size, keys.count(key)
        keys_of_sweep.add(key)
    return None


def _rank_count(
    options: HardwareOptions, output: NcclTestsOutput, table: Table, column_ranks: RankRange | None
) -> tuple[int | None, str]:
    """Return the number of ranks and its source: the table, else NCCL's log, the list of devices or the options."""
    if column_ranks and column_ranks.low == column_ranks.high:
        return column_ranks.low, "columns of the table"
    if len(output.comm_sizes) == 1:
        ((logged_ranks, _nodes),) = output.comm_sizes
        return logged_ranks, "NCCL's log"
    fits = column_ranks is None or column_ranks.low <= len(table.devices) <= column_ranks.high
    if _is_complete_list(table.devices) and fits:
        return len(table.devices), "list of devices"
    return (options.ranks, "--gpus and --nodes") if options.ranks else (None, "")


def _nodes_and_gpus_per_node(
    options: HardwareOptions, output: NcclTestsOutput, table: Table, ranks: int | None
) -> tuple[int | None, int | None]:
    """Return the number of nodes and the number of GPUs per node. A number that is unknown is None.

    Each comes from an option, else from NCCL's log or the list of devices, else from ``ranks`` and the other number.
    """
    nodes, gpus = options.nodes, options.gpus_per_node
    if nodes is None and len(output.comm_sizes) == 1:
        ((_ranks, nodes),) = output.comm_sizes
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
    options: HardwareOptions, output: NcclTestsOutput, table: Table, column_ranks: RankRange | None
) -> list[str]:
    """Return the first contradiction, if any, between the numbers of ranks and nodes of the four sources.

    The sources are the table, NCCL's log, the list of devices and the options.
    """
    hosts = {device.host for device in table.devices}
    last_rank = max((device.rank for device in table.devices), default=-1)
    last_device = max((device.index for device in table.devices), default=-1)
    listed = len(table.devices) if _is_complete_list(table.devices) else None
    if listed and column_ranks and not column_ranks.low <= listed <= column_ranks.high:
        listed = None  # an excerpt of the list
    # text that names the source → its number of ranks, None if unknown
    ranks_by_source = {
        f"--gpus {options.gpus_text} --nodes {options.nodes} are {options.ranks} GPUs": options.ranks,
        f"{listed} GPUs are listed": listed,
    }
    if len(output.comm_sizes) == 1:
        ((ranks, nodes),) = output.comm_sizes
        ranks_by_source[f"NCCL's log has {ranks} ranks on {nodes} nodes"] = ranks
        if options.nodes and nodes != options.nodes:
            hint = f". If all nodes were started, {_SEVERAL_PROCESSES}" if nodes == 1 else ""
            return [f"--nodes {options.nodes} contradicts NCCL's log: {ranks} ranks, {nodes} nodes{hint}"]
    if column_ranks:
        low, high = column_ranks
        columns = f"the columns of the table are those of {low if low == high else f'{low} to {high:.0f}'} ranks"
        if wrong := [source for source, count in ranks_by_source.items() if count and not low <= count <= high]:
            is_single_node = bool(options.gpus_per_node and high <= options.gpus_per_node)
            hint = f". If all GPUs were started, {_SEVERAL_PROCESSES}" if is_single_node else ""
            return [f"{columns}, but {wrong[0]}{hint}"]
        if last_rank >= high:
            return [f"{columns}, but rank {last_rank} is listed"]
    if len({count for count in ranks_by_source.values() if count}) > 1:
        return ["; ".join(source for source, count in ranks_by_source.items() if count)]
    if options.nodes and (len(hosts) > options.nodes or (listed and len(hosts) != options.nodes)):
        count = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        return [f"--nodes {options.nodes} contradicts the list of devices, which has {count}"]
    if options.gpus_per_node and last_device >= options.gpus_per_node:
        return [f"--gpus {options.gpus_text} contradicts the list of devices, which has device {last_device}"]
    return []


def _fabric(options: HardwareOptions, output: NcclTestsOutput) -> tuple[str, str]:
    """Return the kind of the network between nodes, and its source; both empty if unknown."""
    if options.fabric:
        return options.fabric, "--fabric"
    logged = (*output.nccl.transports, *([f"{networks.PREFIX}{output.nccl.network}"] if output.nccl.network else ()))
    kind, unknown = networks.slowest(logged)
    if kind == "rdma":
        return "roce" if output.uses_roce else "ib", "NCCL's log"
    if kind or unknown:
        return kind or unknown, "NCCL's log"
    return ("rdma", "assumed") if options.ports else ("", "")


def _network_contradictions(options: HardwareOptions, output: NcclTestsOutput) -> list[str]:
    texts = []
    logged, _ = _fabric(HardwareOptions(), output)  # without options: the fabric in NCCL's log
    expected = options.fabric or ("rdma" if options.ports else "")
    if logged == "tcp" and expected not in ("", "tcp"):
        option = f"--fabric {options.fabric}" if options.fabric else f"--nics {options.nics_text}"
        texts.append(f"{option}: NCCL's log has sockets (NET/Socket), so that NCCL did not use RDMA")
    elif logged and options.fabric and logged != options.fabric:
        texts.append(f"--fabric {options.fabric} contradicts NCCL's log, which has {logged}")
    hcas = output.nccl.hcas
    if hcas and options.ports and len(set(hcas)) != options.ports:
        texts.append(
            f"--nics {options.nics_text}: NCCL's log lists {len(set(hcas))} RDMA ports ({', '.join(hcas[:9])})"
        )
    return texts


def all_reduce_algorithm(options: HardwareOptions, output: NcclTestsOutput, table: Table) -> str:
    """Return the algorithm of an all-reduce: --algorithm, else NCCL_ALGO, else the one in NCCL's log; empty if unknown.

    NCCL's log can have an algorithm for each size: that of the largest size is used.
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
    if hardware.nodes == 1:
        return Links(algorithms=algorithms), TcpFabric()
    if hardware.fabric == "tcp":
        interfaces = TcpInterfaces(output.nccl.socket_interfaces, gbps) if gbps else None
        return Links(network="tcp", tcp=interfaces, algorithms=algorithms), TcpFabric(gbps)
    ports = None
    if hardware.ports and hardware.port_gbps:
        ports = RdmaPorts(hardware.fabric, hardware.ports, hardware.port_gbps)
    network = {"ib": "rdma", "roce": "rdma"}.get(hardware.fabric, hardware.fabric)
    known = network in ("", *get_args(networks.Kind))
    links = Links(ports=ports, network=network if known else "", unknown_network="" if known else network)
    return replace(links, algorithms=algorithms), TcpFabric()
