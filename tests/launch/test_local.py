from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.config.schema import Cluster, Config
from seatrial.launch import launcher_for
from seatrial.launch.local import LocalLauncher
from seatrial.model import Job, UsageError

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cuda",
    nodes=1,
    ranks_per_node=4,
    checks=("train.ddp",),
    options={},
    expected_gpus=4,
    limits={"train.ddp": 420},
    limit_s=600,
    env={"NCCL_DEBUG": "INFO WARN"},
)


def rendered(**changes: object) -> str:
    text = LocalLauncher().render(JOB.model_copy(update=changes), Path("RUN")).text
    return text.replace(LocalLauncher().render(JOB, Path("RUN")).argv[0], "PYTHON")


def test_ranks_are_started_by_torchrun() -> None:
    assert rendered() == (
        'unset "${!PET_@}"\n'
        "PYTHONSAFEPATH=1 \\\n    NCCL_DEBUG='INFO WARN' \\\n    "
        "PYTHON -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4 --max-restarts=0 "
        "--redirects=3 --log-dir=RUN/jobs/ranks/attempt1/logs -m seatrial.worker RUN/jobs/ranks/job.json 1"
    )


def test_gloo_uses_loopback_by_default() -> None:
    assert "GLOO_SOCKET_IFNAME=lo" in rendered(device="cpu", env={})
    assert "GLOO_SOCKET_IFNAME=eth7" in rendered(device="cpu", env={"GLOO_SOCKET_IFNAME": "eth7"})
    assert "GLOO_SOCKET_IFNAME" not in rendered(device="cuda", env={})


def test_jobs_without_torch_start_without_torchrun() -> None:
    assert "torch" not in rendered(placement="nodes", name="nodes", env={}, ranks_per_node=1)


def test_local_launcher_refuses_several_nodes() -> None:
    settings = Config(name="t", checks={})
    assert launcher_for(settings, "ranks").name == "local"
    several = settings.model_copy(update={"launcher": "local", "cluster": Cluster(nodes=2)})
    assert launcher_for(several, "control").name == "local"
    with pytest.raises(UsageError, match=r"cluster\.nodes is 2"):
        launcher_for(several, "ranks")
