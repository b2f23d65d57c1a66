"""Slowdown and data wait of each rank, for training runs on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.declare import Answers, Evidence, absent, metric, rule, value
from seatrial.checks.training._workload import TrainingResult
from seatrial.train.rank_times import MIN_STEPS, RankTimes, slowdowns

SLOWDOWN, DATA_WAIT = "rank_slowdown", "rank_data_wait"
# Limits in percent. On two CPU cores at a load of 16, equal ranks had a slowdown of 0 % over 20 steps and a data wait
# of 0.1 %; on H200 the data wait is below 0.25 % (docs/results). device.gemm too fails a GPU 10 % below its peers.
MAX_DATA_WAIT = 10
# Device → limit; higher on CPUs: two ranks on the hyperthreads of one core are slower than a rank with its own core
MAX_SLOWDOWN = {"cuda": 10, "cpu": 25}
DECLARED = (
    metric(
        SLOWDOWN,
        f"<= {MAX_SLOWDOWN['cuda']} %",
        "The rank computes slower than the other ranks of this run, which wait for it in every step. The value is the "
        "lower end of the 95 % interval over the steps.",
        "Compare clocks, temperature and processes of the rank's GPU with those of another GPU of the node "
        "(nvidia-smi), then the load and the binding of its CPU cores (top; taskset -cp PID). Then run the check "
        "without the node.",
        when="device == cuda",
        also=(rule(f"<= {MAX_SLOWDOWN['cpu']} %", when="device == cpu"),),
        per="rank",
        speed=True,
        may_exceed_100=True,
    ),
    metric(
        DATA_WAIT,
        f"<= {MAX_DATA_WAIT} %",
        "The device of the rank is idle while the data loader reads and prepares the next batch; all ranks wait for "
        "it.",
        "Check the filesystem of the data (filesystem.speed; iostat -x 1) and the load of the CPUs (top). If all "
        "ranks wait, start more data loader workers, or copy the data to a local disk.",
        per="rank",
        speed=True,
    ),
)


def slowdown_and_data_wait(results: Mapping[str, Sequence[TrainingResult]], subjects: Sequence[str]) -> Answers:
    """The slowdowns in the first stage whose ranks can be compared, and the data waits in the last stage.

    ``results``: stage → its trainings, which ran concurrently and are peers. ``subjects[rank]``: the rank's subject.
    """
    times_by_stage = [times_by_subject(trainings, subjects) for trainings in results.values()]
    comparable = (times for times in times_by_stage if slowdowns(list(times.values())))
    yield from slowdown(next(comparable, times_by_stage[0]))
    yield from data_wait(times_by_stage[-1])


def times_by_subject(trainings: Sequence[TrainingResult], subjects: Sequence[str]) -> dict[str, RankTimes]:
    """Subject → the times of its rank in concurrent training runs. ``subjects[rank]``: the rank's subject."""
    times: dict[str, RankTimes] = {}
    for training in trainings:
        rank_metrics = training.value("ranks") or ()  # empty if the training failed
        for rank, metrics in zip(training.ranks, rank_metrics, strict=False):
            times[subjects[rank]] = RankTimes.from_metrics(metrics)
    return times


def slowdown(times: Mapping[str, RankTimes]) -> Answers:
    """The slowdown of each rank. ``times``: subject → the times of its rank in one training."""
    compared = slowdowns(list(times.values()))
    if not compared:
        for subject in times or (None,):
            yield absent(SLOWDOWN, _not_compared_reason(times), subject)
        return
    for index, subject in enumerate(times):
        if each := compared.get(index):
            interval = f"95 % interval {each.low:.2f} to {each.high:.2f}, {each.steps} steps"
            text = f"{each.ratio:.2f} times the compute time of the other ranks ({interval})"
            yield value(SLOWDOWN, max(0.0, 100 * (each.low - 1)), subject, evidence=text)
        else:
            yield absent(SLOWDOWN, "no other rank with compute times has the same device model", subject)


def data_wait(times: Mapping[str, RankTimes], evidence: Evidence = None) -> Answers:
    """The share of the step time that each rank waits for data. ``times``: subject → the times of its rank."""
    for subject in times or (None,):
        share = times[subject].data_wait_share if subject else None
        if share is None:
            yield absent(DATA_WAIT, "the training did not time the data loader", subject)
        else:
            yield value(DATA_WAIT, 100 * share, subject, evidence=evidence)


def _not_compared_reason(compute_times: Mapping[str, RankTimes]) -> str:
    step_counts = [len(times.compute_s) for times in compute_times.values() if times.compute_s]
    if len(compute_times) < 2:
        return "fewer than 2 ranks"
    if not step_counts:
        return "compute time contains waiting for other ranks (ZeRO-3), or the training failed"
    steps = min(step_counts)
    if steps < MIN_STEPS:
        return f"{steps} steps; {MIN_STEPS} are needed"
    return "no two ranks have the same device model"
