"""Slowdown and data wait of each rank, with their rules, for training runs on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from seatrial.checks.base import RuleFact
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Fact, Metric, Observation, Rule
from seatrial.train.rank_times import MIN_STEPS, RankTimes, Slowdown, slowdowns

SLOWDOWN, DATA_WAIT = "rank_slowdown", "rank_data_wait"
METRICS = {SLOWDOWN: "%", DATA_WAIT: "%"}
# Limits in percent. On two CPU cores at a load of 16, equal ranks had a slowdown of 0 % over 20 steps and a data wait
# of 0.1 %; on H200 the data wait is below 0.25 % (docs/results). device.gemm also fails 10 % below the peers.
MAX_DATA_WAIT = 10
# The limit on CPUs is higher: two ranks on the hyperthreads of one core are slower than a rank with its own core
MAX_SLOWDOWN = {"cuda": 10, "cpu": 25}
_MAX_NAMED = 4  # ranks in the facts slowest_ranks and longest_data_waits
# Checks with these rules also declare the fact ``device``
RULE_FACTS = {
    "ranks_compared": RuleFact(reason="compute times of ranks were not compared"),
    "data_wait_timed": RuleFact(),
}
RULES = (
    *(
        Rule(
            metric=SLOWDOWN,
            expect=f"<= {limit} %",
            applies_if={"ranks_compared": "yes", "device": device},
            evidence_facts=("slowest_ranks",),
            meaning="The rank computes slower than the other ranks of this run, which wait for it in every step. The "
            "value is the lower end of the 95 % interval over the steps.",
            fix="Compare clocks, temperature and processes of the rank's GPU with those of another GPU of the node "
            "(nvidia-smi), then the load and the binding of its CPU cores (top; taskset -cp PID). Then run the check "
            "without the node.",
        )
        for device, limit in MAX_SLOWDOWN.items()
    ),
    Rule(
        metric=DATA_WAIT,
        expect=f"<= {MAX_DATA_WAIT} %",
        applies_if={"data_wait_timed": "yes"},
        evidence_facts=("longest_data_waits",),
        meaning="The device of the rank is idle while the data loader reads and prepares the next batch; all ranks "
        "wait for it.",
        fix="Check the filesystem of the data (filesystem.speed; iostat -x 1) and the load of the CPUs (top). If all "
        "ranks wait, start more data loader workers, or copy the data to a local disk.",
    ),
)


def observations_of_trainings(
    results: Mapping[str, Sequence[TrainingResult]], subjects: Sequence[str]
) -> Iterator[Observation]:
    """The observations from the first stage whose ranks can be compared, and the data wait in the last stage.

    ``results``: stage → its trainings, which ran concurrently and are peers. ``subjects[rank]``: the rank's subject.
    """
    stages = [times_by_subject(trainings, subjects) for trainings in results.values()]
    compared = next((stage for stage in stages if slowdowns(list(stage.values()))), stages[0] if stages else {})
    yield from observations(compared, stages[-1] if stages else {})


def times_by_subject(trainings: Sequence[TrainingResult], subjects: Sequence[str]) -> dict[str, RankTimes]:
    """Subject → the times of its rank in concurrent training runs. ``subjects[rank]``: the rank's subject."""
    return {
        subjects[rank]: RankTimes.from_metrics(entry)
        for training in trainings
        for rank, entry in zip(training.ranks, training.value("ranks") or (), strict=False)
    }


def observations(
    compute_times: Mapping[str, RankTimes], data_wait_times: Mapping[str, RankTimes]
) -> Iterator[Observation]:
    """Metrics of each rank, and facts that name the slowest ranks.

    Both arguments map a subject to the times of its rank: of the training whose compute times are compared, and of the
    training whose wait for data is judged.
    """
    by_index = slowdowns(list(compute_times.values()))
    by_subject = {subject: by_index[index] for index, subject in enumerate(compute_times) if index in by_index}
    yield Fact(name="ranks_compared", value="yes" if by_subject else f"no: {_not_compared_reason(compute_times)}")
    for subject, slowdown in by_subject.items():
        yield Metric(name=SLOWDOWN, value=max(0.0, 100 * (slowdown.low - 1)), unit="%", subject=subject)
    if by_subject:
        slowest = sorted(by_subject, key=lambda subject: -by_subject[subject].ratio)
        named = [subject for subject in slowest if by_subject[subject].ratio > 1][:_MAX_NAMED] or slowest[:1]
        yield Fact(name="slowest_ranks", value={subject: _slowdown_text(by_subject[subject]) for subject in named})
    shares = {
        subject: share for subject, times in data_wait_times.items() if (share := times.data_wait_share) is not None
    }
    yield Fact(name="data_wait_timed", value="yes" if shares else "no: the training did not time the data loader")
    for subject, share in shares.items():
        yield Metric(name=DATA_WAIT, value=100 * share, unit="%", subject=subject)
    if shares:
        longest = sorted(shares, key=lambda subject: -shares[subject])[:_MAX_NAMED]
        value: dict[str, JsonValue] = {subject: f"{shares[subject]:.1%} of the step time" for subject in longest}
        yield Fact(name="longest_data_waits", value=value)


def _not_compared_reason(ranks: Mapping[str, RankTimes]) -> str:
    timed = [rank for rank in ranks.values() if rank.compute_s]
    if len(ranks) < 2:
        return "fewer than 2 ranks"
    if not timed:
        return "compute time contains waiting for other ranks (ZeRO-3), or the training failed"
    steps = min(len(rank.compute_s) for rank in timed)
    if steps < MIN_STEPS:
        return f"{steps} steps; {MIN_STEPS} are needed"
    return "no two ranks have the same device model"


def _slowdown_text(slowdown: Slowdown) -> str:
    return (
        f"{slowdown.ratio:.2f} times the compute time of the other ranks (95 % interval {slowdown.low:.2f} to "
        f"{slowdown.high:.2f}, {slowdown.steps} steps)"
    )
