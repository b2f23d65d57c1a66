"""The hardware behind the output of nccl-tests or nvbandwidth: from options, and from the output itself.

Pure: reads no file and no GPU. Disagreements between an option and the output are listed as contradictions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seatrial.discover.nccl_tests_output import CommSize, NcclTestsOutput, Table
from seatrial.hardware import networks
from seatrial.hardware.links import NCCL_ALGO_NAMES
from seatrial.hardware.references import MODEL_SEPARATOR, Sku, skus
from seatrial.model import UsageError
from seatrial.model.benchmark import BenchmarkHardware
from seatrial.pipeline.nccl_tests_table import RankRange, rank_range, split_series
from seatrial.util.text import plural

FABRICS = {  # --fabric → transport
    **{"ib": "NET/IB", "roce": "NET/IB", "efa": "NET/Libfabric", "tcp": "NET/Socket"},
    **{"tcpx": "NET/GPUDirectTCPX", "tcpxo": "NET/FasTrak", "mnnvl": networks.MNNVL},
}
# Value of NCCL_ALGO in lower case → name in NCCL's log
ALGORITHMS = {"nvls": "NVLS"} | {name.casefold(): logged for logged, name in NCCL_ALGO_NAMES.items()}
_MAX_RANKS = 2**17
_GPUS = re.compile(r"([1-9]\d{0,3})\s*[x×]\s*([A-Za-z].*\S)")  # 8xH200
# 8x400: ports x Gbit/s of each; 4x2x200: NICs x ports of each x Gbit/s of a port
_NICS = re.compile(r"(\d{1,3})\s*[x×]\s*(?:(\d{1,2})\s*[x×]\s*)?(\d{1,5}(?:\.\d+)?)")
# Ports of a node, and Gbit/s of each; beyond, and below 1 Gbit/s, the two numbers of --nics are probably swapped
_MAX_PORTS, _MAX_GBPS = 32, 3000
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


@dataclass(frozen=True)
class TableHardware:
    """The hardware of one table. ``contradictions``: texts that say where options and output contradict each other.

    ``problems``: texts that say why the table cannot be judged. ``transports``: NCCL's, over the network between nodes.
    """

    hardware: BenchmarkHardware
    contradictions: Sequence[str]
    problems: Sequence[str]
    transports: Sequence[str]


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
        expected = ", ".join(("NVLS", *NCCL_ALGO_NAMES.values()))
        raise UsageError(f"--algorithm {algorithm!r}: expected one of {expected}")
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
    if not 1 <= ports <= _MAX_PORTS or not 1 <= port_gbps <= _MAX_GBPS:
        raise UsageError(
            f"--nics {nics or repr('')}: expected PORTSxGb/s of each port, such as 8x400: 1 to {_MAX_PORTS} ports of a "
            f"node, each of 1 to {_MAX_GBPS} Gb/s"
        )
    return ports, port_gbps


def known_models() -> str:
    """The GPU models with reference values, as text."""
    return f"models with reference values: {', '.join(sku.name.removeprefix('NVIDIA ') for sku in skus())}"


def _named_models(text: str) -> tuple[tuple[Sku, ...], tuple[str, ...]]:
    """Return the models that a name such as ``H200`` or ``A100 SXM 80GB`` can mean; and a note on how it was read.

    A name without form factor means the SXM module, as in NVIDIA's NVML names of H200 and B200.
    """
    words = _words(text)
    matching = [sku for sku in skus() if words in _names(sku)]
    matching = matching or [sku for sku in skus() if words and set(words) <= set().union(*_names(sku))]
    if not matching:
        return (Sku(name=text, nvml_names=(text,)),), (f"no data of GPU model {text}; {known_models()}",)
    modules = [sku for sku in matching if "sxm" in _words(sku.name)]
    if len(matching) > 1 and len(modules) == 1:
        others = ", ".join(sku.name for sku in matching if sku not in modules)
        return tuple(modules), (f"--gpus: {text} is read as {modules[0].name}; other models: {others}",)
    return tuple(matching), ()


def _words(name: str) -> tuple[str, ...]:
    """The words of the name of a GPU model, without NVIDIA; sxm stands for sxm4 and sxm5."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return tuple(re.sub(r"^sxm\d$", "sxm", word) for word in words if word != "nvidia")


def _names(sku: Sku) -> list[tuple[str, ...]]:
    return [_words(name) for name in (sku.name, *sku.nvml_names)]


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
    """Return whether a listed GPU is one of ``models``; of a model without data it must have all words of --gpus."""
    words = _words(listed)
    return any(words in _names(sku) if sku in skus() else set(_words(sku.name)) <= set(words) for sku in models)


def table_hardware(options: HardwareOptions, output: NcclTestsOutput, table: Table, operation: str) -> TableHardware:
    """The hardware of one table. ``operation``: the name of the collective, empty if unknown."""
    gpu = gpu_name(options, (device.name for device in table.devices))
    columns, log, listed = rank_range(table.rows, operation), _comm_size(output), len(table.devices)
    is_complete = sorted(device.rank for device in table.devices) == list(range(listed))
    if not is_complete or (columns and not columns.low <= listed <= columns.high):
        listed = 0  # an excerpt of the list
    ranks_by_source = {
        "columns of the table": columns.low if columns and columns.low == columns.high else None,
        "NCCL's log": log.ranks if log else None,
        "list of devices": listed,
        "--gpus and --nodes": options.ranks,
    }
    ranks_source, ranks = next(((source, count) for source, count in ranks_by_source.items() if count), ("", None))
    nodes, gpus = _nodes_and_gpus_per_node(options, log, table, ranks)
    problems = _process_problems(table, columns) or _shape_problems(options, log, table, columns, listed)
    if not problems and not (ranks and nodes):
        problems = ["the output does not name the number of GPUs and nodes: give --gpus and --nodes"]
    elif not problems and ranks and nodes and (ranks % nodes or ranks > _MAX_RANKS):
        expected = f"expected the same number on each node, and at most {_MAX_RANKS}"
        problems = [f"{plural(ranks, 'GPU')} on {plural(nodes, 'node')}: {expected}"]
    problems += [_ONE_RANK] if ranks == 1 else []
    problems += [gpu.problem] if gpu.problem else []
    has_network = (nodes or 1) > 1
    fabric, fabric_source, transports = _network(options, output) if has_network else ("", "", ())
    contradictions = [gpu.contradiction] if gpu.contradiction else []
    contradictions += _network_contradictions(options, output) if has_network else []
    sources = {
        "gpu": gpu.source,
        "nodes": "--nodes" if options.nodes else "output" if nodes else "",
        "gpus_per_node": "--gpus" if options.gpus_per_node else "output" if gpus else "",
        "ranks": ranks_source,
        "fabric": fabric_source,
        "ports": "--nics" if options.ports else "",
    }
    hardware = BenchmarkHardware(
        gpu=gpu.name,
        gpus_per_node=gpus,
        nodes=nodes,
        ranks=ranks,
        fabric=fabric,
        ports=options.ports,
        port_gbps=options.port_gbps,
        sources={name: source for name, source in sources.items() if source},
    )
    return TableHardware(hardware, contradictions, problems, transports)


def _comm_size(output: NcclTestsOutput) -> CommSize | None:
    """The size of the communicator; None if NCCL's log has none, or several."""
    return next(iter(output.comm_sizes)) if len(output.comm_sizes) == 1 else None


def _process_problems(table: Table, columns: RankRange | None) -> list[str]:
    """Why the rows are not from one group of ranks; empty if they are. ``columns``: from rank_range."""
    processes: dict[int, set[tuple[str, int]]] = {}
    for device in table.devices:
        processes.setdefault(device.rank, set()).add((device.host, device.pid))
    for rank, of_rank in processes.items():
        if len(of_rank) > 1:
            hosts = ", ".join(sorted({host for host, _ in of_rank})[:4])
            return [f"rank {rank} is listed {len(of_rank)} times ({hosts}): {_SEVERAL_PROCESSES}"]
    for series in split_series(table.rows):
        sizes = [row.size for row in series]
        if repeated := [size for size, following in itertools.pairwise(sizes) if size == following >= 2**20]:
            text = f"the size {repeated[0]} B appears {sizes.count(repeated[0])} times, more than once per sweep"
            return [f"{text}: {_SEVERAL_PROCESSES}"]
    if any(device.group for device in table.devices):
        return [
            "NCCL_TESTS_SPLIT made several communicators: the bandwidth is that of one of them, and no reference "
            "value applies"
        ]
    if table.has_second_header:
        return [f"a second table begins before the first one ends: the first run ended early, or {_SEVERAL_PROCESSES}"]
    if columns and columns.low > columns.high:
        return ["the rows of the table are those of different numbers of ranks: several runs in one table"]
    return []


def _nodes_and_gpus_per_node(
    options: HardwareOptions, log: CommSize | None, table: Table, ranks: int | None
) -> tuple[int | None, int | None]:
    """The number of nodes and the number of GPUs per node. A number that is unknown is None.

    Each comes from an option, else from NCCL's log or the list of devices, else from ``ranks`` and the other number.
    """
    nodes, gpus, devices = options.nodes or (log.nodes if log else None), options.gpus_per_node, table.devices
    if nodes is None and ranks and ranks == len(devices):
        nodes = len({device.host for device in devices})
    if gpus is None and nodes is None and ranks and devices:
        devices_per_node = max(device.index for device in devices) + 1
        lists_last_rank = max(device.rank for device in devices) + 1 == ranks
        gpus = devices_per_node if lists_last_rank and ranks % devices_per_node == 0 else None
    if nodes is None and gpus and ranks and ranks % gpus == 0:
        nodes = ranks // gpus
    if gpus is None and nodes and ranks and ranks % nodes == 0:
        gpus = ranks // nodes
    return nodes or None, gpus or None


def _shape_problems(
    options: HardwareOptions, log: CommSize | None, table: Table, columns: RankRange | None, listed: int
) -> list[str]:
    """The first contradiction, if any, between the numbers of ranks and nodes of the four sources.

    The sources are the table, NCCL's log, the list of devices (0 if it is an excerpt) and the options.
    """
    hosts = len({device.host for device in table.devices})
    last_rank = max((device.rank for device in table.devices), default=-1)
    last_device = max((device.index for device in table.devices), default=-1)
    # text that names the source → its number of ranks
    ranks_by_source: dict[str, int] = {}
    if options.ranks:
        ranks_by_source[f"--gpus {options.gpus_text} --nodes {options.nodes} are {options.ranks} GPUs"] = options.ranks
    if listed:
        ranks_by_source[f"{listed} GPUs are listed"] = listed
    if log:
        ranks_by_source[f"NCCL's log has {log.ranks} ranks on {log.nodes} nodes"] = log.ranks
        if options.nodes and log.nodes != options.nodes:
            hint = f". If all nodes were started, {_SEVERAL_PROCESSES}" if log.nodes == 1 else ""
            return [f"--nodes {options.nodes} contradicts NCCL's log: {log.ranks} ranks, {log.nodes} nodes{hint}"]
    if columns:
        low, high = columns
        text = f"the columns of the table are those of {low if low == high else f'{low} to {high:.0f}'} ranks"
        if wrong := [source for source, count in ranks_by_source.items() if count and not low <= count <= high]:
            is_single_node = bool(options.gpus_per_node and high <= options.gpus_per_node)
            hint = f". If all GPUs were started, {_SEVERAL_PROCESSES}" if is_single_node else ""
            return [f"{text}, but {wrong[0]}{hint}"]
        if last_rank >= high:
            return [f"{text}, but rank {last_rank} is listed"]
    if len(set(filter(None, ranks_by_source.values()))) > 1:
        return ["; ".join(source for source, count in ranks_by_source.items() if count)]
    if options.nodes and (hosts > options.nodes or (listed and hosts != options.nodes)):
        return [f"--nodes {options.nodes} contradicts the list of devices, which has {plural(hosts, 'host')}"]
    if options.gpus_per_node and last_device >= options.gpus_per_node:
        return [f"--gpus {options.gpus_text} contradicts the list of devices, which has device {last_device}"]
    return []


def _network(options: HardwareOptions, output: NcclTestsOutput) -> tuple[str, str, tuple[str, ...]]:
    """The network between nodes, its source, and transports over it; empty if unknown.

    It is a kind of network, else the name that has no row in data/networks.yaml.
    """
    if options.fabric:
        return options.fabric, "--fabric", (FABRICS[options.fabric],)
    logged = (*output.nccl.transports, *([f"{networks.PREFIX}{output.nccl.network}"] if output.nccl.network else ()))
    kind, unknown = networks.slowest(logged)
    if kind or unknown:
        name = kind or unknown
        return ("roce" if output.uses_roce else "ib") if name == "rdma" else name, "NCCL's log", logged
    return ("rdma", "assumed", (FABRICS["ib"],)) if options.ports else ("", "", ())


def _network_contradictions(options: HardwareOptions, output: NcclTestsOutput) -> list[str]:
    texts = []
    logged, _, transports = _network(HardwareOptions(), output)  # without options: the network in NCCL's log
    option = f"--fabric {options.fabric}" if options.fabric else f"--nics {options.nics_text}"
    if logged == "tcp" and (options.fabric or options.ports) and options.fabric != "tcp":
        names = ", ".join(dict.fromkeys(transports))
        texts.append(f"{option}: NCCL's log has sockets ({names}), so that NCCL did not use RDMA")
    elif logged and options.fabric and logged != options.fabric:
        texts.append(f"{option} contradicts NCCL's log, which has {logged}")
    hcas = output.nccl.hcas
    if hcas and options.ports and len(set(hcas)) != options.ports:
        ports = f"{len(set(hcas))} RDMA ports ({', '.join(hcas[:9])})"
        texts.append(f"--nics {options.nics_text}: NCCL's log lists {ports}")
    return texts


def all_reduce_algorithm(options: HardwareOptions, output: NcclTestsOutput, table: Table) -> str:
    """The algorithm of an all-reduce, by its name in NCCL's log; empty if unknown.

    It is that of --algorithm, else NCCL_ALGO, else of the largest size in NCCL's log.
    """
    setting = table.settings.get("NCCL_ALGO") or output.nccl.settings.get("NCCL_ALGO", "")
    choices = [choice for choice in output.nccl.choices if choice.operation == "AllReduce"]
    logged = max(choices, key=lambda choice: choice.size).algorithm if choices else ""
    return options.algorithm or ALGORITHMS.get(setting.casefold()) or (logged if logged in ALGORITHMS.values() else "")
