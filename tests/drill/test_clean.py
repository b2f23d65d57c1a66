"""Clean runs: which alarms count, and what share of false alarms they allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.drill import catalog, clean
from seatrial.drill.clean import clean_drills, list_alarms, run_clean, upper_bound
from seatrial.drill.cpu import CPU_LIMIT
from seatrial.drill.injection import Injection
from seatrial.model import UsageError
from tests.drill.test_evaluate import RECORD, VERDICT, finding
from tests.drill.test_injection import DRILL

NO_ALARM = RECORD.model_copy(update={"verdicts": (), "findings": ()})
ALARM = NO_ALARM.model_copy(update={"verdicts": (VERDICT,), "findings": (finding(),)})


@pytest.mark.parametrize(
    ("events", "runs", "expected"),
    [(0, 40, 0.0722), (0, 300, 0.00994), (1, 40, 0.1132), (40, 40, 1.0), (0, 1, 0.95)],
)
def test_upper_bound(events: int, runs: int, expected: float) -> None:
    """Exact binomial limits; without an event near 3 / runs. 1 of 40: scipy.stats.beta.ppf(0.95, 2, 39)."""
    assert upper_bound(events, runs) == pytest.approx(expected, abs=1e-4)


def test_clean_runs_have_the_checks_thresholds_and_limits_of_all_drills_and_no_fault() -> None:
    drills = ["bit-flip", "shm-small", "memlock-low", "cpu-hog", "rank-killed", "rank-stopped"]
    first, second = clean_drills([catalog()[name] for name in drills])
    assert list(first.checks) == ["collectives.all_reduce", "host.inventory", "host.load", "train.ddp"]
    assert first.checks["train.ddp"] == catalog()["rank-killed"].checks["train.ddp"]
    assert first.thresholds == {
        "host.inventory": {"memlock_unlimited": "== 1 bool"},
        "host.load": {"cpu_busy": CPU_LIMIT},
    }
    assert (first.fault, first.prepare) == ("", DRILL.prepare)
    assert second.settings == catalog()["rank-stopped"].settings  # its limits are its own
    with pytest.raises(UsageError, match="of one machine"):
        clean_drills([catalog()["bit-flip"], catalog()["missing-gpu"]])


def test_trials_that_differ_in_an_option_or_a_threshold_stay_apart() -> None:
    load = catalog()["cpu-hog"]
    other = replace(load, thresholds={"host.load": {"cpu_busy": "<= 99 %"}})
    assert len(clean_drills([load, other, load])) == 2
    assert len(clean_drills([load, replace(load, checks={"host.load": {"seconds": 1}})])) == 2


def test_interrupted_clean_runs_keep_those_that_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(injection: Injection, limit_s: float) -> None:
        if "clean-3" in str(injection.folder):
            raise KeyboardInterrupt

    monkeypatch.setattr(Injection, "start_trial", lambda self: None)
    monkeypatch.setattr(Injection, "wait_for_end", wait)
    monkeypatch.setattr(clean, "load_record", lambda run_dir: NO_ALARM)
    result = run_clean([DRILL], 40, [], tmp_path, lambda _text: None)
    assert (result.runs, len(result.seconds)) == (2, 2)
    assert result.upper_bound == pytest.approx(1 - 0.05**0.5)


def test_verdicts_and_findings_are_alarms() -> None:
    assert [alarm.name for alarm in list_alarms(ALARM, 1)] == [
        "collectives.all_reduce:busbw.1MiB",
        "finding:data_corrupted",
    ]
    assert not list(list_alarms(NO_ALARM, 1))


def test_known_conditions_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Injection, "start_trial", lambda self: None)
    monkeypatch.setattr(Injection, "wait_for_end", lambda self, limit_s: 0)
    monkeypatch.setattr(clean, "load_record", lambda run_dir: ALARM if "clean-2" in str(run_dir) else NO_ALARM)
    drills = [replace(DRILL, name="clean")]
    result = run_clean(drills, 3, [], tmp_path / "all", lambda _text: None)
    assert (result.runs_with_alarm, {alarm.run for alarm in result.alarms}) == (1, {2})
    result = run_clean(drills, 3, ["collectives.*:busbw.*", "finding:*"], tmp_path / "known", lambda _text: None)
    assert (result.runs_with_alarm, result.alarms) == (0, ())
    assert result.upper_bound == pytest.approx(1 - 0.05 ** (1 / 3))
