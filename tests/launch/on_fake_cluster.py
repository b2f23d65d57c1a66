"""One job of the Kubernetes launcher on a fake cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Config, Limits
from seatrial.launch import kubernetes_job
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.watch import run_job
from seatrial.model import Job, JobResult
from tests.fakes.kubectl import Cluster
from tests.launch.scripted import RecordingListener
from tests.launch.test_pod_states import PODS

FORBIDDEN = (
    'Error from server (Forbidden): error when creating "objects.yaml": jobs.batch is forbidden: exceeded quota: jobs, '
    "requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4"
)
NODE_STATUS = {"allocatable": {"nvidia.com/gpu": "8"}, "nodeInfo": {"kubeletVersion": "v1.34.1"}}
NODES = [{"kind": "Node", "metadata": {"name": name}, "status": NODE_STATUS} for name in ("node-a", "node-b")]
NOTEBOOK = {
    "kind": "Pod",
    "metadata": {"name": "notebook-0", "namespace": "ml", "uid": "1"},
    "spec": {"nodeName": "node-b", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
    "status": {"phase": "Running"},
}


def settings(gpus: int = 0, **kubernetes: Any) -> Config:
    return Config.model_validate(
        {
            "name": "trial",
            "launcher": "kubernetes",
            "cluster": {"nodes": 2, "gpus_per_node": gpus},
            "kubernetes": {"image": "registry.example/seatrial:9", "namespace": "ml", "queue_s": 0.5, **kubernetes},
            "checks": {"host.inventory": {}},
        }
    )


JOB = Job(
    name="nodes",
    placement="nodes",
    device="cpu",
    nodes=2,
    ranks_per_node=1,
    checks=("host.inventory",),
    options={},
    expected_gpus=None,
    limits={"host.inventory": 60.0},
    limit_s=60,
)


class Attempt:
    """One job on a fake cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.run_dir = Cluster(folder / "cluster"), folder / "run"
        self.listener, self.monkeypatch = RecordingListener(), monkeypatch
        for name in ("_EVENTS_AFTER_S", "_EVENTS_POLL_S", "_COLLECT_LIMIT_S"):
            monkeypatch.setattr(kubernetes_job, name, 0.0)
        monkeypatch.setattr(kubernetes_job.KubernetesJob, "poll_s", 0.0)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")

    def install(self, **scenario: Any) -> None:
        self.cluster.install(self.run_dir.parent / "bin", **scenario)
        self.cluster.call_in_process(self.monkeypatch)

    def run(self, config: Config | None = None, job: Job = JOB, **scenario: Any) -> JobResult:
        self.install(**scenario)
        launcher = KubernetesLauncher(config or settings())
        limits = Limits(startup_s=30)
        (result,) = run_job(launcher, job, self.run_dir, limits, catalog(), self.listener)
        assert self.cluster.left_behind() == []
        assert self.cluster.unexpected_calls == []
        return result


def both(pod: str) -> dict[str, Any]:
    fields = {"status": PODS[pod]["status"], "nodeName": PODS[pod]["spec"].get("nodeName", "")}
    return {"0": fields, "1": fields}
