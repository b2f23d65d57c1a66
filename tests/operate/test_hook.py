"""One run of a hook: results, the drain limit, the site's file, records that cannot be written, and time."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import Outcome, Verdict
from seatrial.operate import drain_limit, hook
from seatrial.operate.hook import Request, run
from seatrial.operate.hook_exit_codes import Result
from seatrial.operate.hook_record import Record
from seatrial.operate.node_checks import NodeResult

GOOD = NodeResult({"gpu.inventory": 0.1}, {}, {}, (), ())
FAULT = Verdict("gpu.inventory", "n1", Outcome.FAIL, metric="gpus_missing", value=1, unit="GPUs", fix="nvidia-smi -L")
BAD = replace(GOOD, failures=(FAULT,))
TIMED_OUT = replace(GOOD, not_measured={"host.inventory": "no result within 6.0 s"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str | None]]:
    """Numbers and models of GPUs that the node was asked for; the node is good."""
    numbers: list[tuple[int | None, str | None]] = []
    set_result(monkeypatch, GOOD, numbers)
    return numbers


def set_result(
    monkeypatch: pytest.MonkeyPatch, result: NodeResult, numbers: list[tuple[int | None, str | None]] | None = None
) -> None:
    def check_node(gpus: int | None, model: str | None, _ended_job: str, _deadline: float) -> NodeResult:
        if numbers is not None:
            numbers.append((gpus, model))
        return result

    monkeypatch.setattr(hook, "check_node", check_node)


def request(tmp_path: Path, **changes: Any) -> Request:
    base = Request("prolog", "slurm", time.monotonic(), tmp_path / "hook.jsonl", time_limit_s=30)
    return replace(base, **changes)


def with_state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    state.mkdir()
    drain_limit.prepare(state)
    return state


def test_a_good_node_passes_and_is_recorded(tmp_path: Path, asked: list[tuple[int | None, str | None]]) -> None:
    record, error = run(request(tmp_path, gpus_per_node=8, job="7"))
    assert (record.result, record.exit_code, error) == (Result.PASSED, 0, "")
    assert asked == [(8, None)]
    assert Record.model_validate_json((tmp_path / "hook.jsonl").read_text()) == record


def test_a_failure_drains_the_node_only_if_the_limit_grants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_result(monkeypatch, BAD)
    state = with_state(tmp_path)
    results = []
    for node in ("n1", "n2", "n1"):
        monkeypatch.setenv("SEATRIAL_NODE", node)
        record, _ = run(request(tmp_path, state_dir=state, nodes=4))
        results.append((record.result, record.exit_code))
    assert results == [(Result.FAILED, 1), (Result.LIMITED, 0), (Result.FAILED, 1)]
    (entry,) = [json.loads(path.read_text()) for path in (state / "drains").iterdir()]
    assert entry["node"] == "n1"
    assert "gpus_missing is 1 GPU" in entry["reason"], "the useful reason is on the shared filesystem"
    lines = [json.loads(line) for line in (tmp_path / "hook.jsonl").read_text().splitlines()]
    assert "n1" in lines[1]["limit"]
    assert lines[1]["failures"][0]["fix"] == "nvidia-smi -L"


def test_without_a_state_folder_failures_are_only_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_result(monkeypatch, BAD)
    record, _ = run(request(tmp_path))
    assert (record.result, record.exit_code) == (Result.LIMITED, 0)
    assert "--state-dir" in record.limit


def test_an_unmeasured_check_passes_unless_fail_closed_with_the_same_drain_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_result(monkeypatch, TIMED_OUT)
    record, _ = run(request(tmp_path))
    assert (record.result, record.exit_code, record.limit) == (Result.INCOMPLETE, 0, "")
    state, codes = with_state(tmp_path), []
    for node in ("n1", "n2"):
        monkeypatch.setenv("SEATRIAL_NODE", node)
        codes.append(run(request(tmp_path, fail_closed=True, state_dir=state, nodes=4))[0].exit_code)
    assert codes == [1, 0]


def test_callers_that_drain_no_node_make_no_entry_in_the_drain_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_result(monkeypatch, BAD)
    state = with_state(tmp_path)
    for caller in ("slurm", "systemd"):
        record, _ = run(request(tmp_path, kind="health", caller=caller, state_dir=state, nodes=4))
        assert (record.result, record.exit_code) == (Result.FAILED, 1)
    assert list((state / "drains").iterdir()) == []


def test_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_result(monkeypatch, BAD)
    state = with_state(tmp_path)
    record, error = run(request(tmp_path, state_dir=state, nodes=4, dry_run=True, status=tmp_path / "status"))
    assert (record.exit_code, error) == (1, "")
    assert [path.name for path in tmp_path.rglob("*")] == ["state", "drains"]


def test_the_site_file_gives_what_options_do_not(tmp_path: Path, asked: list[tuple[int | None, str | None]]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("cluster: {nodes: 64, gpus_per_node: 8}\nchecks: {gpu.model: {options: {expected: H200}}}\n")
    assert run(request(tmp_path, site=str(site)))[0].not_measured == {}
    run(request(tmp_path, site=str(site), gpus_per_node=4))
    assert asked == [(8, "H200"), (4, "H200")]


def test_an_unreadable_site_file_is_reported_and_the_node_is_still_measured(
    tmp_path: Path, asked: list[tuple[int | None, str | None]]
) -> None:
    record, _ = run(request(tmp_path, site=str(tmp_path / "no.yaml")))
    assert record.result is Result.INCOMPLETE
    assert "no.yaml" in record.not_measured["site"]
    assert asked == [(None, None)]


@pytest.mark.parametrize("path", ["/dev/full", "/proc/x/hook.jsonl"])
def test_a_record_that_cannot_be_written_changes_no_exit_code(
    path: str, tmp_path: Path, asked: list[tuple[int | None, str | None]]
) -> None:
    record, error = run(request(tmp_path, records=Path(path)))
    assert record.exit_code == 0
    assert path.split("/hook")[0] in error or "No space left" in error


def test_filesystems_that_do_not_answer_cost_no_more_than_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_result(monkeypatch, BAD)

    def hang(*_arguments: Any, **_options: Any) -> None:
        time.sleep(600)

    monkeypatch.setattr(drain_limit, "request_drain", hang)
    monkeypatch.setattr(hook, "append", hang)
    record, error = run(request(tmp_path, state_dir=tmp_path, time_limit_s=3))
    assert (record.result, record.exit_code) == (Result.LIMITED, 0)
    assert "does not answer" in record.limit
    assert "no answer" in error


def test_a_child_process_that_dies_is_not_reported_as_silent() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    result, error = hook.call_until(die, time.monotonic() + 30, "no answer")
    assert (result, error == "no answer", bool(error)) == (None, False, True)


def test_the_status_for_node_problem_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_result(monkeypatch, TIMED_OUT)
    run(request(tmp_path, kind="health", caller="npd", status=tmp_path / "status"))
    code, reason = (tmp_path / "status").read_text().splitlines()
    assert code == "2"
    assert "not measured: host.inventory" in reason


def test_an_unmeasured_check_makes_no_entry_in_the_drain_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_result(monkeypatch, TIMED_OUT)
    state = with_state(tmp_path)
    for caller in ("slurm", "npd"):
        record, _ = run(request(tmp_path, kind="prolog", caller=caller, state_dir=state, nodes=4))
        assert (record.result, record.limit) == (Result.INCOMPLETE, "")
    assert list((state / "drains").iterdir()) == []


def test_text_names_checks_that_do_not_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_result(
        monkeypatch, replace(GOOD, seconds_by_check={"host.inventory": 0.1}, not_applicable={"gpu.model": "no GPU"})
    )
    record, _ = run(request(tmp_path))
    assert record.result == Result.PASSED
    assert "  not applicable: gpu.model: no GPU\n  measured: host.inventory, in " in record.text()
