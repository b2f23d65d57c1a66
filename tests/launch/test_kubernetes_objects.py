"""Rendered Kubernetes objects, tested by golden files, the schemas of Kubernetes and a run of the pod's script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from seatrial.config.kubernetes import Claim, Kubernetes, Kueue, PodOverlay, Toleration
from seatrial.config.schema import Config, Environment
from seatrial.launch.kubernetes_objects import kubernetes_objects, manifest, object_name
from seatrial.model import Job, Topology, UsageError
from tests import paths
from tests.launch.test_slurm import CPU_ONLY, NODES, RANKS

GOLDEN, SCHEMAS = paths.GOLDEN / "kubernetes", paths.FIXTURES / "kubernetes"
RUN = Path("/runs/20261123-120000-acceptance")
VERSIONS = [f"1.{minor}" for minor in range(28, 38)]
IMAGE = "ghcr.io/example/seatrial:1.0"
EVERY_OPTION = Kubernetes(
    namespace="acceptance",
    image=f"{IMAGE}@sha256:{'0f' * 32}",
    registry="mirror.example:5000/cache",
    image_pull_secrets=("pull",),
    service_account="seatrial",
    node_selector={"node.kubernetes.io/instance-type": "gpu-h100-sxm"},
    tolerations=(Toleration(key="dedicated", value="gpu", effect="NoExecute"), Toleration(operator="Exists")),
    claim=Claim(name="results", path="/mnt/results"),
    shm_size="64Gi",
    queue_s=1800,
    kueue=Kueue(queue="acceptance", required_topology="cloud.provider.com/topology-rack"),
    overlay=PodOverlay(
        resources={"rdma/ib": "1", "memory": "512Gi"},
        annotations={"k8s.v1.cni.cncf.io/networks": "rail0,rail1"},
        capabilities=("IPC_LOCK",),
        host_network=True,
        run_as_user=0,
        runtime_class="nvidia",
        priority_class="acceptance",
        scheduler="gang",
    ),
)
ON_NODES = RANKS.model_copy(update={"nodelist": "gpu-1,gpu-2", "exclude": "gpu-3,gpu-4", "preflight": None})


def settings(**kubernetes: Any) -> Config:
    return Config(name="t", checks={}, launcher="kubernetes", kubernetes=Kubernetes(image=IMAGE, **kubernetes))


CASES = {
    "job": (RANKS, settings()),
    "cpu-only": (
        CPU_ONLY.model_copy(update={**NODES.model_dump(include={"name", "placement", "ranks_per_node"}), "nodes": 1}),
        settings().model_copy(update={"environment": Environment(source="/opt/site env.sh", hf_home="/hf")}),
    ),
    "every-option": (ON_NODES, settings().model_copy(update={"kubernetes": EVERY_OPTION})),
    "jobset": (NODES, settings(workload="jobset", kueue=Kueue(queue="q", preferred_topology="rack"))),
    "trainjob": (
        RANKS,
        settings(
            workload="trainjob",
            service_account="seatrial",
            image_pull_secrets=("pull",),
            node_selector={"pool": "gpu"},
            kueue=Kueue(queue="acceptance", required_topology="rack"),
            overlay=PodOverlay(resources={"rdma/ib": "1"}),
        ),
    ),
}


def objects(name: str) -> tuple[dict[str, Any], ...]:
    job, config = CASES[name]
    return kubernetes_objects(config, job, RUN)


def pod_template(rendered: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The template of pods; of a TrainJob, as its trainer and the patch of the runtime make it."""
    spec: dict[str, Any] = rendered[-1]["spec"]
    if rendered[-1]["kind"] == "Job":
        return dict(spec["template"])
    if rendered[-1]["kind"] == "JobSet":
        return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"])
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    template = patch["template"]["spec"]["template"]
    trainer = {key: spec["trainer"][key] for key in ("image", "command", "args", "env")}
    container = {**template["spec"]["containers"][0], **trainer, "resources": spec["trainer"]["resourcesPerNode"]}
    return {"metadata": template["metadata"], "spec": {**template["spec"], "containers": [container]}}


def arguments(rendered: tuple[dict[str, Any], ...]) -> list[str]:
    """The arguments that the container gets: Kubernetes reads ``$$`` as ``$`` and expands ``$(NAME)``."""
    container = pod_template(rendered)["spec"]["containers"][0]
    variables = {entry["name"]: entry.get("value", "from the pod") for entry in container["env"]}

    def expanded(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", expanded, text) for text in container["args"]]


@pytest.mark.parametrize("name", CASES)
def test_objects_match_golden_file(name: str) -> None:
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(manifest(objects(name)))
    assert manifest(objects(name)) == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_parser_of_yaml_reads_the_same_objects(name: str) -> None:
    assert tuple(yaml.safe_load_all(manifest(objects(name)))) == objects(name)


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_of_kubernetes_accept_all_fields(version: str) -> None:
    """With unknown fields refused. JobSet and TrainJob: their templates of jobs and pods."""
    for name in CASES:
        for document in objects(name):
            kind, core = document["kind"], document
            if kind == "JobSet":
                core = {"apiVersion": "batch/v1", "kind": "Job", **document["spec"]["replicatedJobs"][0]["template"]}
            elif kind == "TrainJob":
                core = {"apiVersion": "v1", "kind": "Pod", **pod_template(objects(name))}
            # the package takes its latest schemas for a version that it does not have
            assert kubernetes_validate.validate(core, version, strict=True) == version


def test_schemas_of_kubernetes_refuse_an_unknown_field() -> None:
    service, job = objects("job")
    job["spec"]["template"]["spec"]["subdomains"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="subdomains"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)
    assert service["kind"] == "Service"


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_schema_of_the_operator_accepts_all_fields_and_refuses_others(name: str) -> None:
    schema = yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text())
    (document,) = objects(name)
    jsonschema.Draft202012Validator(schema).validate(document)
    for path in _mappings(document["spec"], stop={"template", "env", "resourcesPerNode", "metadata"}):
        changed = json.loads(json.dumps(document))
        target = changed["spec"]
        for key in path:
            target = target[key]
        target["unknownField"] = 1
        assert not jsonschema.Draft202012Validator(schema).is_valid(changed), path


def _mappings(value: Any, stop: set[str], path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of the mappings in a document, not below the keys ``stop``."""
    if isinstance(value, dict):
        below = [
            inner for key, item in value.items() if key not in stop for inner in _mappings(item, stop, (*path, key))
        ]
        return [path, *below]
    if isinstance(value, list):
        return [inner for index, item in enumerate(value) for inner in _mappings(item, stop, (*path, index))]
    return []


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "pod.sh"
    script.write_text(arguments(objects(name))[0])
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_kubernetes_passes_script_and_job_unchanged() -> None:
    hostile = {"A": "$(SEATRIAL_SCRATCH)", "B": "$$(HOME) $$ $", "C": "$(date)\n'x' \"y\" é \U0001f600 \t"}
    job = RANKS.model_copy(update={"env": hostile})
    rendered = tuple(yaml.safe_load_all(manifest(kubernetes_objects(settings(), job, RUN))))
    script, name, job_json = arguments(rendered)
    assert (Job.model_validate_json(job_json), name) == (job, "seatrial")
    code = script[script.index("export A=") : script.index("# Tries Python")] + '\nprintf \'%s|\' "$A" "$B" "$C"'
    out = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("|")[:3] == list(hostile.values())


def test_pod_runs_the_checks_of_its_job(tmp_path: Path) -> None:
    """A real worker; a second start in the same pod runs nothing."""
    job = Job(
        name="nodes",
        placement="nodes",
        device="cpu",
        nodes=1,
        ranks_per_node=1,
        checks=("host.inventory",),
        options={"host.inventory": {}},
        expected_gpus=None,
        limits={"host.inventory": 60},
        limit_s=120,
    )
    env = {
        **{"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"},
        **{
            "SEATRIAL_SCRATCH": str(tmp_path),
            "SEATRIAL_POD": "pod-0-x",
            "SEATRIAL_NODE": "gpu-7",
            "HOME": str(tmp_path),
        },
        **{"SEATRIAL_MASTER": "pod-0", "SEATRIAL_TOKEN": "0f" * 16},
    }
    argv = ["bash", "-c", *arguments(kubernetes_objects(settings(), job, RUN))]
    first = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    attempt = tmp_path / "pod-0-x" / "jobs" / "nodes" / "attempt1"
    assert first.returncode == 0, (attempt / "node0.err").read_text()
    journal = (attempt / "rank0.jsonl").read_bytes()
    assert b'"host.inventory"' in journal
    second = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (second.returncode, second.stdout, "has run before" in second.stderr) == (0, "", True)
    assert (attempt / "rank0.jsonl").read_bytes() == journal


def test_the_group_of_the_volume_reads_the_results_only_with_a_group() -> None:
    for group, mode in ((None, "700"), ("team", "750")):
        rendered = kubernetes_objects(settings().model_copy(update={"group": group}), RANKS, Path("/runs/today"), 1)
        assert f'mkdir -m {mode} "$SEATRIAL_RUN_DIR"' in arguments(rendered)[0]


def test_names_are_unique_dns_labels_that_jobset_accepts() -> None:
    jobs = ["ranks", "ranks-retry2-on128", "a" * 60, "a" * 61]
    names = [object_name(run, job, attempt) for run in (RUN, RUN / "other") for job in jobs for attempt in (1, 12)]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(f"{name}-node-0-99999-abcde") <= 63
    assert object_name(RUN, "ranks", 1).endswith("-ranks-1")


def test_pods_of_a_run_are_on_different_nodes_and_only_on_those_of_the_job() -> None:
    affinity = pod_template(objects("every-option"))["spec"]["affinity"]
    (anti,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = pod_template(objects("every-option"))["metadata"]["labels"]
    assert anti["labelSelector"]["matchLabels"].items() <= labels.items()
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    fields = [[(f["operator"], *f["values"]) for f in term["matchFields"]] for term in required]
    assert fields == [[("In", node), ("NotIn", "gpu-3"), ("NotIn", "gpu-4")] for node in ("gpu-1", "gpu-2")]
    only_excluded = ON_NODES.model_copy(update={"nodelist": ""})
    affinity = pod_template(kubernetes_objects(settings(), only_excluded, RUN))["spec"]["affinity"]
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [len(term["matchFields"]) for term in required] == [2]
    of_trial = settings(nodes=("gpu-7",))
    affinity = pod_template(kubernetes_objects(of_trial, RANKS, RUN))["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-7"]}]}


def test_the_deadline_covers_pending_pods_and_the_requested_time() -> None:
    assert objects("job")[1]["spec"]["activeDeadlineSeconds"] == pytest.approx(RANKS.requested_s + 600, abs=1)
    assert objects("every-option")[1]["spec"]["activeDeadlineSeconds"] == pytest.approx(
        ON_NODES.requested_s + 1800, abs=1
    )


def test_gpus_and_rdma_are_requests_and_limits() -> None:
    for name in ("every-option", "trainjob"):
        resources = pod_template(objects(name))["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        assert {"nvidia.com/gpu": "8", "rdma/ib": "1"}.items() <= resources["limits"].items()
    assert "nvidia.com/gpu" not in (GOLDEN / "cpu-only.yaml").read_text().replace("key: nvidia.com/gpu", "")


def test_every_object_and_pod_has_the_labels_by_which_it_is_deleted() -> None:
    for name in CASES:
        labels = {"app.kubernetes.io/name", "seatrial.dev/run", "seatrial.dev/job", "seatrial.dev/attempt"}
        for document in (*objects(name), pod_template(objects(name))):
            assert labels <= set(document["metadata"]["labels"])


def test_the_digest_of_the_image_is_recorded() -> None:
    env = {
        entry["name"]: entry.get("value")
        for entry in pod_template(objects("every-option"))["spec"]["containers"][0]["env"]
    }
    assert env["SEATRIAL_IMAGE_ID"] == f"sha256:{'0f' * 32}"
    assert "SEATRIAL_IMAGE_ID" not in (GOLDEN / "job.yaml").read_text()


def test_a_job_that_is_too_large_for_an_argument_is_refused() -> None:
    switches = {f"node-{index}": ("leaf", "spine") for index in range(5000)}
    job = RANKS.model_copy(update={"topology": Topology(source="t.yaml", switches=switches)})
    with pytest.raises(UsageError, match=r"job ranks: its description has \d+ bytes"):
        kubernetes_objects(settings(), job, RUN)
