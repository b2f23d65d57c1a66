"""The Kubernetes launcher: permissions, operators, refused objects, and the objects that it creates."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from seatrial.discover.kubectl import ApiUnavailable, Kubectl
from seatrial.launch import kubernetes_job, node_prefix, submission, trial_launcher
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.kubernetes_job import label_value
from seatrial.model import JobState, UsageError
from tests.launch.on_fake_cluster import FORBIDDEN, JOB, Attempt, both, settings


def test_refused_object_leaves_no_other(attempt: Attempt) -> None:
    result = attempt.run(create_errors={"Job": FORBIDDEN})
    assert (result.state, attempt.listener.measurements) == (JobState.REJECTED, [])
    assert "(Forbidden): jobs.batch is forbidden: exceeded quota: jobs" in result.cause
    assert any(call.endswith("--wait=false") and "delete jobs.batch,services" in call for call in attempt.cluster.calls)


def test_an_api_server_that_restarts_delays_the_job(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_POLL_S", 0.0)
    run, failures = Kubectl.run, [ApiUnavailable("connection refused")] * 2

    def restarting(client: Kubectl, *args: str, **options: Any) -> str:
        if args[0] == "create" and failures:
            raise failures.pop()
        return run(client, *args, **options)

    monkeypatch.setattr(Kubectl, "run", restarting)
    result = attempt.run(pods=both("image_missing"))
    assert "the registry does not have it" in result.cause, "the third creation succeeded"
    assert sum(call.endswith("--wait=false") for call in attempt.cluster.calls) == 3, (
        "no object of an earlier one stays"
    )
    assert len(attempt.listener.warnings) == 1


def test_interrupted_creation_names_the_command_that_deletes_what_it_may_have_created(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def api_server_stops(client: Kubectl, *args: str, **options: object) -> str:
        if args[0] == "create":
            raise KeyboardInterrupt
        raise ApiUnavailable("connection refused")

    monkeypatch.setattr(Kubectl, "run", api_server_stops)
    monkeypatch.setattr(kubernetes_job, "DELETE_LIMIT_S", 0)
    with pytest.raises(KeyboardInterrupt, match=r"Run first: kubectl .*delete jobs.batch,services,pods --selector="):
        attempt.run()


def test_objects_of_others_with_the_same_name_stay(attempt: Attempt) -> None:
    service = next(yaml.safe_load_all(KubernetesLauncher(settings()).render(JOB, attempt.run_dir).text))
    other = {"kind": "Service", "metadata": {"name": service["metadata"]["name"], "uid": "1", "labels": {}}}
    result = attempt.run(objects=[other])
    assert "exists already and is not of this run; it is left unchanged" in result.cause
    assert attempt.cluster.objects == [other]


def test_token_is_in_objects_but_not_in_the_shown_command(attempt: Attempt) -> None:
    attempt.run(pods=both("image_missing"))
    folder = attempt.run_dir / "jobs" / "nodes" / "attempt1"
    objects = list(yaml.safe_load_all((folder / "objects.yaml").read_text()))
    (container,) = objects[1]["spec"]["template"]["spec"]["containers"]
    (token,) = [each["value"] for each in container["env"] if each["name"] == "SEATRIAL_TOKEN"]
    assert token not in (folder / "command.sh").read_text()
    assert (folder / "objects.yaml").stat().st_mode & 0o077 == 0
    for item in (*objects, objects[1]["spec"]["template"]):
        assert item["metadata"]["labels"]["seatrial.dev/token"] == label_value(token)
    assert "seatrial.dev/token" not in objects[0]["spec"]["selector"]


@pytest.mark.parametrize(
    ("scenario", "kubernetes", "expected"),
    [
        ({"refused": ["create jobs.batch", "get pods/log"]}, {}, "may not create jobs.batch, get pods/log in names"),
        ({}, {"workload": "jobset"}, "the cluster has no jobsets of jobset.x-k8s.io: install JobSet"),
        ({}, {"workload": "trainjob"}, "install Kubeflow Trainer, or set kubernetes.workload to job"),
        ({}, {"kueue": {"queue": "gpus"}}, "no workloads of kueue.x-k8s.io: install Kueue, or remove kubernetes.kueue"),
    ],
)
def test_missing_permissions_and_operators_are_found_before_the_first_job(
    attempt: Attempt, scenario: dict[str, Any], kubernetes: dict[str, Any], expected: str
) -> None:
    attempt.install(**scenario)
    with pytest.raises(UsageError, match=expected):
        trial_launcher(settings(**kubernetes)).require_access()


def test_no_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match="command -v kubectl"):
        trial_launcher(settings()).require_access()


@pytest.mark.parametrize(
    "error",
    [
        'error: context "prod" does not exist',
        "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
    ],
    ids=["context", "kubeconfig"],
)
def test_no_context_is_a_usage_error_and_creates_nothing(attempt: Attempt, error: str) -> None:
    attempt.install(unreachable=error)
    with pytest.raises(UsageError, match=r"no cluster to connect to .* Run first: kubectl config get-contexts"):
        trial_launcher(settings(context="prod")).require_access()
    assert not [call for call in attempt.cluster.calls if " create " in f" {call} " and " auth " not in f" {call} "]


def test_forbidden_namespace_is_one_usage_error_and_creates_nothing(attempt: Attempt) -> None:
    attempt.install(refused=["create jobs.batch", "list jobs.batch", "create services", "list pods"])
    with pytest.raises(UsageError) as refused:
        trial_launcher(settings()).require_access()
    text = str(refused.value)
    assert "may not create jobs.batch, list jobs.batch, create services, list pods in namespace ml" in text
    assert text.endswith("Run first: kubectl --namespace=ml auth can-i --list")
    assert all(" auth can-i " in call for call in attempt.cluster.calls)


def test_command_on_a_node() -> None:
    """A privileged pod: not in the namespace of the trial, where Pod Security may refuse it."""
    prefix = node_prefix(settings(context="gpu"))
    assert prefix.startswith("as an administrator: kubectl --context=gpu --namespace=kube-system debug ")
    assert prefix.endswith(" node/{node} -- chroot /host")
