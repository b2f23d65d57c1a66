from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.bench import host_speed

CPUS = sorted(os.sched_getaffinity(0))


def test_hash_rate_of_one_and_of_all_cpus() -> None:
    assert host_speed.hash_rate(CPUS[:1], 0.03) > 1e3
    assert host_speed.hash_rate(CPUS, 0.03) > 1e3


def test_copies_per_group() -> None:
    rates = host_speed.copy_rates([CPUS[:1], CPUS[1:]], 0.02, block=2**22)
    assert rates[0] > 0.01
    assert (rates[1] > 0.01) == (len(CPUS) > 1)


def test_each_thread_runs_on_its_cpu_and_the_caller_keeps_its_cpus() -> None:
    seen: list[set[int]] = []

    def prepare() -> Callable[[], float]:
        seen.append(os.sched_getaffinity(0))
        return lambda: 1.0

    assert host_speed._run_on_cpus(CPUS, prepare) == [1.0] * len(CPUS)
    assert sorted(cpu for cpus in seen for cpu in cpus) == CPUS
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_an_error_of_one_thread_ends_the_others() -> None:
    first = threading.Lock()

    def prepare() -> Callable[[], float]:
        if first.acquire(blocking=False):
            raise MemoryError("no memory")
        return lambda: 1.0

    with pytest.raises((MemoryError, threading.BrokenBarrierError)):
        host_speed._run_on_cpus(CPUS[:1] * 3, prepare)


def disk_speed_or_skip(folder: Path, size: int, limit_s: float) -> host_speed.DiskSpeed:
    try:
        return host_speed.disk_speed(folder / "file", size, limit_s)
    except OSError as error:
        if error.errno == errno.EINVAL:
            pytest.skip(f"{folder} does not support O_DIRECT")
        raise


def test_disk_speed_removes_its_file(tmp_path: Path) -> None:
    speed = disk_speed_or_skip(tmp_path, 2**23, 10)
    assert speed.size == 2**23
    assert min(speed.write, speed.read) > 0
    assert not list(tmp_path.iterdir())


def test_disk_speed_ends_at_its_time_limit(tmp_path: Path) -> None:
    assert 0 < disk_speed_or_skip(tmp_path, 2**40, 0.05).size < 2**40


def test_disk_speed_keeps_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("data")
    with pytest.raises(FileExistsError):
        host_speed.disk_speed(tmp_path / "file", 2**22, 1)
    assert (tmp_path / "file").read_text() == "data"
