"""Settings of the Kubernetes launcher: each wrong value is refused with the key that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.checks import catalog
from seatrial.config.layers import resolve
from seatrial.config.schema import Config
from seatrial.model import UsageError

SCHEMAS = catalog()


def config(tmp_path: Path, **groups: Any) -> Config:
    tree = {"launcher": "kubernetes", "kubernetes": {"image": "a/b"}, "checks": {"host.inventory": None}, **groups}
    trial = tmp_path / "t.yaml"
    trial.write_text(yaml.safe_dump(tree))
    return resolve(str(trial), environ={}, schemas=SCHEMAS).config


@pytest.mark.parametrize(
    ("key", "settings", "reason"),
    [
        ("overlay.resource", {"overlay": {"resource": {}}}, "did you mean 'resources'"),
        ("overlay.host_pid", {"overlay": {"host_pid": True}}, "unknown key"),
        ("overlay.resources.rdma/ib", {"overlay": {"resources": {"rdma/ib": "one"}}}, "quantity"),
        ("overlay.resources.rdma/ib", {"overlay": {"resources": {"rdma/ib": True}}}, "valid string"),
        ("overlay", {"overlay": {"resources": {"rdma/ib": 1.5}}}, "rdma/ib: expected a whole number of devices"),
        ("overlay.resources", {"overlay": {"resources": {"rdma ib": 1}}}, "label key"),
        ("overlay", {"overlay": {"resources": {"nvidia.com/gpu": 8}}}, "cluster.gpus_per_node"),
        ("overlay", {"overlay": {"capabilities": ["IPC_LOCK"]}}, "need run_as_user: 0"),
        ("overlay.capabilities.0", {"overlay": {"capabilities": ["ipc lock"], "run_as_user": 0}}, "capability"),
        ("namespace", {"namespace": "My_Space"}, "namespace"),
        ("namespace", {"namespace": "a" * 64}, "at most 63"),
        ("image", {"image": "registry/Seatrial"}, "image name"),
        ("image", {"image": "registry:123456/a"}, "image name"),
        ("image", {"image": "a/b@sha256:12"}, "image name"),
        ("registry", {"registry": "https://mirror"}, "registry"),
        ("shm_size", {"shm_size": "16GB"}, "quantity"),
        ("shm_size", {"shm_size": 0}, "above 0"),
        ("overlay.resources.cpu", {"overlay": {"resources": {"cpu": 0}}}, "above 0"),
        ("overlay.resources.memory", {"overlay": {"resources": {"memory": "0Gi"}}}, "above 0"),
        ("claim.path", {"claim": {"name": "c", "path": "results"}}, "absolute path"),
        ("claim.path", {"claim": {"name": "c", "path": "/dev/shm"}}, "absolute path"),
        ("claim.path", {"claim": {"name": "c", "path": "/a/../dev/shm"}}, "absolute path"),
        ("node_selector.pool", {"node_selector": {"pool": "a b"}}, "label value"),
        ("overlay", {"overlay": ["privileged"]}, "expected a mapping"),
        ("overlay.annotations", {"overlay": {"annotations": 5}}, "expected a mapping"),
        ("tolerations.0.foo", {"tolerations": [{"key": "a", "foo": 1}]}, "valid: key, operator"),
        ("kueue.queues", {"kueue": {"queues": "q"}}, "did you mean 'queue'"),
        ("kueue.queue", {"kueue": {}}, "required key is missing"),
        ("tolerations.0", {"tolerations": [{"operator": "Exists", "value": "b"}]}, "takes no value"),
        ("tolerations.0", {"tolerations": [{"value": "b"}]}, "needs a key"),
        ("kueue", {"kueue": {"queue": "q", "required_topology": "a", "preferred_topology": "b"}}, "not both"),
        ("workload", {"workload": "mpijob"}, "'job', 'jobset' or 'trainjob'"),
        ("queue_s", {"queue_s": 0}, "greater than 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key(
    key: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        config(tmp_path, kubernetes={"image": "a/b", **settings})
    assert f"kubernetes.{key}" in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("key", "groups"),
    [
        ("kubernetes.image is required", {"kubernetes": {}}),
        ("container.*", {"container": {"runtime": "docker", "image": "a/b"}}),
        ("environment.venv /shared/venv", {"environment": {"venv": "/shared/venv"}}),
        (
            "kubernetes.nodes has 2 nodes, cluster.nodes (--nodes) is 1",
            {"kubernetes": {"image": "a", "nodes": ["a", "b"]}},
        ),
    ],
)
def test_settings_that_pods_cannot_have_are_refused(key: str, groups: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        config(tmp_path, **groups)
    assert key in str(refused.value)
    assert config(tmp_path, **groups, launcher="local").launcher == "local"


@pytest.mark.parametrize("name", ["host_network", "priority_class", "runtime_class", "scheduler"])
def test_a_trainjob_cannot_patch_these_fields(name: str, tmp_path: Path) -> None:
    overlay = {name: True if name == "host_network" else "x"}
    for workload in ("job", "jobset"):
        config(tmp_path, kubernetes={"image": "a/b", "workload": workload, "overlay": overlay})
    with pytest.raises(UsageError, match=rf"kubernetes: overlay\.{name}: a TrainJob cannot set it"):
        config(tmp_path, kubernetes={"image": "a/b", "workload": "trainjob", "overlay": overlay})


def test_a_number_is_a_quantity(tmp_path: Path) -> None:
    overlay = {"resources": {"rdma/ib": 1, "cpu": 0.5, "memory": "512Gi"}}
    settings = config(tmp_path, kubernetes={"image": "a/b", "overlay": overlay}).kubernetes
    assert settings.overlay.resources == {"rdma/ib": "1", "cpu": "0.5", "memory": "512Gi"}
