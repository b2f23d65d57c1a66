"""Measurements → the node, the GPU or its way out of the node, or the path between two of them at fault. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from seatrial.checks.fabric import gpu_pairs
from seatrial.checks.fabric.pairs import CHECK
from seatrial.model import Finding, Measurement, Metric

GPUS = gpu_pairs.CHECK
_RULES = {rule.metric: rule for rule in (*CHECK.rules, *GPUS.rules) if rule.metric.endswith("_share")}


def localize(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    """Who is slow with every partner, and which two good ones meet slowly.

    See checks.collectives_pairs and collectives_gpu_pairs.
    """
    for measured in measurements:
        if measured.check == CHECK.name and _applies(measured, "best_share"):
            slow = _short(measured, "best_share")
            certain = len({_node(metric) for metric in slow}) <= _told_apart(measured)
            yield from _ends(measured, slow, certain=certain)
            yield from _paths(measured)
        elif measured.check == GPUS.name and _applies(measured, "gpu_share"):
            yield from _gpus(measured)
            yield from _paths_of_gpus(measured)


def _applies(measured: Measurement, metric: str) -> bool:
    return all(measured.facts.get(name) == value for name, value in _RULES[metric].where.items())


def _short(measured: Measurement, name: str) -> list[Metric]:
    expect = _RULES[name].expect
    return [metric for metric in measured.metrics if metric.name == name and expect and not expect.holds(metric.value)]


def _ends(measured: Measurement, slow: Sequence[Metric], *, certain: bool) -> Iterator[Finding]:
    everybody = [metric for metric in measured.metrics if metric.name == "best_share"]
    for node, found in groupby(sorted(slow, key=_node), key=_node):
        own, count = list(found), sum(_node(metric) == node for metric in everybody)
        whole = len(own) == count
        shares = ", ".join(f"{metric.subject} at {metric.value:.0%}" for metric in own)
        why = f"With every one of its partners {shares} of what the others reach with their best; "
        yield Finding(
            what=f"{'A node is' if whole else f'{len(own)} of {count} GPUs of a node are'} slow to every other node",
            where=node if whole else ", ".join(metric.subject for metric in own),
            confidence="high" if certain else "low",
            why=why + _sure(measured, certain=certain),
            first_command=f"on {node}: ibstat; nvidia-smi topo -m",
            fix=_RULES["best_share"].fix,
            source=f"best_share of {CHECK.name}",
        )


def _sure(measured: Measurement, *, certain: bool) -> str:
    known = str(measured.facts.get("guarantee"))
    return known if certain else f"so many are slow that some may only have met slow partners ({known})"


def _paths(measured: Measurement) -> Iterator[Finding]:
    speeds = {metric.subject: metric.value for metric in measured.metrics if metric.name == "pair_busbw"}
    alone = measured.facts.get("alone")
    for metric in _short(measured, "pair_share"):
        again = isinstance(alone, dict) and metric.subject in alone
        yield Finding(
            what="The path between two nodes is slow",
            where=metric.subject,
            confidence="high" if again else "medium",  # it may share an uplink with a pair that worked at the same time
            why=f"{speeds[metric.subject]:.4g} GB/s among others, {'and alone' if again else 'which is'} "
            f"{metric.value:.0%} of what both ends reach with other partners",
            first_command=f"ibtracert between {metric.subject.replace('->', ' and ')}",
            fix=_RULES["pair_share"].fix,
            source=f"pair_share of {CHECK.name}",
        )


def _gpus(measured: Measurement) -> Iterator[Finding]:
    slow = _short(measured, "gpu_share")
    of_node = Counter(map(_node, slow))
    for metric in slow:
        few = of_node[_node(metric)] <= _told_apart(measured)
        sure = "" if few else "; so many of its node are slow that some may only have met slow partners"
        yield Finding(
            what="A GPU is slow with every other GPU of its node",
            where=metric.subject,
            confidence="high" if few else "low",
            why=f"With its fastest partner it reaches {metric.value:.0%} of what the others do with theirs{sure}",
            first_command=f"on {_node(metric)}: nvidia-smi nvlink -s; nvidia-smi -q -d PERFORMANCE,CLOCK",
            fix=_RULES["gpu_share"].fix,
            source=f"gpu_share of {GPUS.name}",
        )


def _paths_of_gpus(measured: Measurement) -> Iterator[Finding]:
    alone = measured.facts.get("alone")
    for metric in _short(measured, "path_share"):
        again = isinstance(alone, dict) and metric.subject in alone
        yield Finding(
            what="The path between two GPUs of a node is slow",
            where=metric.subject,
            confidence="high" if again else "medium",
            why=f"{'With no other pair at work it' if again else 'It'} reaches {metric.value:.0%} of what both GPUs do "
            "with other partners",
            first_command=f"on {_node(metric)}: nvidia-smi nvlink -e; nvidia-smi topo -p2p r",
            fix=_RULES["path_share"].fix,
            source=f"path_share of {GPUS.name}",
        )


def _node(metric: Metric) -> str:
    return metric.subject.partition("/")[0]


def _told_apart(measured: Measurement) -> int:
    value = measured.facts.get("told_apart")
    return value if isinstance(value, int) else 0
