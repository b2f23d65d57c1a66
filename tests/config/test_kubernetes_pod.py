"""The pod that the settings of the Kubernetes launcher describe."""

from __future__ import annotations

import pytest

from seatrial.config.kubernetes import Claim, Kubernetes, PodOverlay
from seatrial.config.kubernetes_pod import container, image, literal_argument, pod_spec


def test_mirror_replaces_the_registry() -> None:
    names = {
        "ghcr.io/example/seatrial:1": "m.io/c/example/seatrial:1",
        "localhost:5000/seatrial": "m.io/c/seatrial",
        "example/seatrial": "m.io/c/example/seatrial",
        "python:3.13": "m.io/c/library/python:3.13",
    }
    assert {name: image(Kubernetes(image=name, registry="m.io/c")) for name in names} == names
    assert image(Kubernetes(image="python:3.13")) == "python:3.13"


def test_a_pod_is_not_root_and_has_no_capability_by_default() -> None:
    """The rules of the Pod Security Standard `restricted`."""
    security = pod_spec(Kubernetes(), {})["securityContext"]
    assert security == {"runAsUser": 65532, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    in_container = container(Kubernetes(), 8)["securityContext"]
    assert in_container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod_spec(Kubernetes(), {})["automountServiceAccountToken"] is False


def test_a_privileged_pod_has_no_setting_that_contradicts_it() -> None:
    """Kubernetes refuses privileged pods with allowPrivilegeEscalation: false."""
    config = Kubernetes(overlay=PodOverlay(privileged=True, run_as_user=0))
    assert container(config, None)["securityContext"] == {"privileged": True}
    assert pod_spec(config, {})["securityContext"] == {"runAsUser": 0, "runAsNonRoot": False}


def test_the_user_of_the_pod_can_write_to_the_claim() -> None:
    config = Kubernetes(claim=Claim(name="results", path="/mnt/results"))
    assert pod_spec(config, {})["securityContext"]["fsGroup"] == 65532
    assert {"name": "results", "mountPath": "/mnt/results"} in container(config, 8)["volumeMounts"]


def test_pods_of_the_host_network_resolve_names_of_services() -> None:
    spec = pod_spec(Kubernetes(overlay=PodOverlay(host_network=True)), {})
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert {"hostNetwork", "dnsPolicy"}.isdisjoint(pod_spec(Kubernetes(), {}))


@pytest.mark.parametrize(
    ("text", "argument"), [("$(A) $$ $A ${A}", "$$(A) $$$ $A ${A}"), ("$$(A)", "$$$$(A)"), ("no dollar", "no dollar")]
)
def test_arguments_are_escaped(text: str, argument: str) -> None:
    assert literal_argument(text) == argument
