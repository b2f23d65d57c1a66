"""All-reduce bandwidth under several NCCL settings: the default, and settings that change one environment variable.

NCCL reads its variables once per process. So each rank starts a child process per setting, and the NCCL logs of these
processes record algorithm, protocol, channels and transport for every size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.base import Check, Comparison, Context, Needs, Options, RuleFact, facts, metric
from seatrial.checks.fabric._nccl_log import NOT_LOGGED, logging_environment
from seatrial.checks.fabric._results import BANDWIDTH_BOUNDS, wrong_data_rule
from seatrial.discover import gpu
from seatrial.model import (
    CLUSTER,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
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
# The sizes of collectives.all_reduce: the report shows the transport of each
UNTIMED_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
ALL_RANKS, PER_NODE = "all_ranks", "per_node"  # one group of all ranks; one group per node, all nodes concurrently


@dataclass(frozen=True)
class NcclSetting:
    """Environment variables, and what the bandwidth under this setting shows, compared with the default's."""

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

    ``size``: bytes of the timed all-reduce. ``untimed_sizes``: more sizes whose algorithm and transport are recorded.
    ``seconds``: maximum timed duration of each setting; twice this duration if the median is imprecise. ``limit_s``:
    time limit of the child processes of a setting.
    """

    size: ByteSize = Field(default=SIZE, ge=4)
    untimed_sizes: tuple[ByteSize, ...] = UNTIMED_SIZES
    seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    limit_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)


def measure(context: Context, options: NcclSettingsOptions) -> Iterator[Observation]:
    """Yield the cluster's metrics on rank 0.

    Raises NotApplicable on CPUs, and SeatrialError if a setting could not be measured.
    """
    if not context.on_gpu:
        raise NotApplicable("NCCL settings have no effect on gloo")
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    names, not_applicable = applicable_settings(nodes, os.environ)
    group = {**collectives.describe_group(), "nodes": len(nodes), "nvlink": _nvlink(context), "size": options.size}
    group |= {"p2p_available": "no" if "no_p2p" in not_applicable else "yes"}
    group |= {"settings_not_applicable": not_applicable}
    group |= {"settings_tested": {name: SETTINGS[name].meaning for name in names}}
    results, logs = {}, {}
    with ExitStack() as stack:
        # all settings at once, since importing torch takes longer than a measurement
        context.progress("starting")
        started = {name: stack.enter_context(start_setting(name, nodes, context, options)) for name in names}
        for children in started.values():
            children.wait_until_ready()
        for name, children in started.items():
            context.progress(name)
            results[name] = children.results()
            logs[name] = rank.gather(_child_log(results[name][context.rank]))
    failed: dict[str, str] = {}  # setting → errors of its ranks
    for name, by_rank in results.items():
        if errors := [f"rank {rank}: {result.error}" for rank, result in enumerate(by_rank) if result.error]:
            failed[name] = and_more(errors, 2, "; ")
    if context.rank == 0:
        yield from facts(group)
        measured = {name: by_rank[0].value for name, by_rank in results.items() if name not in failed}
        yield from _metrics(measured, list(nodes), options.size)
        yield from _path_facts(measured, logs, options, _left_out(context, options))
    if failed:
        texts = "; ".join(f"{name} ({errors})" for name, errors in failed.items())
        raise SeatrialError(f"NCCL settings not measured: {texts}")


def applicable_settings(
    nodes: Mapping[str, Sequence[int]], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The names of the settings to measure, and the reasons for omitting the others."""
    not_applicable = {}
    if environ.get("NCCL_NVLS_ENABLE") == "0":
        not_applicable["no_nvls"] = "NCCL_NVLS_ENABLE=0 in the environment: NVLS is already disabled"
    if max(map(len, nodes.values())) == 1:
        not_applicable["no_p2p"] = "one rank per node: no peer-to-peer transfers"
    return [name for name in SETTINGS if name not in not_applicable], not_applicable


def start_setting(
    name: str, nodes: Mapping[str, Sequence[int]], context: Context, options: NcclSettingsOptions
) -> AbstractContextManager[StartedChildRanks]:
    """Context manager: starts the child processes of one setting on all ranks."""
    from seatrial.bench import child_ranks

    groups = {ALL_RANKS: [[rank for ranks in nodes.values() for rank in ranks]]}
    if len(nodes) > 1 and min(map(len, nodes.values())) > 1:
        groups[PER_NODE] = [list(ranks) for ranks in nodes.values()]
    task = {
        "groups": {key: [sorted(ranks) for ranks in members] for key, members in groups.items()},
        "size": options.size,
        "seconds": options.seconds,
        "untimed_sizes": [size for size in options.untimed_sizes if size not in _left_out(context, options)],
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


def _left_out(context: Context, options: NcclSettingsOptions) -> list[int]:
    """The sizes among UNTIMED_SIZES that the network is too slow for; none if the trial sets ``untimed_sizes``."""
    is_default = options.untimed_sizes == UNTIMED_SIZES
    return context.tcp_network.too_slow_sizes("all_reduce", UNTIMED_SIZES) if context.tcp_network and is_default else []


def _child_log(result: ChildResult) -> NcclLog:
    """The NCCL log of this rank's child process; empty if the child failed."""
    from seatrial.discover import nccl_log
    from seatrial.discover.nccl_log import NcclLog

    if result.error:
        return NcclLog()
    return nccl_log.read(Path(result.value["log"]), result.value["log_bytes"])


def _nvlink(context: Context) -> str:
    """``unknown`` if the NVLinks of a node are not readable, ``yes`` if every node has active NVLinks, else ``no``."""
    from seatrial.bench import rank

    gpus = gpu.read(context.root).gpus if context.local_rank == 0 else ()
    if not gpus or not all(device.nvlink_states_readable for device in gpus):
        state = "unknown"
    else:
        state = "yes" if any(device.active_nvlinks for device in gpus) else "no"
    states = [
        node_state for node_state, is_local_rank_0 in rank.gather((state, context.local_rank == 0)) if is_local_rank_0
    ]
    return next((value for value in ("unknown", "no") if value in states), "yes")


def _metrics(results: Mapping[str, Any], nodes: Sequence[str], size: int) -> Iterator[Metric]:
    """Yield busbw (GB/s) by setting, over all ranks and per node, and the ratios default/no_p2p and default/ring."""
    rates: dict[str, dict[str, Sequence[float]]] = {}
    for name, result in results.items():
        busbw = result["busbw"]
        rates[name] = {
            CLUSTER: busbw[ALL_RANKS][0],
            **(dict(zip(nodes, busbw[PER_NODE], strict=True)) if PER_NODE in busbw else {}),
        }
        for subject, samples in rates[name].items():
            yield metric(f"busbw_{name}.{size_label(size)}", samples, "GB/s", subject)
    default, no_p2p, ring = (rates.get(name, {}) for name in ("default", "no_p2p", "ring"))
    ratios = [("p2p_gain", no_p2p, subject) for subject in (nodes if len(nodes) > 1 else [CLUSTER])]
    for name, other, subject in (*ratios, ("default_vs_ring", ring, CLUSTER)):
        if subject in default and subject in other:
            base = median(other[subject])
            yield metric(name, [rate / base for rate in default[subject]], "x", subject)
    yield metric("wrong_elements", sum(result["wrong_elements"] for result in results.values()), "count")


def _path_facts(
    results: Mapping[str, Any],
    logs: Mapping[str, Sequence[NcclLog]],
    options: NcclSettingsOptions,
    left_out: Sequence[int],
) -> Iterator[Fact]:
    """Yield algorithm, protocol, channels and transport by setting and size, and the method."""
    by_size = {
        name: {
            size_label(size): "not measured: no memory"
            if size in result["not_allocated"]
            else path_at_size(logs[name], size)
            for size in sorted({options.size, *options.untimed_sizes} - set(left_out))
        }
        for name, result in results.items()
    }
    yield Fact(name="path_by_size", value=by_size)
    if left_out:
        sizes = ", ".join(map(format_bytes, left_out))
        yield Fact(name="sizes_left_out", value=f"{sizes}: would take too long at the cluster.fabric.rate of the trial")
    if "default" in results:
        by_rank = logs["default"]
        algorithm, protocol, channels, transport = path_at_size(by_rank, options.size).values()
        tree = "" if len(by_rank) > 2 else "; with two ranks NCCL has no tree, only a ring"
        yield Fact(
            name="method",
            value=f"NCCL {by_rank[0].version}, {len(by_rank)} ranks on {by_rank[0].nodes} nodes, all-reduce of "
            f"{format_bytes(options.size)} in new processes for each setting; default: {algorithm}, {protocol}, "
            f"{channels} channels, over {transport}{tree}",
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
    metrics={
        "busbw_default.*": "GB/s",
        "busbw_ring.*": "GB/s",
        "busbw_no_p2p.*": "GB/s",
        "busbw_no_nvls.*": "GB/s",
        "p2p_gain": "x",
        "default_vs_ring": "x",
        "wrong_elements": "count",
    },
    rules=(
        Rule(
            metric="p2p_gain",
            # The slowest NVLink bridge (RTX A6000) carries 56 GB/s per direction (NVIDIA's data sheet: 112.5 GB/s
            # bidirectional), 1.8 times the 31.5 GB/s of PCIe 4.0 x16
            expect=">= 1.5 x",
            applies_if={"nvlink": "yes", "p2p_available": "yes"},
            evidence_facts=("path_by_size",),
            meaning="NVLinks are active, but disabling peer-to-peer hardly slows the all-reduce: NCCL does not use "
            "them.",
            fix="Run env | grep NCCL (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL) and nvidia-smi topo -p2p r. In a container, "
            "all GPUs must be visible to each process. In a virtual machine, check the ACS and IOMMU settings.",
        ),
        Rule(
            metric="default_vs_ring",
            expect=">= 0.90 x",
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("path_by_size",),
            meaning="A ring is faster than NCCL's default algorithm: NCCL's model of this machine is wrong.",
            fix="Run env | grep NCCL (NCCL_ALGO, NCCL_TOPO_FILE, NCCL_TUNER_PLUGIN) and unset these variables. Else "
            "report an NCCL log with NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING to NVIDIA.",
        ),
        wrong_data_rule("Run collectives.all_reduce: it names rank, offset and flipped bits."),
    ),
    rule_facts={
        "nvlink": RuleFact("yes|no|unknown", "the GPUs are not known to be connected by NVLink"),
        "p2p_available": RuleFact(reason="one rank per node: no peer-to-peer transfers"),
    },
    measure=measure,
    fact_roles={"algorithms_by_setting": "path_by_size"},
    bounds=BANDWIDTH_BOUNDS,
    comparisons={"p2p_gain": Comparison(part="peer-to-peer", is_speedup=True)},
    performance_metrics=("busbw_*", "p2p_gain", "default_vs_ring"),
    required_per={"p2p_gain": "node"},
    limit_s=600.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=NcclSettingsOptions,
)
