"""deploy/kubernetes, deploy/readmit: accounts have the rights that their calls of kubectl need, and no others.

The calls are those of jobs, checks and readmissions on fake clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.checks.kubernetes import nodes, pods
from seatrial.discover.kubectl import Kubectl
from seatrial.launch import trial_launcher
from seatrial.launch.collect_logs import LogTransport
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.kubernetes_job import KubernetesJob
from seatrial.model import DecisionValue
from seatrial.util.processes import CommandResult
from tests.checks.kubernetes.fake_cluster import KubernetesRunner
from tests.deploy.test_kubernetes import FOLDER
from tests.fakes.kubectl import Cluster
from tests.launch.on_fake_cluster import JOB, NODES, NOTEBOOK, Attempt, both, settings
from tests.launch.test_pod_states import QUEUED
from tests.operate.test_kubernetes_nodes import OUR_TAINT, Site, node
from tests.paths import ROOT

Right = tuple[str, str, str]  # place, resource, verb
TRIAL_RBAC = FOLDER / "rbac.yaml"
WORKLOADS = ("jobs", "jobsets", "trainjobs")
# kubectl describe in messages, for the user; kubectl exec by WebSocket since Kubernetes 1.30
FOR_COMMANDS = {*(("trial", name, "get") for name in WORKLOADS), ("trial", "pods/exec", "get")}
# Optional, and too much for a role: it shows all pods of the cluster
NOT_GRANTED = {("all", "pods", "list")}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    created = Attempt(tmp_path, monkeypatch)
    yield created
    created.cluster.stop()


def granted(account: tuple[str, str], *files: Path) -> set[Right]:
    """The rights that ``files`` bind to the ServiceAccount (name, namespace); ``trial``: in its own namespace.

    ``operators``: in other namespaces; ``cluster``: of objects without a namespace. Objects of a file that have no
    namespace are created in that of the account.
    """
    name, namespace = account
    items = [item for file in files for item in yaml.safe_load_all(file.read_text())]
    namespaces = {item["metadata"]["name"] for item in items if item["kind"] == "Namespace"} | {"trial"}
    accounts = {
        (item["metadata"]["name"], item["metadata"].get("namespace", namespace))
        for item in items
        if item["kind"] == "ServiceAccount"
    }
    assert account in accounts
    assert namespace in namespaces
    rules = {(item["kind"], item["metadata"]["name"]): item["rules"] for item in items if "rules" in item}
    rights: set[Right] = set()
    for binding in (item for item in items if item["kind"].endswith("Binding")):
        if (name, namespace) not in {(each["name"], each.get("namespace", namespace)) for each in binding["subjects"]}:
            continue
        place = "trial" if binding["metadata"].get("namespace", namespace) == namespace else "operators"
        place = "cluster" if binding["kind"] == "ClusterRoleBinding" else place
        rights |= {
            (place, resource, verb)
            for rule in rules[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    return rights


def needed(argv: Sequence[str], namespace: str) -> set[Right]:
    """The rights that a call of kubectl needs on the API server."""
    words = [each for each in argv if not each.startswith("-")]
    options = dict(each[2:].partition("=")[::2] for each in argv if each.startswith("--"))
    command, arguments = words[0], words[1:]
    if command in ("auth", "api-resources"):  # for all authenticated users
        return set()
    place = "trial" if options.get("namespace") == namespace else "operators"
    if command == "create":
        objects = yaml.safe_load_all(Path(options["filename"]).read_text())
        return {(place, f"{each['kind'].lower()}s", "create") for each in objects}
    if command == "logs":
        return {(place, "pods", "list"), (place, "pods/log", "get")}
    if command == "exec":
        return {(place, "pods", "get"), (place, "pods/exec", "create")}
    if command in ("patch", "taint"):  # kubectl gets the object, or the subresource that it patches, before the patch
        subresource = f"/{options['subresource']}" if "subresource" in options else ""
        return {("cluster", f"{arguments[0]}s{subresource}", verb) for verb in ("get", "patch")}
    resources = [name.partition(".")[0].removesuffix("s") + "s" for name in arguments[0].split(",")]
    if command == "delete":
        assert options["wait"] == "false"  # else kubectl watches the objects
        return {(place, name, verb) for name in resources for verb in ("list", "delete")}
    assert command == "get", argv
    place = "all" if "all-namespaces" in options else place
    verb = "get" if len(arguments) > 1 else "list"
    return {("cluster" if name == "nodes" else place, name, verb) for name in resources}


def rights_of_launcher(attempt: Attempt, workload: str, kinds: list[str], **scenario: Any) -> set[Right]:
    """The rights of one job whose pods do not start, and whose node is lost."""
    config = settings(gpus=8, workload=workload)
    attempt.install(kinds=kinds, objects=[*NODES, NOTEBOOK], **scenario)
    trial_launcher(config).require_access()
    launcher = KubernetesLauncher(config)
    folder = attempt.run_dir / "jobs" / "nodes" / "attempt1"
    folder.mkdir(parents=True)
    job = launcher.start(launcher.render(JOB, attempt.run_dir), folder)
    assert isinstance(job, KubernetesJob)
    assert job.wait_state()
    job.node_state("node-b")
    assert job.cancel(node_lost=True) == ""
    assert attempt.cluster.unexpected_calls == []
    return rights_of_calls(attempt.cluster)


def rights_of_calls(cluster: Cluster) -> set[Right]:
    calls = [call.partition(" --output=")[0] for call in cluster.calls]  # a template has spaces
    return {right for call in calls for right in needed(call.split(" "), "ml")}


def rights_of_check(runner: KubernetesRunner, monkeypatch: pytest.MonkeyPatch) -> set[Right]:
    found: set[Right] = set()
    answer = runner.cluster.run_command

    def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
        found.update(needed(argv[1:], "team"))
        return answer(argv, timeout_s)

    monkeypatch.setattr(runner.cluster, "run_command", run_command)
    runner.measure()
    return found


def test_roles_have_the_rights_that_calls_of_kubectl_need_and_no_others(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used = rights_of_launcher(attempt, "job", ["Workload"], pods=both("gpus_in_use"))
    transport = LogTransport(Kubectl("ml"), "a=b", "seatrial", "token", 2, nodes="pod-a")
    used |= needed(transport.step("", 0)[1:], "ml")
    assert "kubectl --namespace=ml exec --container=seatrial" in transport.command("true")[2]
    used |= needed(["exec", "--namespace=ml", "pod-a"], "ml")
    for number, (workload, kind) in enumerate((("jobset", "JobSet"), ("trainjob", "TrainJob"))):
        attempt.run_dir = tmp_path / f"other{number}" / "run"
        used |= rights_of_launcher(attempt, workload, [kind])
    attempt.run_dir = tmp_path / "queued" / "run"
    used |= rights_of_launcher(attempt, "job", ["Workload"], suspend=True, queued=QUEUED)
    for check in (nodes.CHECK, pods.CHECK):
        runner = KubernetesRunner(check, monkeypatch, tmp_path)
        runner.use_clock(monkeypatch)
        used |= rights_of_check(runner, monkeypatch)
    assert used >= NOT_GRANTED
    rights = granted(("seatrial", "trial"), TRIAL_RBAC, FOLDER / "cluster-reader.yaml")
    assert used - NOT_GRANTED - rights == set(), "a call of kubectl that the roles do not allow"
    assert rights - used == FOR_COMMANDS, "rights that no call needs"


def test_account_of_readmit_has_the_rights_of_a_trial_and_of_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """readmit runs a trial; the calls of the changes are those of all flags, for an accepted and a rejected node."""
    used: set[Right] = set()
    for decision, taints in ((DecisionValue.ACCEPTED, [OUR_TAINT]), (DecisionValue.REJECTED, [])):
        site = Site(tmp_path, monkeypatch)
        site.change(site.candidates(node("new", *taints)), decision)
        used |= rights_of_calls(site.cluster)
    rights = granted(("seatrial-readmit", "seatrial"), TRIAL_RBAC, ROOT / "deploy" / "readmit" / "rbac.yaml")
    in_namespace = granted(("seatrial", "trial"), TRIAL_RBAC)
    assert in_namespace
    assert rights == used | in_namespace
