"""Training results from files and results of child processes, without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bench.child_ranks import EXIT_TIMEOUT, ChildResult
from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.check import Context
from seatrial.checks.training import _workload, lora
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import SeatrialError


def make_context(device: str, out: Path = Path()) -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def result(*children: ChildResult) -> TrainingResult:
    return _workload._result_of_ranks("sft", Path("out"), dict(enumerate(children)))


def test_first_failed_rank_explains_the_failure() -> None:
    late = ChildResult(error="stopped: another rank failed", exit_code=-15, failure_order=2)
    failed = result(late, ChildResult(error="ended with exit code 1", exit_code=1, failure_order=1, host="n0"))
    assert (failed.problem, failed.exit_code) == ("rank 1 on n0: ended with exit code 1", 1)
    assert (failed.failed_rank, failed.failed_node) == (1, "n0")
    assert failed.metrics is None


def test_killed_rank_explains_the_failure_of_its_peer() -> None:
    peer = ChildResult(error="a peer disconnected", exit_code=1, failure_order=1)
    failed = result(peer, ChildResult(error="ended by signal 9", exit_code=-9, failure_order=2, host="n1"))
    assert (failed.problem, failed.exit_code) == ("rank 1 on n1: ended by signal 9", -9)


@pytest.mark.parametrize("metrics", [None, [1], 7, "text"])
def test_invalid_metrics_are_an_error(metrics: object) -> None:
    with pytest.raises(SeatrialError, match="sft: rank 0"):
        result(ChildResult(metrics))


def test_timeout_and_out_of_memory() -> None:
    timeout = ChildResult(error="did not end within 5 s", exit_code=EXIT_TIMEOUT, failure_order=1)
    assert result(timeout).exit_code == EXIT_TIMEOUT
    error = "ended with exit code 1: torch.OutOfMemoryError: CUDA"
    problem = result(ChildResult(error=error, exit_code=1, failure_order=1)).problem
    assert problem.startswith("rank 0")


def test_usage_error_is_an_error_of_the_check() -> None:
    other = ChildResult(error="ended with exit code 1", exit_code=1, failure_order=1)
    error = "stack hf needs peft, which is not installed: pip install 'seatrial[hf]'"
    with pytest.raises(SeatrialError, match=r"sft: .* rank 1: stack hf needs peft"):
        result(other, ChildResult(error=error, exit_code=EXIT_USAGE_ERROR, failure_order=2))


def test_full_disk_is_an_error_of_the_check() -> None:
    full = ChildResult(error="ended with exit code 28", exit_code=EXIT_DISK_FULL, failure_order=1, host="n1")
    with pytest.raises(SeatrialError, match=r"sft: .*disk full: rank 1 on n1:"):
        result(ChildResult(error="stopped: another rank failed", exit_code=-15, failure_order=2), full)


@pytest.mark.parametrize("code", [EXIT_USAGE_ERROR, EXIT_DISK_FULL])
def test_killed_rank_is_a_result(code: int) -> None:
    failed = result(
        ChildResult(error="no", exit_code=code, failure_order=1),
        ChildResult(error="ended by signal 9", exit_code=-9, failure_order=2),
    )
    assert (failed.problem, failed.exit_code) == ("rank 1: ended by signal 9", -9)


def test_new_attempt_gets_a_new_folder(tmp_path: Path) -> None:
    assert _workload._new_folders(tmp_path, "sft", 1) == [tmp_path / "sft"]
    (tmp_path / "sft").mkdir()
    assert _workload._new_folders(tmp_path, "sft", 1) == [tmp_path / "sft.2"]
    assert _workload._new_folders(tmp_path, "gpu", 2) == [tmp_path / "gpu-0", tmp_path / "gpu-1"]


def test_cpu_uses_the_tiny_config() -> None:
    assert _workload.config_for_device(make_context("cpu"), lora.NAME) == f"tiny/{lora.NAME}"
    assert _workload.config_for_device(make_context("cuda:0"), lora.NAME) == lora.NAME
    assert _workload.config_for_device(make_context("cpu"), "mine.yaml") == "mine.yaml"


def test_progress_from_the_written_files(tmp_path: Path) -> None:
    progress = [_workload.training_progress(tmp_path, 2)]
    for name in ("config.json", "data/markov_chain-1.incomplete-x/", "data/markov_chain-1/", "steps.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
        progress.append(_workload.training_progress(tmp_path, 2))
    for step in (1, 2):
        (tmp_path / "steps.jsonl").write_text(f'{{"step": {step}, "seconds": 1}}\n' + '{"step": 3, "lo')
        progress.append(_workload.training_progress(tmp_path, 2))
    assert progress == [
        "",
        "preparing data",
        "preparing data",
        "data prepared; building the model",
        "model built; first step",
        "step 1 of 2",
        "steps finished; saving",
    ]
