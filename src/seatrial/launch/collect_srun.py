"""How srun carries what the nodes of a Slurm job send: a step beside the job's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SrunTransport:
    """``nodes``: all nodes of the job, as Slurm names them."""

    job_id: str
    nodes: str = ""
    name: str = "srun"
    script: str = "node=$SLURM_NODEID nodes=$SLURM_NNODES"
    test: str = "srun --nodes=1 hostname"

    def command(self, *argv: str) -> list[str]:
        """``argv`` once on every node of the job. Our folder need not exist there."""
        where = [f"--jobid={self.job_id}", f"--nodelist={self.nodes}", "--ntasks-per-node=1"]
        return ["srun", *where, "--overlap", "--gres=none", "--chdir=/", "--input=none", *argv]
