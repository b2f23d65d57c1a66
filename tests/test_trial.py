"""The pipeline in this process: what is done, what is left, what no Ctrl-C may tear apart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from seatrial import report
from seatrial.collect import Collected
from seatrial.journal import Journal, Record
from seatrial.model import Job, Machine, Measurement, Outcome, Trial, Verb
from seatrial.plan import Plan
from seatrial.rundir import Request, RunDir
from seatrial.settings import CheckSettings, Cluster, Config
from seatrial.trial import INTERRUPTED, _done, _scope, _take_up, run
from tests.test_survey import survey

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cpu",
    nodes=1,
    ranks_per_node=2,
    checks=("train.cnn",),
    options={},
    promised_gpus=None,
    limit_s=1,
)
HERE = Machine(host="h", gpus=("GPU-1", "GPU-2"))


class Quiet:
    """Nobody watches."""

    def __init__(self) -> None:
        self.complaints: list[str] = []

    def job_started(self, job: Job, attempt: int) -> None: ...

    def doing(self, words: str) -> None: ...

    def planned(self, jobs: tuple[Job, ...], run_dir: Path) -> None: ...

    def judged(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None: ...

    def complain(self, text: str) -> None:
        self.complaints.append(text)


def request(**cluster: int) -> Request:
    config = Config(name="t", cluster=Cluster(**cluster), checks={"host.inventory": CheckSettings()})
    return Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)


def collected(run_dir: RunDir) -> Collected:
    return Collected(run_dir, run_dir.request.config, Quiet())


def test_one_rank_measured_twice_does_not_stand_for_two() -> None:
    plan = Plan((JOB,), (), {})
    first, second = (Measurement(check="train.cnn", subject=f"n0/rank{rank}", rank=rank) for rank in (0, 1))
    assert _done(plan, [first, first]) == []
    assert _done(plan, [first, second]) == ["train.cnn"]


def test_what_an_earlier_plan_had_skipped_is_not_measured() -> None:
    skipped = Measurement(check="train.cnn", subject="cluster", skipped="no GPU")
    alone = JOB.model_copy(update={"ranks_per_node": 1})
    assert _done(Plan((alone,), (), {}), [skipped]) == []
    assert _done(Plan((), (skipped,), {}), [skipped]) == ["train.cnn"]


@pytest.mark.parametrize("now", [Machine(host="other", gpus=HERE.gpus), Machine(host="h", gpus=("GPU-1", "GPU-3"))])
def test_figures_of_another_host_or_gpu_are_forgotten_for_good(tmp_path: Path, now: Machine) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.keep_machine(HERE)
    run_dir.keep(Measurement(check="host.inventory", subject="h", rank=0))
    same = collected(run_dir)
    _take_up(same, HERE)
    assert len(same.measurements) == 1
    other = collected(run_dir)
    _take_up(other, now)
    assert other.measurements == []
    back = collected(run_dir)
    _take_up(back, HERE)
    assert back.measurements == [], "and coming back does not bring them back"


def test_a_record_of_another_machine_is_set_aside_before_anything_is_measured(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.keep_machine(HERE)
    run_dir.keep(Measurement(check="host.inventory", subject="h", rank=0))
    record = tmp_path / "out/trial.json"
    record.write_text("ACCEPTED")
    _take_up(collected(run_dir), HERE)
    assert record.exists()
    watching = Quiet()
    new_driver = HERE.model_copy(update={"system": ("driver 590",)})
    _take_up(Collected(run_dir, run_dir.request.config, watching), new_driver)
    assert watching.complaints == ["measured before on h, now on h; driver 590: everything is measured again"]
    assert not record.exists()
    assert (tmp_path / "out/trial.json.before").read_text() == "ACCEPTED"


def test_killed_while_it_forgets_another_machine_it_still_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.keep_machine(HERE)
    run_dir.keep(Measurement(check="host.inventory", subject="h", rank=0))
    other = Machine(host="other", gpus=())
    append = Journal.append
    written: list[Record] = []

    def one_line_then_death(journal: Journal, record: Record) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(record)
        append(journal, record)

    with monkeypatch.context() as dying:
        dying.setattr(Journal, "append", one_line_then_death)
        with pytest.raises(KeyboardInterrupt):
            _take_up(collected(run_dir), other)
    again = collected(run_dir)
    _take_up(again, other)
    assert written
    assert again.measurements == []


def test_a_rehearsal_on_a_machine_with_gpus_says_so() -> None:
    plan = Plan((JOB,), (), {})
    assert "no GPU used, though there are 2" in _scope(request(gpus_per_node=0).config, plan, survey("H200", "H200"))
    assert _scope(request(gpus_per_node=0).config, plan, survey()).startswith("REHEARSAL: 1 node, no GPU;")


def test_the_scope_speaks_of_the_gpus_that_are_used() -> None:
    settings = request(gpus_per_node=2).config
    plan = Plan((JOB.model_copy(update={"device": "cuda"}),), (), {})
    assert _scope(settings, plan, survey(*["H200"] * 4)) == "1 node, 2 × H200 of 4"
    assert _scope(settings, Plan((), (), {}), survey("H200", "H200")) == (
        "1 node; no check of this trial computes on a GPU"
    )
    assert _scope(settings, plan, survey("H200")).startswith("1 node; 2 GPUs promised, 1 usable")


def test_ctrl_c_while_the_reports_are_written_does_not_tear_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = report.write_all

    def interrupted(trial: Trial, run_dir: Path) -> list[Path]:
        os.kill(os.getpid(), signal.SIGINT)
        return write_all(trial, run_dir)

    monkeypatch.setattr(report, "write_all", interrupted)
    trial = run(RunDir.create(tmp_path / "out", request()), Quiet())
    assert (trial.decision.value, trial.stopped) == (Verb.ACCEPTED, "")
    assert Trial.model_validate_json((tmp_path / "out/trial.json").read_text()) == trial
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_ctrl_c_while_measuring_is_told_and_keeps_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Collected, measurement: Measurement) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Collected, "measured", interrupt)
    trial = run(RunDir.create(tmp_path / "out", request()), Quiet())
    assert (trial.decision.value, trial.stopped) == (Verb.INCOMPLETE, INTERRUPTED)
    assert (tmp_path / "out/report.html").exists()


@pytest.mark.parametrize(("expect", "verb"), [(0, Verb.INCOMPLETE), (10**9, Verb.REJECTED)])
def test_a_record_that_cannot_be_written_accepts_nothing_but_still_rejects(
    tmp_path: Path, expect: int, verb: Verb
) -> None:
    settings = {"expect": {"nofile_soft": f">= {expect} files"}}
    config = Config(name="t", checks={"host.inventory": CheckSettings.model_validate(settings)})
    run_dir = RunDir.create(tmp_path / "out", request().model_copy(update={"config": config}))
    (tmp_path / "out/report.html").mkdir()
    trial = run(run_dir, Quiet())
    assert trial.decision.value is verb
    written = Trial.model_validate_json((tmp_path / "out/trial.json").read_text())
    assert written.decision == trial.decision
