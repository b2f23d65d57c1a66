"""Records with second and third measurements: good, bad or uncertain, incomplete, and faults that move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from seatrial.judge.retry import CHANGE_FACT
from seatrial.model import Measurement, Metric, Trial
from tests.guard import clusters
from tests.guard.changes import Change, only_checks, record, retries, slowed, times, with_facts, with_metrics

BASE = "2026-11-22-4xh200/acceptance"
CONTEXT = ("host.inventory", "gpu.inventory", "collectives.transport")
State = Literal["bad", "good", "uncertain"]
# what the first, the second and the third measurement show
SEQUENCES: tuple[tuple[State, ...], ...] = (
    ("bad",),
    ("uncertain",),
    ("bad", "bad"),
    ("bad", "good"),
    ("bad", "good", "bad"),
    ("bad", "good", "good"),
    ("bad", "good", "uncertain"),
    ("good", "bad"),
    ("good", "bad", "bad"),
    ("good", "bad", "good"),
    ("uncertain", "uncertain"),
    ("uncertain", "bad"),
    ("uncertain", "good"),
    ("bad", "uncertain"),
)


class Place(NamedTuple):
    """A performance metric of a check on one subject, and the subject of its rank if the order of GPUs is reversed."""

    check: str
    metric: str
    subject: str
    other: str


PLACES = (
    Place("device.gemm", "tflops.bf16", "vm/gpu2", "vm/gpu1"),
    Place("device.memory", "copy", "vm/gpu1", "vm/gpu2"),
    Place("transfer.host", "h2d_single", "vm/gpu3", "vm/gpu0"),
    Place("transfer.peers", "unidirectional", "vm/gpu1->gpu2", "vm/gpu3->gpu0"),
    Place("collectives.gpu_pairs", "gpu_share", "vm/gpu2", "vm/gpu1"),
    Place("collectives.all_reduce", "busbw.8GiB", "cluster", "cluster"),
)


def _change(state: State, metric: str, subject: str) -> Change:
    if state == "uncertain":
        return lambda each: _uncertain(each) if (each.name, each.subject) == (metric, subject) else each
    return slowed(0.7 if state == "bad" else 1.0, metric, (subject,))


def _uncertain(metric: Metric) -> Metric:
    """Few samples far apart, with a median below the limit."""
    low = times(metric, 0.85).value
    return replace(metric, value=low, samples=(0.7 * low, low, 1.4 * low))


def shapes() -> Iterator[tuple[str, Trial]]:
    for place in PLACES:
        trial = only_checks(record(BASE), (*CONTEXT, place.check))
        of_check = [each for each in trial.measurements if each.check == place.check]
        for states in SEQUENCES:
            changes = [_change(state, place.metric, place.subject) for state in states]
            yield f"{place.check} {'-'.join(states)}", _measured(trial, of_check, changes)
        bad = _change("bad", place.metric, place.subject)
        again = retries(of_check, 1, slowed(1.0))
        first = _measured(trial, of_check, [bad])
        for name, incomplete in {
            "without a GPU": again[:-1],
            "with an error": _last(again, error="CUDA error: an illegal memory access was encountered"),
            "with a skip": _last(again, skipped="no GPU"),
            "on another GPU": [*again[:-1], again[-1].model_copy(update={"subject": "vm/gpu9"})],
        }.items():
            yield f"{place.check} {name}", first.model_copy(update={"retries": tuple(incomplete)})
        moved = _change("bad", place.metric, place.other)
        yield f"{place.check} moved", _measured(trial, of_check, [bad, moved])
        yield f"{place.check} moved twice", _measured(trial, of_check, [bad, moved, bad])
        reverse = tuple(_on_reversed_gpus(retries(of_check, 1, moved)))
        yield f"{place.check} same rank on another GPU", first.model_copy(update={"retries": reverse})
    yield from _wrong_data()
    yield from _between_nodes()


def _measured(trial: Trial, of_check: Sequence[Measurement], changes: Sequence[Change]) -> Trial:
    """The trial with one measurement of the check for each change: the first, the second and the third."""
    first = tuple(
        with_metrics(each, changes[0]) if each.check == of_check[0].check else each for each in trial.measurements
    )
    again = [each for number, change in enumerate(changes[1:], 1) for each in retries(of_check, number, change)]
    return trial.model_copy(update={"measurements": first, "retries": tuple(again)})


def _last(measurements: Sequence[Measurement], **end: str) -> list[Measurement]:
    return [*measurements[:-1], measurements[-1].model_copy(update={"metrics": (), **end})]


def _on_reversed_gpus(measurements: Sequence[Measurement]) -> Iterator[Measurement]:
    """The measurements of ranks that used the GPUs in reverse order, as retries do."""
    ranks = [each.rank for each in measurements]
    for each, rank in zip(measurements, reversed(ranks), strict=True):
        yield with_facts(each, **{CHANGE_FACT: "GPUs in reverse order"}).model_copy(update={"rank": rank})


def _wrong_data() -> Iterator[tuple[str, Trial]]:
    """Wrong data needs no second measurement."""

    def wrong(metric: Metric) -> Metric:
        return replace(metric, value=3.0) if metric.name == "wrong_elements" else metric

    check = "collectives.all_reduce"
    trial = only_checks(record(BASE), (*CONTEXT, check))
    of_check = [each for each in trial.measurements if each.check == check]
    good = slowed(1.0)
    yield "wrong data, then right data", _measured(trial, of_check, [wrong, good])
    yield "right data, then wrong data", _measured(trial, of_check, [good, wrong])
    yield "right data, then right and wrong data", _measured(trial, of_check, [good, good, wrong])


def _between_nodes() -> Iterator[tuple[str, Trial]]:
    """Faults that move to another node, or show on two nodes."""
    check = "device.gemm"
    trial = only_checks(clusters.healthy("infiniband", 4), ("host.inventory", check))
    of_check = [each for each in trial.measurements if each.check == check]
    here, there = (slowed(0.7, "tflops.bf16", (subject,)) for subject in ("node0001/gpu2", "node0003/gpu2"))
    yield "moved to another node", _measured(trial, of_check, [here, there])
    yield "on two nodes, then on one", _measured(trial, of_check, [lambda each: here(there(each) or each), here])
