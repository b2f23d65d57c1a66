"""Does a training end, everywhere and soon, when one of its ranks fails, and is the right one named?

Three runs of seatrial itself, as a user starts it, each a ``train.failing_job`` whose rank fails: by an error, by SIGKILL,
by SIGSTOP. And a look at what each left behind: in the queue, and with a run of ``nodes.leftovers`` on its nodes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml
from pydantic import Field, JsonValue

from seatrial.checks.base import Check, Context, Options
from seatrial.checks.faults import failing_job, leftovers
from seatrial.checks.faults.failing_job import Fault, InjectedFault
from seatrial.config.layers import ENV_PREFIX
from seatrial.config.schema import CheckSettings, Config
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Job
from seatrial.model import (
    CLUSTER,
    Artifact,
    Fact,
    JobResult,
    JobState,
    Measurement,
    Metric,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    Trial,
    Verdict,
)
from seatrial.util import processes

FAULTS: tuple[Fault, ...] = get_args(Fault)
METRICS = {
    "named.*": "bool",
    "job_end_s.*": "s",
    "ended_in_time.*": "bool",
    "leftover_jobs.*": "count",
    "leftover_processes.*": "count",
}
# What must be told of each fault, in the words of launch/root_cause.py.
_CAUSES: dict[Fault, str] = {"error": failing_job.ERROR_MESSAGE, "kill": "SIGKILL", "stop": "no heartbeat"}
# What our launcher set for this check, and not for the runs that it starts. GLOO_SOCKET_IFNAME, where it is "lo", too.
_OF_THIS_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LOOK_EVERY_S = 0.2
_CANCEL_S = 120.0  # an interrupted run fetches from its job of Slurm, cancels it, and waits a minute for its end
_AGREE_S = 1.0  # two clocks may differ by so much, or we may not subtract times of one from those of the other


class FailureOptions(Options):
    """Where the fault is, and how long its end may take."""

    rank: int | None = Field(
        default=None, ge=0, description="the one that fails; by default the last, on the last node"
    )
    # From the moment that the failure is known. Seconds suffice torchrun, Slurm and us; an Epilog that looks at GPUs
    # comes on top, and is given half a minute in all.
    teardown_s: float = Field(default=30, gt=0, description="seconds for a job's end, once its failure is known")


@dataclass(frozen=True)
class TrialRunner:
    """Starts runs like the present one, with another check, and reads what became of them."""

    folder: Path
    config: Config  # of the present trial: launcher, nodes, environment, limits
    progress: Callable[[str], None]

    def run(self, name: str, check: Check, limit_s: float, **options: JsonValue) -> Trial:
        """Carry out a trial of one check, called ``name``, and return its record.

        Raises SeatrialError with its last words where it left none: it was refused, or broke.
        """
        self.progress(f"run {name}")
        settings = CheckSettings(limit_s=limit_s, options=options)
        config = self.config.model_copy(update={"name": name, "checks": {check.name: settings}})
        file, out, err = (self.folder / f"{name}{ending}" for ending in (".yaml", ".out", ".err"))
        file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
        program = [sys.executable, "-m", "seatrial", "run", str(file), "--out", str(self.folder / name)]
        code = _to_its_end(["env", *_env_unset_args(), *program], out, err)
        try:
            return Trial.model_validate_json((self.folder / name / "trial.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            words = err.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
            raise SeatrialError(f"the run {name} ended with {code} and left no record: {words[-1]}") from error

    def on_nodes(self, nodes: str) -> TrialRunner:
        """The same on these nodes alone, where a scheduler has several."""
        header = self.config.slurm.model_copy(update={"nodelist": nodes or self.config.slurm.nodelist})
        return TrialRunner(self.folder, self.config.model_copy(update={"slurm": header}), self.progress)


def measure(context: Context, options: FailureOptions) -> Iterator[Observation]:
    """Raises SeatrialError where a run could not be carried out, and NotApplicable where it has only one rank."""
    request = json.loads((context.run_dir / "run.json").read_text(encoding="utf-8"))
    folder = context.artifacts_dir / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir()
    desk = TrialRunner(folder, Config.model_validate(request["config"]), context.progress)
    for fault in FAULTS:
        yield from _fail(desk, fault, options)
        report = (folder / fault / "report.html").relative_to(context.run_dir)
        yield Artifact(path=str(report), title=f"report of the run with the fault {fault!r}")


def _fail(desk: TrialRunner, fault: Fault, options: FailureOptions) -> Iterator[Observation]:
    heartbeat_timeout_s = desk.config.limits.heartbeat_timeout_s
    limit_s = heartbeat_timeout_s + failing_job.CHECK.limit_s  # silence is to end it, and not the check's own limit
    trial = desk.run(fault, failing_job.CHECK, limit_s, fault=fault, rank=options.rank)
    victim = _read_fault(desk.folder / fault / "artifacts" / failing_job.CHECK.name / failing_job.RECORD, trial)
    result = trial.results[-1]
    scheduler = result.launcher == "slurm"
    kill_wait_s = slurm.settings().kill_wait_s if scheduler else 0
    allowed = {
        "teardown_s": options.teardown_s,
        # before it takes SIGKILL to what does not end by SIGTERM: slurm.conf(5)
        "KillWait": float(kill_wait_s) if isinstance(kill_wait_s, int) else 0.0,
        "limits.heartbeat_timeout_s": heartbeat_timeout_s
        if fault == "stop"
        else 0.0,  # nothing else tells of a process that is stopped
    }
    yield Fact(name="scheduler", value="slurm" if scheduler else "none")
    yield from report_observations(victim, trial, allowed)
    if scheduler:
        yield from allocation_observations(fault, slurm.job(result.scheduler_id))
    name = f"{fault}-leftovers"
    run = str(desk.folder / fault)
    looked = desk.on_nodes(result.nodelist).run(name, leftovers.CHECK, leftovers.CHECK.limit_s, run=run)
    yield from leftover_observations(fault, looked.measurements, desk.config.cluster.nodes)


def report_observations(victim: InjectedFault, trial: Trial, allowed: dict[str, float]) -> Iterator[Observation]:
    """What the run of ``victim`` said, and when it ended. Its job may take the sum of ``allowed``, in seconds. Pure.

    Raises SeatrialError where the fault was not during the job, by the clocks of the victim's node and of this host.
    """
    result = trial.results[-1]
    ended = result.started + result.seconds
    if not result.started - _AGREE_S <= victim.time <= ended + _AGREE_S:
        raise SeatrialError(
            f"the clock of {victim.node} says {victim.time:.1f} of a fault between {result.started:.1f} and "
            f"{ended:.1f} by the clock here. Run first, on both: date +%s.%N; chronyc tracking"
        )
    verdicts = [verdict for verdict in trial.verdicts if verdict.check == failing_job.CHECK.name]
    took_s, limit_s = max(0.0, ended - victim.time), sum(allowed.values())
    terms = " + ".join(f"{name} {seconds:g} s" for name, seconds in allowed.items() if seconds)
    record = {
        "victim": f"rank {victim.rank} ({victim.subject}, pid {victim.pid})",
        "culprit": result.failed_subject,
        "cause": result.cause,
        "state": result.state.value,
        "ended": f"{took_s:.1f} s after the fault; may take {limit_s:g} s: {terms}",
        "report": [f"{verdict.outcome} {verdict.subject}: {verdict.message}" for verdict in verdicts],
    }
    fault = victim.fault
    yield Fact(name=f"fault.{fault}", value=record)
    yield _metric(f"named.{fault}", _is_accused(victim, result) and _is_reported(victim, result, verdicts))
    yield _metric(f"job_end_s.{fault}", took_s)
    yield _metric(f"ended_in_time.{fault}", took_s <= limit_s)


def allocation_observations(fault: Fault, job: Job) -> Iterator[Observation]:
    """Whether Slurm has taken back the allocation of a run that has ended; a job it has forgotten has none. Pure."""
    yield Fact(name=f"job.{fault}", value=f"job {job.id} on {job.nodes or 'no node'}: {job}")
    yield _metric(f"leftover_jobs.{fault}", job.has_state and not job.ended)


def leftover_observations(fault: Fault, looks: Sequence[Measurement], nodes: int) -> Iterator[Observation]:
    """What each node found of a run that has ended. Pure. Raises SeatrialError unless every node has looked."""
    found = [metric for look in looks for metric in look.metrics if not look.error]
    if len({metric.subject for metric in found}) != nodes:
        errors = [look.error for look in looks if look.error]
        raise SeatrialError(
            f"{len(found)} of {nodes} nodes told what was left of the run {fault}: {'; '.join(errors) or 'no error'}"
        )
    yield Fact(name=f"left.{fault}", value=[words for look in looks for words in _listed(look.facts.get("left"))])
    for metric in found:
        yield _metric(f"leftover_processes.{fault}", metric.value, metric.subject)


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _is_accused(victim: InjectedFault, result: JobResult) -> bool:
    """Whether the job's end is laid to the victim, on its node, and to no other rank."""
    ranks = re.findall(r"\brank (\d+)", result.failed_subject)
    ended_by = JobState.HUNG if victim.fault == "stop" else JobState.FAILED
    return ranks == [str(victim.rank)] and victim.subject in result.failed_subject and result.state is ended_by


def _is_reported(victim: InjectedFault, result: JobResult, verdicts: Sequence[Verdict]) -> bool:
    """Whether all that the report says of it is an ERROR of the victim, with the culprit and the right cause."""
    words = (result.failed_subject, _CAUSES[victim.fault])
    return bool(verdicts) and all(
        one.outcome is Outcome.ERROR and one.subject == victim.subject and all(word in one.detail for word in words)
        for one in verdicts
    )


def _read_fault(record: Path, trial: Trial) -> InjectedFault:
    """What the victim wrote before its fault. Raises NotApplicable or SeatrialError, with the reason, without it."""
    if record.exists() and not trial.stop_reason:
        return InjectedFault.model_validate_json(record.read_text(encoding="utf-8"))
    for measurement in trial.measurements:
        if measurement.skipped:
            raise NotApplicable(measurement.skipped)
    errors = [measurement.error for measurement in trial.measurements if measurement.error]
    why = "; ".join(errors) or trial.stop_reason or trial.decision.reason
    raise SeatrialError(f"the run {trial.name} ended before its rank could fail: {why}")


def _to_its_end(argv: Sequence[str], out: Path, err: Path) -> int:
    """The exit code of a run of seatrial. Should we end first, it is ended, and ends what it has started itself."""
    child = processes.start(argv, env={}, stdout=out, stderr=err)
    try:
        while (code := child.poll()) is None:
            time.sleep(_LOOK_EVERY_S)
        return code
    finally:
        processes.stop(child, grace_s=_CANCEL_S)


def _env_unset_args() -> list[str]:
    """Words for env(1) that take back what our launcher has set, and settings that are in the trial's file by now."""
    names = [name for name in os.environ if name in _OF_THIS_PROCESS or name.startswith(ENV_PREFIX)]
    names += ["GLOO_SOCKET_IFNAME"] if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else []
    return [f"--unset={name}" for name in names]


def _metric(name: str, value: float, subject: str = CLUSTER) -> Metric:
    return Metric(name=name, value=value, unit=METRICS[f"{name.partition('.')[0]}.*"], subject=subject)


def _rules(fault: Fault) -> tuple[Rule, ...]:
    """What must hold after each fault alike."""
    return (
        Rule(
            metric=f"named.{fault}",
            evidence_facts=(f"fault.{fault}",),
            expect="== 1 bool",
            meaning="the report must name the rank that failed, its host and the cause, and none of those that failed "
            "because of it: else a healthy node is taken out, and the sick one stays",
            fix=f"Open the report of the run {fault!r} (artifacts), and RUN/artifacts/train.failure/*/{fault}/jobs/"
            "ranks/attempt1: launcher.err, logs, rank*.jsonl. Silent, though alive? limits.heartbeat_timeout_s is too short here",
        ),
        Rule(
            metric=f"ended_in_time.{fault}",
            evidence_facts=(f"fault.{fault}",),
            expect="== 1 bool",
            meaning="a job whose rank has failed must end on all nodes: until then it holds them, and does nothing",
            fix="scontrol show config | grep -E 'KillWait|UnkillableStep|Epilog|ProctrackType'; how long the Epilog "
            "takes by itself; teardown_s, where more is right here",
        ),
        Rule(
            metric=f"leftover_jobs.{fault}",
            evidence_facts=(f"job.{fault}",),
            expect="== 0",
            applies_if={"scheduler": "slurm"},
            meaning="the allocation was not released: its nodes are kept from everybody else, and somebody pays for them",
            fix="squeue --all --states=all; scancel ID. COMPLETING without end: on its nodes, journalctl -u slurmd "
            "-n 50, and ps -eo pid,stat,wchan,cmd | grep ' D'",
        ),
        Rule(
            metric=f"leftover_processes.{fault}",
            evidence_facts=(f"left.{fault}",),
            expect="== 0",
            meaning=leftovers.CHECK.rules[0].meaning,
            fix=leftovers.CHECK.rules[0].fix,
        ),
    )


CHECK = Check(
    name="train.failure",
    title="A training whose rank fails ends everywhere, and names it",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CONTROL,  # its runs take the nodes: nothing else of this trial may have them then
    metrics=METRICS,
    rules=tuple(rule for fault in FAULTS for rule in _rules(fault)),
    measure=measure,
    limit_s=1800,  # six jobs through a queue, three of which start torch
    options=FailureOptions,
)
