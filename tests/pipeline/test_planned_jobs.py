"""Jobs as text, without a run."""

from __future__ import annotations

import json

import pytest

from seatrial.config.kubernetes import Kubernetes
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.pipeline import planned_jobs
from seatrial.pipeline.planned_jobs import plan_request, planning_host, rendered_jobs
from seatrial.pipeline.run_directory import Request
from tests.pipeline.test_this_host import this_host

CONFIG = Config(
    name="t",
    launcher="kubernetes",
    cluster=Cluster(nodes=2, gpus_per_node=8),
    kubernetes=Kubernetes(image="a/b"),
    env={"HF_TOKEN": "hf_0123456789"},
    checks={"host.inventory": CheckSettings(), "train.ddp": CheckSettings()},
)


def test_this_host_is_read_only_if_jobs_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = this_host("NVIDIA H200")
    monkeypatch.setattr(planned_jobs, "discover", lambda: host)
    assert planning_host(Config(name="t", checks={}, launcher="local")) is host
    for launcher in ("slurm", "torchrun", "kubernetes"):
        settings = CONFIG.model_copy(update={"launcher": launcher})
        assert not planning_host(settings).gpus.gpus
        assert planning_host(settings).node_gpus(settings).usable_gpus == 8


def test_jobs_are_rendered_without_secrets() -> None:
    request = Request(config=CONFIG, origins={}, only=(), skip=(), command=("seatrial",), started=0.0)
    rendered = rendered_jobs(CONFIG, plan_request(request, planning_host(CONFIG)).jobs)
    assert [(job.placement, job.nodes) for job, _ in rendered] == [("nodes", 2), ("ranks", 2)]
    for job, text in rendered:
        assert "kind: Job" in text
        assert "hf_0123456789" not in text + json.dumps(job.model_dump(mode="json"))
