"""gpu.kernel_log: Xids of the hardware warn, those of programs do not; an unreadable log is a SKIP with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.check import Context
from seatrial.checks.gpu.kernel_log import CHECK
from seatrial.discover import kernel_log, settings
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure


@pytest.fixture(autouse=True)
def gpu_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "is_gpu_node", lambda _root: True)


def measured(root: Path, *numbers: int) -> Measurement:
    if numbers:
        (root / "dev").mkdir()
        lines = [f"4,{i},{i}000000,-;NVRM: Xid (PCI:0000:3b:00): {number}, text\n" for i, number in enumerate(numbers)]
        (root / "dev/kmsg").write_text("".join(lines))
    context = Context(
        node="n1",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=root,
        run_dir=root,
        root=root,
    )
    return measure(CHECK, context, {})


def outcome(measurement: Measurement) -> Outcome:
    (verdict,) = judge_check(CHECK, [measurement], {}, "")
    return verdict.outcome


@pytest.mark.parametrize("number", [48, 64, 74, 79, 95, 119])
def test_an_xid_for_which_nvidia_asks_for_a_reset_or_repair_warns(number: int, tmp_path: Path) -> None:
    measurement = measured(tmp_path, 13, number)
    assert outcome(measurement) is Outcome.WARN
    assert f"['1 s after boot, PCI 0000:3b:00: Xid {number} (" in str(measurement.metrics[0].evidence)


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 94, 154, 99999])
def test_an_xid_of_a_program_or_without_an_action_passes(number: int, tmp_path: Path) -> None:
    measurement = measured(tmp_path, number)
    assert outcome(measurement) is Outcome.PASS
    assert measurement.facts["xids"] == 1


def test_a_container_without_the_log_skips(tmp_path: Path) -> None:
    measurement = measured(tmp_path)
    assert outcome(measurement) is Outcome.SKIP
    assert "No such file" in measurement.absent[0].reason


def test_a_user_who_may_not_read_it_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_root: Path) -> None:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    monkeypatch.setattr(kernel_log, "read", refuse)
    measurement = measured(tmp_path)
    assert outcome(measurement) is Outcome.SKIP
    assert "Operation not permitted" in measurement.absent[0].reason


def test_a_node_without_gpus_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "is_gpu_node", lambda _root: False)
    assert outcome(measured(tmp_path, 79)) is Outcome.SKIP
