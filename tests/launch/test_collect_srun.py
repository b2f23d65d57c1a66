"""The srun command that collects files from the nodes of a job."""

from __future__ import annotations

from seatrial.config.schema import JobPlacement
from seatrial.launch.collect_srun import SrunTransport


def test_srun_runs_one_task_per_node_beside_the_job() -> None:
    argv = SrunTransport("7", JobPlacement(), nodes="n[0-3]").command("tar", "-c")
    assert argv[:4] == ["srun", "--jobid=7", "--nodelist=n[0-3]", "--ntasks-per-node=1"]
    assert argv[-2:] == ["tar", "-c"]
    # without --overlap the step waits for the job's own steps; with the job's GRES it waits for its GPUs
    assert {"--overlap", "--gres=none", "--input=none", "--chdir=/"} < set(argv)


def test_test_command_runs_on_the_nodes_of_the_job_in_the_trials_partition() -> None:
    transport = SrunTransport("7", JobPlacement(partition="gpu", nodelist="n[0-7]"), nodes="n[0-3]")
    assert transport.test_command == "srun --nodelist=n[0-3] --partition=gpu hostname"
