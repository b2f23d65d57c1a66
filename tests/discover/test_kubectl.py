"""kubectl's command lines and errors. The error texts are output of kubectl 1.32."""

from __future__ import annotations

import pytest

from seatrial.discover.kubectl import ApiUnavailable, Kubectl, KubectlError
from seatrial.util.processes import CommandResult

FORBIDDEN = (
    'Error from server (Forbidden): error when creating "objects.json": jobs.batch is forbidden: User "ml" cannot '
    'create resource "jobs" in API group "batch" in the namespace "prod"'
)
NO_SERVER = """\
E1123 11:45:34.473272   30847 memcache.go:265] "Unhandled Error" err="couldn't get current server API group list: Get \
\\"http://localhost:8080/api?timeout=32s\\": dial tcp 127.0.0.1:8080: connect: connection refused"
The connection to the server localhost:8080 was refused - did you specify the right host or port?
"""
NO_CONTEXT = "Error in configuration: context was not found for specified context: gpu"


def replies(monkeypatch: pytest.MonkeyPatch, code: int | None, out: str = "", err: str = "") -> list[list[str]]:
    commands: list[list[str]] = []

    def run_command(argv: list[str], timeout_s: float) -> CommandResult:
        commands.append(argv)
        return CommandResult(code, out, err)

    monkeypatch.setattr("seatrial.util.processes.run_command", run_command)
    return commands


@pytest.mark.parametrize(
    ("err", "error_type", "reason", "expected"),
    [
        (FORBIDDEN, KubectlError, "Forbidden", 'jobs.batch is forbidden: User "ml" cannot create'),
        (
            NO_SERVER,
            KubectlError,
            "",
            "no cluster to connect to (The connection to the server localhost:8080 was refused",
        ),
        (NO_CONTEXT, KubectlError, "", "context was not found for specified context: gpu"),
        ('error: context "gpu" does not exist', KubectlError, "", ". Run first: kubectl config get-contexts"),
        (NO_SERVER.replace("localhost:8080", "10.0.0.1:6443"), ApiUnavailable, "", "10.0.0.1:6443 was refused"),
        (FORBIDDEN, KubectlError, "Forbidden", "Run first: kubectl --context=gpu --namespace=prod auth can-i --list"),
        (f"{FORBIDDEN}: exceeded quota: a", KubectlError, "Forbidden", "--namespace=prod describe resourcequotas"),
        (
            "Error from server (ServiceUnavailable): apiserver not ready",
            ApiUnavailable,
            "ServiceUnavailable",
            "not ready",
        ),
        ("", KubectlError, "", "exit code 1, no output"),
    ],
)
def test_error_has_its_reason_and_a_command(
    monkeypatch: pytest.MonkeyPatch, err: str, error_type: type[KubectlError], reason: str, expected: str
) -> None:
    replies(monkeypatch, 1, err=err)
    with pytest.raises(error_type) as error:
        Kubectl("prod", "gpu").run("create", "-f", "objects.json")
    assert (error.value.reason, type(error.value)) == (reason, error_type)
    assert expected in str(error.value)
    assert "memcache.go" not in str(error.value)
    no_cluster = "no cluster" in str(error.value)
    assert f"Run first: kubectl {'config' if no_cluster else '--context=gpu --namespace=prod'} " in str(error.value)


def test_a_command_without_an_answer_and_a_missing_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    replies(monkeypatch, None)
    with pytest.raises(ApiUnavailable, match="took longer than 60 s"):
        Kubectl().run("get", "pods")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(KubectlError, match="command -v kubectl"):
        Kubectl().run("get", "pods")


NO_OBJECTS = ('{"metadata": null}', '{"items": [{"status": []}]}', "[" * 100_000)


def test_objects_of_a_list_of_one_and_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for out, expected in (('{"items": [{"kind": "Pod"}]}', 1), ('{"kind": "Pod"}', 1), ('{"items": []}', 0)):
        (command,) = [replies(monkeypatch, 0, out)]
        assert len(Kubectl("ml").get("pods")) == expected
        assert command[0][:4] == ["kubectl", "--namespace=ml", "get", "pods"]
    for out in ("", "garbage", '{"items": [', '{"items": [1]}', "[]", '{"items": 7}', *NO_OBJECTS):
        replies(monkeypatch, 0, out)
        with pytest.raises(KubectlError, match="no JSON list of objects"):
            Kubectl().get("pods")


def test_permissions(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = replies(monkeypatch, 1, "no - no RBAC policy matched\n")
    assert Kubectl().refusals(("get", "pods/log")) == ["get pods/log"]
    assert commands == [["kubectl", "auth", "can-i", "get", "pods", "--subresource=log"]]
    replies(monkeypatch, 0, "yes\n", "Warning: resource 'nodes' is not namespace scoped\n")
    assert Kubectl().refusals(("get", "nodes")) == []
    replies(monkeypatch, 1, err=NO_SERVER.replace("localhost:8080", "10.0.0.1:6443"))  # no answer is not a "no"
    with pytest.raises(ApiUnavailable):
        Kubectl().refusals(("create", "jobs"))
    replies(monkeypatch, 1, err=NO_CONTEXT.replace("context was not found", "x"))
    with pytest.raises(KubectlError, match=r"^kubectl auth can-i failed: "):
        Kubectl().refusals(("create", "jobs"))
