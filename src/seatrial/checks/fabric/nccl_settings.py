"""All-reduce bandwidth under several NCCL settings: the default, and three that each change one environment variable.

NCCL reads its variables once per process. So each rank starts a child process per setting, and the NCCL logs of these
processes record algorithm, protocol, channels and transport for every size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.check import Check, Context, Needs, Options, Seconds, facts
from seatrial.checks.declare import Answers, Comparison, absent, fact, metric, value, warning
from seatrial.checks.fabric._nccl_log import NOT_LOGGED, logging_environment
from seatrial.checks.fabric._results import bandwidth
from seatrial.checks.fabric._wrong_data import wrong_data_metric
from seatrial.discover import gpu
from seatrial.discover.nvlinks import link_types
from seatrial.model import (
    CLUSTER,
    ByteSize,
    Fact,
    NotApplicable,
    Phase,
    Scope,
    SeatrialError,
    format_bytes,
    parse_bytes,
    size_label,
)
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult, StartedChildRanks
    from seatrial.discover.nccl_log import NcclLog

SIZE = parse_bytes("1GiB")  # saturates the links
# At these sizes of collectives.all_reduce, NCCL's algorithm and transport are recorded for the report, without timing
UNTIMED_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
ALL_RANKS, PER_NODE = "all_ranks", "per_node"  # one group of all ranks; one group per node, all nodes concurrently


@dataclass(frozen=True)
class NcclSetting:
    """``env``: environment variables. ``meaning``: what the bandwidth shows, compared with that of setting default."""

    env: Mapping[str, str]
    meaning: str


SETTINGS = {
    "default": NcclSetting({}, "NCCL's own choice in the trial's environment; the other settings are compared with it"),
    "ring": NcclSetting(
        {"NCCL_ALGO": "Ring"},
        "much slower: the default uses trees or NVLS, and its bandwidth does not predict that of more nodes; "
        "faster: NCCL's choice is wrong (topology file, tuner plugin, NCCL_ALGO)",
    ),
    "no_p2p": NcclSetting(
        {"NCCL_P2P_DISABLE": "1"},
        "equally fast: the default does not use NVLink or PCIe peer-to-peer, or another component limits both",
    ),
    "no_nvls": NcclSetting(
        {"NCCL_NVLS_ENABLE": "0"},
        "slower: the default sums in the NVLink switches (NVLink SHARP); its bus bandwidth may exceed the line rate",
    ),
}


class NcclSettingsOptions(Options):
    """Options of collectives.nccl_settings.

    ``size``: bytes of the timed all-reduce. ``seconds``: maximum timed duration of each setting; an imprecise median
    extends this to at most twice. ``limit_s``: time limit of the child processes of a setting.
    """

    size: ByteSize = Field(default=SIZE, ge=4, multiple_of=4)
    seconds: Seconds = 0.5
    limit_s: Seconds = 120.0


def measure(context: Context, options: NcclSettingsOptions) -> Answers:
    """Yield the cluster's metrics on rank 0.

    Raises NotApplicable on CPUs, and SeatrialError if a setting could not be measured.
    """
    if not context.on_gpu:
        raise NotApplicable("NCCL settings have no effect on gloo")
    from seatrial.bench import collectives, rank, subgroups

    ranks_by_node = subgroups.ranks_by_node(context.node)
    settings, not_applicable = applicable_settings(ranks_by_node, os.environ)
    group_facts = {
        **collectives.describe_group(),
        "nodes": len(ranks_by_node),
        "nvlink": _nvlink(context),
        "size": options.size,
        "settings_not_applicable": not_applicable,
        "settings_tested": {name: SETTINGS[name].meaning for name in settings},
    }
    results: dict[str, Sequence[ChildResult]] = {}  # setting → results of the child processes by rank
    logs: dict[str, list[NcclLog]] = {}  # setting → logs of the child processes by rank
    with ExitStack() as stack:
        context.progress("starting")
        started = {name: stack.enter_context(start_setting(name, ranks_by_node, context, options)) for name in settings}
        for children in started.values():
            children.wait_until_ready()
        for name, children in started.items():
            context.progress(name)
            results[name] = children.results()
            logs[name] = rank.gather(_child_log(results[name][context.rank]))
    failed = {
        name: and_more(errors, 2, "; ")
        for name, rank_results in results.items()
        if (errors := [f"rank {number}: {result.error}" for number, result in enumerate(rank_results) if result.error])
    }
    if context.rank == 0:
        yield from facts(group_facts)
        rank_0_results = {name: results[name][0].value for name in results if name not in failed}
        paths = {name: path_at_size(logs[name], options.size) for name in rank_0_results}
        yield from _values(rank_0_results, list(ranks_by_node), options.size, paths)
        if "no_p2p" in not_applicable:
            yield absent("p2p_gain", not_applicable["no_p2p"])
        yield from _path_facts(rank_0_results, logs, options.size, _too_slow_sizes(context))
    if failed:
        texts = "; ".join(f"{name} ({errors})" for name, errors in failed.items())
        raise SeatrialError(f"NCCL settings not measured: {texts}")


def applicable_settings(
    ranks_by_node: Mapping[str, Sequence[int]], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The names of the settings to measure, and a mapping: setting that is not measured → the reason."""
    not_applicable = {}
    if environ.get("NCCL_NVLS_ENABLE") == "0":
        not_applicable["no_nvls"] = "NCCL_NVLS_ENABLE=0 in the environment: NVLS is already disabled"
    if max(map(len, ranks_by_node.values())) == 1:
        not_applicable["no_p2p"] = "one rank per node: no peer-to-peer transfers"
    return [name for name in SETTINGS if name not in not_applicable], not_applicable


def start_setting(
    name: str, ranks_by_node: Mapping[str, Sequence[int]], context: Context, options: NcclSettingsOptions
) -> AbstractContextManager[StartedChildRanks]:
    """Context manager: starts the child process of this rank for the setting ``name``. Called by all ranks."""
    from seatrial.bench import child_ranks

    groups = {ALL_RANKS: [sorted(chain.from_iterable(ranks_by_node.values()))]}
    if len(ranks_by_node) > 1 and min(map(len, ranks_by_node.values())) > 1:
        groups[PER_NODE] = [sorted(ranks) for ranks in ranks_by_node.values()]
    too_slow = _too_slow_sizes(context)
    task = {
        "groups": groups,
        "size": options.size,
        "seconds": options.seconds,
        "untimed_sizes": [size for size in UNTIMED_SIZES if size not in too_slow],
    }
    return child_ranks.start_child_ranks(
        "seatrial.bench.nccl_settings",
        task,
        {**logging_environment(context.artifacts_dir, name), **SETTINGS[name].env},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / name,
        limit_s=options.limit_s,
    )


def _too_slow_sizes(context: Context) -> Sequence[int]:
    """The sizes among UNTIMED_SIZES that the network is too slow for."""
    return context.tcp_network.too_slow_sizes("all_reduce", UNTIMED_SIZES) if context.tcp_network else ()


def _child_log(result: ChildResult) -> NcclLog:
    """The NCCL log of this rank's child process; empty if the child failed."""
    from seatrial.discover import nccl_log
    from seatrial.discover.nccl_log import NcclLog

    if result.error:
        return NcclLog()
    return nccl_log.read(Path(result.value["log"]), result.value["log_bytes"])


def _nvlink(context: Context) -> str:
    """The first of these that applies to a node; ``yes`` if NVLinks connect every two GPUs of each node.

    ``unknown``: its NVLinks are unreadable. ``no``: no NVLink is active. ``some``: not between all GPUs, as with
    bridges between pairs of PCIe cards, where PCIe limits the all-reduce.
    """
    from seatrial.bench import rank

    state, inventory = None, gpu.read(context.root) if context.local_rank == 0 else None
    if inventory:
        gpus = inventory.gpus
        if not gpus or not all(device.nvlink_states_readable for device in gpus):
            state = "unknown"
        elif not any(device.active_nvlinks for device in gpus):
            state = "no"
        else:
            types = link_types(inventory, [device.index for device in gpus])
            state = "yes" if all(name.startswith("NV") for name in types) else "some"
    states_of_nodes = rank.gather(state)
    return next((each for each in ("unknown", "no", "some") if each in states_of_nodes), "yes")


def _values(
    results: Mapping[str, Any], nodes: Sequence[str], size: int, paths: Mapping[str, Mapping[str, object]]
) -> Answers:
    """Yield busbw (GB/s) by setting, over all ranks and per node, and the ratios default/no_p2p and default/ring.

    ``results``: setting → the result of bench.nccl_settings on rank 0; ``paths``: setting → path at ``size``.
    """
    busbw: dict[tuple[str, str], Sequence[float]] = {}  # (setting, subject) → GB/s of every window
    for name, result in results.items():
        busbw[name, CLUSTER] = result["busbw"][ALL_RANKS][0]
        busbw |= {
            (name, node): samples for node, samples in zip(nodes, result["busbw"].get(PER_NODE, ()), strict=False)
        }
    for (name, subject), samples in busbw.items():
        yield value(f"busbw_{name}.{size_label(size)}", samples, subject)
    p2p_gains = [("p2p_gain", "no_p2p", subject) for subject in (nodes if len(nodes) > 1 else [CLUSTER])]
    for metric_name, base_setting, subject in (*p2p_gains, ("default_vs_ring", "ring", CLUSTER)):
        default, base = busbw.get(("default", subject)), busbw.get((base_setting, subject))
        if default and base:
            evidence = {each: paths[each] for each in ("default", base_setting)}
            yield value(metric_name, [each / median(base) for each in default], subject, evidence=evidence)
    yield value("wrong_elements", sum(result["wrong_elements"] for result in results.values()))


def _path_facts(
    results: Mapping[str, Any], logs: Mapping[str, Sequence[NcclLog]], timed_size: int, too_slow_sizes: Sequence[int]
) -> Iterator[Fact]:
    """Yield algorithm, protocol, channels and transport by setting and size, and the method."""
    sizes = sorted({timed_size, *UNTIMED_SIZES} - set(too_slow_sizes))
    no_memory = "not measured: no memory"
    path_by_size = {  # setting → size → path
        name: {
            size_label(size): no_memory if size in result["not_allocated"] else path_at_size(logs[name], size)
            for size in sizes
        }
        for name, result in results.items()
    }
    yield fact("path_by_size", path_by_size)
    if too_slow_sizes:
        texts = ", ".join(map(format_bytes, too_slow_sizes))
        yield fact("sizes_left_out", f"{texts}: would take too long at the cluster.fabric.rate of the trial")
    if "default" in results:
        rank_logs = logs["default"]
        path = path_at_size(rank_logs, timed_size)
        tree = "" if len(rank_logs) > 2 else "; with two ranks NCCL has no tree, only a ring"
        yield fact(
            "method",
            f"NCCL {rank_logs[0].version}, {len(rank_logs)} ranks on {rank_logs[0].nodes} nodes, all-reduce of "
            f"{format_bytes(timed_size)} in new processes for each setting; default: {path['algorithm']}, "
            f"{path['protocol']}, {path['channels']} channels, over {path['transport']}{tree}",
        )


def path_at_size(logs_by_rank: Sequence[NcclLog], size: int) -> dict[str, object]:
    """Algorithm, protocol and channels of the all-reduce from the first rank's log, and the transports of all ranks."""
    choice = logs_by_rank[0].find_choice("AllReduce", size)
    transports = sorted({name for log in logs_by_rank for name in log.transports})
    uses_nvls = choice is not None and choice.algorithm.startswith("NVLS")
    return {
        "algorithm": choice.algorithm if choice else NOT_LOGGED,
        "protocol": (choice.protocol if choice else None) or NOT_LOGGED,
        "channels": (choice.channels if choice else None) or NOT_LOGGED,
        "transport": " + ".join([*(["NVLS"] if uses_nvls else []), *transports]) or NOT_LOGGED,
    }


CHECK = Check(
    name="collectives.nccl_settings",
    title="All-reduce under different NCCL settings",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    declared=(
        *(
            bandwidth(
                f"busbw_{name}.*",
                meaning=f"bus bandwidth of all-reduce, {' '.join(map('='.join, setting.env.items())) or 'defaults'}",
            )
            for name, setting in sorted(SETTINGS.items())
        ),
        metric(
            "p2p_gain",
            # The slowest NVLink bridge (RTX A6000) carries 56 GB/s per direction (NVIDIA's data sheet: 112.5 GB/s
            # bidirectional), 1.8 times the 31.5 GB/s of PCIe 4.0 x16
            ">= 1.5 x",
            "NVLinks are active, but disabling peer-to-peer hardly slows the all-reduce: NCCL does not use them.",
            "Run env | grep NCCL (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL) and nvidia-smi topo -p2p r. In a container, all "
            "GPUs must be visible to each process. In a virtual machine, check the ACS and IOMMU settings.",
            when="nvlink == yes",
            per="node",
            speed=True,
            comparison=Comparison(part="peer-to-peer", is_speedup=True),
        ),
        warning(
            "default_vs_ring",
            ">= 0.90 x",
            "A ring is faster than NCCL's default algorithm: NCCL's model of this machine is wrong.",
            "Run env | grep NCCL (NCCL_ALGO, NCCL_TOPO_FILE, NCCL_TUNER_PLUGIN) and unset these variables. Else report "
            "an NCCL log with NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING to NVIDIA.",
            speed=True,
        ),
        wrong_data_metric("Run collectives.all_reduce: it names rank, offset and flipped bits."),
    ),
    measure=measure,
    fact_roles={"algorithms_by_setting": "path_by_size"},
    limit_s=600.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=NcclSettingsOptions,
)
