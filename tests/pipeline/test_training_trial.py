"""The shipped trial ``training`` as a user starts it, CPU ONLY with two processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.training import parity
from seatrial.model import Measurement, Outcome, Trial
from seatrial.pipeline.rejudge import rejudge
from tests.processes import Program, load

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]
CRASH = """
checks:
  train.fsdp:
    options: {hf: false, overrides: [learning_rate.peak=1.0e30]}
"""


@dataclass(frozen=True)
class Run:
    """A finished run with its output."""

    folder: Path
    trial: Trial
    code: int
    out: str
    err: str

    def measurements(self, check: str) -> list[Measurement]:
        """Return the measurements of a check that passed."""
        outcomes = {verdict.outcome for verdict in self.trial.verdicts if verdict.check == check}
        assert outcomes - {Outcome.SKIP} == {Outcome.PASS}, "rules on the speed of GPUs are skipped on CPUs"
        return [measurement for measurement in self.trial.measurements if measurement.check == check]


def run_trial(trial: str, cwd: Path, seconds: float) -> Run:
    code, out, err = Program("run", trial, "--gpus-per-node", "0", cwd=cwd).finish(seconds)
    (folder,) = cwd.glob("seatrial-runs/*")
    return Run(folder, rejudge(load(folder)), code, out, err)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_trial("training", tmp_path_factory.mktemp("training"), 800)


def test_training_trial_passes_on_two_cores(training: Run) -> None:
    not_passed = [verdict for verdict in training.trial.verdicts if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)]
    assert (training.code, not_passed) == (0, []), training.err[-2000:]
    assert training.trial.decision.cpu_only
    metrics = [metric for measurement in training.trial.measurements for metric in measurement.metrics]
    values = {metric.name: metric.value for metric in metrics}
    assert values["generated_tokens"] >= 1
    assert {"efficiency.native", "efficiency.hf", "native_vs_hf", "efficiency.node_vs_gpu"} <= values.keys()
    facts = {measurement.check: measurement.facts for measurement in training.trial.measurements if measurement.facts}
    (adapters,) = (metric for metric in metrics if metric.name == "adapter_mismatches")
    assert adapters.evidence["expected"] == 17_920  # type: ignore[index,call-overload]
    assert facts["train.fsdp"]["run.hf"]["strategy"] == "fsdp2"  # type: ignore[index,call-overload]
    runs = facts["train.fsdp"]
    assert runs["run.hf"]["flops_per_token"] == runs["run.native"]["flops_per_token"] > 0  # type: ignore[index,call-overload,operator]
    assert all("cpu_only" in measured for name, measured in facts.items() if name.startswith("train."))


def test_throughput_metrics_have_samples_per_step(training: Run) -> None:
    speeds = [
        (measurement.check, metric)
        for measurement in training.trial.measurements
        for metric in measurement.metrics
        if metric.name.startswith("tokens_per_second_per_gpu")
    ]
    assert {"train.sft_smollm", "train.sft_mistral", "train.lora", "train.fsdp", "train.throughput"} <= {
        check for check, _ in speeds
    }
    for check, metric in speeds:
        assert len(metric.samples) > 1, (check, metric.name)
        assert min(metric.samples) <= metric.value <= max(metric.samples), (check, metric.name)


def test_one_process_ddp_and_fsdp2_agree(training: Run) -> None:
    first, second = training.measurements("train.parity")
    assert second == Measurement(
        **{**second.model_dump(), "metrics": (), "facts": {}}
    )  # only the first rank reports metrics
    runs = ("single_process", *parity.STRATEGIES, *parity.VARIANTS)
    assert {series.name for series in first.series} == {f"loss.{run}" for run in runs}
    memory: Any = first.facts["memory_by_run"]
    assert {run: row["state_device"] for run, row in memory.items()} == dict.fromkeys(runs[1:], "cpu")


def test_checkpoint_is_resumed_and_damage_is_refused(training: Run) -> None:
    measured, _ = training.measurements("train.checkpoint")
    figures = {metric.name: metric for metric in measured.metrics}
    kept = figures["checkpoints_kept_after_kill"]
    assert kept.evidence == {"found": ["step-00000003", "step-00000006.incomplete"]}
    assert "rank 1 (" in str(figures["nan_detected"].evidence)
    assert [len(figures[name].samples) for name in ("save_rate", "async_save_rate", "load_rate")] == [2, 2, 1]
    assert all(metric.value > 0 for metric in figures.values() if metric.unit == "GB/s")


def test_checkpoints_leave_manifests_and_no_large_file(training: Run) -> None:
    measured, _ = training.measurements("train.checkpoint")
    out = training.folder / "artifacts" / "train.checkpoint" / "attempt1"
    assert not [path for path in out.rglob("*") if path.suffix == ".distcp" or path.is_symlink()]
    assert str(measured.facts["removed_files"]).startswith("76 ")
    manifests = sorted(str(path.parent.relative_to(out)) for path in out.rglob("manifest.json"))
    steps = {"fewer": (4,), "killed": (3, 4, 6), "timed": (1, 2, 3, 4), "uninterrupted": (3, 6)}
    assert manifests == [f"{name}/checkpoints/step-{step:08}" for name, saved in steps.items() for step in saved]
    assert {training.folder / artifact.path for artifact in measured.artifacts} == {
        out / name / "metrics.json"
        for name in ("uninterrupted", "killed", "fewer", "fsdp2", "ddp", "timed", "timed-resumed")
    }


def test_failed_training_is_a_verdict_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "crash.yaml").write_text(CRASH)
    run = run_trial("crash.yaml", tmp_path, 180)
    (failed,) = [verdict for verdict in run.trial.verdicts if verdict.outcome is Outcome.FAIL]
    assert (run.code, failed.metric, failed.check) == (1, "exit_code", "train.fsdp")
    assert "NonFiniteError: step 2" in failed.evidence
