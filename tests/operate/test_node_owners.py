"""The owner of a process, by /proc of nodes with and without cgroups, and of a Kubernetes node."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.operate.node_owners import owner


def add(root: Path, pid: int, cgroup: str, environ: str = "", title: str = "python") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup + "\n")
    (folder / "environ").write_bytes(environ.encode())
    (folder / "cmdline").write_bytes(title.encode() + b"\0")


V1 = "12:devices:/slurm_node3/uid_1000/job_57/step_0\n1:name=systemd:/system.slice/slurmd.service"
V2 = "0::/system.slice/slurmstepd.scope/job_57/step_0/user/task_0"
SLURMD = "0::/system.slice/slurmd.service"  # jobs with proctrack/linuxproc
POD = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b2c.slice/cri-containerd-9f.scope"


@pytest.mark.parametrize(("cgroup", "environ"), [(V1, ""), (V2, ""), (SLURMD, "A=1\0SLURM_JOB_ID=57\0B=2\0")])
def test_a_job_owns_its_processes_while_a_step_of_it_runs(tmp_path: Path, cgroup: str, environ: str) -> None:
    add(tmp_path, 900, cgroup, environ)
    assert owner(900, "", tmp_path) == "", "the job has ended: its process was left"
    add(tmp_path, 800, SLURMD, title="slurmstepd: [57.batch]")
    assert owner(900, "", tmp_path) == "job 57"
    assert owner(900, "57", tmp_path) == "", "an epilog: the job is over"
    assert owner(900, "58", tmp_path) == "job 57", "the epilog of another job on the node"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (POD, "a pod"),
        ("0::/system.slice/nvidia-mps.service", "service nvidia-mps.service"),
        ("1:name=systemd:/system.slice/dcgm.service", "service dcgm.service"),
        ("0::/user.slice/user-1000.slice/session-5.scope", ""),
        (SLURMD, ""),
        ("0::/", ""),
    ],
)
def test_pods_and_services_own_their_processes_and_sessions_do_not(tmp_path: Path, cgroup: str, expected: str) -> None:
    add(tmp_path, 900, cgroup)
    assert owner(900, "", tmp_path) == expected


def test_a_process_that_is_not_visible_has_no_known_owner(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert owner(900, "", tmp_path) is None


def test_a_job_id_in_another_variable_does_not_count(tmp_path: Path) -> None:
    add(tmp_path, 800, SLURMD, title="slurmstepd: [57.batch]")
    add(tmp_path, 900, SLURMD, "MY_SLURM_JOB_ID=57\0SLURM_JOB_ID=57x\0")
    assert owner(900, "", tmp_path) == ""
