from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.discover import slurm_task
from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.slurm_task import Task, parse_tasks
from tests.paths import FIXTURES

MANY = "\n".join(
    f"{rank}: node=n\n{rank}: cpus={rank}\n{rank}: gpu=0, GPU-{rank}, 0:0:0.0\n{rank}: end=" for rank in (9, 10)
)
# Two sockets with one GPU each
SOCKETS = """\
0: node=gpu1
0: cpus={cpus}
0: cuda={cuda}
0: gpu=0, GPU-aaaa, 00000000:1B:00.0
0: gpu=1, GPU-bbbb, 00000000:9A:00.0
0: pci=0000:1b:00.0 {first}
0: pci=0000:9a:00.0 1
0: siblings=0,64
0: numa=0|0-31,64-95|10 21
0: numa=1|32-63,96-127|21 10
0: numa=2||21 21 10
0: end=
"""


def recorded(name: str) -> tuple[Task, ...]:
    return parse_tasks((FIXTURES / "slurm-task" / name).read_text())


def sockets(cpus: str = "0-1", cuda: str = "0", first: int = 0) -> Task:
    (task,) = parse_tasks(SOCKETS.format(cpus=cpus, cuda=cuda, first=first))
    return task


class TestOnTestCluster:
    def test_constrained_tasks_access_only_their_gpu(self) -> None:
        tasks = recorded("rig-confined.txt")
        assert [task.name for task in tasks] == ["node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3"]
        assert [task.cpus for task in tasks] == [(0,), (1,), (0,), (1,)]
        assert [task.accessible_devices for task in tasks[:2]] == [("/rig/dev/gpu0",), ("/rig/dev/gpu1",)]
        assert {task.accessible_gpus for task in tasks} == {1}
        assert {task.memory_limit for task in tasks} == {2000 * 2**20}

    def test_constrained_tasks_have_the_same_cuda_index_for_different_gpus(self) -> None:
        first, second = recorded("rig-confined.txt")[:2]
        assert first.cuda_visible_devices == second.cuda_visible_devices == "0"
        assert first.gpus(constrained=True) == ("/rig/dev/gpu0",)
        assert second.gpus(constrained=True) == ("/rig/dev/gpu1",)

    def test_unconstrained_tasks_access_all_gpus(self) -> None:
        first, second = recorded("rig.txt")[:2]
        assert first.accessible_devices == second.accessible_devices == ("/rig/dev/gpu0", "/rig/dev/gpu1")
        assert (first.gpus(constrained=False), second.gpus(constrained=False)) == (("0",), ("1",))
        assert first.memory_limit is None
        assert first.listed_gpus is None
        assert "nvidia-smi" in first.listing_error


class TestOnRealGpus:
    def test_gpus_are_identified_by_uuid(self) -> None:
        first, second = recorded("h200x2.txt")
        assert first.gpus(constrained=False) == ("GPU-238c88fa-6d6b-80f0-f225-fb4bd4332413",)
        assert second.gpus(constrained=True) == ("GPU-d9590940-d7e3-6149-905d-38a989b63b86",)
        assert first.accessible_devices == ("/dev/nvidia0", "/dev/nvidia1")
        assert first.accessible_gpus == 2
        assert first.memory_limit == 256 * 2**30

    def test_a_virtual_machine_has_no_numa_node_of_a_gpu(self) -> None:
        assert "0000:00:06.0" in str(recorded("h200x2.txt")[0].numa_distance())


class TestCudaVisibleDevices:
    @pytest.mark.parametrize(
        ("cuda", "gpus"),
        [
            ("1", ("GPU-bbbb",)),
            ("GPU-bb", ("GPU-bbbb",)),
            ("0,1", ("GPU-aaaa", "GPU-bbbb")),
            ("7", ()),
            ("NoDevFiles", ()),
            ("", ()),
            ("MIG-cccc", ("MIG-cccc",)),
        ],
    )
    def test_selects_gpus(self, cuda: str, gpus: tuple[str, ...]) -> None:
        assert sockets(cuda=cuda).gpus(constrained=False) == gpus

    def test_unset_selects_all_gpus(self) -> None:
        (task,) = parse_tasks(SOCKETS.replace("0: cuda={cuda}\n", "").format(cpus="0", first=0))
        assert task.gpus(constrained=False) == ("GPU-aaaa", "GPU-bbbb")

    def test_no_listed_gpu_is_a_result(self) -> None:
        (task,) = parse_tasks("0: node=n\n0: cpus=0\n0: cuda=\n0: unlisted=No devices were found \n0: end=\n")
        assert task.listed_gpus == ()
        assert task.gpus(constrained=False) == ()

    def test_neither_a_list_nor_the_variable(self) -> None:
        (task,) = parse_tasks("0: node=n\n0: cpus=0\n0: unlisted=NVML: Driver/library version mismatch\n0: end=\n")
        assert task.gpus(constrained=False) is None
        assert task.gpus(constrained=True) == ()


class TestNumaDistance:
    @pytest.mark.parametrize(
        ("cpus", "cuda", "distance"), [("0-1", "0", 10), ("0-1", "1", 21), ("31-32", "0", 21), ("96", "1", 10)]
    )
    def test_is_the_largest(self, cpus: str, cuda: str, distance: int) -> None:
        assert sockets(cpus, cuda).numa_distance() == distance

    def test_is_unknown_without_numa_nodes(self) -> None:
        assert "0000:1b:00.0" in str(sockets(first=-1).numa_distance())
        assert "no GPU" in str(sockets(cuda="7").numa_distance())
        assert "the task's CPUs" in str(sockets(cpus="200").numa_distance())


class TestThreads:
    """128 CPUs are online, two threads per core."""

    @pytest.mark.parametrize(("node_cpus", "threads"), [(64, 2), (128, 1), (32, 1), (None, 1)])
    def test_slurm_counts_cores_or_threads(self, node_cpus: int | None, threads: int) -> None:
        assert sockets().threads_per_slurm_cpu(node_cpus) == threads

    def test_one_thread_per_core(self) -> None:
        (task,) = parse_tasks(SOCKETS.replace("0: siblings=0,64\n", "").format(cpus="0", cuda="0", first=0))
        assert task.threads_per_slurm_cpu(64) == task.threads_per_slurm_cpu(128) == 1


class TestOutput:
    def test_ranks_are_numbers(self) -> None:
        assert [task.rank for task in parse_tasks(MANY)] == [9, 10]
        assert [task.rank for task in parse_tasks(MANY.replace("9: ", " 9: "))] == [9, 10]

    @pytest.mark.parametrize("missing", ["0: end=\n", "0: node=gpu1\n", "0: cpus=0-1\n"])
    def test_truncated(self, missing: str) -> None:
        text = SOCKETS.format(cpus="0-1", cuda="0", first=0)
        with pytest.raises(ValueError, match="task 0 is truncated"):
            parse_tasks(text.replace(missing, ""))

    def test_other_lines_are_ignored(self) -> None:
        assert len(parse_tasks("srun: warning\n" + MANY + "\n0: module: loaded\n")) == 2


class TestScript:
    def run(self, shell: str, devices: str = "/dev/nul[l]") -> Task:
        argv = [shell, *slurm_task.srun_command(devices)[1:]]
        env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "here", "CUDA_VISIBLE_DEVICES": "0"}
        result = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        (task,) = parse_tasks("".join(f"0: {line}\n" for line in result.stdout.splitlines()))
        return task

    @pytest.mark.parametrize("shell", ["sh", "bash"])
    def test_in_every_shell(self, shell: str) -> None:
        task = self.run(shell)
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "Cpus_allowed_list" in line)
        assert parse_id_list(line.split()[1]) == list(task.cpus)
        assert (task.node, task.cuda_visible_devices, task.accessible_devices) == ("here", "0", ("/dev/null",))

    def test_a_regular_file_is_no_device(self, tmp_path: Path) -> None:
        (tmp_path / "gpu0").touch()
        assert self.run("sh", devices=f"{tmp_path}/gpu*").accessible_devices == ()

    def test_creates_no_files(self, tmp_path: Path) -> None:
        assert self.run("sh", devices=f"{tmp_path}/gpu*").accessible_devices == ()
        assert list(tmp_path.iterdir()) == []

    def test_passes_shellcheck(self, tmp_path: Path) -> None:
        (script := tmp_path / "probe.sh").write_text("#!/bin/sh" + slurm_task.srun_command("x")[2])
        argv = [Path(sys.executable).parent / "shellcheck", script]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, "")
