"""Two drills for real; all drills: ``seatrial drill --all``, with results in docs/drills.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.drill import catalog
from seatrial.drill.runner import run_drill
from tests.processes import Program, until


@pytest.mark.training
@pytest.mark.parametrize("name", ["bit-flip", "cpu-hog"])
def test_report_names_the_injected_fault(name: str, tmp_path: Path) -> None:
    result = run_drill(catalog()[name], tmp_path / name, print)
    assert result.holds, result.problems
    until(lambda: not _processes_of(tmp_path), 30)


@pytest.mark.training
def test_nothing_of_a_killed_drill_remains(tmp_path: Path) -> None:
    drill = Program("drill", "rank-killed", "--out", tmp_path / "drills")
    until(lambda: list(tmp_path.glob("drills/rank-killed/run/jobs/ranks/attempt1/rank*.heartbeat.json")), 120)
    drill.process.kill()
    drill.finish()
    until(lambda: not _processes_of(tmp_path), 60)


def _processes_of(folder: Path) -> list[str]:
    """The command lines of processes that name ``folder``."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # ended
            continue
    return [line for line in lines if str(folder) in line]
