from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import rank
from seatrial.checks import catalog
from seatrial.checks.check import HOURS_UNDER_LOAD, Context
from seatrial.checks.gpu import soak
from seatrial.checks.gpu.soak import CHECK, Round
from seatrial.config.layers import resolve
from seatrial.judge.insights import trial_insights
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, UsageError, worst
from seatrial.pipeline.plan import NodeGpus, Plan, make_plan
from seatrial.util import journal
from seatrial.util.journal import Journal
from seatrial.worker import measure

OPTIONS = {"budget_s": 600, "round_s": 100}


def make_round(**changes: Any) -> Round:
    values: dict[str, Any] = {
        "device": "",
        "seconds": 100,
        "load_s": 90,
        "speeds": {"products": 700.0, "copy": 4000.0, "training": 1e5},
        "changed_products": 0,
        "relative_error": 0.3,
        "wrong_words": 0,
        "wrong_elements": 0,
        "losses": "a",
        "steps": 10,
        "errors": {"FAIL": 0, "WARN": 0},
    }
    return Round.model_validate(values | changes)


class Rounds:
    """Replaces the work of one rank on a GPU: round n has the changes ``changes[n]``; ``count``: rounds so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, changes: dict[int, dict[str, Any]] | None = None) -> None:
        self.count, self.changes = 0, changes or {}
        facts = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}
        monkeypatch.setattr(rank, "gather", lambda each: [each])
        monkeypatch.setattr(rank, "describe_devices", lambda device: facts)
        monkeypatch.setattr(soak, "_run_round", self.run)

    def run(self, _context: Context, _options: object, device: str, _load: object, steps: int) -> Round:
        assert steps == (10 if self.count else 0)
        self.count += 1
        return make_round(device=device, **self.changes.get(self.count, {}))


def run(out: Path, uuid: str = "GPU-1") -> Measurement:
    context = Context(
        node="n", rank=0, world_size=1, local_rank=0, device="cuda:0", expected_gpus=None, artifacts_dir=out,
        run_dir=out, gpu_uuid=uuid,
    )  # fmt: skip
    return measure(CHECK, context, OPTIONS)


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    verdicts = list(judge_check(CHECK, [measurement], {}, "t"))
    metrics = {verdict.metric for verdict in verdicts}
    return {name: worst(each.outcome for each in verdicts if each.metric == name) for name in metrics}


def bad(measurement: Measurement) -> dict[str, Outcome]:
    return {name: outcome for name, outcome in outcomes(measurement).items() if outcome in (Outcome.FAIL, Outcome.WARN)}


def test_rounds_fill_the_budget_and_the_report_states_the_rare_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch)
    measurement = run(tmp_path)
    assert rounds.count == measurement.facts["rounds"] == 6
    assert measurement.error is None
    assert not bad(measurement)
    assert measurement.facts[HOURS_UNDER_LOAD] == pytest.approx(0.15)
    (insight,) = trial_insights(resolve("burn-in", environ={}, schemas=catalog()).config, [measurement], catalog())
    seen: Any = insight.values["seen"]
    assert seen["1"] == pytest.approx(13.93, abs=0.01)  # 1 - exp(-0.15)
    assert "a GPU shows once" in insight.text


def test_the_rare_faults_of_a_run_without_gpus_are_those_of_cpus() -> None:
    measurement = Measurement(
        check="device.soak", subject="cluster", rank=0, facts={"gpu": None, HOURS_UNDER_LOAD: 1.0}
    )
    (insight,) = trial_insights(resolve("burn-in", environ={}, schemas=catalog()).config, [measurement], catalog())
    assert "GPU" not in insight.text


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"losses": "b"}, "changed_losses"),
        ({"losses": ""}, "changed_losses"),
        ({"changed_products": 1}, "changed_products"),
        ({"wrong_words": 2}, "wrong_words"),
        ({"relative_error": 1.1}, "relative_error"),
    ],
)
def test_a_wrong_result_ends_the_rounds(
    changes: dict[str, Any], metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(monkeypatch, {2: changes})
    measurement = run(tmp_path)
    assert rounds.count == 2
    assert bad(measurement) == {metric: Outcome.FAIL}


def test_a_gpu_that_slows_down_over_the_rounds_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"speeds": {"products": 600.0, "copy": 3760.0, "training": 1e5}}
    Rounds(monkeypatch, {5: slow, 6: slow})
    assert bad(run(tmp_path)) == {"drift.products": Outcome.FAIL, "drift.copy": Outcome.WARN}


def test_resume_continues_with_the_rest_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = soak_device(tmp_path, monkeypatch)
    saved = Journal(tmp_path / "rounds.rank0.jsonl")
    for changes in ({"errors": {"FAIL": 1, "WARN": 0}}, {"errors": {"FAIL": 0, "WARN": 3}}):
        saved.append(make_round(device=device, **changes).model_dump(mode="json"))
    with (tmp_path / "rounds.rank0.jsonl").open("a") as file:
        file.write('{"device": "cut by a ki')
    rounds = Rounds(monkeypatch)
    rounds.count = 2
    measurement = run(tmp_path)
    assert rounds.count == measurement.facts["rounds"] == 6
    assert bad(measurement) == {"errors_before_resume": Outcome.FAIL, "warnings_before_resume": Outcome.WARN}
    assert measurement.facts["unreadable_lines"] == {"rounds.rank0.jsonl": 1}


def test_the_record_of_each_resume_counts_the_damaged_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    first, path = run(tmp_path), tmp_path / "rounds.rank0.jsonl"
    assert first.facts["unreadable_lines"] == {}
    assert "not compared" not in str(first.facts["method"])
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"losses": "a"', '"losses": "b"')  # no longer what its SHA-256 states
    path.write_text("\n".join(lines))
    # Another rank has completed 3 rounds: the surplus ones of this rank are dropped, its damaged line stays in the file
    monkeypatch.setattr(rank, "gather", lambda each: [each, 3] if type(each) is int else [each])
    rounds.count = 3
    for _ in range(2):
        measurement = run(tmp_path)
        assert measurement.facts["unreadable_lines"] == {"rounds.rank0.jsonl": 1}
        assert measurement.facts["rounds"] == 6
        assert "1 of rounds.rank0.jsonl" in str(measurement.facts["method"])
        rounds.count = 3


def soak_device(out: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a round, as a run on GPU-1 writes it."""
    (out / "first").mkdir()
    Rounds(monkeypatch)
    run(out / "first")
    records, _ = journal.read(out / "first" / "rounds.rank0.jsonl")
    return str(records[0]["device"])


def test_resume_on_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(monkeypatch)
    run(tmp_path)
    measurement = run(tmp_path, "GPU-2")
    assert measurement.error is not None
    assert "GPU-1" in measurement.error
    assert "GPU-2" in measurement.error


def test_a_full_disk_keeps_the_earlier_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    append = Journal.append

    def full_after_two(target: Journal, record: dict[str, Any]) -> None:
        if rounds.count > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(target, record)

    monkeypatch.setattr(Journal, "append", full_after_two)
    measurement = run(tmp_path)
    assert measurement.error is not None
    assert "2 rounds are saved" in measurement.error
    assert len((tmp_path / "rounds.rank0.jsonl").read_text().splitlines()) == 2


def test_budget_sets_duration_and_time_limit() -> None:
    def plan(budget: str, trial: str = "burn-in") -> Plan:
        overrides = [("--budget", "budget", budget)]
        config = resolve(trial, overrides=overrides, environ={}, schemas=catalog()).config
        return make_plan(config, catalog(), NodeGpus(1))

    job = next(job for job in plan("24h").jobs if "device.soak" in job.checks)
    assert job.options["device.soak"]["budget_s"] == 86400
    assert job.limits["device.soak"] > 86400
    with pytest.raises(UsageError, match=r"^--budget 2m: device\.soak: shorter than 3 .* at least 3m") as short:
        plan("120s")
    assert "pydantic" not in str(short.value)
    assert "Value error" not in str(short.value)
    with pytest.raises(UsageError, match="takes a budget"):
        plan("8m", "quick")
    for text in ("8x", "0m", "32d"):
        with pytest.raises(UsageError, match=rf"^--budget: expected a number and s, m, h or d, .* \(got '{text}'\)$"):
            plan(text)
