"""The script of a probe pod, and the findings in its log."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from seatrial.discover.pod_probe import SCRIPT, parse_logs, peers
from seatrial.model import SeatrialError

LOG = ["shm_kib=1024-blocks", "shm_kib=16777216", "memlock_kib=8192", "memory_kib=263767352"]
LOG += ["capabilities=00000000a80425fb", "rdma=mlx5_0", "rdma=mlx5_1", "probed=1", "resolved=p-1"]


def prefixed(lines: list[str], pod: str = "p-0-x5crl") -> str:
    """The lines as ``kubectl logs --prefix`` prints them."""
    return "\n".join(f"[pod/{pod}/seatrial] {line}" for line in lines)


def test_findings() -> None:
    """a80425fb: the capabilities that container runtimes give by default, without CAP_IPC_LOCK."""
    container = parse_logs(prefixed(LOG))["p-0-x5crl"]
    assert (container.shm_bytes, container.memlock_unlimited) == (16 * 2**30, False)
    assert container.rdma_devices == ("mlx5_0", "mlx5_1")
    assert (container.resolved, container.ended) == (("p-1",), False)


@pytest.mark.parametrize(
    ("line", "unlimited"),
    [("memlock_kib=unlimited", True), ("memlock_kib=263767352", True), ("memlock_kib=64", False)],
)
def test_limit_of_locked_memory(line: str, unlimited: bool) -> None:
    lines = [line if other.startswith("memlock") else other for other in LOG]
    assert parse_logs(prefixed(lines))["p-0-x5crl"].memlock_unlimited is unlimited


def test_capability_ipc_lock() -> None:
    lines = ["capabilities=0000000000004000" if line.startswith("capabilities") else line for line in LOG]
    assert parse_logs(prefixed(lines))["p-0-x5crl"].memlock_unlimited


def test_a_probe_that_has_not_looked_at_its_devices_has_no_findings() -> None:
    assert parse_logs(prefixed(["shm_kib=16777216"])) == {}


@pytest.mark.parametrize("line", ["shm_kib=many", "memlock_kib=", "capabilities=xyz", "gpus=eight"])
def test_a_value_of_another_form_is_an_error(line: str) -> None:
    key = line.partition("=")[0]
    lines = [other for other in LOG if not other.startswith(f"{key}=")]
    with pytest.raises(SeatrialError, match="p-0-x5crl"):
        parse_logs(prefixed([line, *lines]))


def test_script_on_this_machine() -> None:
    """The script itself, in a POSIX shell: one pod, so that it resolves no name."""
    env = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": "0"}
    arguments = ["p", "1", "0", "0"]
    output = subprocess.run(["sh", "-c", SCRIPT, "sh", *arguments], env=env, capture_output=True, text=True, check=True)
    (container,) = parse_logs(prefixed(output.stdout.splitlines())).values()
    assert container.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    assert (container.ended, container.gpus, output.stderr) == (True, None, "")


@pytest.mark.parametrize("mig", [True, False])
def test_mig_instances_are_not_counted_as_gpus(tmp_path: Path, mig: bool) -> None:
    """Published output of nvidia-smi on an A100, with one device in the pod."""
    lines = ["GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-9c73eb7b-8d6d-6c0e-dc13-97873e2ede40)"]
    if mig:
        lines.append("  MIG 1g.10gb     Device  0: (UUID: MIG-a686709d-6dc2-542a-8851-0d2508448c10)")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\ntest "$*" = -L || exit 64\ncat "$0.txt"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "nvidia-smi.txt").write_text("\n".join(lines) + "\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    argv = ["sh", "-c", SCRIPT, "sh", "job", "1", "1", "0"]
    output = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    (container,) = parse_logs(prefixed(output.splitlines())).values()
    assert container.gpus == (None if mig else 1)
    assert container.gpu_error == ("MIG enabled; MIG instances are not supported" if mig else "")


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40])
def test_every_name_is_resolved_by_another_pod(count: int) -> None:
    resolved = set(itertools.chain.from_iterable(peers(index, count) for index in range(count)))
    assert resolved == (set(range(count)) if count > 1 else set())
    assert all(index not in peers(index, count) for index in range(count))
