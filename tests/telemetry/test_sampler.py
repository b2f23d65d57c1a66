"""The sampler: its queries of NVML and the kernel, its output, and its end."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml as real
import pytest

from seatrial.model.telemetry import GPU_GAUGES, HOST_GAUGES
from seatrial.telemetry import sampler
from seatrial.telemetry.sampler import Sampler, run_sampler
from tests.fakes.nvml import FakeGpu, FakeNvml, h200, links, memory, nvml_error
from tests.processes import alive, until

ALL_LINKS = 2**32 - 1
RX, TX = real.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, real.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX


class Clock:
    """A clock that advances only when the sampler sleeps or a test changes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(time=self, monotonic=self, process_time=lambda: 0.5, sleep=self.sleep)
        monkeypatch.setattr(sampler, "time", fake)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def nvlink(clock: Clock, kib_per_s: int = 10**6, sums: bool = True) -> Callable[[list[tuple[int, int]]], Any]:
    """Counters that started at time 0: each link receives ``kib_per_s`` and sends twice that."""

    def answer(queries: list[tuple[int, int]]) -> Any:
        values = (real.c_nvmlFieldValue_t * len(queries))()
        for value, (field, link) in zip(values, queries, strict=True):
            assert field in (RX, TX)
            shares = 18 if link == ALL_LINKS else 1
            value.nvmlReturn = real.NVML_SUCCESS if sums or link != ALL_LINKS else real.NVML_ERROR_INVALID_ARGUMENT
            value.value.ullVal = int(clock.now * kib_per_s * shares * (1 + (field == TX)))
        return values

    return answer


def busy_gpu(clock: Clock, index: int = 0, **answers: Any) -> FakeGpu:
    utilization = real.c_nvmlUtilization_t()
    utilization.gpu, utilization.memory = 98, 41
    kbs = {real.NVML_PCIE_UTIL_RX_BYTES: 55_500_000, real.NVML_PCIE_UTIL_TX_BYTES: 1_250_000}

    def pcie(counter: int) -> int:
        clock.now += 0.02  # the duration of NVML's measurement
        return kbs[counter]

    return h200(
        index,
        **{
            "nvmlDeviceGetUtilizationRates": utilization,
            "nvmlDeviceGetMemoryInfo": memory(150754820096, used=9 * 2**30),
            "nvmlDeviceGetPowerUsage": 699512,
            "nvmlDeviceGetClockInfo": lambda clock: {real.NVML_CLOCK_SM: 1500}[clock],
            "nvmlDeviceGetPcieThroughput": pcie,
            "nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwPowerCap,
            "nvmlDeviceGetFieldValues": nvlink(clock),
            **answers,
        },
    )


def open_sampler(fake: FakeNvml, root: Path = Path("/")) -> Sampler:
    fake.nvmlInit()
    return Sampler(fake, {}, root)


def sample_by_column(node_sampler: Sampler) -> dict[str, Any]:
    return dict(zip(node_sampler.header(1)["columns"], node_sampler.sample(), strict=True))


def test_every_gauge_of_a_busy_gpu(clock: Clock) -> None:
    node_sampler = open_sampler(FakeNvml(busy_gpu(clock)))
    clock.now += 1
    row = sample_by_column(node_sampler)
    assert {gauge.name: row[f"gpu0.{gauge.name}"] for gauge in GPU_GAUGES} == {
        "sm_util": 98,
        "memory_util": 41,
        "memory_used_bytes": 9 * 2**30,
        "power_w": 699.5,
        "temperature_c": 34,
        "sm_clock_mhz": 1500,
        "pcie_rx_gbs": 55.5,
        "pcie_tx_gbs": 1.25,
        "nvlink_rx_gbs": 18.432,  # 18 links × 10⁶ KiB/s
        "nvlink_tx_gbs": 36.864,
    }
    assert row["gpu0.clocks_event_reasons"] == real.nvmlClocksEventReasonSwPowerCap
    assert row["time"] == round(clock.now, 3)
    assert not [name for name in node_sampler.unreadable() if name.startswith("gpu0")]
    header = node_sampler.header(1)
    assert header["reasons"][str(real.nvmlClocksEventReasonSwPowerCap)] == "software power cap"
    assert header["devices"]["gpu0"]["name"] == "NVIDIA H200"


@pytest.mark.parametrize(("sums", "query_count"), [(True, 2), (False, 36)])
def test_links_are_queried_separately_only_if_the_driver_has_no_sum(clock: Clock, sums: bool, query_count: int) -> None:
    counters, query_counts = nvlink(clock, sums=sums), list[int]()

    def count(queries: list[tuple[int, int]]) -> Any:
        query_counts.append(len(queries))
        return counters(queries)

    node_sampler = open_sampler(FakeNvml(busy_gpu(clock, nvmlDeviceGetFieldValues=count)))
    clock.now += 2
    assert sample_by_column(node_sampler)["gpu0.nvlink_rx_gbs"] == 18.432
    assert query_counts[-1] == query_count


def test_sum_of_links_is_tried_once_counters_are_above_zero(clock: Clock) -> None:
    clock.now, query_counts = 0.0, list[int]()
    counters = nvlink(clock)

    def count(queries: list[tuple[int, int]]) -> Any:
        query_counts.append(len(queries))
        return counters(queries)

    node_sampler = open_sampler(FakeNvml(busy_gpu(clock, nvmlDeviceGetFieldValues=count)))
    clock.now = 0.0  # counters are 0: no byte since the driver was loaded
    query_counts.clear()
    sample_by_column(node_sampler)
    clock.now = 2.0
    sample_by_column(node_sampler)
    assert query_counts == [36, 36, 36, 2, 36]
    clock.now = 4.0
    assert sample_by_column(node_sampler)["gpu0.nvlink_rx_gbs"] == 18.432
    assert query_counts[-1] == 2


def test_gpus_are_sampled_in_turn_within_the_cpu_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = [0.0]
    monkeypatch.setattr("seatrial.telemetry.sampler.time.process_time", lambda: cpu_s[0])

    def slow_query() -> int:
        cpu_s[0] += 0.003
        return 699512

    fake = FakeNvml(*(busy_gpu(clock, index, nvmlDeviceGetPowerUsage=slow_query) for index in range(4)))
    node_sampler = open_sampler(fake)
    cpu_s[0] = 0.0

    def sampled(cpu_limit_s: float) -> list[int]:
        row = dict(zip(node_sampler.header(1)["columns"], node_sampler.sample(cpu_limit_s), strict=True))
        return [index for index in range(4) if row[f"gpu{index}.power_w"] is not None]

    assert sampled(0.0085) == [0, 1, 2]
    assert sampled(0.0085) == []  # no CPU time left
    assert sampled(0.0095) == [3]  # first those that had no turn
    assert sampled(1) == [0, 1, 2, 3]
    cpu_s[0] = 0
    assert sampled(0.005) == [0, 1]
    assert sampled(1) == [0, 1, 2, 3]


def test_wrong_sum_of_links_is_not_used(clock: Clock) -> None:
    counters = nvlink(clock)

    def first_link_for_all(queries: list[tuple[int, int]]) -> Any:
        return counters([(field, 0 if link == ALL_LINKS else link) for field, link in queries])

    node_sampler = open_sampler(FakeNvml(busy_gpu(clock, nvmlDeviceGetFieldValues=first_link_for_all)))
    clock.now += 1
    assert sample_by_column(node_sampler)["gpu0.nvlink_rx_gbs"] == 18.432


def test_counter_reset_gives_no_rate(clock: Clock) -> None:
    node_sampler = open_sampler(FakeNvml(busy_gpu(clock)))
    clock.now -= 500
    assert sample_by_column(node_sampler)["gpu0.nvlink_rx_gbs"] is None
    clock.now += 1
    assert sample_by_column(node_sampler)["gpu0.nvlink_rx_gbs"] == 18.432


def test_links_that_are_down_are_not_queried(clock: Clock) -> None:
    node_sampler = open_sampler(FakeNvml(busy_gpu(clock, **links(18, down=range(18)))))
    assert sample_by_column(node_sampler)["gpu0.nvlink_tx_gbs"] is None
    assert node_sampler.unreadable()["gpu0.nvlink_tx_gbs"] == "no NVLink is up"


def test_pcie_is_queried_in_turn_within_its_share_of_the_time(clock: Clock) -> None:
    node_sampler = open_sampler(FakeNvml(*(busy_gpu(clock, index) for index in range(8))))
    sample_by_column(node_sampler)  # values read while opening
    rounds = []
    for _ in range(4):
        started = clock.now
        node_sampler.read_pcie(0.1)
        assert clock.now - started == pytest.approx(0.08)
        row = sample_by_column(node_sampler)
        rounds.append([index for index in range(8) if row[f"gpu{index}.pcie_rx_gbs"] is not None])
    assert sorted(itertools.chain(*rounds)) == list(range(8)), "each once in four rounds"


def test_refused_gauge_is_unreadable_and_queried_once(clock: Clock) -> None:
    query_counts = []

    def refused() -> Any:
        query_counts.append(1)
        raise nvml_error("NoPermission")

    node_sampler = open_sampler(FakeNvml(busy_gpu(clock, nvmlDeviceGetUtilizationRates=lambda: refused())))
    rows = [sample_by_column(node_sampler) for _ in range(3)]
    assert [row["gpu0.sm_util"] for row in rows] == [None] * 3
    assert rows[-1]["gpu0.power_w"] == 699.5
    assert node_sampler.unreadable()["gpu0.memory_util"] == "Insufficient Permissions"
    assert len(query_counts) == 1


def test_sampling_continues_after_a_gpu_is_lost(clock: Clock) -> None:
    gpu = busy_gpu(clock)
    node_sampler = open_sampler(FakeNvml(gpu, busy_gpu(clock, 1)))
    sample_by_column(node_sampler)  # uses the PCIe rates read before
    gpu.answers = gpu.lost().answers
    clock.now += 1
    node_sampler.read_pcie(1)
    row = sample_by_column(node_sampler)
    assert {row[f"gpu0.{gauge.name}"] for gauge in GPU_GAUGES} == {None}
    assert row["gpu1.power_w"] == 699.5
    assert node_sampler.unreadable()["gpu0.power_w"] == "GPU is lost"


def test_only_gpus_in_cuda_visible_devices_are_sampled(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(*(busy_gpu(clock, index) for index in range(3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert list(open_sampler(fake).header(1)["devices"]) == ["host", "gpu2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    all_gpus = open_sampler(fake)
    assert list(all_gpus.header(1)["devices"]) == ["host", "gpu0", "gpu1", "gpu2"]
    assert "lists '7'" in all_gpus.unreadable()["host.CUDA_VISIBLE_DEVICES"]


def test_samples_are_written_every_period_and_errors_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7] * 4 + [1])
    monkeypatch.setattr(sampler, "os", SimpleNamespace(getppid=lambda: next(parents), environ={}))
    file = io.StringIO()
    run_sampler(open_sampler(FakeNvml(busy_gpu(clock))), file, 2.0)
    header, *lines = map(json.loads, file.getvalue().splitlines())
    rows = [line for line in lines if isinstance(line, list)]
    assert [round(b[0] - a[0], 3) for a, b in itertools.pairwise(rows)] == [0.5, 0.5]
    assert {len(row) for row in rows} == {len(header["columns"])}
    assert len([line for line in lines if isinstance(line, dict)]) == 1


@pytest.mark.parametrize("query_s", [0.006, 0.012])
def test_cpu_share_is_limited_with_slow_queries(clock: Clock, monkeypatch: pytest.MonkeyPatch, query_s: float) -> None:
    parents, cpu_s = iter([7] * 102 + [1]), [0.0]
    monkeypatch.setattr(sampler, "os", SimpleNamespace(getppid=lambda: next(parents), environ={}))
    monkeypatch.setattr("seatrial.telemetry.sampler.time.process_time", lambda: cpu_s[0])

    def slow_query() -> int:
        cpu_s[0] += query_s
        return 699512

    file = io.StringIO()
    run_sampler(
        open_sampler(FakeNvml(*(busy_gpu(clock, index, nvmlDeviceGetPowerUsage=slow_query) for index in range(8)))),
        file,
        1.0,
    )
    header, *lines = map(json.loads, file.getvalue().splitlines())
    rows = [dict(zip(header["columns"], line, strict=True)) for line in lines if isinstance(line, list)]
    share = (rows[-1]["host.sampler_cpu_s"] - rows[0]["host.sampler_cpu_s"]) / (rows[-1]["time"] - rows[0]["time"])
    assert 0.006 < share < 0.0075
    samples = [sum(row[f"gpu{index}.power_w"] is not None for row in rows) for index in range(8)]
    assert max(samples) - min(samples) <= 1, "all GPUs equally often"


def test_real_sampler_samples_the_host_and_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed; the sampler ends, and every line but the last is complete."""
    path = tmp_path / "rank0.samples"
    starter = (
        "import sys, time; from pathlib import Path; from seatrial.util import processes\n"
        "argv = [sys.executable, '-m', 'seatrial.telemetry.sampler', sys.argv[1], '10']\n"
        "log = Path(sys.argv[1] + '.err')\n"
        "print(processes.start(argv, env={}, stdout=log, stderr=log).process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starter, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        until(lambda: path.exists() and path.read_text().count("\n[") >= 3)
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()[:4]]
    names = [f"host.{gauge.name}" for gauge in HOST_GAUGES]
    assert [name for name in header["columns"] if name.startswith("host.")][1:] == names
    row = dict(zip(header["columns"], [line for line in rows if isinstance(line, list)][-1], strict=True))
    assert row["host.memory_used_bytes"] > 2**20
    assert row["host.sampler_cpu_s"] > 0
    assert (tmp_path / "rank0.samples.err").read_text() == ""
