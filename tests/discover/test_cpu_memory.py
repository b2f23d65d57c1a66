from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from seatrial.discover import cpu_memory
from tests.discover import trees


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trees.node(tmp_path)
    return tmp_path


def test_a_node_of_two_sockets(root: Path) -> None:
    cpu = cpu_memory.read_cpu(root)
    assert cpu.model == "Intel(R) Xeon(R) Platinum 8468"
    assert (cpu.sockets, cpu.cores, cpu.threads, cpu.smt) == (2, 8, 16, True)
    assert (cpu.usable_threads, cpu.quota_cores) == (8, None)
    assert [(numa.name, numa.cpus, numa.memory_bytes) for numa in cpu.numa] == [
        ("node0", "0-3,8-11", 1056692156 * 1024),
        ("node1", "4-7,12-15", 1056692156 * 1024),
    ]
    assert cpu.unreadable == {}


def test_an_arm_cpu_has_no_model_name(root: Path) -> None:
    trees.write(root, {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"})
    assert cpu_memory.read_cpu(root).model == "Arm 0x41 0xd4f"
    trees.write(root, {"proc/cpuinfo": "processor\t: 0\n"})
    assert cpu_memory.read_cpu(root).model is None


def test_memory_of_a_node(root: Path) -> None:
    memory = cpu_memory.read_memory(root)
    assert memory.total_bytes == 2113384312 * 1024
    assert (memory.swap_bytes, memory.limit_bytes, memory.unreadable) == (0, None, {})


def test_the_lowest_limit_of_all_cgroups_applies(root: Path) -> None:
    group = "sys/fs/cgroup/system.slice"
    trees.write(root, {f"{group}/memory.max": "1000000\n", f"{group}/slurmd.service/memory.max": "2000000\n"})
    trees.write(root, {f"{group}/slurmd.service/cpu.max": "250000 100000\n"})
    assert cpu_memory.read_memory(root).limit_bytes == 1_000_000
    assert cpu_memory.read_cpu(root).quota_cores == 2.5


def test_cgroup_v1_in_a_container(root: Path) -> None:
    """The path is the host's; the root of the mount is the container's cgroup."""
    trees.write(root, {"proc/self/cgroup": "9:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n"})
    trees.write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n"})
    trees.write(
        root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    )
    assert cpu_memory.read_memory(root).limit_bytes == 8 * 2**30
    assert cpu_memory.read_cpu(root).quota_cores == 4


def test_cgroup_v1_without_limits(root: Path) -> None:
    trees.write(root, {"proc/self/cgroup": "9:memory:/\n4:cpu,cpuacct:/\n"})
    trees.write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    trees.write(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"})
    memory = cpu_memory.read_memory(root)
    assert (memory.limit_bytes, memory.unreadable) == (None, {})
    assert cpu_memory.read_cpu(root).quota_cores is None


def test_malformed_files_are_reported_and_other_fields_read(root: Path) -> None:
    trees.write(
        root, {"sys/devices/system/cpu/online": "lots\n", "proc/meminfo": "MemTotal: plenty\nSwapTotal: 0 kB\n"}
    )
    trees.write(root, {"sys/devices/system/node/node1/meminfo": "\0\0", "proc/self/cgroup": "no colons here\n"})
    cpu, memory = cpu_memory.read_cpu(root), cpu_memory.read_memory(root)
    assert (cpu.threads, cpu.cores, cpu.smt, cpu.usable_threads) == (None, None, None, 8)
    assert "'lots'" in cpu.unreadable["threads"]
    assert "online CPUs could not be read" in cpu.unreadable["cores"]
    assert "MemTotal" in cpu.numa[1].unreadable["memory_bytes"]
    assert (memory.total_bytes, memory.swap_bytes) == (None, 0)
    assert "'plenty'" in memory.unreadable["total_bytes"]
    assert "limit_bytes" in memory.unreadable


def test_this_machine() -> None:
    cpu, memory = cpu_memory.read_cpu(), cpu_memory.read_memory()
    assert cpu.usable_threads == len(os.sched_getaffinity(0))
    assert cpu.threads == psutil.cpu_count()
    assert memory.total_bytes == psutil.virtual_memory().total
