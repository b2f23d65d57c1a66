"""A cluster of Kubernetes objects that answers kubectl; any other command fails the test."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.check import Check
from seatrial.checks.kubernetes import _probe_pods
from seatrial.model import Measurement, Outcome
from seatrial.util.processes import CommandResult
from tests.fakes.kubectl import forbidden, printed
from tests.fakes.slurm import judge, not_passed, run_check
from tests.paths import FIXTURES

Object = dict[str, Any]


def node_list() -> list[Object]:
    """The nodes of the fixture: gpu0 to gpu3 with 8 GPUs each, and control0 without."""
    items: list[Object] = json.loads((FIXTURES / "kubernetes/nodes-4x8xb200.json").read_text())["items"]
    return items


def daemon_pod(node: str, daemon_set: str, waiting: str = "") -> Object:
    """A pod of a DaemonSet, ready unless its container waits for the reason ``waiting``."""
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": "2026-11-20T09:20:53Z"}}
    return {
        "metadata": {
            "name": f"{daemon_set}-5crlk",
            "namespace": "gpu-operator",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": daemon_set, "uid": "1"}],
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False" if waiting else "True"}],
            "containerStatuses": [{"name": "main", "state": state}],
        },
    }


DAEMON_SETS = ("nvidia-device-plugin-daemonset", "nvidia-container-toolkit-daemonset")


class FakeCluster:
    """Tests change ``nodes``, and ``pods`` by namespace; ``forbidden``: resources that the user may not list.

    ``namespaces``: those that exist and in which the user may list pods; None: the user may list pods everywhere.
    """

    def __init__(self) -> None:
        self.nodes = node_list()
        names = ["gpu0", "gpu1", "gpu2", "gpu3"]
        self.pods = {"gpu-operator": [daemon_pod(node, name) for node in names for name in DAEMON_SETS]}
        self.forbidden: set[str] = set()
        self.namespaces: set[str] | None = None
        self.events: list[Object] = []
        self.created: list[Object] = []  # Jobs and Services, as the check wrote them
        self.deleted: list[str] = []  # selectors
        self.terminating = 0  # answers until the objects of the deleted Job are gone
        self.probe_pods: Callable[[Object], list[Object]] = lambda _job: []
        self.log: Callable[[Object], str] = lambda _job: ""  # of all pods, with the prefix of kubectl
        self.now = 0.0
        self.settings: Object = {"image": "registry.example/seatrial:1", "namespace": "team"}

    def node(self, name: str) -> Object:
        return next(node for node in self.nodes if node["metadata"]["name"] == name)

    def run_command(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        assert timeout_s > 0
        assert argv[0] == "kubectl"
        options = {option for option in argv if option.startswith("--")}
        verb, *rest = [part for part in argv[1:] if not part.startswith("--")]
        values = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
        if verb == "get":
            (resource,) = rest
            return self._get(resource, values)
        assert values["namespace"] == self.settings["namespace"]
        if verb == "create":
            manifest = json.loads(Path(values["filename"]).read_text())
            self.created.append(manifest)
            return CommandResult(0, json.dumps({**manifest, "metadata": {**manifest["metadata"], "uid": "u1"}}), "")
        assert values["selector"] == f"seatrial.dev/probe={self.created[0]['metadata']['name']}"
        if verb == "logs":
            assert {"--prefix", "--ignore-errors"} <= options
            assert values["tail"] == "-1"  # with a selector, kubectl prints the last ten lines by default
            return CommandResult(0, self.log(self.created[0]), "")
        assert (verb, rest, values["cascade"], values["wait"]) == ("delete", ["jobs"], "foreground", "false")
        self.deleted.append(values["selector"])
        self.terminating = 1
        return CommandResult(0, "", "")

    def _get(self, resource: str, values: dict[str, str]) -> CommandResult:
        items: list[Object]
        may_list = resource != "pods" or self.namespaces is None or values["namespace"] in self.namespaces
        if resource in self.forbidden or not may_list:
            return CommandResult(1, "", forbidden(resource, values.get("namespace")))
        if resource == "jobs,pods":
            self.terminating -= 1
            items = [{"kind": "Job", "metadata": {}}] * (self.terminating > 0)
        elif resource == "pods":
            probe = "selector" in values
            items = self.probe_pods(self.created[0]) if probe else self.pods.get(values["namespace"], [])
        else:
            items = {"nodes": self.nodes, "events": self.events}[resource]
        if resource == "nodes" and "selector" in values:
            labels = dict(pair.split("=") for pair in values["selector"].split(","))
            items = [node for node in items if labels.items() <= node["metadata"]["labels"].items()]
        return CommandResult(0, printed(items, values["output"]), "")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class KubernetesRunner:
    """Runs a check against the fake cluster and judges it with its rules."""

    def __init__(self, check: Check, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check = check
        self.folder = folder
        self.cluster = FakeCluster()
        monkeypatch.setattr("seatrial.util.processes.run_command", self.run_command)

    def run_command(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        return self.cluster.run_command(argv, timeout_s)

    def use_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Waiting takes no time: the clock of the probe pods advances by their sleep only."""
        clock = SimpleNamespace(sleep=self.cluster.sleep, monotonic=lambda: self.cluster.now)
        monkeypatch.setattr(_probe_pods, "time", clock)

    def measure(self, nodes: int = 4, gpus: int | None = 8, **options: Any) -> Measurement:
        """``nodes``, ``gpus``: the expected nodes, and GPUs per node."""
        self.cluster.created, self.cluster.deleted, self.cluster.now = [], [], 0.0
        settings = copy.deepcopy(self.cluster.settings)
        return run_check(self.check, self.folder, (nodes, gpus), kubernetes=settings, **options)

    def not_passed(self, nodes: int = 4, gpus: int | None = 8, **options: Any) -> dict[str, Outcome]:
        return not_passed(judge(self.check, self.measure(nodes, gpus, **options)))
