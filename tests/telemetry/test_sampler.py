"""The sampler: what it asks of NVML and the kernel, and how it ends."""

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
    """Time that goes on by a second at each sample, and not otherwise."""

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


def nvlink(clock: Clock, kib_per_s: int = 10**6, together: bool = True) -> Callable[[list[tuple[int, int]]], Any]:
    """Counters that have run since time 0: each link receives so much and sends twice that."""

    def answer(questions: list[tuple[int, int]]) -> Any:
        values = (real.c_nvmlFieldValue_t * len(questions))()
        for value, (field, link) in zip(values, questions, strict=True):
            assert field in (RX, TX)
            shares = 18 if link == ALL_LINKS else 1
            value.nvmlReturn = real.NVML_SUCCESS if together or link != ALL_LINKS else real.NVML_ERROR_INVALID_ARGUMENT
            value.value.ullVal = int(clock.now * kib_per_s * shares * (1 + (field == TX)))
        return values

    return answer


def at_work(clock: Clock, index: int = 0, **answers: Any) -> FakeGpu:
    used = real.c_nvmlUtilization_t()
    used.gpu, used.memory = 98, 41
    kbs = {real.NVML_PCIE_UTIL_RX_BYTES: 55_500_000, real.NVML_PCIE_UTIL_TX_BYTES: 1_250_000}

    def pcie(counter: int) -> int:
        clock.now += 0.02  # as long as NVML watches
        return kbs[counter]

    return h200(
        index,
        **{
            "nvmlDeviceGetUtilizationRates": used,
            "nvmlDeviceGetMemoryInfo": memory(150754820096, used=9 * 2**30),
            "nvmlDeviceGetPowerUsage": 699512,
            "nvmlDeviceGetClockInfo": lambda clock: {real.NVML_CLOCK_SM: 1500}[clock],
            "nvmlDeviceGetPcieThroughput": pcie,
            "nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwPowerCap,
            "nvmlDeviceGetFieldValues": nvlink(clock),
            **answers,
        },
    )


def opened(fake: FakeNvml, root: Path = Path("/")) -> Sampler:
    fake.nvmlInit()
    return Sampler(fake, {}, root)


def looked(seen: Sampler) -> dict[str, Any]:
    return dict(zip(seen.header(1)["columns"], seen.sample(), strict=True))


def test_every_gauge_of_a_gpu_at_work(clock: Clock) -> None:
    seen = opened(FakeNvml(at_work(clock)))
    clock.now += 1
    row = looked(seen)
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
    assert not [name for name in seen.unreadable() if name.startswith("gpu0")]
    header = seen.header(1)
    assert header["reasons"][str(real.nvmlClocksEventReasonSwPowerCap)] == "software power cap"
    assert header["devices"]["gpu0"]["name"] == "NVIDIA H200"


@pytest.mark.parametrize(("together", "questions"), [(True, 2), (False, 36)])
def test_links_are_asked_one_by_one_only_where_their_sum_cannot_be_had(
    clock: Clock, together: bool, questions: int
) -> None:
    counters, asked = nvlink(clock, together=together), list[int]()

    def count(questions: list[tuple[int, int]]) -> Any:
        asked.append(len(questions))
        return counters(questions)

    seen = opened(FakeNvml(at_work(clock, nvmlDeviceGetFieldValues=count)))
    clock.now += 2
    assert looked(seen)["gpu0.nvlink_rx_gbs"] == 18.432
    assert asked[-1] == questions


def test_the_sum_of_links_is_tried_once_something_has_passed(clock: Clock) -> None:
    clock.now, asked = 0.0, list[int]()
    counters = nvlink(clock)

    def count(questions: list[tuple[int, int]]) -> Any:
        asked.append(len(questions))
        return counters(questions)

    seen = opened(FakeNvml(at_work(clock, nvmlDeviceGetFieldValues=count)))
    clock.now = 0.0  # the counters too: no byte since the driver was loaded
    asked.clear()
    looked(seen)
    clock.now = 2.0
    looked(seen)
    assert asked == [36, 36, 36, 2, 36]
    clock.now = 4.0
    assert looked(seen)["gpu0.nvlink_rx_gbs"] == 18.432
    assert asked[-1] == 2


def test_gpus_are_looked_at_in_turn_as_far_as_the_time_on_a_core_suffices(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [0.0]
    monkeypatch.setattr("seatrial.telemetry.sampler.time.process_time", lambda: used[0])

    def dear() -> int:
        used[0] += 0.003
        return 699512

    fake = FakeNvml(*(at_work(clock, index, nvmlDeviceGetPowerUsage=dear) for index in range(4)))
    seen = opened(fake)
    used[0] = 0.0

    def gpus(until: float) -> list[int]:
        row = dict(zip(seen.header(1)["columns"], seen.sample(until), strict=True))
        return [index for index in range(4) if row[f"gpu{index}.power_w"] is not None]

    assert gpus(0.0085) == [0, 1, 2]
    assert gpus(0.0085) == []  # nothing is left
    assert gpus(0.0095) == [3]  # those that had no turn come first
    assert gpus(1) == [0, 1, 2, 3]
    used[0] = 0
    assert gpus(0.005) == [0, 1]
    assert gpus(1) == [0, 1, 2, 3]


def test_a_sum_that_is_not_the_sum_of_the_links_is_not_believed(clock: Clock) -> None:
    counters = nvlink(clock)

    def first_link_for_all(questions: list[tuple[int, int]]) -> Any:
        return counters([(field, 0 if link == ALL_LINKS else link) for field, link in questions])

    seen = opened(FakeNvml(at_work(clock, nvmlDeviceGetFieldValues=first_link_for_all)))
    clock.now += 1
    assert looked(seen)["gpu0.nvlink_rx_gbs"] == 18.432


def test_a_counter_that_began_anew_gives_no_rate(clock: Clock) -> None:
    seen = opened(FakeNvml(at_work(clock)))
    clock.now -= 500
    assert looked(seen)["gpu0.nvlink_rx_gbs"] is None
    clock.now += 1
    assert looked(seen)["gpu0.nvlink_rx_gbs"] == 18.432


def test_links_that_are_down_are_not_asked(clock: Clock) -> None:
    seen = opened(FakeNvml(at_work(clock, **links(18, down=range(18)))))
    assert looked(seen)["gpu0.nvlink_tx_gbs"] is None
    assert seen.unreadable()["gpu0.nvlink_tx_gbs"] == "no NVLink is up"


def test_pcie_is_asked_in_turn_for_no_more_than_its_share_of_the_time(clock: Clock) -> None:
    seen = opened(FakeNvml(*(at_work(clock, index) for index in range(8))))
    looked(seen)  # what was asked while opening
    rounds = []
    for _ in range(4):
        began = clock.now
        seen.read_pcie(0.1)
        assert clock.now - began == pytest.approx(0.08)
        row = looked(seen)
        rounds.append([index for index in range(8) if row[f"gpu{index}.pcie_rx_gbs"] is not None])
    assert sorted(itertools.chain(*rounds)) == list(range(8)), "each once in four rounds"


def test_what_is_not_permitted_is_absent_with_its_reason_and_asked_once(clock: Clock) -> None:
    asked = []

    def refused() -> Any:
        asked.append(1)
        raise nvml_error("NoPermission")

    seen = opened(FakeNvml(at_work(clock, nvmlDeviceGetUtilizationRates=lambda: refused())))
    rows = [looked(seen) for _ in range(3)]
    assert [row["gpu0.sm_util"] for row in rows] == [None] * 3
    assert rows[-1]["gpu0.power_w"] == 699.5
    assert seen.unreadable()["gpu0.memory_util"] == "Insufficient Permissions"
    assert len(asked) == 1


def test_a_gpu_that_is_lost_meanwhile_ends_nothing(clock: Clock) -> None:
    gpu = at_work(clock)
    seen = opened(FakeNvml(gpu, at_work(clock, 1)))
    looked(seen)  # with what PCIe did before
    gpu.answers = gpu.lost().answers
    clock.now += 1
    seen.read_pcie(1)
    row = looked(seen)
    assert {row[f"gpu0.{gauge.name}"] for gauge in GPU_GAUGES} == {None}
    assert row["gpu1.power_w"] == 699.5
    assert seen.unreadable()["gpu0.power_w"] == "GPU is lost"


def test_only_gpus_that_cuda_may_use_are_watched(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(*(at_work(clock, index) for index in range(3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert list(opened(fake).header(1)["devices"]) == ["host", "gpu2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    every = opened(fake)
    assert list(every.header(1)["devices"]) == ["host", "gpu0", "gpu1", "gpu2"]
    assert "lists '7'" in every.unreadable()["host.CUDA_VISIBLE_DEVICES"]


def test_samples_are_written_at_each_period_and_news_are_told_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter([7] * 4 + [1])
    monkeypatch.setattr(sampler, "os", SimpleNamespace(getppid=lambda: next(parents), environ={}))
    file = io.StringIO()
    run_sampler(opened(FakeNvml(at_work(clock))), file, 2.0)
    header, *lines = map(json.loads, file.getvalue().splitlines())
    rows = [line for line in lines if isinstance(line, list)]
    assert [round(b[0] - a[0], 3) for a, b in itertools.pairwise(rows)] == [0.5, 0.5]
    assert {len(row) for row in rows} == {len(header["columns"])}
    assert len([line for line in lines if isinstance(line, dict)]) == 1


@pytest.mark.parametrize("look_s", [0.006, 0.012])
def test_dear_answers_make_samples_rarer_and_not_the_sampler_dear(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    parents, used = iter([7] * 102 + [1]), [0.0]
    monkeypatch.setattr(sampler, "os", SimpleNamespace(getppid=lambda: next(parents), environ={}))
    monkeypatch.setattr("seatrial.telemetry.sampler.time.process_time", lambda: used[0])

    def dear() -> int:
        used[0] += look_s
        return 699512

    file = io.StringIO()
    run_sampler(
        opened(FakeNvml(*(at_work(clock, index, nvmlDeviceGetPowerUsage=dear) for index in range(8)))), file, 1.0
    )
    header, *lines = map(json.loads, file.getvalue().splitlines())
    rows = [dict(zip(header["columns"], line, strict=True)) for line in lines if isinstance(line, list)]
    share = (rows[-1]["host.sampler_cpu_s"] - rows[0]["host.sampler_cpu_s"]) / (rows[-1]["time"] - rows[0]["time"])
    assert 0.006 < share < 0.0075
    seen = [sum(row[f"gpu{index}.power_w"] is not None for row in rows) for index in range(8)]
    assert max(seen) - min(seen) <= 1, "each as often as the others"


def test_a_real_one_samples_the_host_and_dies_with_its_parent(tmp_path: Path) -> None:
    """Its parent is killed: nothing of the sampler is left, and every line but the last is whole."""
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
    row = dict(zip(header["columns"], [one for one in rows if isinstance(one, list)][-1], strict=True))
    assert row["host.memory_used_bytes"] > 2**20
    assert row["host.sampler_cpu_s"] > 0
    assert (tmp_path / "rank0.samples.err").read_text() == ""
