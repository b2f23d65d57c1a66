"""Transport through srun: commands run as an overlapping step of the Slurm job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SrunTransport:
    """Runs commands on all nodes of a Slurm job; ``nodes`` is Slurm's node list of the job."""

    job_id: str
    nodes: str = ""
    name: str = "srun"
    script: str = "node=$SLURM_NODEID nodes=$SLURM_NNODES"
    test: str = "srun --nodes=1 hostname"

    def command(self, *argv: str) -> list[str]:
        """Return the srun command that runs ``argv`` once per node, in /: the current directory may not exist there."""
        nodes = [f"--jobid={self.job_id}", f"--nodelist={self.nodes}", "--ntasks-per-node=1"]
        return ["srun", *nodes, "--overlap", "--gres=none", "--chdir=/", "--input=none", *argv]
