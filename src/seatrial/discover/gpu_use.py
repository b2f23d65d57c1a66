"""GPU use on the nodes of a Slurm job, from nvidia-smi in an overlapping step of the job.

The step shares the job's GPUs and changes nothing. One step reads again and again, since Slurm limits the number of
steps of a job (MaxStepCount).
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seatrial.discover import slurm
from seatrial.model.job_status import GpuUse
from seatrial.util import processes
from seatrial.util.input_files import tail_lines
from seatrial.util.text import printable

FIRST_ANSWER_S = 20.0  # srun starts a step in less than a second; nvidia-smi without persistence mode takes seconds
_POLL_S = 0.1
_MAX_BYTES = 4 * 2**20  # read from the output of the step; 1,000 nodes of 8 GPUs write 0.5 MB per reading
_MIB = 2**20
_MAX_REASONS = 4

_QUERY = "index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm"
# $1: seconds between two reads; 0: read once. Each line starts with the node, since the lines of several nodes
# alternate. The line "end" follows the last GPU of a node.
_SCRIPT = rf"""
node=${{SLURMD_NODENAME:-$(hostname)}}
while :; do
  if output=$(timeout 15 nvidia-smi --query-gpu={_QUERY} --format=csv,noheader,nounits 2>&1); then
    printf '%s\n' "$output" | while IFS= read -r line; do echo "$node,gpu,$line"; done
  else
    printf '%s,error,%s\n' "$node" "$(printf '%s' "$output" | tr '\n,' '  ' | cut -c1-200)"
  fi
  echo "$node,end"
  test "$1" != 0 || exit 0
  sleep "$1"
done
"""


class GpuUseStep:
    """A running srun step on ``node_count`` nodes, which writes to the files ``out`` and ``err``."""

    def __init__(self, child: processes.Child, out: Path, err: Path, node_count: int) -> None:
        self.child = child
        self._out, self._err, self._node_count = out, err, node_count
        self._readings = Readings()

    def read(self, wait_s: float = FIRST_ANSWER_S) -> tuple[tuple[GpuUse, ...], str]:
        """The newest reading of each GPU, and the reasons why nodes have none (empty if all nodes have one).

        Waits for the first answer of all nodes, at most ``wait_s`` seconds.
        """
        deadline = time.monotonic() + wait_s
        while True:
            ended = self.child.poll() is not None
            self._readings.add(tail_lines(self._out, _MAX_BYTES, _MAX_BYTES))  # all lines
            missing_count = self._node_count - len(self._readings.answered)
            if missing_count <= 0 or ended or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        reasons = [f"{node}: {reason}" for node, reason in sorted(self._readings.errors.items())]
        if missing_count > 0:
            reason = "the step ended" if ended else f"no answer within {wait_s:g} s"
            if error_lines := tail_lines(self._err, 1, 4096):
                reason = printable(error_lines[0])
            reasons.append(f"{missing_count} of {self._node_count} nodes: {reason}")
        with self._out.open("r+b") as file:  # keep the file small; safe, since the step appends (O_APPEND)
            if file.seek(0, os.SEEK_END) > _MAX_BYTES // 2:
                file.truncate(0)
        return self._readings.uses, "; ".join(reasons[:_MAX_REASONS])


@contextmanager
def gpu_use_step(job_id: str, node_count: int, interval_s: float) -> Iterator[GpuUseStep]:
    """Start the step on all ``node_count`` nodes of a running job. The step ends with the context.

    ``interval_s``: seconds between two reads of nvidia-smi; 0: read once.
    Raises SlurmUnavailable if srun does not start.
    """
    options = [f"--jobid={job_id}", f"--nodes={node_count}", f"--ntasks={node_count}", "--ntasks-per-node=1"]
    options += ["--overlap", "--chdir=/", "--input=none", "--job-name=seatrial-watch"]
    argv = [*slurm.env_prefix_outside_job(), "srun", *options, "bash", "-c", _SCRIPT, "watch", f"{interval_s:g}"]
    with tempfile.TemporaryDirectory(prefix="seatrial-watch-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        try:
            child = processes.start(argv, env={}, stdout=out, stderr=err)
        except OSError as error:
            raise slurm.SlurmUnavailable(f"srun: {error.strerror}. Run first: command -v srun") from error
        try:
            yield GpuUseStep(child, out, err, node_count)
        finally:
            if child.poll() is None:
                processes.stop(child, grace_s=1)


class Readings:
    """The newest reading of each GPU.

    ``answered``: nodes with a complete answer, even if it is an error. ``errors``: node → last error, removed by a
    later reading.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.answered: set[str] = set()
        self._uses: dict[tuple[str, int], GpuUse] = {}

    @property
    def uses(self) -> tuple[GpuUse, ...]:
        return tuple(self._uses[key] for key in sorted(self._uses))

    def add(self, lines: Sequence[str]) -> None:
        """Add lines of the script's output; others are ignored."""
        for line in lines:
            match [printable(field.strip()) for field in line.split(",")]:
                case [node, "gpu", index, *values] if index.isdecimal() and len(values) == 6:
                    self._uses[node, int(index)] = _gpu_use(node, index, values)
                    self.errors.pop(node, None)
                case [node, "error", reason]:
                    self.errors[node] = reason or "nvidia-smi failed without output"
                case [node, "end"]:
                    self.answered.add(node)


def _gpu_use(node: str, index: str, values: Sequence[str]) -> GpuUse:
    utilization, used, total, power_w, temperature_c, sm_clock_mhz = map(_number, values)
    return GpuUse(
        node=node,
        gpu=f"gpu{index}",
        utilization=utilization,
        memory_used_bytes=None if used is None else round(used * _MIB),
        memory_total_bytes=None if total is None else round(total * _MIB),
        power_w=power_w,
        temperature_c=temperature_c,
        sm_clock_mhz=sm_clock_mhz,
    )


def _number(text: str) -> float | None:
    """The number; None for ``[N/A]`` and ``[Not Supported]``."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
