"""What is said of trainings that a check has started: from files and answers, without training anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.bench.child_ranks import EXIT_TIMEOUT, ChildResult
from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.base import Context
from seatrial.checks.training import _workload, lora
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import SeatrialError


def place(device: str, out: Path = Path()) -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def end(*answers: ChildResult) -> TrainingResult:
    return _workload._result_of_ranks("sft", Path("out"), dict(enumerate(answers)))


def test_who_failed_first_explains_a_failure() -> None:
    late = ChildResult(error="ended because that of another rank had failed", exit_code=-15, failure_order=2)
    found = end(late, ChildResult(error="ended with exit code 1; its last words: no", exit_code=1, failure_order=1))
    assert (found.problem, found.exit_code) == ("rank 1: ended with exit code 1; its last words: no", 1)
    assert found.metrics is None


def test_who_was_killed_explains_it_though_a_peer_that_missed_it_ended_first() -> None:
    peer = ChildResult(error="lost a peer that said nothing", exit_code=1, failure_order=1)
    found = end(peer, ChildResult(error="ended by signal 9", exit_code=-9, failure_order=2, host="n1"))
    assert (found.problem, found.exit_code) == ("rank 1 on n1: ended by signal 9", -9)


def test_metrics_that_are_none_are_an_error() -> None:
    for value in (None, [1], 7, "words"):
        with pytest.raises(SeatrialError, match="sft: rank 0 answered"):
            end(ChildResult(value))


def test_a_hang_and_too_little_memory_are_told_as_what_they_are() -> None:
    assert (
        end(ChildResult(error="did not end within 5 s", exit_code=EXIT_TIMEOUT, failure_order=1)).exit_code
        == EXIT_TIMEOUT
    )
    words = "ended with exit code 1; its last words: torch.OutOfMemoryError: CUDA"
    assert end(ChildResult(error=words, exit_code=1, failure_order=1)).problem.startswith("out of memory: rank 0")


def test_what_cannot_be_trained_at_all_is_no_verdict() -> None:
    other = ChildResult(error="ended with exit code 1", exit_code=1, failure_order=1)
    words = "stack hf needs peft, which is not installed: pip install 'seatrial[hf]'"
    with pytest.raises(SeatrialError, match="sft was not trained: rank 1: stack hf needs peft"):
        end(other, ChildResult(error=words, exit_code=EXIT_USAGE_ERROR, failure_order=2))


def test_a_full_disk_is_no_verdict() -> None:
    full = ChildResult(
        error="ended with exit code 28; its last words: NoRoom: no",
        exit_code=EXIT_DISK_FULL,
        failure_order=1,
        host="n1",
    )
    with pytest.raises(SeatrialError, match="sft was not trained to its end, for want of room on disk: rank 1 on n1:"):
        end(ChildResult(error="ended because that of another rank had failed", exit_code=-15, failure_order=2), full)


@pytest.mark.parametrize("code", [EXIT_USAGE_ERROR, EXIT_DISK_FULL])
def test_a_rank_that_was_killed_stays_a_finding(code: int) -> None:
    found = end(
        ChildResult(error="no", exit_code=code, failure_order=1),
        ChildResult(error="ended by signal 9", exit_code=-9, failure_order=2),
    )
    assert (found.problem, found.exit_code) == ("rank 1: ended by signal 9", -9)


def test_progress_is_of_whole_lines(tmp_path: Path) -> None:
    assert _workload.last_step(tmp_path) == 0
    lines = [json.dumps({"step": number, "loss": 1.5}) for number in range(1, 400)]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + '\n{"step": 400, "lo')
    assert _workload.last_step(tmp_path) == 399
    assert len(_workload._read_steps(tmp_path)) == 399


@pytest.mark.parametrize("line", [b'{"step": 1, "lo\n', b"[1, 2]\n", b'{"loss": 1}\n', b'{"step": "1"}\n', b"\xff\0\n"])
def test_lines_that_are_no_steps_are_an_error_that_names_the_file(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + line)
    with pytest.raises(SeatrialError, match=r"steps\.jsonl"):
        _workload._read_steps(tmp_path)


def test_an_earlier_attempt_is_kept(tmp_path: Path) -> None:
    assert _workload._new_folders(tmp_path, "sft", 1) == [tmp_path / "sft"]
    (tmp_path / "sft").mkdir()
    assert _workload._new_folders(tmp_path, "sft", 1) == [tmp_path / "sft.2"]
    assert _workload._new_folders(tmp_path, "gpu", 2) == [tmp_path / "gpu-0", tmp_path / "gpu-1"]


def test_a_cpu_rehearses_with_the_tiny_twin() -> None:
    assert _workload.config_for_device(place("cpu"), lora.NAME) == f"tiny/{lora.NAME}"
    assert _workload.config_for_device(place("cuda:0"), lora.NAME) == lora.NAME
    assert _workload.config_for_device(place("cpu"), "mine.yaml") == "mine.yaml"


def test_what_a_training_does_is_told_by_what_it_has_written(tmp_path: Path) -> None:
    told = [_workload.training_progress(tmp_path, 2)]
    for made in ("config.json", "data/walks-1.incomplete-x/", "data/walks-1/", "steps.jsonl"):
        path = tmp_path / made
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if made.endswith("/") else path.touch()
        told.append(_workload.training_progress(tmp_path, 2))
    for step in (1, 2):
        (tmp_path / "steps.jsonl").write_text(f'{{"step": {step}}}\n')
        told.append(_workload.training_progress(tmp_path, 2))
    assert told == [
        *("", "preparing data", "preparing data", "data prepared; building the model"),
        *("model built; first step", "step 1 of 2", "all steps taken; saving, measuring"),
    ]
