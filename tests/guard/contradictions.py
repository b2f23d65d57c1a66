"""Records with one fault each that a single line of the judge sees: in the plan, the values, the counters, a retry.

A cluster has one verdict for all differences from the plan, so each record here has only one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.judge.plausibility import validate_thresholds
from seatrial.model import Baseline, Measurement, Trial, UsageError
from tests.guard import clusters, configured
from tests.guard.changes import (
    Change,
    only_checks,
    record,
    retries,
    slowed,
    times,
    with_config,
    with_facts,
    with_metrics,
    with_settings,
)
from tests.guard.observed import Observed

GEMM, METRIC, TRANSPORT = "device.gemm", "tflops.bf16", "collectives.transport"
THRESHOLDS = (GEMM, "transfer.peers", "collectives.all_reduce", "host.settings")  # checks with other thresholds
COUNTERS: Mapping[str, JsonValue] = {
    "uncorrectable ECC errors": {"counters_read": 12, "increased": {"gpu0": {"ecc_uncorrected": [0, 2]}}},
    "rows remapped": {"counters_read": 12, "increased": {"gpu0": {"rows_remapped": [0, 1]}}},
    "a link that went down": {"counters_read": 12, "increased": {"mlx5_0/1": {"link_downed": [0, 1]}}},
    "an Xid": {"counters_read": 12, "xids": [79]},
    "an unreadable counter": {"counters_read": 12, "unreadable": {"gpu0 xid": "timeout"}},
    "no counters": {"counters_read": 0},
    "malformed": {"counters_read": "twelve"},
    "not recorded": None,
}


def shapes() -> Iterator[tuple[str, Trial | Observed]]:
    return chain(_plans(), _counters(), _values(), _retries(), _thresholds())


def _run(name: str = configured.BASE, checks: Collection[str] = (GEMM,)) -> Trial:
    return only_checks(record(name), checks)


def _changed(trial: Trial, change: Callable[[Measurement], Measurement]) -> Trial:
    return trial.model_copy(update={"measurements": tuple(map(change, trial.measurements))})


def _planned(trial: Trial, cluster: Mapping[str, JsonValue], of: str = "ranks", **job: JsonValue) -> Trial:
    """The trial with other keys of ``cluster``, and with other fields of the job whose placement is ``of``."""
    jobs = tuple(each.model_copy(update=job) if each.placement == of else each for each in trial.jobs)
    return with_config(trial, cluster={**trial.config["cluster"], **cluster}).model_copy(update={"jobs": jobs})


def _renamed(measurement: Measurement, old: str, new: str) -> Measurement:
    """The measurement and its metrics with another name of the subject."""
    renamed = with_metrics(measurement, lambda metric: replace(metric, subject=metric.subject.replace(old, new)))
    return renamed.model_copy(update={"subject": measurement.subject.replace(old, new)})


def _plans() -> Iterator[tuple[str, Trial]]:
    """The jobs against the configuration, the other jobs and the measured nodes and GPUs."""
    run, one_gpu = _run(), _run("2026-11-28-1xh100/acceptance")
    on_cpu, ranks_on_cpu = (
        _run("launchers/local", checks) for checks in (("host.inventory", "collectives.all_reduce"), ("train.ddp",))
    )
    two_nodes = only_checks(clusters.healthy("infiniband", 2), (GEMM,))
    yield "fewer nodes than configured", _planned(run, {"nodes": 2})
    yield "fewer GPUs than configured", _planned(run, {"gpus_per_node": 4})
    yield "a job of more nodes than expected", _planned(two_nodes, {"min_nodes": 1}, expected_nodes=1)
    yield "jobs on two devices", _planned(on_cpu, {}, "nodes", device="cuda")
    yield "on CPUs, GPUs expected", _planned(ranks_on_cpu, {"gpus_per_node": 2}, expected_gpus=2)
    yield "on GPUs, none expected", _planned(run, {"gpus_per_node": 0}, expected_gpus=0)
    yield "fewer ranks than GPUs", _planned(run, {"gpus_per_node": 4}, expected_gpus=4)
    yield "on GPUs, ranks measured", _changed(run, lambda each: _renamed(each, "/gpu", "/rank"))
    listed = _changed(run, lambda each: with_facts(each, gpus_used=[0, 1, 2, 3]))
    yield "fewer ranks than usable GPUs", _planned(listed, {"gpus_per_node": None}, expected_gpus=None)
    yield "wrong placement", _planned(one_gpu, {}, placement="nodes")
    yield "fewer nodes measured", _changed(two_nodes, lambda each: _renamed(each, "node0001/gpu", "node0000/gpu1"))
    yield "a GPU on another node", _changed(two_nodes, lambda each: _renamed(each, "node0001/gpu5", "node0000/gpu8"))
    transport = only_checks(clusters.healthy("infiniband", 2), (TRANSPORT,))
    yield "TCP configured, RDMA used", _planned(transport, {"fabric": {"kind": "tcp"}})


def _counters() -> Iterator[tuple[str, Trial]]:
    for name, fact in COUNTERS.items():
        yield f"counters: {name}", _changed(_run(), partial(with_facts, error_counters=fact))


def _values() -> Iterator[tuple[str, Trial]]:
    """A negative value and units that are not those of the metric, of its threshold or of its reference value."""

    def with_change(change: Change) -> Trial:
        return _changed(_run(), lambda each: with_metrics(each, lambda has: change(has) if has.name == METRIC else has))

    yield "negative", with_change(lambda metric: times(replace(metric, samples=()), -1.0))
    yield "another unit", with_change(lambda metric: replace(metric, unit="GFLOP/s"))
    yield "threshold in another unit", with_settings(_run(), GEMM, expect={METRIC: "> 4e5 GFLOP/s"}, override=True)
    baseline = configured.changed_baseline(configured.good_baseline(), 1.0, unit="GFLOP/s")
    yield "baseline in another unit", _run().model_copy(update={"baseline": baseline})


def _retries() -> Iterator[tuple[str, Trial]]:
    """A GPU of an unknown model is slower than its peers, and in the second measurement it is not."""
    trial = _changed(_run("2026-11-22-4xh200/acceptance"), lambda each: with_facts(each, gpu="NVIDIA X1"))
    slow = slowed(0.6, METRIC, ("vm/gpu2",))
    first = _changed(trial, lambda each: with_metrics(each, slow))
    for name, change in {"slow, then not": slowed(1.0), "slow twice": slow}.items():
        again = tuple(retries(trial.measurements, 1, change))
        yield f"unknown GPU {name}", first.model_copy(update={"retries": again})


def _thresholds() -> Iterator[tuple[str, Observed]]:
    """Whether a trial with other thresholds may start, on nodes of known, other and unknown GPUs."""
    for check in THRESHOLDS:
        for name, trial in configured.thresholds(_run(checks=(check,)), catalog()[check]):
            for model in (configured.MODEL, configured.OTHER_MODEL, ""):
                gpus = [model] * configured.GPUS if model else []
                yield f"thresholds {name}, {model or 'unknown GPUs'}", _start(trial, gpus)
    high = with_settings(_run(), GEMM, expect={METRIC: "> 900 TFLOP/s"})
    yield "threshold above the published value", _start(high, [configured.MODEL])
    good, changed = configured.good_baseline(), configured.changed_baseline
    for name, baseline in {
        "good": good,
        "beyond physical limits": changed(good, 20.0),
        "of another model": changed(good, 1.0, gpu=configured.OTHER_MODEL),
        "without a network": changed(good, 1.0, nodes=2),
    }.items():
        yield f"baseline at the start {name}", _start(_run(), [configured.MODEL], baseline)


def _start(trial: Trial, gpus: Sequence[str], baseline: Baseline | None = None) -> Observed:
    try:
        validate_thresholds(Config.model_validate(trial.config), catalog(), gpus, baseline)
    except UsageError:
        return {"refused": "UsageError"}
    return {"thresholds": "valid"}
