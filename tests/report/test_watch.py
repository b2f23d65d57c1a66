from __future__ import annotations

import time

from seatrial.model.job_status import GpuUse, JobStatus, TrainingSpeed
from seatrial.report.watch import status_lines

SPEED = TrainingSpeed(
    folder="runs/a-7",
    step=14,
    max_steps=30,
    loss=5.1234,
    steps=12,
    steps_per_second=2.31,
    tokens_per_second=37800,
    age_s=3,
)


def lines(**fields: object) -> list[str]:
    common = {"target": "7", "title": "job 7 a", "state": "RUNNING"}
    return list(status_lines(JobStatus.model_validate({**common, **fields})))


def test_a_running_training() -> None:
    use = GpuUse(node="node0", gpu="gpu0", utilization=98, memory_used_bytes=62720 * 2**20, power_w=645.3, age_s=30)
    heading, training, gpus, gpu, note, log, last = lines(
        start=time.time() - 130,
        time_limit_s=3600,
        nodes=("node0", "node1"),
        training=SPEED,
        gpus=(use,),
        notes=("GPU use: 1 of 2 nodes: no answer",),
        log="logs/a-7.out",
        log_lines=("step 14/30",),
    )
    assert heading == "job 7 a: RUNNING on node0, node1, for 2 min 10 s, time limit 1 h 0 min"
    assert "step 14 of 30, loss 5.1234, 2.31 steps/s, 37,800 tokens/s over 12 steps, last step 3 s ago" in training
    assert gpus == "gpus"
    assert gpu.split() == ["node0", "gpu0", "98", "%", "61.2", "GiB", "645", "W", "-", "-", "30", "s", "ago"]
    assert note == "note      GPU use: 1 of 2 nodes: no answer"
    assert (log, last) == ("log       logs/a-7.out", "  | step 14/30")


def test_a_pending_job_has_reason_and_expected_start() -> None:
    (heading,) = lines(state="PENDING", reason="Resources", start=time.time() + 7200)
    assert heading.startswith("job 7 a: PENDING (Resources), expected start 20")


def test_an_ended_job_has_no_duration() -> None:
    (heading,) = lines(state="FAILED", ended=True, reason="NonZeroExitCode, exit code 1", start=0.0, time_limit_s=60)
    assert heading == "job 7 a: FAILED (NonZeroExitCode, exit code 1)"


def test_text_of_a_job_does_not_control_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07evil\x07\u202e"
    title, log_lines = f"job {hostile}\nfaked: ACCEPTED", (hostile, f"a\tb{hostile}")
    shown = lines(title=title, log="l", log_lines=log_lines, notes=(hostile,))
    assert len(shown) == 5
    assert not any(char in line for line in shown for char in "\x1b\x07\u202e\n\t")


def test_many_gpus_and_ranks_are_cut() -> None:
    uses = tuple(GpuUse(node=f"node{number // 8}", gpu=f"gpu{number % 8}") for number in range(100))
    shown = lines(gpus=uses, ranks={f"check {number}": 1 for number in range(100)})
    assert len(shown) == 1 + 6 + 1 + 64 + 1
    assert "36 more" in shown[-1]
