"""The pipeline in this process: what is done, what is left, what no Ctrl-C may tear apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial import report
from seatrial.collect import Collected
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu
from seatrial.journal import Journal, Record
from seatrial.model import Job, Limit, Machine, Measurement, Outcome, Trial, UsageError, Verb
from seatrial.plan import Plan
from seatrial.rundir import Request, RunDir
from seatrial.settings import CheckSettings, Cluster, Config
from seatrial.survey import Survey
from seatrial.trial import INTERRUPTED, _done, _scope, _take_up, prepare, preview, run

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


def survey(*models: str) -> Survey:
    gpus = tuple(Gpu(index=index, name=name, uuid=f"GPU-{index}") for index, name in enumerate(models))
    return Survey({}, GpuFacts(gpus=gpus))


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


def test_where_gpus_cannot_be_looked_for_there_may_be_some() -> None:
    blind = Survey({}, GpuFacts(unavailable="no driver", unread={"pci_devices": "/sys: hidden"}))
    assert "is not known: no driver; /sys: hidden" in (blind.devices(request().config).trouble or "")
    assert blind.devices(request(gpus_per_node=0).config).trouble is None
    assert Survey({}, GpuFacts(unavailable="no driver")).devices(request().config).trouble is None


def test_the_machine_is_what_cuda_may_use_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    settings = request().config
    assert survey("H200", "H200").machine(settings).gpus == ("GPU-1",)


def test_a_trials_own_variables_choose_gpus_as_well() -> None:
    hidden = request().config.model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": ""}})
    two = survey("H200", "H200")
    assert "CUDA_VISIBLE_DEVICES hides them all" in two.obstacle(hidden)
    second = request().config.model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": "1"}})
    assert (two.machine(second).gpus, two.devices(second).usable_gpus) == (("GPU-1",), 1)


def test_a_gpu_that_is_lost_is_an_obstacle_unless_somebody_set_it_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = GpuFacts(gpus=(Gpu(index=0, uuid="GPU-0"),), lost=("gpu1: GPU is lost",))
    one_left = Survey({}, gpus)
    assert one_left.obstacle(request().config) == "1 of the 2 GPUs of this machine can be used: gpu1: GPU is lost"
    assert one_left.devices(request().config).trouble is None, "what is left is measured"
    assert one_left.obstacle(request(gpus_per_node=1).config) == ""
    assert survey("H200").obstacle(request().config) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert one_left.obstacle(request().config) == ""


def test_another_driver_or_kernel_makes_another_machine() -> None:
    def of(kernel: str, driver: str) -> Machine:
        facts = {"host": {"os": {"kernel": kernel}, "software": {"torch": "2.13.0"}}}
        return Survey(facts, GpuFacts(driver=driver)).machine(request().config)

    assert of("6.1", "580") == of("6.1", "580")
    assert len({of("6.1", "580"), of("6.2", "580"), of("6.1", "590")}) == 3
    assert {"kernel 6.1", "driver 580", "torch 2.13.0"} < set(of("6.1", "580").system)


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


@pytest.mark.parametrize("start", ["run", "preview", "prepare"])
def test_a_threshold_above_the_hardware_is_refused_before_anything_starts(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seatrial.trial.discover", lambda: survey("NVIDIA H100 80GB HBM3"))
    gemm = CheckSettings(expect={"tflops.bf16": Limit.parse("> 1979 TFLOP/s")})  # the datasheet's, with sparsity
    config = Config(name="t", launcher="local", cluster=Cluster(gpus_per_node=1), checks={"device.gemm": gemm})
    asked = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    ways: dict[str, Callable[[], object]] = {
        "run": lambda: run(RunDir.create(tmp_path / "run", asked), Quiet()),
        "preview": lambda: preview(asked),
        "prepare": lambda: prepare(asked, tmp_path / "run"),
    }
    with pytest.raises(UsageError, match=r"device\.gemm\.expect\.tflops\.bf16: > 1,979 TFLOP/s is above .* 989\.5"):
        ways[start]()
    assert not list((tmp_path / "run").glob("jobs/*"))


def test_only_what_is_measured_here_counts_as_the_gpus_of_a_trial() -> None:
    both = survey("NVIDIA A", "NVIDIA B")
    assert both.models(request().config) == ("NVIDIA A", "NVIDIA B")
    assert both.models(request(gpus_per_node=1).config) == ("NVIDIA A",)
    elsewhere = request().config.model_copy(update={"launcher": "slurm"})
    assert both.models(elsewhere) == ()
