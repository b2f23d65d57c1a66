"""seatrial watch on running jobs of a real Slurm cluster; nvidia-smi is a script that prints values.

tests/launch/test_site_on_rig.py watches a real training that has ended.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Program, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

NVIDIA_SMI = """#!/bin/bash
[[ "$*" == "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm \
--format=csv,noheader,nounits" ]] || exit 2
echo "0, 98, 62720, 143771, 645.31, 61, 1980"
echo "1, [N/A], 1, 143771, [N/A], 30, 345"
"""
# Writes what a job script of `seatrial init` and its training write
JOB = """#!/bin/bash
out={folder}/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p $out
echo '{{"max_steps": 100000}}' >$out/config.json
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: tiny/ddp, results in $out"
for ((step = 1; ; step++)); do
    echo "{{\\"step\\": $step, \\"loss\\": 2.5, \\"tokens\\": 256, \\"seconds\\": 0.5}}" >>$out/steps.jsonl
    echo "step $step/100000"
    sleep 0.5
done
"""


def test_a_job_on_two_nodes(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(2, gpus_per_node=2)
    (tmp_path / "bin").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    (tmp_path / "job.sh").write_text(JOB.format(folder=tmp_path))
    env = {**cluster.env, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    options = ["--parsable", "--nodes=2", "--exclusive", "--job-name=ddp", f"--output={tmp_path}/logs/%x-%j.out"]
    job_id, waiting = (cluster.run(["sbatch", *options, str(tmp_path / "job.sh")]).stdout.strip() for _ in range(2))
    out = tmp_path / "runs" / f"ddp-{job_id}"

    def status(*target: str | Path) -> dict[str, Any]:
        code, text, err = Program("watch", *target, "--json", env=env).finish()
        assert code == 0, err
        read: dict[str, Any] = json.loads(text)
        return read

    until(lambda: (out / "steps.jsonl").is_file() and (out / "steps.jsonl").read_text().count("\n") > 2)
    for read in (status(job_id), status(out)):
        assert (read["state"], read["nodes"]) == ("RUNNING", ["node0", "node1"])
        assert [(use["node"], use["gpu"], use["utilization"]) for use in read["gpus"]] == [
            ("node0", "gpu0", 98),
            ("node0", "gpu1", None),
            ("node1", "gpu0", 98),
            ("node1", "gpu1", None),
        ]
        assert (read["training"]["steps_per_second"], read["training"]["max_steps"]) == (2, 100000)
        assert read["notes"] == []
        assert read["log"] == str(tmp_path / "logs" / f"ddp-{job_id}.out")
        assert read["log_lines"][-1].startswith("step ")
    code, text, err = Program("watch", job_id, "--lines", "1", env=env).finish()
    assert code == 0, err
    assert text.startswith(f"job {job_id} ddp: RUNNING on node0, node1, for ")
    pending = status(waiting)
    assert (pending["state"], pending["gpus"], pending["log_lines"]) == ("PENDING", [], [])
    assert pending["reason"] in ("Resources", "Priority", "")

    controller, terminal = pty.openpty()
    steps_of_jobs = ["squeue", "--steps", "--noheader", "--format=%j"]
    with subprocess.Popen([sys.executable, "-m", "seatrial", "watch", job_id], stdout=terminal, env=env) as view:
        until(lambda: "seatrial-watch" in cluster.run(steps_of_jobs).stdout)
        view.send_signal(signal.SIGINT)
        assert view.wait(30) == 130
    os.close(controller)
    os.close(terminal)
    until(lambda: "seatrial-watch" not in cluster.run(steps_of_jobs).stdout)
    assert status(job_id)["state"] == "RUNNING", "the job goes on"

    assert cluster.run(["scancel", job_id, waiting]).returncode == 0
    until(lambda: status(job_id)["ended"])
    assert status(job_id)["state"] == "CANCELLED"
    code, _, err = Program("watch", "99999", env=env).finish()
    assert code == 2, err
