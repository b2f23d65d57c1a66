"""The command drill: selection, listing, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.drill import catalog
from seatrial.drill.base import DrillResult
from tests.processes import call

HOLDS = DrillResult(
    name="bit-flip",
    title="",
    machine="cpu",
    seen=True,
    located=True,
    explained=True,
    command_right=True,
    action_right=True,
)


def test_list_names_every_drill() -> None:
    code, out, _ = call("drill", "--list", "--json")
    assert (code, [row["name"] for row in json.loads(out)]) == (0, list(catalog()))
    code, out, _ = call("drill", "--list", "rank-*")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (
        0,
        [name for name in catalog() if name.startswith("rank-")],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give names of drills or --all"),
        (("--all", "bit-flip"), "give names of drills or --all"),
        (("no-such-drill",), "no drill matches no-such-drill"),
        (("bit-flip", "--out", "/proc/drills"), "cannot write to --out /proc/drills"),
        (("bit-flip", "--out", "/proc"), "--out /proc is not empty"),
    ],
)
def test_wrong_arguments_start_nothing(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call("drill", *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([HOLDS], 0),
        ([HOLDS, HOLDS.model_copy(update={"could_not_run": "needs 2 GPUs"})], 3),
        ([HOLDS.model_copy(update={"explained": False}), HOLDS.model_copy(update={"could_not_run": "needs root"})], 1),
    ],
)
def test_exit_code(results: list[DrillResult], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.drill.runner.run_drills", lambda *_: iter(results))
    exit_code, out, _ = call("drill", "bit-flip", "--json", "--out", tmp_path)
    assert exit_code == code
    assert [DrillResult.model_validate(row) for row in json.loads(out)] == results


def test_a_drill_that_needs_more_than_this_machine_has_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    drill = catalog()["bit-flip"]
    needs = replace(drill.needs, gpus=99)
    monkeypatch.setattr("seatrial.drill.catalog", lambda: {"bit-flip": replace(drill, needs=needs)})
    code, out, _ = call("drill", "--all")
    assert code == 3
    assert "bit-flip: could not run here: needs 99 GPUs" in out
