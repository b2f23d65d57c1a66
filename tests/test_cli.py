from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.model import Trial
from tests.processes import load, run

HOST_ONLY = "checks: {host.inventory: }\n"
WORDS = ("run", "discover", "checks", "render", "judge", "report", "explain", "schema")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "host.yaml").write_text(HOST_ONLY)
    code, out, err = run("run", folder / "host.yaml", "--out", folder / "run")
    assert code == 0, err
    assert f"Report: {folder / 'run' / 'report.html'}" in out
    return folder / "run"


def test_the_words_are_those_of_the_contract() -> None:
    _, out, _ = run("--help")
    listed = [line.split()[1] for line in out.splitlines() if line.startswith("│ ") and line.split()[1] in WORDS]
    assert sorted(set(listed)) == sorted(WORDS)


def test_a_run_leaves_its_record_and_reports(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= {
        "trial.json",
        "measurements.jsonl",
        "report.html",
        "junit.xml",
        "metrics.prom",
        "run.json",
        "jobs",
    }
    assert (finished / "jobs" / "nodes" / "attempt1" / "command.sh").read_text().strip()


def test_the_record_knows_where_its_values_come_from(finished: Path) -> None:
    record = load(finished)
    assert record.origins["cluster.nodes"] == "default"
    assert record.origins["checks.host.inventory"].endswith("host.yaml")
    assert record.command[:2] == ("seatrial", "run")


def test_times_outside_checks_are_accounted_for(finished: Path) -> None:
    record = load(finished)
    names = [timing.name for timing in record.timings if timing.kind == "overhead"]
    assert {"start of the command", "discover", "plan", "judge", "report"} <= set(names)
    assert sum(timing.seconds for timing in record.timings) == pytest.approx(record.seconds, rel=0.25, abs=0.3)


def test_the_record_is_valid_by_the_printed_schema(finished: Path) -> None:
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out) == Trial.model_json_schema()
    written = json.loads((finished / "trial.json").read_text())
    assert set(json.loads(out)["properties"]) == set(written)


def test_judge_reads_an_old_run_and_changes_nothing(finished: Path) -> None:
    before = (finished / "trial.json").read_bytes()
    code, out, _ = run("judge", finished, "--json")
    assert code == 0
    assert Trial.model_validate_json(out).verdicts == load(finished).verdicts
    assert (finished / "trial.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "start"),
    [("html", "<!doctype html>"), ("junit", "<?xml"), ("prometheus", "# HELP"), ("json", "{"), ("markdown", "#")],
)
def test_report_prints_every_format(finished: Path, name: str, start: str) -> None:
    code, out, err = run("report", finished, "--format", name)
    assert code == 0, err
    assert out.lower().startswith(start.lower())


def test_an_unknown_format_names_the_known_ones(finished: Path) -> None:
    code, _, err = run("report", finished, "--format", "pdf")
    assert code == 2
    assert "html, junit, prometheus, json, markdown" in err


def test_checks_lists_every_check_with_its_rules() -> None:
    _, out, _ = run("checks")
    for check in catalog().values():
        assert check.name in out
    code, out, _ = run("checks", "--json")
    assert code == 0
    assert {entry["name"] for entry in json.loads(out)} == set(catalog())


def test_discover_is_one_document() -> None:
    code, out, _ = run("discover", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"host", "gpu"}
    assert "kernel" in run("discover")[1]


def test_json_puts_one_document_on_stdout_and_progress_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text(HOST_ONLY)
    code, out, err = run("run", tmp_path / "host.yaml", "--json", "--out", tmp_path / "run")
    assert code == 0
    assert Trial.model_validate_json(out) == load(tmp_path / "run")
    assert "host.inventory" in err


def test_a_dry_run_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    code, out, _ = run("run", "quick", "--dry-run", cwd=tmp_path)
    assert code == 0
    assert "torch.distributed.run" in out
    assert list(tmp_path.iterdir()) == []
    rendered = run("render", "local", "quick", cwd=tmp_path)[1]
    assert all(line in out for line in rendered.splitlines())


def test_explain_names_cause_and_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    code, out, _ = run("explain", log)
    assert code == 0
    assert "GPU out of memory" in out
    assert "nvidia-smi" in out
    assert "No known failure" in run("explain", _empty(tmp_path))[1]
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    log.rename(tmp_path / "run" / "jobs" / "rank0.log")
    assert "GPU out of memory" in run("explain", tmp_path / "run")[1]
    piped = subprocess.run(
        [sys.executable, "-m", "seatrial", "explain", "-"],
        input="NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "standard input" in piped.stdout
    assert "Xid 79" in piped.stdout
    code, _, err = run("explain", tmp_path / "nosuch.log")
    assert (code, "cannot read" in err) == (2, True)


def _empty(folder: Path) -> Path:
    path = folder / "empty.log"
    path.touch()
    return path
