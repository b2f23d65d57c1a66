"""Commands that train or evaluate: train run, train evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.cli.app import app
from tests.train.function_calling.test_score import record


@pytest.mark.parametrize("passed", [False, True])
def test_evaluate_prints_a_table_or_json(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = record(passed)
    monkeypatch.setattr("seatrial.train.hf.evaluate", lambda _config, _out: evaluation)

    def out(*flags: str) -> str:
        code = app(["train", "evaluate", "tiny/function-calling-qwen2-7b", "--out", "o", *flags], standalone_mode=False)
        return f"{code} {capsys.readouterr().out}"

    lines = out().splitlines()
    assert lines[0].startswith(f"{int(not passed)} 2 cases")
    assert lines[-1] == f"Results: {Path('o', 'evaluation.json')}"
    code, _, text = out("--json").partition(" ")
    assert (code, json.loads(text)) == (str(int(not passed)), evaluation)


def test_train_passes_its_options_and_exits_without_teardown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr("seatrial.train.command.train", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("seatrial.bench.group.exit_without_teardown", lambda: calls.append("exited"))
    flags = ["--set", "bsz=2", "--set", "max_steps=1", "--out", str(tmp_path), "--json"]
    app(["train", "run", "throughput", *flags], standalone_mode=False)
    app(["train", "run", "throughput"], standalone_mode=False)
    assert calls == [
        *((Path("throughput"), ["bsz=2", "max_steps=1"], tmp_path, True), "exited"),
        *((Path("throughput"), [], None, False), "exited"),
    ]
