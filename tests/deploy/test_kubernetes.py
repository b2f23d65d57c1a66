"""deploy/kubernetes: manifests against the schemas of Kubernetes, settings against the schema of a trial."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from seatrial.checks import catalog
from seatrial.checks.kubernetes._probe_pods import probe_job
from seatrial.config import layers
from seatrial.config.kubernetes import Kubernetes
from seatrial.config.schema import Config
from seatrial.launch.kubernetes_objects import kubernetes_objects
from tests.launch.test_kubernetes_objects import RUN, VERSIONS, pod_template
from tests.launch.test_slurm import RANKS
from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
OVERLAYS = sorted(FOLDER.glob("*.env"))


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_schemas_of_kubernetes_accept_the_manifest(path: Path) -> None:
    for document in documents(path.name):
        core = document
        if document["kind"] == "ClusterTrainingRuntime":  # its template of a Job
            (replicated,) = document["spec"]["template"]["spec"]["replicatedJobs"]
            core = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
        for version in (VERSIONS[0], VERSIONS[-1]):
            assert kubernetes_validate.validate(core, version, strict=True) == version


def test_every_binding_names_a_role_of_its_file() -> None:
    for path in MANIFESTS:
        names = {(each["kind"], each["metadata"]["name"]) for each in documents(path.name)}
        for binding in (each for each in documents(path.name) if each["kind"].endswith("Binding")):
            assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names


def test_no_role_allows_more_than_a_trial_does() -> None:
    """Nothing is changed, secrets are not read, and only objects of a trial are created or deleted."""
    allowed = {
        (resource, verb)
        for path in MANIFESTS
        for role in documents(path.name)
        for rule in role.get("rules", ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    changes = {each for each in allowed if each[1] not in ("get", "list")}
    created = {(name, verb) for name in ("jobs", "jobsets", "trainjobs", "services") for verb in ("create", "delete")}
    assert changes == {*created, ("pods", "delete"), ("pods/exec", "create")}
    assert not {"secrets", "configmaps", "*"} & {resource for resource, _ in allowed}


def test_quota_is_that_of_its_comment() -> None:
    (quota,) = documents("quota.yaml")
    hard = quota["spec"]["hard"]
    assert int(hard["requests.nvidia.com/gpu"]) == 8 * int(hard["pods"])


def test_quota_allows_the_job_of_a_trial_and_its_probe_pods() -> None:
    """A probe Job exists before each job of the trial, and may be deleted while that one is created."""
    (quota,) = documents("quota.yaml")
    hard = {name: int(value) for name, value in quota["spec"]["hard"].items()}
    nodes = hard["pods"]
    settings = Kubernetes(image="registry.example/seatrial:1")
    config = Config.model_validate(
        {"name": "t", "launcher": "kubernetes", "kubernetes": settings, "checks": {"host.inventory": {}}}
    )
    job = RANKS.model_copy(update={"nodes": nodes, "ranks_per_node": 8, "expected_gpus": 8})
    probe = probe_job(settings, "seatrial-probe-1", nodes, 8, 600)
    objects = [*kubernetes_objects(config, job, RUN), probe]
    assert [each["kind"] for each in objects] == ["Service", "Job", "Job"]  # the probe has a Service too
    assert hard["count/jobs.batch"] == 2
    assert hard["services"] == 2
    for each in objects[1:]:
        (container,) = each["spec"]["template"]["spec"]["containers"]
        gpus = int(container["resources"]["requests"]["nvidia.com/gpu"])
        assert each["spec"]["parallelism"] == nodes
        assert each["spec"]["parallelism"] * gpus == hard["requests.nvidia.com/gpu"]


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_overlay_is_valid_for_every_workload_that_can_have_it(path: Path, tmp_path: Path) -> None:
    trial = tmp_path / "t.yaml"
    trial.write_text("launcher: kubernetes\nkubernetes: {image: a/b}\nchecks: {host.inventory: }\n")
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    environ = dict(shlex.split(line)[0].split("=", 1) for line in lines)
    schemas = catalog()
    config = layers.resolve(str(trial), environ=environ, schemas=schemas).config
    overlay = config.kubernetes.overlay
    assert overlay.run_as_user == 0
    template = pod_template(kubernetes_objects(config, RANKS, RUN))
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    assert kubernetes_validate.validate(pod, VERSIONS[0], strict=True) == VERSIONS[0]
    limits = template["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {**overlay.resources, "nvidia.com/gpu": "8"}
    assert template["metadata"].get("annotations", {}) == overlay.annotations


def test_readme_lists_every_file() -> None:
    text = (FOLDER / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in text for path in FOLDER.iterdir() if path.name != "README.md")
