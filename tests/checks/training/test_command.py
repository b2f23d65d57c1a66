from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from seatrial.checks.training.command import CHECK, CommandOptions, log_entries
from seatrial.config.layers import resolve
from seatrial.discover import gpu
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu
from seatrial.model import Measurement, Outcome, Why
from tests.fakes.nvml import FakeGpu, FakeNvml, nvml_error
from tests.fakes.slurm import judge, not_passed, run_check
from tests.paths import ROOT
from tests.processes import with_enough_time

TRAINER = str(ROOT / "tests" / "fakes" / "trainer.py")
LOG = r"step (?P<step>\d+) loss (?P<loss>\S+) grad (?P<grad_norm>\S+) tok/s (?P<tokens_per_second>\S+)"
STATE = "trained/trainer_state.json"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read_with_timeout", lambda: GpuFacts(nvml_unavailable="no driver"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def trained(folder: Path, fault: str = "", **options: Any) -> Measurement:
    return run_check(CHECK, folder, command=[sys.executable, TRAINER, "{out}", fault], **options)


def values(measured: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in measured.metrics}


def evidence(measured: Measurement, name: str) -> Any:
    return next(metric.evidence for metric in measured.metrics if metric.name == name)


def outcomes(measured: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge(CHECK, measured)}


def test_no_command_is_skipped(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path)
    assert measured.skipped
    assert "options.command" in measured.skipped
    assert [verdict.outcome for verdict in judge(CHECK, measured)] == [Outcome.SKIP]


def test_missing_executable_is_an_error(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path, command="no-such-trainer {out}")
    assert measured.error
    assert "no-such-trainer" in measured.error


def test_loss_and_speed_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    measured = trained(tmp_path, log=[LOG], steps=6)
    assert measured.error is None
    metrics = values(measured)
    assert (metrics["exit_code"], metrics["steps_missing"]) == (0, 0)
    assert (metrics["loss_first_third"], metrics["loss_last_third"], metrics["loss_drop"]) == (5.25, 3.25, 2.0)
    assert metrics["tokens_per_second"] == 1003.5
    assert [series.y for series in measured.series] == [(5.5, 5.0, 4.5, 4.0, 3.5, 3.0)]
    verdicts = outcomes(measured)
    assert (verdicts.pop("artifacts_missing"), verdicts.pop("gpu_memory_growth")) == (Outcome.SKIP, Outcome.SKIP)
    assert set(verdicts.values()) == {Outcome.PASS}
    assert "rank: None" in (tmp_path / measured.artifacts[0].path).read_text()
    assert evidence(measured, "exit_code")["exit_reason"] == "exit code 0"


def test_steps_that_are_numbered_from_0(tmp_path: Path) -> None:
    log = "for step in range(4): print('step', step, 'loss', 4 - step)"
    options: dict[str, Any] = {"log": [r"step (?P<step>\d+) loss (?P<loss>\S+)"], "steps": 4}
    measured = run_check(CHECK, tmp_path, command=[sys.executable, "-c", log], **options)
    assert measured.error is None
    assert len(measured.series[0].x) == 4
    assert values(measured)["steps_missing"] == 0


def test_loss_and_speed_from_trainer_state(tmp_path: Path) -> None:
    measured = trained(tmp_path, trainer_state=STATE, artifacts=["trained", "trained/*.bin"])
    assert measured.error is None
    assert values(measured) == {
        **{"exit_code": 0, "wall_seconds": pytest.approx(1, abs=30), "train_runtime": 2.0, "samples_per_second": 12.5},
        **{"steps_missing": 0, "nonfinite_steps": 0, "artifacts_missing": 0},
        **{"loss_first_third": 5.25, "loss_last_third": 3.25, "loss_drop": 2.0},
    }
    assert len(measured.series[0].x) == 6
    verdicts = outcomes(measured)
    assert verdicts.pop("gpu_memory_growth") is Outcome.SKIP
    assert set(verdicts.values()) == {Outcome.PASS}


def test_command_without_loss_has_only_an_exit_code(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path, command=f"{shlex.quote(sys.executable)} -c pass")
    verdicts = outcomes(measured)
    assert verdicts.pop("exit_code") is Outcome.PASS
    assert set(verdicts.values()) == {Outcome.SKIP}
    assert {each.metric for each in measured.absent} == verdicts.keys()


def test_fewer_than_three_steps_have_no_loss_drop(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('loss 2')"]
    measured = run_check(CHECK, tmp_path, command=command, log=["loss (?P<loss>[0-9]+)"])
    assert outcomes(measured)["loss_drop"] is Outcome.ERROR
    assert [(each.metric, each.subject) for each in measured.absent if each.why is Why.UNREADABLE] == [
        ("loss_drop", "login")
    ]


@pytest.mark.parametrize(
    ("fault", "metric", "options"),
    [
        ("flat", "loss_drop", {"log": [LOG]}),
        ("flat", "loss_drop", {"trainer_state": STATE}),
        ("nan", "nonfinite_steps", {"log": [LOG]}),
        ("nan", "nonfinite_steps", {"trainer_state": STATE}),
        ("short", "steps_missing", {"log": [LOG], "steps": 6}),
        ("short", "steps_missing", {"trainer_state": STATE}),
        ("no-weights", "artifacts_missing", {"artifacts": ["trained/*.bin"]}),
    ],
)
def test_bad_training_fails_its_metric(tmp_path: Path, fault: str, metric: str, options: dict[str, Any]) -> None:
    measured = trained(tmp_path, fault, **options)
    assert measured.error is None
    assert {name for name, outcome in outcomes(measured).items() if outcome is Outcome.FAIL} == {metric}


@pytest.mark.parametrize(
    ("fault", "code", "reason"), [("exit", 1, "exit code 1"), ("signal", 137, "killed by SIGKILL")]
)
def test_failed_command_gives_exit_code_and_reason(tmp_path: Path, fault: str, code: int, reason: str) -> None:
    measured = trained(tmp_path, fault, log=[LOG])
    assert measured.error is None
    assert values(measured)["exit_code"] == code
    (failed,) = [verdict for verdict in judge(CHECK, measured) if verdict.outcome is Outcome.FAIL]
    assert failed.metric == "exit_code"
    assert reason in str(failed.evidence)
    assert evidence(measured, "exit_code")["exit_reason"] == reason
    assert "visible: None" in evidence(measured, "exit_code")["log_tail"]
    assert {name for name, outcome in outcomes(measured).items() if outcome is Outcome.ERROR} == {
        *("nonfinite_steps", "loss_drop")
    }


@pytest.mark.parametrize(
    ("fault", "options", "reason"),
    [
        ("silent", {"log": [LOG]}, "matches none of the 1 lines of"),
        ("", {"log": [LOG, r"lr (?P<step>\d+)"]}, r"'lr (?P<step>\\d+)' matches none of the 7 lines of"),
        ("", {"log": [r"(?P<loss>loss)"]}, "matches 'loss' in"),
        ("ranks", {"log": [LOG]}, "step 1 follows step 1"),
        ("", {"trainer_state": "elsewhere/trainer_state.json"}, "cannot read"),
        ("full", {}, "disk full"),
    ],
)
def test_unreadable_results_are_an_error(tmp_path: Path, fault: str, options: dict[str, Any], reason: str) -> None:
    measured = trained(tmp_path, fault, **options)
    assert measured.error
    assert reason in measured.error


def test_time_limit_stops_the_command_and_its_descendants(tmp_path: Path) -> None:
    measured = with_enough_time(
        lambda seconds: trained(tmp_path, "hang", train_limit_s=seconds),
        lambda measured: "visible: None" in (measured.error or ""),  # the end of the log
        2,
    )
    assert re.search(r"within \d+ s", measured.error or "")
    assert "visible: None" in (measured.error or "")
    pids = [int(path.read_text()) for path in tmp_path.rglob("child.pid")]
    remaining = [process for process in psutil.process_iter() if process.pid in pids]
    assert pids
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in remaining)


def two_gpus(monkeypatch: pytest.MonkeyPatch, *memory: Any) -> None:
    """Two GPUs; ``memory``: for each, NVML's answers on the bytes in use, the last one repeated."""

    def reading(answers: list[Any]) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(used=answer)

    gpus = tuple(Gpu(index=index, uuid=f"GPU-{index}") for index in range(2))
    monkeypatch.setattr(gpu, "read_with_timeout", lambda: GpuFacts(gpus=gpus))
    lists = [list(answers) for answers in memory]
    fakes = [FakeGpu(nvmlDeviceGetMemoryInfo=lambda _version, each=each: reading(each)) for each in lists]
    FakeNvml(*fakes).install(monkeypatch)


USED = (4_000_000, 600_000_000)


@pytest.mark.parametrize(
    ("memory", "outcome"),
    [
        ((USED, USED[:1]), Outcome.PASS),  # one of the GPUs suffices
        ((USED[:1], (5e9, 5e9, 1e9)), Outcome.FAIL),  # another program holds memory
        ((USED[:1], (5e9, 1e9, 1.6e9)), Outcome.PASS),  # another program ends before the command uses the GPU
        ((USED[:1], [nvml_error("GpuIsLost")]), Outcome.FAIL),
        (([nvml_error("Unknown"), 6e8], [nvml_error("Unknown"), 6e8]), Outcome.ERROR),  # growth from when on is unknown
        (([nvml_error("GpuIsLost")], [nvml_error("GpuIsLost")]), Outcome.ERROR),
        (([nvml_error("NotSupported")], [nvml_error("NotSupported")]), Outcome.UNJUDGED),
    ],
)
def test_command_that_computes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any, outcome: Outcome
) -> None:
    two_gpus(monkeypatch, *memory)
    command = ["sleep", "0.6"]  # long enough for two readings after the first
    assert outcomes(run_check(CHECK, tmp_path, command=command))["gpu_memory_growth"] is outcome


def test_command_that_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, USED[:1], USED[:1])
    verdicts = outcomes(run_check(CHECK, tmp_path, command=["true"], uses_gpu=False))
    assert verdicts["gpu_memory_growth"] is Outcome.SKIP


def test_one_run_per_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, USED, USED)
    measured = trained(tmp_path, per="gpu", log=[LOG], artifacts=["trained"])
    assert measured.error is None
    assert {metric.subject for metric in measured.metrics} == {"login/gpu0", "login/gpu1"}
    assert [metric.value for metric in measured.metrics if metric.name == "loss_drop"] == [2.0, 2.0]
    logs = [(tmp_path / artifact.path).read_text().splitlines()[0] for artifact in measured.artifacts]
    assert logs == ["visible: GPU-0 rank: None", "visible: GPU-1 rank: None"]


def test_failure_on_one_gpu_leaves_its_results_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, USED, USED)
    command = ["sh", "-c", "test $CUDA_VISIBLE_DEVICES = GPU-0 && echo weights > {out}/weights"]
    measured = run_check(CHECK, tmp_path, command=command, per="gpu", artifacts=["weights"])
    assert not_passed(judge(CHECK, measured)) == {
        "exit_code login/gpu1": Outcome.FAIL,
        "artifacts_missing login/gpu1": Outcome.ERROR,
        "gpu_memory_growth login/gpu1": Outcome.ERROR,
    }


def test_fewer_gpus_than_expected_are_an_error(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path, (1, 8), command=[sys.executable, "-c", "pass"])
    assert measured.error
    assert "0 GPUs visible, expected 8" in measured.error


def test_placeholders(tmp_path: Path) -> None:
    script = "import sys; print(sys.argv[1:])"
    measured = run_check(
        CHECK, tmp_path, command=[sys.executable, "-c", script, "{gpus} {node} {node_rank}/{nodes} {x}"]
    )
    text = (tmp_path / measured.artifacts[0].path).read_text()
    assert text.strip() == "['1 login 0/1 {x}']"


def test_env_is_set_only_for_the_command(tmp_path: Path) -> None:
    script = "import os; print(os.environ['MODEL'])"
    measured = run_check(CHECK, tmp_path, command=[sys.executable, "-c", script], env={"MODEL": "smollm"})
    assert "smollm" in (tmp_path / measured.artifacts[0].path).read_text()
    assert "MODEL" not in os.environ


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"log": ["(?P<loss>"]}, "is not a regular expression"),
        ({"log": ["loss"]}, "has the named groups []"),
        ({"log": ["(?P<perplexity>x)"]}, "has the named groups ['perplexity']"),
        ({"log": ["(?P<loss>x)"], "trainer_state": STATE}, "two sources"),
        ({"trainer_state": "/etc/passwd"}, "is not a path below {out}"),
        ({"artifacts": ["../*"]}, "is not a path below {out}"),
    ],
)
def test_invalid_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CommandOptions.model_validate(options)
    assert reason in str(refused.value)


def test_trial_and_patterns_of_the_documentation(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "workloads" / "command.md").read_text()
    (trial,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(textwrap.dedent(trial))
    checks = {"train.command": CHECK}
    options = resolve(str(tmp_path / "mine.yaml"), environ={}, schemas=checks).config.checks["train.command"].options
    assert CommandOptions.model_validate(options).steps == 100
    examples = re.findall(r"^\| `(.*)` \| `(.*\(\?P<.*)` \|$", text, re.MULTILINE)
    entries = [log_entries(line, [pattern], tmp_path) for line, pattern in examples]
    assert entries == [[{"step": 10, "loss": 2.31, "tokens_per_second": 9120}], [{"loss": 2.31}]]
