"""Transport through srun: commands run as an overlapping step of the Slurm job."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.config.schema import JobPlacement
from seatrial.config.slurm_options import srun_command
from seatrial.launch.collect import NODE_SCRIPT, Transport


@dataclass
class SrunTransport(Transport):
    """Runs commands on all nodes of a Slurm job; has no ``errors``, since srun ends if one node fails."""

    name = "srun"
    job_id: str
    placement: JobPlacement

    @property
    def test_command(self) -> str:
        return f"{srun_command(self.placement, self.nodes)} hostname"

    def step(self, node_dir: str, limit_bytes: int) -> list[str]:
        script = f"node=$SLURM_NODEID nodes=$SLURM_NNODES\n{NODE_SCRIPT}"
        return self.command("bash", "-c", script, node_dir, str(limit_bytes))

    def payload(self, line: bytes) -> bytes:
        """Return the line itself: a step prints nothing else."""
        return line

    def command(self, *argv: str) -> list[str]:
        """Return the srun command that runs ``argv`` once per node, in /: the current directory may not exist there."""
        placement = [f"--jobid={self.job_id}", f"--nodelist={self.nodes}", "--ntasks-per-node=1"]
        return ["srun", *placement, "--overlap", "--gres=none", "--chdir=/", "--input=none", *argv]
