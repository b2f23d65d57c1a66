"""Misconfigured sites: each trial ends with a message that names the error, and with an empty queue."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.model import Trial
from tests.launch.test_slurm_on_rig import CHECK, SHORT_TIMEOUT, TRIAL, nothing_is_left, started
from tests.processes import CPU_ONLY, HOST_ONLY, load, ranks_in_check, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TRIAL.replace("min_seconds_per_size: 10", "min_seconds_per_size: 30"))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB that the login node and all nodes share."""
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "small")], check=True)
    yield tmp_path / "small"
    subprocess.run(["umount", "--lazy", str(tmp_path / "small")], check=True)


def failure(record: Trial) -> str:
    """The failed subject and the cause of the only job."""
    (result,) = record.results
    assert result.cause_without_command in record.decision.reason or record.measurements
    return f"{result.failed_subject}: {result.cause}"


def test_node_with_different_munge_key(make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    cluster.wrong_munge_key("node1")
    options = ("--only", "host.inventory", "--set", "slurm.queue_s=20")
    code, _, err = started(cluster, trial, tmp_path / "run", *options).finish()
    assert code == 3, err
    reason = failure(load(tmp_path / "run"))
    # depends on whether srun or the controller detects the node first, and on whether that marks it DOWN in time
    first = reason.rpartition("Run first: ")[2]
    if re.search(r"node1 is (DOWN|IDLE)\+NOT_RESPONDING", reason):
        assert "1 of 2 nodes of partition gpu are usable" in reason
        assert first == "scontrol show job 1; sinfo -R"
    else:
        assert reason.startswith("node1: srun cannot start a task on this node: Zero Bytes")
        assert first.startswith("sinfo -R; munge -n | ssh node1 unmunge")
    assert nothing_is_left(cluster)


def test_unknown_interface_fails_preflight(make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path) -> None:
    """slurm.interface is used if a node cannot resolve the first node's name."""
    cluster = make_cluster(2)
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    cluster.run_on("node1", ["mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts"])
    out = tmp_path / "run"
    code, _, err = started(cluster, trial, out, "--only", "nodes.reachable", "--set", "slurm.interface=ib7").finish()
    assert code == 3, err
    reason = failure(load(out))
    assert "node0, node1: slurm.interface: ib7 does not exist or has no IPv4 address" in reason
    assert "Run first: srun --nodelist=node0 ip -br address" in reason
    assert nothing_is_left(cluster)


def test_rendezvous_by_interface_address(make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    cluster.run_on("node1", ["mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts"])
    with (cluster.folder / "task-prolog").open("a") as prolog:
        prolog.write('echo "print Welcome"\n')  # Slurm writes it to the standard output of each task
    trial.write_text(CPU_ONLY + "checks: {nodes.reachable: }")
    code, _, err = started(cluster, trial, tmp_path / "run").finish()
    assert code == 0, err


def test_run_directory_fills_up_during_the_run(
    small: Path, make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    program = started(cluster, trial, small / "run", *SHORT_TIMEOUT)
    until(lambda: ranks_in_check(small / "run", "ranks", CHECK, 4))
    subprocess.run(["dd", "if=/dev/zero", f"of={small}/filler", "bs=4k"], capture_output=True, check=False)
    code, _, err = program.finish()
    assert code == 3, err
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert nothing_is_left(cluster)


def test_run_directory_full_at_start(small: Path, make_cluster: Callable[..., Cluster], trial: Path) -> None:
    cluster = make_cluster(2)
    subprocess.run(["dd", "if=/dev/zero", f"of={small}/filler", "bs=4k"], capture_output=True, check=False)
    code, _, err = started(cluster, trial, small / "run").finish()
    assert code == 2, err
    assert "cannot write to --out" in err
    assert "No space left on device" in err
    assert nothing_is_left(cluster)


def test_read_only_run_directory(small: Path, make_cluster: Callable[..., Cluster], trial: Path) -> None:
    cluster = make_cluster(2)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    code, _, err = started(cluster, trial, small / "run").finish()
    assert code == 2, err
    assert "cannot write to --out" in err
    assert "Read-only file system" in err
    assert nothing_is_left(cluster)


def test_run_directory_read_only_on_one_node(make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "scratch").mkdir()
    for node in cluster.nodes:
        cluster.private_dir(tmp_path / "scratch", node)
    cluster.run_on("node1", ["mount", "--bind", str(tmp_path / "runs"), str(tmp_path / "runs")])
    cluster.run_on("node1", ["mount", "-o", "remount,ro,bind", str(tmp_path / "runs")])
    out = tmp_path / "runs" / "run"
    trial.write_text(HOST_ONLY)
    code, _, err = started(cluster, trial, out, "--set", f"slurm.scratch={tmp_path / 'scratch'}").finish()
    assert code == 0, err
    assert "not shared: node1" in (out / "jobs" / "nodes" / "attempt1" / "launcher.err").read_text()


def test_blocked_rendezvous_port_is_named_before_torchrun_waits(
    make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    rule = ["-p", "tcp", "--dport", "20000:29999", "--jump", "DROP"]
    assert cluster.run_on("node0", ["iptables", "--append", "INPUT", "-i", "eth0", *rule]).returncode == 0
    code, _, err = started(cluster, trial, tmp_path / "run", "--only", CHECK).finish()
    assert code == 3, err
    record = load(tmp_path / "run")
    reason = failure(record)
    assert reason.startswith("node1: cannot connect to the rendezvous at node0, port 2")
    assert "no answer within 2 s" in reason
    (finding,) = record.findings
    assert (finding.subject, finding.first_command.split()[:3]) == ("node1", ["srun", "--nodelist=node1", "sh"])
    assert nothing_is_left(cluster)
