"""GPU use on the nodes of a Slurm job, from nvidia-smi in an overlapping step of the job.

The step shares the job's GPUs and changes nothing. It repeats by itself, since each step counts for MaxStepCount.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from seatrial.discover import slurm
from seatrial.model.job_status import GpuUse
from seatrial.util import processes
from seatrial.util.input_files import tail_lines
from seatrial.util.text import printable

FIRST_ANSWER_S = 20.0  # srun starts a step in less than a second; nvidia-smi without persistence mode takes seconds
_POLL_S = 0.1
_MAX_BYTES = 4 * 2**20  # of the step's output; 1,000 nodes of 8 GPUs write 0.5 MB at a time
_MIB = 2**20

_QUERY = "index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm"
# $1: seconds between two reads, 0: only one. Each line starts with the node, since the lines of nodes mix.
_SCRIPT = rf"""
node=${{SLURMD_NODENAME:-$(hostname)}}
while :; do
  if output=$(timeout 15 nvidia-smi --query-gpu={_QUERY} --format=csv,noheader,nounits 2>&1); then
    printf '%s\n' "$output" | while IFS= read -r line; do echo "$node,gpu,$line"; done
  else
    printf '%s,error,%s\n' "$node" "$(printf '%s' "$output" | tr '\n,' '  ' | cut -c1-200)"
  fi
  test "$1" != 0 || exit 0
  sleep "$1"
done
"""


@dataclass
class GpuUseStep:
    """A running srun step; ``read`` returns its newest output."""

    child: processes.Child
    out: Path
    err: Path
    nodes: int

    def read(self, wait_s: float = FIRST_ANSWER_S) -> tuple[tuple[GpuUse, ...], str]:
        """Return the last use of each GPU, and why that of some nodes is unknown; empty if all nodes answered.

        Waits for the first answer of all nodes, at most ``wait_s`` seconds.
        """
        deadline = time.monotonic() + wait_s
        while True:
            ended = self.child.poll() is not None
            uses, errors = parse_gpu_use(tail_lines(self.out, 10**6, _MAX_BYTES))
            missing = self.nodes - len({use.node for use in uses} | errors.keys())
            if missing <= 0 or ended or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        reasons = [f"{node}: {reason}" for node, reason in sorted(errors.items())]
        if missing > 0:
            lines = tail_lines(self.err, 1, 4096)
            reason = printable(lines[0]) if lines else "the step ended" if ended else f"no answer within {wait_s:g} s"
            reasons.append(f"{missing} of {self.nodes} nodes: {reason}")
        with self.out.open("r+b") as file:  # the step appends
            if file.seek(0, os.SEEK_END) > _MAX_BYTES:
                file.truncate(0)
        return uses, "; ".join(reasons[:4])


@contextmanager
def gpu_use_step(job_id: str, nodes: int, interval_s: float) -> Iterator[GpuUseStep]:
    """Start the step on all ``nodes`` of a running job; ``interval_s`` 0: read once. The step ends with the context.

    Raises SlurmUnavailable if srun does not start.
    """
    options = [f"--jobid={job_id}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    options += ["--overlap", "--chdir=/", "--input=none", "--job-name=seatrial-watch"]
    argv = [*slurm.env_prefix_outside_job(), "srun", *options, "bash", "-c", _SCRIPT, "watch", f"{interval_s:g}"]
    with tempfile.TemporaryDirectory(prefix="seatrial-watch-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        try:
            child = processes.start(argv, env={}, stdout=out, stderr=err)
        except OSError as error:
            raise slurm.SlurmUnavailable(f"srun: {error.strerror}. Run first: command -v srun") from error
        try:
            yield GpuUseStep(child, out, err, nodes)
        finally:
            if child.poll() is None:
                processes.stop(child, grace_s=1)


def parse_gpu_use(lines: Sequence[str]) -> tuple[tuple[GpuUse, ...], dict[str, str]]:
    """Return the last use of each GPU, and the last error of each node that has no GPU line after it."""
    uses: dict[tuple[str, int], GpuUse] = {}
    errors: dict[str, str] = {}
    for line in lines:
        match [field.strip() for field in line.split(",")]:
            case [node, "gpu", index, *values] if index.isdecimal() and len(values) == 6:
                used, total = _number(values[1]), _number(values[2])
                uses[node, int(index)] = GpuUse(
                    node=printable(node),
                    gpu=f"gpu{index}",
                    utilization=_number(values[0]),
                    memory_used_bytes=None if used is None else round(used * _MIB),
                    memory_total_bytes=None if total is None else round(total * _MIB),
                    power_w=_number(values[3]),
                    temperature_c=_number(values[4]),
                    sm_clock_mhz=_number(values[5]),
                )
                errors.pop(node, None)
            case [node, "error", reason]:
                errors[node] = printable(reason) or "nvidia-smi failed without output"
    return tuple(uses[key] for key in sorted(uses)), errors


def _number(text: str) -> float | None:
    """The number; None for ``[N/A]`` and ``[Not Supported]``."""
    try:
        return float(text)
    except ValueError:
        return None
