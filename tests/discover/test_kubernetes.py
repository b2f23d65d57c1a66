"""Nodes, pods and events of the Kubernetes API."""

from __future__ import annotations

import json

import pytest

from seatrial.discover.kubectl import Kubectl
from seatrial.discover.kubernetes import (
    Event,
    KubernetesNode,
    Pod,
    device_count,
    kubernetes_data,
    parse,
    read_gpu_users,
    read_nodes,
)
from seatrial.model import SeatrialError
from tests.fakes.kubectl import printed
from tests.paths import FIXTURES


class Lines(Kubectl):
    """kubectl that prints ``out``."""

    out: str
    arguments: tuple[str, ...]

    def run(self, *args: str, timeout_s: float = 1.0) -> str:
        object.__setattr__(self, "arguments", args)  # Kubectl is immutable
        return self.out


def lines(out: str) -> Lines:
    client = Lines()
    object.__setattr__(client, "out", out)
    return client


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("0", 0), ("1k", 1000), ("2Ki", 2048), ("1M", 10**6)])
def test_device_count(text: str, count: int) -> None:
    assert device_count(text) == count


@pytest.mark.parametrize("text", ["", "eight", "-1", "7.5", "500m", "1e3"])
def test_a_number_of_devices_is_a_whole_number(text: str) -> None:
    with pytest.raises(SeatrialError, match="whole number"):
        device_count(text)


def test_a_node_with_the_least_fields() -> None:
    """A node that has just registered; the driver version is that of older releases of GPU Feature Discovery."""
    labels = {
        f"nvidia.com/cuda.driver.{key}": value for key, value in {"major": "460", "minor": "73", "rev": "01"}.items()
    }
    (bare,) = read_nodes(lines("n\t\t\t\t\t\t\tv1.34.1\n"))
    assert (bare.ready_condition.status, bare.has_gpus, bare.driver_version, bare.allocatable("nvidia.com/gpu")) == (
        "Unknown",
        False,
        None,
        0,
    )
    (labelled,) = read_nodes(lines(f"n\t{json.dumps(labels)}\t\t\t\t\t\tv1.34.1\n"))
    assert labelled.driver_version == "460.73.01"


@pytest.mark.parametrize(
    ("status", "text", "started"),
    [
        ({"phase": "Pending"}, "p: Pending", False),
        ({"phase": "Failed", "reason": "Evicted"}, "p: Evicted", False),
        (
            {"containerStatuses": [{"name": "c", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "p: CrashLoopBackOff",
            False,
        ),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [
                    {"name": "i", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
                ],
                "containerStatuses": [{"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "p: ImagePullBackOff: no",
            False,
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": [{"name": "c", "state": {"running": {"startedAt": "2026-11-20T09:21:23Z"}}}],
            },
            "p: Running",
            True,
        ),
    ],
)
def test_state_of_a_pod(status: dict[str, object], text: str, started: bool) -> None:
    (pod,) = parse([{"metadata": {"name": "p"}, "status": status}], Pod)
    assert (str(pod), pod.started, pod.start_s) == (text, started, None)


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ('Successfully pulled image "nginx" in 27.88s (27.88s including waiting). Image size: 68507108 bytes.', 27.88),
        (
            'Successfully pulled image "ghcr.io/x:latest" in 312ms (312ms including waiting). Image size: 1 bytes.',
            0.312,
        ),
        ('Successfully pulled image "web:0.1" in 6.122254288s', 6.122254288),
        ('Successfully pulled image "nvcr.io/nvidia/pytorch:25.10-py3" in 4m12.5s (4m12.5s including waiting)', 252.5),
        ('Container image "nginx" already present on machine', None),
        ('Successfully pulled image "nginx:1.7.9"', None),  # before 1.20
    ],
)
def test_pull_time(message: str, seconds: float | None) -> None:
    """Messages of kubelets; file 11306852934 and others of a public index of GitHub repositories."""
    (event,) = parse([{"involvedObject": {"name": "p"}, "reason": "Pulled", "message": message}], Event)
    assert event.pull_s == (pytest.approx(seconds) if seconds else None)


@pytest.mark.parametrize(
    "line", ["", "n", "n\t\t\t\t\t\t\t", "n\t7\t\t\t\t\t\tv1", "n\t{\t\t\t\t\t\tv1", "\t\t\t\t\t\t\tv1"]
)
def test_an_object_that_is_no_node_is_an_error(line: str) -> None:
    with pytest.raises(SeatrialError, match="kubectl returned an invalid"):
        list(read_nodes(lines(line + "\n")))


def test_nodes_as_kubectl_prints_them() -> None:
    """kubectl 1.32.4 printed the nodes of the JSON file, the first of them cordoned, with ``--output=jsonpath=…``."""
    folder = FIXTURES / "kubernetes"
    items = json.loads((folder / "nodes-4x8xb200.json").read_text())["items"]
    items[0]["spec"] |= {"unschedulable": True, "taints": [{"key": "a/b", "value": "c\t<d>", "effect": "NoSchedule"}]}
    client = lines((folder / "nodes-4x8xb200.jsonpath.txt").read_text())
    assert list(read_nodes(client, {"a": "b", "c": "d"})) == [KubernetesNode.model_validate(item) for item in items]
    assert "--selector=a=b,c=d" in client.arguments
    assert printed(items, client.arguments[-1].removeprefix("--output=")) == client.out.replace(r"\u003cd\u003e", "<d>")


def test_terms() -> None:
    assert kubernetes_data().bad_conditions["NebiusGPUError"] == "True"
    assert kubernetes_data().bad_conditions["AcceleratedHardwareReady"] == "False"
    assert "nvidia.com/gpu.clique" in kubernetes_data().topology_prefixes


def test_pods_that_use_gpus() -> None:
    """kubectl 1.32.4 printed the first three lines for pods with several containers, without GPUs, and with one."""
    client = lines("ml/notebook-0\tnode-b\t1 2\nml/web\tnode-a\t\nml/train\tnode-a\t8\nml/pending\t\t8\n")
    assert [*read_gpu_users(client)] == [("ml/notebook-0", "node-b", 3), ("ml/train", "node-a", 8)]
    for garbage in ("ml/a node-b 1", "ml/a\tnode-b\tone"):
        with pytest.raises(SeatrialError, match="invalid"):
            next(read_gpu_users(lines(garbage)))
