"""Transport through srun: commands run as an overlapping step of the Slurm job."""

from __future__ import annotations

from dataclasses import dataclass, field

from seatrial.config.schema import JobPlacement
from seatrial.config.slurm_options import srun_command
from seatrial.launch.collect import NODE_SCRIPT


@dataclass
class SrunTransport:
    """Runs commands on all nodes of a Slurm job; ``nodes`` is Slurm's node list of the job, once known."""

    job_id: str
    placement: JobPlacement
    nodes: str = ""
    name: str = "srun"
    starts_at_once: bool = False
    keeps_files: bool = False
    needs_restart: bool = False
    errors: dict[int, str] = field(default_factory=dict)  # srun ends if one node fails

    @property
    def test_command(self) -> str:
        """Return a command by which a user can test that srun works on the nodes of the job."""
        return f"{srun_command(self.placement, self.nodes)} hostname"

    def step(self, node_dir: str, limit_bytes: int) -> list[str]:
        """Return the srun command of the step that sends the files of all nodes."""
        script = f"node=$SLURM_NODEID nodes=$SLURM_NNODES\n{NODE_SCRIPT}"
        return self.command("bash", "-c", script, node_dir, str(limit_bytes))

    def payload(self, line: bytes) -> bytes:
        """Return the line itself: a step prints nothing else."""
        return line

    def command(self, *argv: str) -> list[str]:
        """Return the srun command that runs ``argv`` once per node, in /: the current directory may not exist there."""
        placement = [f"--jobid={self.job_id}", f"--nodelist={self.nodes}", "--ntasks-per-node=1"]
        return ["srun", *placement, "--overlap", "--gres=none", "--chdir=/", "--input=none", *argv]
