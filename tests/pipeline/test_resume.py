"""Resuming: measurements of earlier sessions that count, and those that are repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.discover.gpu import GpuFacts
from seatrial.model import Absent, Machine, Measurement, Why
from seatrial.pipeline.plan import Plan
from seatrial.pipeline.results import GpuExchanged, TrialResults, new_run_command
from seatrial.pipeline.resume import completed_checks, load_earlier_sessions, remaining_plan
from seatrial.pipeline.run_directory import RunDir
from seatrial.pipeline.this_host import ThisHost
from seatrial.util.journal import Journal, Record
from tests.pipeline.fixtures import HERE, JOB, SilentDisplay, request, results


def test_two_measurements_of_one_rank_do_not_complete_a_check() -> None:
    plan = Plan((JOB,), (), {})
    first, second = (Measurement(check="train.cnn", subject=f"n0/rank{rank}", rank=rank) for rank in (0, 1))
    assert completed_checks(plan, [first, first]) == []
    assert completed_checks(plan, [first, second]) == ["train.cnn"]


def test_check_skipped_by_an_earlier_plan_is_not_complete() -> None:
    skipped = Measurement(check="train.cnn", subject="cluster", skipped="no GPU")
    one_rank = JOB.model_copy(update={"ranks_per_node": 1})
    assert completed_checks(Plan((one_rank,), (), {}), [skipped]) == []
    assert completed_checks(Plan((), (skipped,), {}), [skipped]) == ["train.cnn"]


@pytest.mark.parametrize("now", [Machine(host="other", gpus=HERE.gpus), Machine(host="h", gpus=("GPU-1", "GPU-3"))])
def test_measurements_of_another_machine_are_discarded_permanently(tmp_path: Path, now: Machine) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(HERE)
    run_dir.save(Measurement(check="host.inventory", subject="h", rank=0))
    same_machine = results(run_dir)
    load_earlier_sessions(same_machine, HERE)
    assert len(same_machine.measurements) == 1
    changed = results(run_dir)
    load_earlier_sessions(changed, now)
    assert changed.measurements == []
    returned = results(run_dir)
    load_earlier_sessions(returned, HERE)
    assert returned.measurements == [], "also after a return to the first machine"


def test_a_check_that_was_too_noisy_for_a_threshold_is_measured_again(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(HERE)
    absent = (Absent(metric="scaling_efficiency", why=Why.UNREADABLE, reason="too noisy"),)
    run_dir.save(Measurement(check="train.ddp", subject="h", rank=0, absent=absent))
    for expect, kept in (({}, 1), ({"scaling_efficiency": "> 90 %"}, 0)):
        checks = {"train.ddp": CheckSettings.model_validate({"expect": expect})}
        resumed = TrialResults(run_dir, run_dir.request.config.model_copy(update={"checks": checks}), SilentDisplay())
        load_earlier_sessions(resumed, HERE)
        assert len(resumed.measurements) == kept


def test_record_of_another_machine_is_set_aside(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(HERE)
    run_dir.save(Measurement(check="host.inventory", subject="h", rank=0))
    record = tmp_path / "out/trial.json"
    record.write_text("ACCEPTED")
    load_earlier_sessions(results(run_dir), HERE)
    assert record.exists()
    display = SilentDisplay()
    new_driver = HERE.model_copy(update={"versions": ("driver 590",)})
    load_earlier_sessions(TrialResults(run_dir, run_dir.request.config, display), new_driver)
    assert display.warnings == ["machine changed from h to h; driver 590: measuring all checks again"]
    assert not record.exists()
    assert (tmp_path / "out/trial.json.before").read_text() == "ACCEPTED"


def test_discard_of_another_machine_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(HERE)
    run_dir.save(Measurement(check="host.inventory", subject="h", rank=0))
    other = Machine(host="other", gpus=())
    append = Journal.append
    written: list[Record] = []

    def append_once(journal: Journal, record: Record) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(record)
        append(journal, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append_once)
        with pytest.raises(KeyboardInterrupt):
            load_earlier_sessions(results(run_dir), other)
    resumed = results(run_dir)
    load_earlier_sessions(resumed, other)
    assert written
    assert resumed.measurements == []


NODES_OF_A_SCHEDULER = Machine(host="", gpus=())


def of_gpu(uuid: str, check: str = "device.gemm") -> Measurement:
    return Measurement(check=check, subject="n0/gpu1", rank=1, gpu_uuid=uuid)


def test_another_gpu_on_a_node_of_the_same_name_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(NODES_OF_A_SCHEDULER)
    run_dir.save(of_gpu("GPU-old"))
    resumed = TrialResults(run_dir, config_of("device.gemm", "device.burn"), SilentDisplay())
    load_earlier_sessions(resumed, NODES_OF_A_SCHEDULER)
    resumed.add_measurement(of_gpu("GPU-old", "device.burn"))
    with pytest.raises(GpuExchanged) as refused:
        resumed.add_measurement(of_gpu("GPU-new", "device.burn"))
    assert all(text in str(refused.value) for text in ("n0/gpu1", "GPU-old", "GPU-new", "device.gemm"))
    assert [each.gpu_uuid for each in run_dir.recover().measurements] == ["GPU-old"] * 2


def test_measurements_of_an_exchanged_gpu_in_the_journal_are_refused_again(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    run_dir.save(NODES_OF_A_SCHEDULER)
    for uuid, check in (("GPU-old", "device.gemm"), ("GPU-new", "device.burn")):
        run_dir.save(of_gpu(uuid, check))
    resumed = TrialResults(run_dir, config_of("device.gemm", "device.burn"), SilentDisplay())
    with pytest.raises(GpuExchanged):
        load_earlier_sessions(resumed, NODES_OF_A_SCHEDULER)
    assert len(resumed.measurements) == 2, "the record shows both"


def test_the_new_run_has_the_command_of_the_old_one_and_another_directory() -> None:
    assert new_run_command(("seatrial", "run", "quick", "--out", "a b")) == "seatrial run quick --out 'a b-2'"
    assert new_run_command(("seatrial", "run", "quick", "--out=runs/x")) == "seatrial run quick --out=runs/x-2"


def config_of(*checks: str) -> Config:
    settings = {name: CheckSettings() for name in checks}
    return request().config.model_copy(update={"checks": settings})


def test_the_plan_of_a_resumed_soak_has_only_the_rest_of_its_budget(tmp_path: Path) -> None:
    """The rounds that one of both ranks has not completed are measured again."""
    checks = {"device.soak": CheckSettings(options={"budget_s": 600, "round_s": 100})}
    trial = request(gpus_per_node=0)
    config = trial.config.model_copy(update={"checks": checks})
    run_dir = RunDir.create(tmp_path / "out", trial.model_copy(update={"config": config}))
    resumed, here = results(run_dir), ThisHost({}, GpuFacts())
    (whole,) = remaining_plan(Plan((), (), {}), resumed, here, 1).jobs
    for rank, rounds in ((0, 3), (1, 2)):
        journal = Journal(run_dir.path / "artifacts/device.soak" / f"rounds.rank{rank}.jsonl")
        for _ in range(rounds):
            journal.append({"seconds": 100.0})
    (rest,) = remaining_plan(Plan((), (), {}), resumed, here, 1).jobs
    assert whole.typical["device.soak"] - rest.typical["device.soak"] == pytest.approx(200)
    assert rest.options == whole.options
    assert rest.limits == whole.limits
