from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks.declare import Answer, answers
from seatrial.checks.faults import failing_job
from seatrial.checks.faults.failing_job import ERROR_MESSAGE, Fault, FaultRecord
from seatrial.checks.faults.train_failure import (
    CHECK,
    FAULTS,
    FailureOptions,
    TrialRunner,
    _env_unset_args,
    _read_fault,
    _with_short_timeout,
    allocation_observation,
    leftover_observations,
    report_observations,
)
from seatrial.config.schema import Config
from seatrial.discover.slurm_facts import UNKNOWN, JobRecord
from seatrial.judge.rules import judge_check
from seatrial.model import (
    CLUSTER,
    Absent,
    Decision,
    DecisionValue,
    JobResult,
    JobState,
    Measurement,
    Metric,
    NotApplicable,
    Outcome,
    SeatrialError,
    Trial,
    Verdict,
)
from seatrial.worker import HEARTBEAT_INTERVAL_S
from tests.processes import Program, load

TRIAL = """
cluster: {gpus_per_node: 0}
checks:
  train.failure:
"""
FAILED_SUBJECT = "rank 3 (node1/rank3, pid 41)"
CAUSES: dict[Fault, str] = {
    "error": f"train.failing_job: RuntimeError: {ERROR_MESSAGE}",
    "kill": "killed by SIGKILL; last status: train.failing_job",
    "stop": "no heartbeat for 6 s; last status: train.failing_job",
}
FAULT_TIME = 1_000.0
ALLOWED = {"teardown_s": 30.0, "KillWait": 2.0}


def trial(fault: Fault, seconds: float = 12, **result: Any) -> Trial:
    """Returns the record of a correct run that started 10 s before the fault, with changes to its job result."""
    values = {
        "job": "ranks",
        "attempt": 1,
        "launcher": "slurm",
        "state": JobState.HUNG if fault == "stop" else JobState.FAILED,
        "started": FAULT_TIME - 10,
        "seconds": seconds,
        "startup_s": 5,
        "failed_subject": FAILED_SUBJECT,
        "cause": CAUSES[fault],
        "scheduler_id": "7",
        "nodelist": "node[0-1]",
    }
    job_result = JobResult(**{**values, **result})
    detail = f"{job_result.failed_subject}: {job_result.cause}"
    verdict = Verdict(check="train.failing_job", subject="node1/rank3", outcome=Outcome.ERROR, detail=detail)
    return Trial(
        seatrial="0",
        name=fault,
        command=(),
        host="login",
        started=FAULT_TIME - 12,
        seconds=seconds + 2,
        config={},
        origins={},
        environment={},
        jobs=(),
        results=(job_result,),
        measurements=(),
        verdicts=(verdict,),
        findings=(),
        timings=(),
        decision=Decision(value=DecisionValue.INCOMPLETE, reason="train.failing_job is ERROR"),
    )


def injected_fault(fault: Fault, time: float = FAULT_TIME) -> FaultRecord:
    return FaultRecord(fault=fault, rank=3, node="node1", subject="node1/rank3", pid=41, time=time)


def verdicts(answered: Iterable[Answer]) -> list[Verdict]:
    observations = list(answers(answered, CHECK.declared, CHECK.name, {None: CLUSTER}))
    metrics = tuple(each for each in observations if isinstance(each, Metric))
    absent = tuple(each for each in observations if isinstance(each, Absent))
    measurement = Measurement(check=CHECK.name, subject="login", metrics=metrics, absent=absent)
    return judge_check(CHECK, [measurement], {}, "")


def failed(observed: Iterable[Answer]) -> dict[str, str]:
    """Returns the evidence of failed metrics by name."""
    return {verdict.metric: verdict.evidence for verdict in verdicts(observed) if verdict.outcome is Outcome.FAIL}


def passed(observed: Iterable[Answer]) -> set[str]:
    return {verdict.metric for verdict in verdicts(observed) if verdict.outcome is Outcome.PASS}


@pytest.mark.parametrize("fault", FAULTS)
class TestReport:
    def test_correct_report_in_time(self, fault: Fault) -> None:
        assert passed(report_observations(injected_fault(fault), trial(fault), ALLOWED)) == {
            f"root_cause_named.{fault}",
            f"ended_in_time.{fault}",
        }

    @pytest.mark.parametrize(
        "change",
        [
            {"failed_subject": "rank 0 (node0/rank0, pid 40)"},
            {"failed_subject": "rank 3 (node0/rank3, pid 41)"},
            {"failed_subject": "rank 3 (node1/rank3, pid 41), rank 0 (node0/rank0, pid 40)"},
            {"failed_subject": "launcher"},
            {"cause": "train.failing_job: RuntimeError: Connection closed by peer"},
            {"state": JobState.TIMEOUT},
            {"state": JobState.COMPLETED},
        ],
    )
    def test_wrong_failed_subject_cause_or_state(self, fault: Fault, change: dict[str, Any]) -> None:
        evidence = failed(report_observations(injected_fault(fault), trial(fault, **change), ALLOWED))
        assert list(evidence) == [f"root_cause_named.{fault}"]
        assert str(next(iter(change.values()))) in evidence[f"root_cause_named.{fault}"]
        assert "node1/rank3, pid 41" in evidence[f"root_cause_named.{fault}"]

    @pytest.mark.parametrize(
        "change",
        [
            {"subject": "node0/rank0"},
            {"detail": "rank 0 (node0/rank0, pid 40): killed by SIGKILL"},
            {"outcome": Outcome.FAIL},
        ],
    )
    def test_other_rank_in_the_report(self, fault: Fault, change: dict[str, Any]) -> None:
        record = trial(fault)
        other = replace(record.verdicts[0], **change)
        changed = record.model_copy(update={"verdicts": (*record.verdicts, other)})
        assert (
            next(iter(change.values()))
            in failed(report_observations(injected_fault(fault), changed, ALLOWED))[f"root_cause_named.{fault}"]
        )

    def test_report_without_verdicts(self, fault: Fault) -> None:
        no_verdicts = trial(fault).model_copy(update={"verdicts": ()})
        assert set(failed(report_observations(injected_fault(fault), no_verdicts, ALLOWED))) == {
            f"root_cause_named.{fault}"
        }

    def test_late_end(self, fault: Fault) -> None:
        evidence = failed(report_observations(injected_fault(fault), trial(fault, seconds=10 + 32.5), ALLOWED))
        assert list(evidence) == [f"ended_in_time.{fault}"]
        limits = "32.5 s after the fault; limit 32 s: teardown_s 30 s + KillWait 2 s"
        assert limits in evidence[f"ended_in_time.{fault}"]

    @pytest.mark.parametrize("time", [FAULT_TIME - 12, FAULT_TIME + 4])
    def test_clock_skew(self, fault: Fault, time: float) -> None:
        with pytest.raises(SeatrialError, match=r"clock of node1"):
            list(report_observations(injected_fault(fault, time), trial(fault), ALLOWED))


class TestLeftovers:
    @pytest.mark.parametrize(
        ("job", "outcome"),
        [
            (JobRecord(id="7", state="FAILED", exit_code=1), Outcome.PASS),
            (JobRecord(id="7", state=UNKNOWN), Outcome.PASS),
            (JobRecord(id="7", state="COMPLETING"), Outcome.FAIL),
            (JobRecord(id="7", state="RUNNING", nodes="node[0-1]"), Outcome.FAIL),
        ],
    )
    def test_job_in_the_queue(self, job: JobRecord, outcome: Outcome) -> None:
        outcomes = [
            verdict.outcome
            for verdict in verdicts([allocation_observation("stop", job)])
            if verdict.metric == "leftover_jobs.stop" and verdict.value is not None
        ]
        assert outcomes == [outcome]

    def measurement(self, node: str, *processes: str, error: str | None = None) -> Measurement:
        evidence: list[JsonValue] = [*processes]
        name, number = "leftover_processes", len(processes)
        count = Metric(name=name, value=number, unit="count", subject=node, evidence=evidence or None)
        return Measurement(check="nodes.leftovers", subject=node, metrics=() if error else (count,), error=error)

    def test_process_on_one_node(self) -> None:
        measurements = [
            self.measurement("node0"),
            self.measurement("node1", "node1: pid 41, stopped: python -m seatrial.worker"),
        ]
        failures = [
            verdict
            for verdict in verdicts(leftover_observations("kill", measurements, 2))
            if verdict.outcome is Outcome.FAIL
        ]
        assert [(verdict.metric, verdict.subject) for verdict in failures] == [("leftover_processes.kill", "node1")]
        assert "pid 41, stopped" in failures[0].evidence
        assert failed(leftover_observations("kill", [self.measurement("node0"), self.measurement("node1")], 2)) == {}

    def test_node_without_measurement(self) -> None:
        for second in ([], [self.measurement("node0")], [self.measurement("node1", error="node1 is drained")]):
            with pytest.raises(SeatrialError, match=r"of 2 nodes reported"):
                list(leftover_observations("kill", [self.measurement("node0"), *second], 2))


class TestRunErrors:
    def runner(self, folder: Path, **config: Any) -> TrialRunner:
        return TrialRunner(folder, Config.model_validate({"name": "t", "checks": {}, **config}), lambda _: None)

    def test_rejected_run(self, tmp_path: Path) -> None:
        runner = self.runner(tmp_path, launcher="local", cluster={"nodes": 2})
        with pytest.raises(SeatrialError, match=r"run kill: exit code 2, no trial.json"):
            runner.run("kill", failing_job.CHECK, 60, fault="kill")

    @pytest.mark.parametrize(
        ("change", "exception", "reason"),
        [
            ({"skipped": "needs 2 ranks, this placement has 1"}, NotApplicable, "needs 2 ranks"),
            ({"error": "launcher slurm: no such partition"}, SeatrialError, "before the fault: .*partition"),
        ],
    )
    def test_run_without_fault(
        self, tmp_path: Path, change: dict[str, str], exception: type[Exception], reason: str
    ) -> None:
        measurement = Measurement(check="train.failing_job", subject="cluster", **change)
        with pytest.raises(exception, match=reason):
            _read_fault(tmp_path / "fault.json", trial("kill").model_copy(update={"measurements": (measurement,)}))

    def test_interrupted_run(self, tmp_path: Path) -> None:
        (tmp_path / "fault.json").write_text(injected_fault("kill").model_dump_json())
        assert _read_fault(tmp_path / "fault.json", trial("kill")) == injected_fault("kill")
        with pytest.raises(SeatrialError, match="interrupted"):
            _read_fault(tmp_path / "fault.json", trial("kill").model_copy(update={"stop_reason": "interrupted"}))

    def test_nodes_of_the_runner(self, tmp_path: Path) -> None:
        runner = self.runner(tmp_path, slurm={"nodelist": "node[0-7]"})
        assert runner.on_nodes("node[2-3]").config.slurm.nodelist == "node[2-3]"
        assert runner.on_nodes("").config.slurm.nodelist == "node[0-7]"


def test_a_shorter_heartbeat_timeout_of_the_trial_applies() -> None:
    options = FailureOptions(heartbeat_timeout_s=15)
    for of_trial, used in ((60, 15), (12, 12)):
        config: dict[str, JsonValue] = {
            "name": "t",
            "checks": {},
            "limits": {"heartbeat_timeout_s": of_trial, "startup_s": 7},
        }
        limits = _with_short_timeout(config, options).limits
        assert (limits.heartbeat_timeout_s, limits.startup_s) == (used, 7)


def test_launcher_variables_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("SEATRIAL_SET_LIMITS__HEARTBEAT_TIMEOUT_S", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    assert set(_env_unset_args()) >= {
        "--unset=RANK",
        "--unset=SEATRIAL_SET_LIMITS__HEARTBEAT_TIMEOUT_S",
        "--unset=GLOO_SOCKET_IFNAME",
    }
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "--unset=GLOO_SOCKET_IFNAME" not in _env_unset_args()


def single_measurement(run_dir: Path) -> Measurement:
    (measurement,) = load(run_dir).measurements
    return measurement


def values(measurement: Measurement, metric: str) -> Iterator[float]:
    for fault in FAULTS:
        yield next(item.value for item in measurement.metrics if item.name == f"{metric}.{fault}")


@pytest.mark.training
def test_three_faults_with_two_processes(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TRIAL)
    program = Program("run", tmp_path / "t.yaml", "--set", "telemetry.enabled=false", "--out", tmp_path / "run")
    code, output, err = program.finish(240)
    assert (code, program.left_behind()) == (0, []), output + err
    measurement = single_measurement(tmp_path / "run")
    assert list(values(measurement, "root_cause_named")) == [1, 1, 1]
    assert [each.metric for each in measurement.absent] == [f"leftover_jobs.{fault}" for fault in FAULTS]
    # heartbeat_timeout_s of the check, not the minute of the trial; it counts from the last heartbeat before the stop
    assert 15 - HEARTBEAT_INTERVAL_S < list(values(measurement, "job_end_s"))[2] < 60 - HEARTBEAT_INTERVAL_S
    stop_record = next(str(each.evidence) for each in measurement.metrics if each.name == "ended_in_time.stop")
    assert "stopped by a signal" in stop_record
    assert "limit 45 s: teardown_s 30 s + heartbeat_timeout_s 15 s" in stop_record
    runs = [load((tmp_path / "run" / artifact.path).parent) for artifact in measurement.artifacts]
    assert max(run.started for run in runs) < min(run.started + run.seconds for run in runs), "one after the other"
    assert all((tmp_path / "run" / artifact.path).exists() for artifact in measurement.artifacts)
    assert len(measurement.artifacts) == len(FAULTS)
