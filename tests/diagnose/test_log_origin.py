"""The rank and node of a log line, by prefixes of launchers, torchrun's failures, NCCL's lines and names of logs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from seatrial.diagnose import explain
from seatrial.diagnose.log_origin import LogOrigins
from seatrial.diagnose.log_search import search
from seatrial.model import Job
from seatrial.worker import Heartbeat

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
# As torchrun 2.11 prints it
TABLE = """\
{prefix}Root Cause (first observed failure):
{prefix}[0]:
{prefix}  time      : 2026-11-20_09:12:44
{prefix}  host      : {host}
{prefix}  rank      : {rank} (local_rank: {local})
{prefix}  exitcode  : {code} (pid: 5123)
{prefix}  error_file: <N/A>
{prefix}  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def table(host: str, rank: int, local: int, prefix: str = "", code: int = 1) -> str:
    return TABLE.format(prefix=prefix, host=host, rank=rank, local=local, code=code)


def subjects(text: str, log: str = "x.log") -> list[str]:
    origins = LogOrigins()
    return [each.subject for each in explain(search(io.BytesIO(text.encode()), log, origins=origins), origins)]


@pytest.mark.parametrize(
    ("line", "source", "name"),
    [
        ("[rank3]: Traceback (most recent call last):", "x.log:1", "rank 3"),
        ("[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] x", "x.log:1", "rank 1"),
        ("[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught", "x.log:1", "rank 2"),
        ("[E1126 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank 3] x", "x.log:1", "rank 3"),
        # the rank in a process group of 2 of 16 ranks
        ("[E1126 ProcessGroupNCCL.cpp:616] [PG ID 2 PG GUID 5(mesh_tp) Rank 1] x", "x.log:1", ""),
        ("[default3]:[rank11]: torch.OutOfMemoryError", "x.log:1", "rank 11"),
        ("[rank3]:[rank11]: torch.OutOfMemoryError", "x.log:1", "rank 11"),  # torchrun --role rank --tee 3
        ("[default3]:torch.OutOfMemoryError", "x.log:1", "local rank 3"),
        ("1: [rank0]:2024-11-27 14:28:39,087 - root - INFO", "x.log:1", "local rank 0 of task 1"),
        ("[INFO] [axolotl.load_model:593] [PID:6548] [RANK:0] x", "x.log:1", "local rank 0"),  # its LOCAL_RANK
        ("failed (exitcode: -9) local_rank: 6 (pid: 730) of binary: /usr/bin/python", "x.log:1", "local rank 6"),
        ("RANK=11 LOCAL_RANK=3 x", "x.log:1", "rank 11"),
        ("NODE_RANK=1 LOCAL_RANK=3 x", "x.log:1", "local rank 3"),
        ("[1,31]<stderr>:ip-172-32-36-209:8800:9549 [7] NCCL INFO x", "x.log:1", "MPI rank 31 on ip-172-32-36-209"),
        ("node3:5123:5200 [3] NCCL WARN x", "x.log:1", "CUDA device 3 on node3"),
        ("[default3]:node3:5123:5200 [3] NCCL WARN x", "x.log:1", "local rank 3 on node3"),
        ("[pod/train-1/main] 2026-11-20T09:12:44Z [default3]:x", "x.log:1", "local rank 3 on pod train-1"),
        (" 29: srun: x", "slurm-8.out:1", "task 29"),
        ("x", "logs/rank_12.err:4", "rank 12"),
        ("x", "logs/local_rank_3.err:4", "local rank 3"),
        ("x", "logs/node_rank_1.err:4", ""),
        ("x", "logs/none_abc/attempt_0/5/stderr.log:4", "local rank 5"),
        ("[rank13]: x", "logs/none_abc/attempt_0/5/stderr.log:4", "rank 13"),
        ("x", "slurm-4711_3.out:4", "task 3"),
        ("x", "slurm-4711.out:4", ""),
        ("CUDA out of memory", "standard input:1", ""),
        ("05:56:51 started", "x.log:1", ""),
        ("x", "ranking.log:7", ""),
    ],
)
def test_line_alone(line: str, source: str, name: str) -> None:
    assert LogOrigins().origin(line, source).name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[default3]:{OOM}\n{table('node3', 11, 3)}", "rank 11 on node3"),
        # two nodes in one log
        (f"[default3]:{OOM}\n{table('node3', 11, 3)}{table('node2', 3, 3)}", "local rank 3"),
        (f"1: [default3]:{OOM}\n{table('node3', 11, 3, '1: ')}{table('node2', 3, 3, '0: ')}", "rank 11 on node3"),
        # a task is one torchrun, so that its other ranks are on the same node
        (f"1: [default5]:{OOM}\n{table('node3', 11, 3, '1: ')}", "rank 13 on node3"),
        (f"[default5]:{OOM}\n{table('node3', 11, 3)}", "local rank 5"),
        (f"[rank11]: {OOM}\n{table('node3', 11, 3)}", "rank 11 on node3"),
        (f"2: {OOM}\nsrun: error: node3: task 2: Exited with exit code 1\n", "task 2 on node3"),
        (f"[default3]:RANK=11\n[default3]:{OOM}\n", "rank 11"),
        (f"[default3]:RANK=11\n[default3]:RANK=3\n[default3]:{OOM}\n", "local rank 3"),
        (f"RANK=0\n[default3]:{OOM}\n", "local rank 3"),
        (f"node3:51:52 [3] NCCL INFO Bootstrap\n{OOM}\n", "node3"),
        (f"node3:51:52 [3] NCCL INFO Bootstrap\nnode2:51:52 [3] NCCL INFO Bootstrap\n{OOM}\n", ""),
        (
            f"[default3]:node3.lab:5:6 [3] NCCL INFO x\n[default3]:{OOM}\n{table('node3.lab', 11, 3)}",
            "rank 11 on node3.lab",
        ),
        (table("node3", 11, 3, code=-9), "rank 11 on node3"),  # the line of the exit code
    ],
)
def test_other_lines_of_the_log(text: str, expected: str) -> None:
    assert subjects(text) == [expected]


def test_files_of_one_rank_tell_its_number(tmp_path: Path) -> None:
    """torchrun writes stdout and stderr of a rank to one directory, named after the local rank."""
    origins, folder = LogOrigins(), "logs/none_abc/attempt_0/3"
    out = b"RANK=11\nnode3:51:52 [3] NCCL INFO Bootstrap\n"
    matches = list(search(io.BytesIO(OOM.encode()), f"{folder}/stderr.log", origins=origins))
    matches += search(io.BytesIO(out), f"{folder}/stdout.log", origins=origins)
    (finding,) = explain(matches, origins)
    assert finding.subject == "rank 11 on node3"


def run_directory(folder: Path, ranks_per_node: int) -> Path:
    """The attempt of a job on two nodes."""
    attempt = folder / "jobs" / "ranks" / "attempt1"
    attempt.mkdir(parents=True)
    job = Job(
        name="ranks",
        placement="ranks",
        device="cuda",
        nodes=2,
        ranks_per_node=ranks_per_node,
        checks=("train.ddp",),
        options={},
        expected_gpus=ranks_per_node,
        limit_s=60,
    )
    (attempt.parent / "job.json").write_text(job.model_dump_json())
    for rank in range(2 * ranks_per_node):
        heartbeat = Heartbeat(pid=100 + rank, node=f"gpu-{rank // ranks_per_node}", status="", progress="", time=0)
        (attempt / f"rank{rank}.heartbeat.json").write_text(heartbeat.model_dump_json())
    return attempt


@pytest.mark.parametrize(
    ("log", "line", "ranks_per_node", "expected"),
    [
        ("logs/node1/none_abc/attempt_0/3/stderr.log", "x", 8, "rank 11 on gpu-1"),
        ("logs/node0/none_abc/attempt_0/3/stderr.log", "x", 8, "rank 3 on gpu-0"),
        ("logs/node1/none_abc/attempt_0/0/stdout.log", "x", 1, "rank 1 on gpu-1"),
        ("launcher.err", "1: x", 8, "task 1 on gpu-1"),
        ("launcher.err", "1: x", 1, "rank 1 on gpu-1"),
        ("launcher.err", "x", 8, ""),
        ("logs/node1/none_abc/attempt_0/9/stderr.log", "x", 8, "local rank 9"),  # no such rank in the job
    ],
)
def test_run_directory(tmp_path: Path, log: str, line: str, ranks_per_node: int, expected: str) -> None:
    attempt = run_directory(tmp_path / "node7", ranks_per_node)  # a folder above is no node of the job
    assert LogOrigins().origin(line, f"{attempt / log}:1").name == expected


def test_lines_of_nccl_are_read_at_the_start_of_a_log_only() -> None:
    line = b"[default3]:node%d:51:52 [3] NCCL INFO x\n"
    origins = LogOrigins()
    origins.read(line % 3 * 10_000, "x.log")
    origins.read(line % 2, "x.log")
    assert origins.origin("[default3]:x", "x.log:1").name == "local rank 3 on node3"
