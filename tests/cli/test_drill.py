"""The command drill: selection, listing, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.drill import catalog
from seatrial.drill.base import Drill, DrillResult
from seatrial.drill.clean import Alarm, CleanRuns
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
        ((), "give the name of a drill, or --all; list all drills"),
        (("--all", "bit-flip"), "give names of drills or --all"),
        (("no-such-drill",), "no drill matches 'no-such-drill'"),
        (("rank-kiled",), "no drill matches 'rank-kiled'; did you mean 'rank-killed'?"),
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


def test_clean_runs_count_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarm = Alarm(run=2, check="train.ddp", metric="loss_drop", subject="cluster", outcome="FAIL", message="0 nats")
    asked = []

    def run_clean(drills: list[Drill], runs: int, ignored: list[str], *_: object) -> CleanRuns:
        asked.append((len(drills), runs, ignored))
        alarms = () if ignored else (alarm,)
        return CleanRuns(
            runs=runs,
            checks=("train.ddp",),
            ignored=tuple(ignored),
            runs_with_alarm=len(alarms),
            upper_bound=0.5,
            alarms=alarms,
            seconds=(1.0,),
        )

    monkeypatch.setattr("seatrial.drill.clean.run_clean", run_clean)
    code, out, _ = call("drill", "--clean", "3", "bit-flip", "--out", tmp_path)
    assert code == 1
    assert "run 2: FAIL train.ddp:loss_drop on cluster: 0 nats" in out
    assert "3 clean runs, 1 with a false alarm; with 95% confidence at most 50.0% of all runs have one" in out
    code, out, _ = call("drill", "--clean", "3", "--ignore", "train.*", "bit-flip", "--out", tmp_path, "--json")
    assert (code, json.loads(out)["alarms"]) == (0, [])
    assert asked == [(1, 3, []), (1, 3, ["train.*"])]
    code, _, err = call("drill", "--ignore", "train.*", "bit-flip", "--out", tmp_path)
    assert (code, "--ignore needs --clean" in err) == (2, True)
