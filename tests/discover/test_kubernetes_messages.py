"""Messages of Kubernetes about pods that do not start: their causes, and the failures of jobs made from them."""

from __future__ import annotations

import re
import time

import pytest

from seatrial.discover.kubernetes_messages import Place, StartCause, find_start_cause, job_failures, start_causes

IMAGE = (
    'ImagePullBackOff: Back-off pulling image "registry.example/seatrial:9": ErrImagePull: failed to resolve reference '
    '"registry.example/seatrial:9": registry.example/seatrial:9: not found'
)
PLACE = Place("ml", image="registry.example/seatrial:9")


@pytest.mark.parametrize("cause", start_causes(), ids=lambda cause: cause.id)
def test_example_of_each_message_is_of_its_cause(cause: StartCause) -> None:
    found = find_start_cause(cause.message.example)
    assert found is not None
    assert found.id == cause.id


@pytest.mark.parametrize("cause", start_causes(), ids=lambda cause: cause.id)
def test_first_command_is_complete(cause: StartCause) -> None:
    (failure,) = job_failures({cause.message.example: [("a-0-x", "node-a")]}, PLACE._replace(context="gpu"))
    assert not re.search(r"[{}]|NAMESPACE|POD", failure.first_command)
    assert "kubectl " in failure.first_command
    assert failure.first_command.count("kubectl --context=gpu ") == failure.first_command.count("kubectl ")


def test_command_without_a_namespace_is_for_that_of_the_context() -> None:
    (failure,) = job_failures({IMAGE: [("a-0-x", "node-a")]}, Place(""))
    assert failure.first_command.startswith("kubectl describe pod a-0-x || kubectl get events --field-selector ")


def test_one_failure_per_cause_with_all_its_nodes() -> None:
    texts = {
        IMAGE: [("a-0-x", "node-a"), ("a-1-x", "node-b")],
        f"a-2-x: {IMAGE}": [("a-2-x", "node-c")],
        "starting on node-d": [("a-3-x", "node-d")],
    }
    (failure,) = job_failures(texts, PLACE)
    assert (failure.cause, failure.name) == ("kubernetes_image_missing", "registry.example/seatrial:9")
    assert failure.nodes == ("node-a", "node-b", "node-c")
    assert failure.message == IMAGE
    assert failure.first_command.startswith("kubectl describe pod -n ml a-0-x || ")


@pytest.mark.parametrize(
    "error",
    [
        "dial tcp 10.0.0.5:10250: connect: connection refused",
        "dial tcp 10.0.0.5:10250: i/o timeout",
        "dial tcp 10.0.0.5:10250: connect: no route to host",
        "remote error: tls: internal error",
        "x509: certificate signed by unknown authority",
        "proxy error from 127.0.0.1:9345 while dialing 10.0.0.5:10250, code 502: 502 Bad Gateway",
        "No agent available",
    ],
)
def test_kubelets_that_cannot_be_reached_are_one_failure_of_their_nodes(error: str) -> None:
    url = "https://10.0.0.{}:10250/containerLogs/ml/x-{}-abcde/seatrial?follow=true"
    lines = {f'Get "{url.format(4 + index, index)}": {error}': [(f"x-{index}-abcde", f"n{index}")] for index in (1, 2)}
    (failure,) = job_failures(lines, PLACE)
    assert (failure.cause, failure.nodes) == ("kubernetes_kubelet_unreachable", ("n1", "n2"))


@pytest.mark.parametrize(
    ("text", "cause", "name"),
    [
        ("exceeded quota: gpus, requested: x", "kubernetes_quota", "gpus"),
        ("ErrImagePull: initializing source: no such host", "kubernetes_image_pull", "registry.example/seatrial:9"),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {gpu: }.", "kubernetes_taint", "gpu"),
        ("0/1 nodes are available: 1 node(s) had untolerated taint(s).", "kubernetes_taint", ""),
        ('namespaces "ml" not found', "kubernetes_namespace_missing", "ml"),
        ('persistentvolumeclaim "results" not found', "kubernetes_claim_missing", "results"),
    ],
)
def test_name_of_the_object_at_fault(text: str, cause: str, name: str) -> None:
    (failure,) = job_failures({text: ()}, PLACE)
    assert (failure.cause, failure.name, failure.nodes) == (cause, name, ())


# Published messages of the scheduler of Kubernetes 1.36; some without the text after the first period
@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 "
            "nodes are available: 1 No preemption victims found for incoming pod.",
            "kubernetes_gpus_in_use",
        ),
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu.",
            "kubernetes_gpus_in_use",
        ),
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node "
            "affinity/selector. no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not "
            "helpful for scheduling.",
            "kubernetes_node_selector",
        ),
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu. no new claims to "
            "deallocate, preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No "
            "preemption victims found for incoming pod.",
            "kubernetes_resources_in_use",
        ),
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) were unschedulable.",
            "kubernetes_unschedulable",
        ),
        ("0/3 nodes are available: 3 node(s) had untolerated taint(s).", "kubernetes_taint"),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "kubernetes_claim_pending",
        ),
        (
            '0/2 nodes are available: persistentvolumeclaim "model-storage" not found. not found',
            "kubernetes_claim_missing",
        ),
    ],
)
def test_the_cause_is_that_of_most_nodes(message: str, cause: str) -> None:
    (failure,) = job_failures({message: ()}, PLACE)
    assert (failure.cause, failure.message) == (cause, message)


def test_unknown_messages_are_no_failure() -> None:
    assert job_failures({"starting on node-a": (), "": ()}, PLACE) == ()


@pytest.mark.parametrize("text", ["ErrImagePull" * 8_000, "ErrImagePull: " * 8_000, 'image "' * 20_000])
def test_long_messages_need_no_time_and_are_cut(text: str) -> None:
    started = time.process_time()
    found = find_start_cause(text), job_failures({text: [("a-0-x", "node-a")]}, PLACE)
    assert time.process_time() - started < 2  # measured: 0.05 s; without a limit 20 s and more
    assert all(len(failure.message) <= 4096 for failure in found[1])
