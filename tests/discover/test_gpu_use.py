"""GPU use from nvidia-smi's CSV output on the nodes of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.discover.gpu_use import Readings, gpu_use_step
from seatrial.discover.slurm import SlurmUnavailable

# nvidia-smi prints [N/A] for values that the GPU, its MIG mode or its virtualization does not give, and
# [Not Supported] with older drivers (enkore/i3pystatus#776, HSF/prmon#318)
LINES = [
    "node0,gpu,0, 98, 62720, 143771, 645.31, 61, 1980",
    "node0,gpu,1, [N/A], 24576, 143771, [Not Supported], 55, [N/A]",
    "node1,error,nvidia-smi: command not found",
    "node1,end",
]


def read(lines: list[str]) -> Readings:
    readings = Readings()
    readings.add(lines)
    return readings


def test_values_of_each_gpu() -> None:
    readings = read(LINES)
    first, second = readings.uses
    assert (first.node, first.gpu, first.utilization, first.power_w) == ("node0", "gpu0", 98, 645.31)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (62720 * 2**20, 143771 * 2**20)
    assert (first.temperature_c, first.sm_clock_mhz) == (61, 1980)
    assert (second.utilization, second.power_w, second.sm_clock_mhz) == (None, None, None)
    assert readings.errors == {"node1": "nvidia-smi: command not found"}
    assert readings.answered == {"node1"}, "another GPU of node0 may follow"


def test_the_last_line_of_a_gpu_counts() -> None:
    readings = read(LINES)
    readings.add(["node1,gpu,0, 5, 1, 2, 3, 4, 5", "node0,gpu,0, 7, 1, 2, 3, 4, 5"])
    assert [(use.node, use.gpu, use.utilization) for use in readings.uses] == [
        ("node0", "gpu0", 7),
        ("node0", "gpu1", None),
        ("node1", "gpu0", 5),
    ]
    assert readings.errors == {}


def test_other_lines_are_ignored() -> None:
    lines = ["", "srun: Job step creation temporarily disabled", "node0,gpu,0, 98", "node0,gpu,x, 1, 2, 3, 4, 5, 6"]
    lines += ["node0,gpu,0, nan, inf, 1, 2, 3, 4", "\x1b[2J,end", "a,b,c"]
    readings = read(lines)
    assert [(use.utilization, use.memory_used_bytes) for use in readings.uses] == [(None, None)]
    assert (readings.errors, readings.answered) == ({}, {"\\x1b[2J"})


def fake_srun(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A srun that checks its options and runs the rest of its arguments, or ``body`` instead."""
    script = folder / "srun"
    script.write_text(
        '#!/bin/bash\n[[ "$1 $2 $3 $4" == "--jobid=7 --nodes=2 --ntasks=2 --ntasks-per-node=1" ]] || exit 64\n'
        '[[ " $* " == *" --overlap "* && " $* " != *" --gres"* ]] || exit 65\n'
        'while [[ "$1" == --* ]]; do shift; done\n' + body
    )
    script.chmod(0o755)
    (folder / "nvidia-smi").write_text("#!/bin/bash\necho '0, 98, 62720, 143771, 645.31, 61, 1980'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


ON_BOTH = 'for node in node0 node1; do SLURMD_NODENAME=$node "$@" & done; wait\n'


def test_a_step_reads_each_node_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, ON_BOTH)
    with gpu_use_step("7", 2, 0) as step:
        uses, note = step.read()
    assert [(use.node, use.utilization) for use in uses] == [("node0", 98), ("node1", 98)]
    assert note == ""


def test_a_repeating_step_ends_with_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, ON_BOTH)
    with gpu_use_step("7", 2, 3600) as step:
        assert len(step.read()[0]) == 2
        assert step.child.poll() is None
    assert step.child.poll() is not None


def test_a_node_without_nvidia_smi_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, ON_BOTH)
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\necho 'NVIDIA-SMI has failed, because'; exit 9\n")
    with gpu_use_step("7", 2, 0) as step:
        uses, note = step.read()
    assert uses == ()
    assert note == "node0: NVIDIA-SMI has failed  because; node1: NVIDIA-SMI has failed  because"


def test_a_step_that_slurm_refuses_has_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "srun: error: Unable to create step for job 7: Access/permission denied"
    fake_srun(tmp_path, monkeypatch, f"echo '{refused}' >&2; exit 1\n")
    with gpu_use_step("7", 2, 0) as step:
        assert step.read() == ((), f"2 of 2 nodes: {refused}")


def test_a_step_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, "sleep 600\n")
    with gpu_use_step("7", 2, 0) as step:
        assert step.read(wait_s=0.2) == ((), "2 of 2 nodes: no answer within 0.2 s")


def test_without_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="command -v srun"), gpu_use_step("7", 2, 0):
        pass
