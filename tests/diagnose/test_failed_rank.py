"""The finding for a rank that failed or hung without a known failure in its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.diagnose import diagnose, refreshed_findings
from seatrial.diagnose.causes import Run
from seatrial.diagnose.job_failures import failed_rank_finding
from seatrial.model import FAILED_RANK, JobResult, JobState, Measurement, Outcome, Verdict, VerdictKey
from seatrial.pipeline.run_directory import load_trial
from tests.diagnose.test_log_origin import run_directory

RANK = "rank 1 (n0/gpu1, pid 4711)"
HANG = "no heartbeat for 15 s; last status: train.ddp; process state T. Run first, on its node: dmesg -T | tail"


def result(state: JobState, cause: str, subject: str = RANK) -> JobResult:
    return JobResult(
        job="ranks",
        attempt=1,
        launcher="local",
        state=state,
        started=0,
        seconds=1,
        startup_s=1,
        failed_subject=subject,
        cause=cause,
    )


def attempt(run_dir: Path, text: str) -> Path:
    folder = run_directory(run_dir, ranks_per_node=2)
    log = folder / "logs" / "id" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    return log


def test_failed_rank_is_named_with_its_log(tmp_path: Path) -> None:
    log = attempt(tmp_path, "RuntimeError: of the site\n")
    failed = result(JobState.FAILED, "RuntimeError: of the site")
    (finding,) = diagnose(Run([], [], catalog()), [failed], [], tmp_path)
    assert (finding.cause, finding.subject, finding.action) == ("rank_failed", RANK, "none")
    assert finding.evidence == "RuntimeError: of the site"
    assert finding.first_command == f"tail -n 50 {log}"


@pytest.mark.parametrize(("rank", "node", "local_rank"), [(1, 0, 1), (3, 1, 1)])
def test_log_of_a_rank_on_several_nodes(tmp_path: Path, rank: int, node: int, local_rank: int) -> None:
    folder = run_directory(tmp_path, ranks_per_node=2)
    logs = {
        (node, local): folder / "logs" / f"node{node}" / "none_abc" / "attempt_0" / str(local) / "stderr.log"
        for node in range(2)
        for local in range(2)
    }
    for log in logs.values():
        log.parent.mkdir(parents=True)
        log.touch()
    finding = failed_rank_finding(result(JobState.FAILED, "x", f"rank {rank} (n1/gpu1, pid 4711)"), folder)
    assert finding
    assert finding.first_command == f"tail -n 50 {logs[node, local_rank]}"


def test_hung_rank_has_the_command_of_its_cause(tmp_path: Path) -> None:
    (finding,) = diagnose(Run([], [], catalog()), [result(JobState.HUNG, HANG)], [], tmp_path)
    assert (finding.cause, finding.first_command, finding.action) == ("rank_hangs", "dmesg -T | tail", "retry-job")


def test_known_failure_in_the_log_explains_the_rank(tmp_path: Path) -> None:
    attempt(tmp_path, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (finding,) = diagnose(Run([], [], catalog()), [result(JobState.FAILED, "exit code 1")], [], tmp_path)
    assert (finding.title, finding.subject) == ("GPU out of memory", RANK)


@pytest.mark.parametrize(
    ("state", "subject"),
    [(JobState.COMPLETED, RANK), (JobState.CANCELLED, RANK), (JobState.FAILED, "launcher"), (JobState.FAILED, "n7")],
)
def test_other_results_have_no_failed_rank(state: JobState, subject: str, tmp_path: Path) -> None:
    assert failed_rank_finding(result(state, "", subject), tmp_path) is None


def test_finding_is_kept_when_a_record_is_judged_again(tmp_path: Path) -> None:
    record = load_trial(record_path("2026-11-23-2xh200/p2p-disabled"))
    finding = failed_rank_finding(result(JobState.HUNG, HANG), tmp_path)
    assert finding
    trial = record.model_copy(update={"findings": (finding,)})
    assert finding in refreshed_findings(trial, Run(record.verdicts, trial.measurements, catalog()))


def test_end_of_a_hung_job_by_seatrial_is_no_cause(tmp_path: Path) -> None:
    log = attempt(tmp_path, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n")
    findings = diagnose(Run([], [], catalog()), [result(JobState.HUNG, HANG)], [], tmp_path)
    assert [finding.cause for finding in findings] == ["rank_hangs"]
    log.write_text("NVRM: Xid (PCI:0000:17:00): 79, pid=4711, GPU has fallen off the bus.\n")
    findings = diagnose(Run([], [], catalog()), [result(JobState.HUNG, HANG)], [], tmp_path)
    assert "Xid 79" in findings[0].title
    assert len(findings) == 1


def test_failure_in_the_log_of_a_program_explains_its_exit_code(tmp_path: Path) -> None:
    evidence = "exit_code = 1 on cluster; sft: rank 9 on n9 waits; CUDA out of memory. Tried to allocate 2.00 GiB"
    measurements = [Measurement(check="train.fsdp", subject="n0/gpu1", facts={FAILED_RANK: {"rank": 1, "node": "n0"}})]
    verdicts = [
        Verdict("train.fsdp", "cluster", Outcome.FAIL, "exit_code", evidence=evidence),
        Verdict("train.fsdp", "cluster", Outcome.FAIL, "loss_drop", evidence="No space left on device"),
        Verdict("train.lora", "cluster", Outcome.PASS, "exit_code", evidence="No space left on device"),
    ]
    (finding,) = diagnose(Run(verdicts, measurements, catalog()), [], [], tmp_path)
    assert (finding.title, finding.subject, finding.confidence) == ("GPU out of memory", "rank 1 on n0", "high")
    assert finding.explains == (VerdictKey(check="train.fsdp", subject="cluster", metric="exit_code"),)


def test_failure_of_a_program_without_a_failed_rank_is_at_the_subject(tmp_path: Path) -> None:
    log = "rank 9 on n9 waits\n  File \"/opt/x.py\", line 3\nModuleNotFoundError: No module named 'wandb_gql'\nend"
    evidence = f"exit_code = 1 on n0; log_tail: {json.dumps(log)}"
    verdict = Verdict("train.command", "n0", Outcome.FAIL, "exit_code", evidence=evidence)
    (finding,) = diagnose(Run([verdict], [], catalog()), [], [], tmp_path)
    assert finding.subject == "n0"
    assert "wandb_gql" in finding.title
    assert finding.evidence.endswith("Log line: ModuleNotFoundError: No module named 'wandb_gql'")


@pytest.mark.parametrize("check", ["train.oumi", "train.command", "train.lora"])
@pytest.mark.parametrize("module", ["omegaconf", "torch"])
def test_missing_package_is_in_the_environment_of_the_configured_command(
    check: str, module: str, tmp_path: Path
) -> None:
    log = f"Traceback (most recent call last):\nModuleNotFoundError: No module named '{module}'"
    evidence = f"exit_code = 1 on n0; log_tail: {json.dumps(log)}"
    verdict = Verdict(check, "n0", Outcome.FAIL, "exit_code", evidence=evidence)
    (finding,) = diagnose(Run([verdict], [], catalog()), [], [], tmp_path)
    assert ("environment of options.command" in finding.title) is (check != "train.lora")
    assert "worker" not in f"{finding.title} {finding.evidence} {finding.fix}"


@pytest.mark.parametrize("check", ["train.lora", "train.oumi", "train.command", "train.function_calling"])
def test_exit_code_of_a_training_has_its_log_as_evidence(check: str) -> None:
    exit_codes = [each for each in catalog()[check].declared if each.name.endswith("exit_code")]
    assert exit_codes
    assert all(each.log_evidence for each in exit_codes)


def test_rank_that_a_message_names_is_the_place(tmp_path: Path) -> None:
    evidence = "problems: rank 0 on n0: exit code 1; NonFiniteError: step 3. rank 1 (n0): its gradient is not finite"
    verdict = Verdict("train.fsdp", "cluster", Outcome.FAIL, "exit_code", evidence=evidence)
    (finding,) = diagnose(Run([verdict], [], catalog()), [], [], tmp_path)
    assert finding.subject == "rank 1"
