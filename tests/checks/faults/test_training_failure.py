from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.faults import failing_job
from seatrial.checks.faults.failing_job import ERROR_MESSAGE, Fault, InjectedFault
from seatrial.checks.faults.training_failure import (
    CHECK,
    FAULTS,
    TrialRunner,
    _env_unset_args,
    _read_fault,
    allocation_observations,
    leftover_observations,
    report_observations,
)
from seatrial.config.schema import Config
from seatrial.discover.slurm_facts import UNKNOWN, Job
from seatrial.judge.rules import judge_check
from seatrial.model import (
    Decision,
    DecisionValue,
    Fact,
    JobResult,
    JobState,
    Measurement,
    Metric,
    NotApplicable,
    Observation,
    Outcome,
    SeatrialError,
    Trial,
    Verdict,
)
from seatrial.worker import HEARTBEAT_INTERVAL_S
from tests.processes import Program, load

# Longer than the end of a job takes on a busy machine: a rank that has failed gives no sign of life meanwhile.
TRIAL = """
limits: {heartbeat_timeout_s: 12}
checks:
  train.failure:
"""
CULPRIT = "rank 3 (node1/rank3, pid 41)"
CAUSES: dict[Fault, str] = {
    "error": f"train.failing_job: RuntimeError: {ERROR_MESSAGE}",
    "kill": "killed by SIGKILL; last status: train.failing_job",
    "stop": "no heartbeat for 6 s; last status: train.failing_job",
}
COMMITTED = 1_000.0
ALLOWED = {"teardown_s": 30.0, "KillWait": 2.0}


def trial(fault: Fault, seconds: float = 12, **result: Any) -> Trial:
    """The record of a run that began 10 s before the fault, and told the truth, but for what a test changes in it."""
    made = {
        "job": "ranks",
        "attempt": 1,
        "launcher": "slurm",
        "state": JobState.HUNG if fault == "stop" else JobState.FAILED,
        "started": COMMITTED - 10,
        "seconds": seconds,
        "startup_s": 5,
        "culprit": CULPRIT,
        "cause": CAUSES[fault],
        "scheduler_id": "7",
        "nodes": "node[0-1]",
    }
    result_of_it = JobResult(**{**made, **result})
    words = f"{result_of_it.failed_subject}: {result_of_it.cause}"
    verdict = Verdict(check="train.failing_job", subject="node1/rank3", outcome=Outcome.ERROR, detail=words)
    return Trial(
        seatrial="0",
        name=fault,
        command=(),
        host="login",
        started=COMMITTED - 12,
        seconds=seconds + 2,
        config={},
        origins={},
        environment={},
        jobs=(),
        results=(result_of_it,),
        measurements=(),
        verdicts=(verdict,),
        findings=(),
        timings=(),
        decision=Decision(value=DecisionValue.INCOMPLETE, reason="train.failing_job is ERROR"),
    )


def victim(fault: Fault, time: float = COMMITTED) -> InjectedFault:
    return InjectedFault(fault=fault, rank=3, node="node1", subject="node1/rank3", pid=41, time=time)


def verdicts(observed: Iterable[Observation]) -> list[Verdict]:
    seen = list(observed)
    facts = {"scheduler": "slurm"} | {one.name: one.value for one in seen if isinstance(one, Fact)}
    metrics = tuple(one for one in seen if isinstance(one, Metric))
    return judge_check(CHECK, [Measurement(check=CHECK.name, subject="login", metrics=metrics, facts=facts)], {}, "")


def failed(observed: Iterable[Observation]) -> dict[str, str]:
    """What fails, by metric, with its evidence."""
    return {one.metric: one.evidence for one in verdicts(observed) if one.outcome is Outcome.FAIL}


def passed(observed: Iterable[Observation]) -> set[str]:
    return {one.metric for one in verdicts(observed) if one.outcome is Outcome.PASS}


@pytest.mark.parametrize("fault", FAULTS)
class TestWhatIsTold:
    def test_the_truth_in_time(self, fault: Fault) -> None:
        assert passed(report_observations(victim(fault), trial(fault), ALLOWED)) == {
            f"named.{fault}",
            f"ended_in_time.{fault}",
        }

    @pytest.mark.parametrize(
        "lie",
        [
            {"culprit": "rank 0 (node0/rank0, pid 40)"},
            {"culprit": "rank 3 (node0/rank3, pid 41)"},
            {"culprit": "rank 3 (node1/rank3, pid 41), rank 0 (node0/rank0, pid 40)"},
            {"culprit": "launcher"},
            {"cause": "train.failing_job: RuntimeError: Connection closed by peer"},
            {"state": JobState.TIMEOUT},
            {"state": JobState.COMPLETED},
        ],
    )
    def test_another_culprit_or_cause(self, fault: Fault, lie: dict[str, Any]) -> None:
        found = failed(report_observations(victim(fault), trial(fault, **lie), ALLOWED))
        assert list(found) == [f"named.{fault}"]
        assert str(next(iter(lie.values()))) in found[f"named.{fault}"]
        assert "node1/rank3, pid 41" in found[f"named.{fault}"]

    @pytest.mark.parametrize(
        "change",
        [
            {"subject": "node0/rank0"},
            {"detail": "rank 0 (node0/rank0, pid 40): killed by SIGKILL"},
            {"outcome": Outcome.FAIL},
        ],
    )
    def test_an_innocent_rank_beside_the_right_one(self, fault: Fault, change: dict[str, Any]) -> None:
        record = trial(fault)
        other = replace(record.verdicts[0], **change)
        accused = record.model_copy(update={"verdicts": (*record.verdicts, other)})
        assert (
            next(iter(change.values()))
            in failed(report_observations(victim(fault), accused, ALLOWED))[f"named.{fault}"]
        )

    def test_a_report_without_a_word_of_it(self, fault: Fault) -> None:
        silent = trial(fault).model_copy(update={"verdicts": ()})
        assert set(failed(report_observations(victim(fault), silent, ALLOWED))) == {f"named.{fault}"}

    def test_an_end_that_comes_late(self, fault: Fault) -> None:
        found = failed(report_observations(victim(fault), trial(fault, seconds=10 + 32.5), ALLOWED))
        assert list(found) == [f"ended_in_time.{fault}"]
        assert (
            "32.5 s after the fault; may take 32 s: teardown_s 30 s + KillWait 2 s" in found[f"ended_in_time.{fault}"]
        )

    @pytest.mark.parametrize("time", [COMMITTED - 12, COMMITTED + 4])
    def test_clocks_that_cannot_be_compared(self, fault: Fault, time: float) -> None:
        with pytest.raises(SeatrialError, match="the clock of node1 says"):
            list(report_observations(victim(fault, time), trial(fault), ALLOWED))


class TestWhatIsLeft:
    @pytest.mark.parametrize(
        ("job", "outcome"),
        [
            (Job(id="7", state="FAILED", exit_code=1), Outcome.PASS),
            (Job(id="7", state=UNKNOWN), Outcome.PASS),
            (Job(id="7", state="COMPLETING"), Outcome.FAIL),
            (Job(id="7", state="RUNNING", nodes="node[0-1]"), Outcome.FAIL),
        ],
    )
    def test_a_job_in_the_queue(self, job: Job, outcome: Outcome) -> None:
        found = [
            one.outcome
            for one in verdicts(allocation_observations("stop", job))
            if one.message.startswith("leftover_jobs.stop is ")
        ]
        assert found == [outcome]

    def look(self, node: str, *processes: str, error: str | None = None) -> Measurement:
        count = Metric(name="processes", value=len(processes), unit="count", subject=node)
        facts = {"left": [*processes]}
        return Measurement(
            check="nodes.leftovers", subject=node, metrics=() if error else (count,), facts=facts, error=error
        )

    def test_a_process_on_one_node(self) -> None:
        looks = [self.look("node0"), self.look("node1", "node1: pid 41, stopped: python -m seatrial.worker")]
        found = [one for one in verdicts(leftover_observations("kill", looks, 2)) if one.outcome is Outcome.FAIL]
        assert [(one.metric, one.subject) for one in found] == [("leftover_processes.kill", "node1")]
        assert "pid 41, stopped" in found[0].evidence
        assert failed(leftover_observations("kill", [self.look("node0"), self.look("node1")], 2)) == {}

    def test_a_node_that_was_not_looked_at(self) -> None:
        for second in ([], [self.look("node0")], [self.look("node1", error="node1 is drained")]):
            with pytest.raises(SeatrialError, match=r"of 2 nodes told .*(drained|no error)"):
                list(leftover_observations("kill", [self.look("node0"), *second], 2))

    def test_without_a_scheduler_there_is_no_queue(self) -> None:
        seen = [Fact(name="scheduler", value="none")]
        skipped = {one.metric for one in verdicts(seen) if one.outcome is Outcome.SKIP}
        assert skipped == {f"leftover_jobs.{fault}" for fault in FAULTS}


class TestRunsThatCannotBeCarriedOut:
    def desk(self, folder: Path, **config: Any) -> TrialRunner:
        return TrialRunner(folder, Config.model_validate({"name": "t", "checks": {}, **config}), lambda _: None)

    def test_one_that_is_refused(self, tmp_path: Path) -> None:
        desk = self.desk(tmp_path, launcher="local", cluster={"nodes": 2})
        with pytest.raises(SeatrialError, match=r"run kill ended with 2 and left no record: .*it has one node"):
            desk.run("kill", failing_job.CHECK, 60, fault="kill")

    @pytest.mark.parametrize(
        ("change", "kind", "why"),
        [
            ({"skipped": "needs 2 ranks, this placement has 1"}, NotApplicable, "needs 2 ranks"),
            ({"error": "launcher slurm: no such partition"}, SeatrialError, "before its rank could fail: .*partition"),
        ],
    )
    def test_one_whose_fault_never_came(
        self, tmp_path: Path, change: dict[str, str], kind: type[Exception], why: str
    ) -> None:
        measurement = Measurement(check="train.failing_job", subject="cluster", **change)
        with pytest.raises(kind, match=why):
            _read_fault(tmp_path / "fault.json", trial("kill").model_copy(update={"measurements": (measurement,)}))

    def test_one_that_was_stopped_from_outside(self, tmp_path: Path) -> None:
        (tmp_path / "fault.json").write_text(victim("kill").model_dump_json())
        assert _read_fault(tmp_path / "fault.json", trial("kill")) == victim("kill")
        with pytest.raises(SeatrialError, match="interrupted"):
            _read_fault(tmp_path / "fault.json", trial("kill").model_copy(update={"stop_reason": "interrupted"}))

    def test_nodes_are_those_of_the_run(self, tmp_path: Path) -> None:
        desk = self.desk(tmp_path, slurm={"nodelist": "node[0-7]"})
        assert desk.on_nodes("node[2-3]").config.slurm.nodelist == "node[2-3]"
        assert desk.on_nodes("").config.slurm.nodelist == "node[0-7]"


def test_a_run_gets_the_environment_of_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("SEATRIAL_SET_LIMITS__SILENCE_S", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    assert set(_env_unset_args()) >= {
        "--unset=RANK",
        "--unset=SEATRIAL_SET_LIMITS__SILENCE_S",
        "--unset=GLOO_SOCKET_IFNAME",
    }
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "--unset=GLOO_SOCKET_IFNAME" not in _env_unset_args()


def check(run_dir: Path) -> Measurement:
    (measurement,) = load(run_dir).measurements
    return measurement


def values(measurement: Measurement, metric: str) -> Iterator[float]:
    for fault in FAULTS:
        yield next(one.value for one in measurement.metrics if one.name == f"{metric}.{fault}")


@pytest.mark.training
def test_three_faults_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TRIAL)
    program = Program("run", tmp_path / "t.yaml", "--out", tmp_path / "run")
    code, output, err = program.finish(240)
    assert (code, program.left_behind()) == (0, []), output + err
    measured = check(tmp_path / "run")
    assert list(values(measured, "named")) == [1, 1, 1]
    # heartbeat_timeout_s counts from the last pulse, and that was before the stop
    assert 12 - HEARTBEAT_INTERVAL_S < list(values(measured, "job_end_s"))[2] < 42
    told_of_stop = str(measured.facts["fault.stop"])
    assert "stopped by a signal" in told_of_stop
    assert "may take 42 s: teardown_s 30 s + limits.heartbeat_timeout_s 12 s" in told_of_stop
    assert all((tmp_path / "run" / one.path).exists() for one in measured.artifacts)
    assert len(measured.artifacts) == len(FAULTS)
