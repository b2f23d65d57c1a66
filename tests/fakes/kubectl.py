"""A fake kubectl with a cluster in a folder: it runs the containers of pods as processes of this host.

``install`` writes an executable ``kubectl``. It implements the calls that seatrial makes and fails on every other one,
which ``unexpected_calls`` returns. The options of ``install`` are its faults. Pods outlive the process that created
them, like those of a real cluster; ``Cluster.stop`` ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # each call of kubectl imports this module: pytest takes two thirds of the time
    import pytest

    from seatrial.util.processes import CommandResult

_TAG = "FAKE_POD"  # a variable of all processes of a pod: its uid
_POLL_S = 0.05
_KINDS = {
    "jobs.batch": "Job",
    "jobs": "Job",
    "services": "Service",
    "pods": "Pod",
    "nodes": "Node",
    "node": "Node",
    "events": "Event",
    "jobsets.jobset.x-k8s.io": "JobSet",
    "trainjobs.trainer.kubeflow.org": "TrainJob",
    "workloads.kueue.x-k8s.io": "Workload",
}
_OPTIONAL = ("JobSet", "TrainJob", "Workload")  # their definitions are not on every cluster
Object = dict[str, Any]


class Cluster:
    """The cluster in ``folder``: ``state.json`` has its objects, ``pods/UID`` the files of each pod."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # For tests

    def install(self, bin_folder: Path, **scenario: Any) -> None:
        """Write an executable kubectl for this cluster.

        ``nodes``: names. ``namespaces``: in which the user has rights; all others answer Forbidden, whether they exist
        or not. ``pods``: index → fields of the pod that never starts, such as ``status``. ``refused``: the
        verbs and resources that the user may not use, as ``create jobs.batch``. ``kinds``: optional kinds that the
        cluster has. ``events``, ``queued``: events and Kueue's Workload of the job. ``create_errors``: kind → error.
        ``cut``: numbers of lines after which the first streams of logs break. ``noise``: lines that the log has before
        each line of the container.
        ``suspend``: Kueue suspends jobs. ``no_pods``: the job's pods cannot be created. ``deadline_s``: replaces the
        job's deadline. ``unreachable``: error of all calls but ``create``. ``kubelets``: node → error of connections to
        its kubelet, as ``dial tcp 10.0.0.5:10250: connect: connection refused``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        defaults: dict[str, Any] = {"nodes": ["node-a", "node-b"], "pods": {}, "cut": [], "noise": []}
        defaults["namespaces"] = ["ml", "default"]
        self._write({"objects": scenario.pop("objects", []), "scenario": defaults | scenario, "calls": []})
        bin_folder.mkdir(parents=True, exist_ok=True)
        program = bin_folder / "kubectl"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            f"from tests.fakes.kubectl import main\nmain({str(self.folder)!r}, sys.argv[1:])\n"
        )
        program.chmod(0o755)

    def call_in_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer the short calls of kubectl without a new process."""
        from seatrial.util.processes import CommandResult

        def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
            assert argv[0] == "kubectl", argv
            assert timeout_s > 0
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = self.call(argv[1:])
            return CommandResult(code, out.getvalue(), err.getvalue())

        monkeypatch.setattr("seatrial.util.processes.run_command", run_command)

    @property
    def objects(self) -> list[Object]:
        """All objects, after the actions of the controllers."""
        with self._locked() as state:
            return list(self._reconciled(state)["objects"])

    @property
    def calls(self) -> list[str]:
        """The command lines of all calls so far."""
        return list(self._read()["calls"])

    @property
    def unexpected_calls(self) -> list[str]:
        """The calls that the fake does not implement."""
        return [call for call in self.calls if call.startswith("unexpected: ")]

    def left_behind(self, wait_s: float = 5.0) -> list[str]:
        """Objects that seatrial created and did not delete, and processes of pods that do not end within ``wait_s``."""
        deadline = time.monotonic() + wait_s
        while (remaining := self._left_behind()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return remaining

    def _left_behind(self) -> list[str]:
        return [
            f"{each['kind']} {each['metadata']['name']}" for each in self.objects if _is_created_by_seatrial(each)
        ] + [f"process {process.pid}" for process in psutil.process_iter() if self._is_pod_process(process)]

    def lose_node(self, node: str) -> None:
        """Stop a node: its pods' processes end, and its kubelet reports nothing."""
        for pod in [each for each in self._read()["objects"] if each["kind"] == "Pod"]:
            if pod["spec"].get("nodeName") == node:
                folder = self._pod_folder(pod)
                (folder / "lost").touch()
                for process in [each for each in psutil.process_iter() if self._is_pod_process(each)]:
                    with contextlib.suppress(psutil.Error):
                        if process.environ().get(_TAG) == f"{self.folder}:{pod['metadata']['uid']}":
                            process.kill()

    def stop(self) -> None:
        """End all pods."""
        for process in [each for each in psutil.process_iter() if self._is_pod_process(each)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_pod_process(self, process: psutil.Process) -> bool:
        try:
            tag = str(process.environ().get(_TAG, ""))
            return tag.startswith(f"{self.folder}:") and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    # The calls of kubectl

    def call(self, argv: Sequence[str]) -> int:
        with self._locked() as state:
            state["calls"].append(" ".join(argv))
        parser = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--context")
        parser.add_argument("--namespace")
        commands = parser.add_subparsers(dest="command", required=True)
        for name, options in _OPTIONS.items():
            command = commands.add_parser(name, allow_abbrev=False, exit_on_error=False)
            for option in options:
                action = "store_true" if option.endswith("!") else "store"
                command.add_argument(option.rstrip("!"), action=action)
            command.add_argument("arguments", nargs="*")
        try:
            command_line, rest = _split(argv)
            args = parser.parse_args(command_line)
            if (error := self._read()["scenario"].get("unreachable")) and args.command != "create":
                print(error, file=sys.stderr)
                return 1
            return int(getattr(self, f"_{args.command.replace('-', '_')}")(args, rest))
        except (argparse.ArgumentError, SystemExit, KeyError, NotImplementedError) as error:
            with self._locked() as state:
                state["calls"].append(f"unexpected: {' '.join(argv)}")
            print(f"fake kubectl: not implemented: {argv} ({error!r})", file=sys.stderr)
            return 64

    def _auth(self, args: argparse.Namespace, rest: list[str]) -> int:
        word, verb, resource = args.arguments
        assert word == "can-i"
        resource += f"/{args.subresource}" if args.subresource else ""
        refused = f"{verb} {resource}" in self._read()["scenario"].get("refused", [])
        print("no" if refused else "yes")
        return int(refused)

    def _api_resources(self, args: argparse.Namespace, rest: list[str]) -> int:
        kinds = self._read()["scenario"].get("kinds", [])
        names = [name for name, kind in _KINDS.items() if kind in kinds and name.endswith(f".{args.api_group}")]
        print("\n".join(names))
        return 0

    def _create(self, args: argparse.Namespace, rest: list[str]) -> int:
        import yaml

        code = 0
        for item in yaml.safe_load_all(Path(args.filename).read_text()):
            with self._locked() as state:
                error = self._create_error(state, item)
                if not error:
                    item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
                    item["metadata"].setdefault("namespace", args.namespace or "default")
                    state["objects"].append(item)
                    self._reconciled(state)
            name = item["metadata"]["name"]
            created = json.dumps(item) if args.output == "json" else f"{item['kind'].lower()}/{name} created"
            print(error or created, file=sys.stderr if error else sys.stdout)
            code = 1 if error else code
        return code

    def _create_error(self, state: Object, item: Object) -> str:
        kind, name = item["kind"], item["metadata"]["name"]
        if kind in state["scenario"].get("create_errors", {}):
            return str(state["scenario"]["create_errors"][kind])
        if any(each["kind"] == kind and each["metadata"]["name"] == name for each in state["objects"]):
            return (
                f'Error from server (AlreadyExists): error when creating "x": {kind.lower()}s "{name}" already exists'
            )
        return ""

    def _get(self, args: argparse.Namespace, rest: list[str]) -> int:
        kinds = [_KINDS[name] for name in args.arguments[0].split(",")]
        if kinds != ["Node"] and args.namespace and args.namespace not in self._read()["scenario"]["namespaces"]:
            print(forbidden(args.arguments[0], args.namespace), end="", file=sys.stderr)
            return 1
        with self._locked() as state:
            self._reconciled(state)
        missing = [kind for kind in kinds if kind in _OPTIONAL and kind not in state["scenario"].get("kinds", [])]
        if missing:
            print(f'error: the server doesn\'t have a resource type "{missing[0].lower()}s"', file=sys.stderr)
            return 1
        items = [each for each in state["objects"] if each["kind"] in kinds and _selected(each, args.selector)]
        items += self._additional(state, kinds[0])
        if len(args.arguments) == 2:
            items = [each for each in items if each["metadata"]["name"] == args.arguments[1]]
            if not items:
                print("Error from server (NotFound): not found", file=sys.stderr)
                return 1
        print(printed(items, args.output), end="")
        return 0

    def _additional(self, state: Object, kind: str) -> list[Object]:
        """Events and Kueue's Workload of the scenario, for the job that exists."""
        name = next((each["metadata"]["name"] for each in state["objects"] if each["kind"] == "Job"), "")
        if kind == "Event":
            return [{**each, "involvedObject": {"name": name}} for each in state["scenario"].get("events", [])]
        return [state["scenario"]["queued"]] if kind == "Workload" else []

    def _delete(self, args: argparse.Namespace, rest: list[str]) -> int:
        if not ((args.ignore_not_found or args.cascade == "foreground") and args.wait == "false" and args.selector):
            raise NotImplementedError(args)
        kinds = [_KINDS[name] for name in args.arguments[0].split(",")]
        with self._locked() as state:
            for item in [each for each in state["objects"] if each["kind"] in kinds and _selected(each, args.selector)]:
                print(f'{item["kind"].lower()} "{item["metadata"]["name"]}" deleted')
                self._remove(state, item, force=args.force)
            self._reconciled(state)
        return 0

    def _remove(self, state: Object, item: Object, *, force: bool = False) -> None:
        """Delete an object: a pod when its processes have ended, a job with its pods."""
        if item["kind"] == "Pod" and not force:
            item["metadata"].setdefault("deletionTimestamp", _now())
            return
        if item in state["objects"]:
            state["objects"].remove(item)
        for child in [each for each in state["objects"] if item["metadata"]["uid"] == _owner(each)]:
            self._remove(state, child)

    def _patch(self, args: argparse.Namespace, rest: list[str]) -> int:
        """Merge conditions of a node by their type, as the API server does with a strategic merge patch.

        kubectl gets the subresource first; seen with kubectl 1.27 to 1.33 against an API server that logs its requests.
        """
        kind, name = args.arguments
        if (kind, args.subresource, args.type) != ("node", "status", "strategic"):
            raise NotImplementedError(args)
        refused = self._read()["scenario"].get("refused", [])
        if verb := next((verb for verb in ("get", "patch") if f"{verb} nodes/status" in refused), ""):
            print(
                f'Error from server (Forbidden): nodes "{name}" is forbidden: User "ada" cannot {verb} resource '
                '"nodes/status" in API group "" at the cluster scope',
                file=sys.stderr,
            )
            return 1
        patch = json.loads(args.patch)
        assert [*patch, *patch["status"]] == ["status", "conditions"], patch
        with self._locked() as state:
            (node,) = [each for each in state["objects"] if (each["kind"], each["metadata"]["name"]) == ("Node", name)]
            conditions = node["status"].setdefault("conditions", [])
            for new in patch["status"]["conditions"]:
                conditions[:] = [each for each in conditions if each["type"] != new["type"]] + [new]
        print(f"node/{name} patched")
        return 0

    def _taint(self, args: argparse.Namespace, rest: list[str]) -> int:
        """Add ``KEY:EFFECT`` to a node, or remove ``KEY:EFFECT-``."""
        kind, name, text = args.arguments
        assert kind == "node"
        key, _, effect = text.rstrip("-").partition(":")
        taint = {"key": key, "effect": effect}
        with self._locked() as state:
            (node,) = [each for each in state["objects"] if (each["kind"], each["metadata"]["name"]) == ("Node", name)]
            taints = node.setdefault("spec", {}).setdefault("taints", [])
            present = [each for each in taints if (each["key"], each["effect"]) == (key, effect)]
            if bool(present) != text.endswith("-"):
                print(f'error: taint "{text}" {"exists" if present else "not found"}', file=sys.stderr)
                return 1
            taints[:] = [each for each in taints if each not in present] if present else [*taints, taint]
        print(f"node/{name} {'untainted' if present else 'tainted'}")
        return 0

    def _exec(self, args: argparse.Namespace, rest: list[str]) -> int:
        pod = self._pod(args.arguments[0])
        error = self._read()["scenario"].get("kubelets", {}).get(pod["spec"]["nodeName"], "")
        if error or (self._pod_folder(pod) / "lost").exists():
            error = error or "dial tcp 10.0.0.5:10250: i/o timeout"
            print(f"Error from server: error dialing backend: {error}", file=sys.stderr)
            return 1
        env = json.loads((self._pod_folder(pod) / "env.json").read_text())
        return subprocess.run(rest, env=env, check=False).returncode

    def _logs(self, args: argparse.Namespace, rest: list[str]) -> int:
        if not (args.timestamps and args.tail == "-1" and args.follow and args.container):
            raise NotImplementedError(args)
        with self._locked() as state:
            pods = [each for each in state["objects"] if each["kind"] == "Pod" and _selected(each, args.selector)]
            cuts = state["scenario"]["cut"]
            lines_left = cuts.pop(0) if cuts else sys.maxsize
        if len(pods) > int(args.max_log_requests or 5):
            print("error: you are attempting to follow more log streams than allowed", file=sys.stderr)
            return 1
        # texts and streams as kubectl 1.27 to 1.33 has them
        for pod in list(pods):
            if error := self._log_error(pod, args.container, state["scenario"].get("kubelets", {})):
                if not args.ignore_errors:
                    print(f"Error from server{error}", file=sys.stderr)
                    return 1
                print(f"error: {error.partition(': ')[2]}", flush=True)
                pods.remove(pod)
        since = args.since_time.partition(".")[0] if args.since_time else ""  # whole seconds, as the API server has it
        return _follow([self._pod_folder(pod) / "log" for pod in pods], since, lines_left)

    def _log_error(self, pod: Object, container: str, kubelets: dict[str, str]) -> str:
        """Why the log of a pod cannot be read: the API server's reason and its message; empty if it can."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if not (self._pod_folder(pod) / "log").exists():
            return f' (BadRequest): container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
        if error := kubelets.get(pod["spec"]["nodeName"]):
            path = f"containerLogs/{namespace}/{name}/{container}?follow=true&timestamps=true"
            return f': Get "https://10.0.0.5:10250/{path}": {error}'
        return ""

    # The controllers

    def _reconciled(self, state: Object) -> Object:
        """Do what the controllers of a cluster do: create pods of jobs, start them, update their states."""
        scenario = state["scenario"]
        for job in [each for each in state["objects"] if each["kind"] == "Job"]:
            if scenario.get("suspend"):
                job["spec"]["suspend"] = True
            elif "status" not in job and not scenario.get("no_pods"):
                job["status"] = {"conditions": []}
                state["objects"] += [self._new_pod(job, index, scenario) for index in range(job["spec"]["completions"])]
        for pod in [each for each in state["objects"] if each["kind"] == "Pod" and _is_created_by_seatrial(each)]:
            self._update_pod(state, pod)
        for job in [each for each in state["objects"] if each["kind"] == "Job" and each.get("status")]:
            self._update_job(state, job)
        return state

    def _new_pod(self, job: Object, index: int, scenario: Object) -> Object:
        name, uid = f"{job['metadata']['name']}-{index}-{uuid.uuid4().hex[:5]}", str(uuid.uuid4())
        pod: Object = {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": uid,
                "namespace": job["metadata"]["namespace"],
                "labels": dict(job["spec"]["template"]["metadata"]["labels"]),
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [{"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}],
            },
            "spec": {**job["spec"]["template"]["spec"]},
            "status": {"phase": "Pending"},
        }
        if fields := scenario["pods"].get(str(index)):
            pod["status"] = fields["status"]
            pod["spec"]["nodeName"] = fields.get("nodeName", "")
            return pod
        pod["spec"]["nodeName"] = scenario["nodes"][index]
        folder = self._pod_folder(pod)
        folder.mkdir(parents=True)
        pods, service = range(job["spec"]["completions"]), pod["spec"].get("subdomain", "")
        dns_names = " ".join(f"{job['metadata']['name']}-{each}.{service}" for each in pods) if service else ""
        content = {"pod": pod, "index": index, "noise": scenario["noise"], "dns_names": dns_names}
        (folder / "pod.json").write_text(json.dumps(content))
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        code += f"from tests.fakes.kubectl import run_pod; run_pod({str(self.folder)!r}, {uid!r})"
        with (folder / "supervisor.err").open("w") as err:
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={"PATH": os.environ["PATH"], _TAG: f"{self.folder}:{uid}"},
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )
        return pod

    def _update_pod(self, state: Object, pod: Object) -> None:
        folder = self._pod_folder(pod)
        deleted = "deletionTimestamp" in pod["metadata"]
        if not folder.exists():  # it never starts
            if deleted:
                state["objects"].remove(pod)
            return
        if deleted:
            (folder / "delete").touch()
        if (folder / "lost").exists():  # its kubelet reports nothing
            return
        if (folder / "exit").exists():
            code = int((folder / "exit").read_text())
            terminated = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
            _set_state(pod, "Succeeded" if code == 0 else "Failed", {"terminated": terminated})
            if deleted:
                state["objects"].remove(pod)
        elif (folder / "log").exists():
            _set_state(pod, "Running", {"running": {"startedAt": _now()}})

    def _update_job(self, state: Object, job: Object) -> None:
        pods = [each for each in state["objects"] if each["kind"] == "Pod" and job["metadata"]["uid"] == _owner(each)]
        conditions, phases = job["status"]["conditions"], [pod["status"].get("phase") for pod in pods]
        if conditions:
            return
        deadline_s = state["scenario"].get("deadline_s", job["spec"]["activeDeadlineSeconds"])
        created = datetime.datetime.fromisoformat(job["metadata"]["creationTimestamp"])
        failed: tuple[str, str] | None = None
        if "Failed" in phases:
            failed = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif (datetime.datetime.now(datetime.UTC) - created).total_seconds() > deadline_s:
            failed = ("DeadlineExceeded", "Job was active longer than specified deadline")
        if failed:
            conditions.append({"type": "Failed", "status": "True", "reason": failed[0], "message": failed[1]})
            for pod in pods:
                if pod["status"].get("phase") in ("Pending", "Running"):
                    self._remove(state, pod)
        elif phases and phases.count("Succeeded") == job["spec"]["completions"]:
            conditions.append({"type": "Complete", "status": "True", "reason": "CompletionsReached"})

    # Files

    def _pod(self, name: str) -> Object:
        return next(each for each in self._read()["objects"] if each["metadata"]["name"] == name)

    def _pod_folder(self, pod: Object) -> Path:
        return self.folder / "pods" / str(pod["metadata"]["uid"])

    def _read(self) -> Object:
        return dict(json.loads((self.folder / "state.json").read_text()))

    def _write(self, state: Object) -> None:
        part = self.folder / f"state.{os.getpid()}"
        part.write_text(json.dumps(state))
        part.rename(self.folder / "state.json")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Object]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._read()
            yield state
            self._write(state)


_OPTIONS = {
    "auth": ["--subresource"],
    "api-resources": ["--api-group", "--output"],
    "create": ["--filename", "--output"],
    "get": ["--selector", "--output", "--request-timeout", "--field-selector", "--all-namespaces!"],
    "delete": ["--selector", "--ignore-not-found!", "--wait", "--force!", "--grace-period", "--cascade"],
    "patch": ["--subresource", "--type", "--patch"],
    "taint": [],
    "exec": ["--container"],
    "logs": [
        "--selector",
        "--container",
        "--follow!",
        "--timestamps!",
        "--tail",
        "--max-log-requests",
        "--ignore-errors!",
        "--since-time",
    ],
}


def _follow(logs: Sequence[Path], since: str, lines_left: int) -> int:
    """Print the log lines from the time ``since`` on, until all pods have ended or ``lines_left`` are printed."""
    offsets = dict.fromkeys(logs, 0)
    while True:
        ended = all((path.parent / "exit").exists() or not path.exists() for path in logs)
        for path in (path for path in logs if path.exists()):
            with path.open("rb") as file:
                file.seek(offsets[path])
                content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            offsets[path] += len(content)
            lines = [line for line in content.splitlines(keepends=True) if line.decode(errors="replace") >= since]
            sys.stdout.buffer.writelines(lines[:lines_left])
            lines_left -= len(lines)
        sys.stdout.flush()
        if lines_left < 0:
            print("error: unexpected EOF", file=sys.stderr)
            return 1
        if ended:
            return 0
        time.sleep(_POLL_S)


def run_pod(cluster: str, uid: str) -> None:
    """Run the container of a pod: its environment, its log with times, its end, and its deletion."""
    folder = Path(cluster) / "pods" / uid
    content = json.loads((folder / "pod.json").read_text())
    pod, (container,) = content["pod"], content["pod"]["spec"]["containers"]
    volume = folder / "volume"
    volume.mkdir()
    fields = {"spec.nodeName": pod["spec"]["nodeName"], "metadata.name": pod["metadata"]["name"]}
    # GLOO_SOCKET_IFNAME: all nodes are this host, whose name need not resolve
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", _TAG: os.environ[_TAG]}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "JOB_COMPLETION_INDEX": str(content["index"]), "LANG": "C.UTF-8"}
    for each in container["env"]:
        env[each["name"]] = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
    # both nodes are this host: each pod gets a folder of its own, and an address of the host instead of a DNS name
    env |= {"SEATRIAL_SCRATCH": str(volume), "SEATRIAL_MASTER": _address()}
    env |= {"FAKE_DNS_NAMES": content["dns_names"], "FAKE_DNS_ADDRESS": _address()}
    env["PYTHONPATH"] = str(Path(__file__).with_name("pod_python"))
    (folder / "env.json").write_text(json.dumps(env))
    process = subprocess.Popen(
        [*container["command"], *(each.replace("$$", "$") for each in container["args"])],  # as Kubernetes does
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deleter = os.fork()
    if deleter == 0:
        _terminate_when_deleted(folder, process.pid, pod["spec"].get("terminationGracePeriodSeconds", 30))
        os._exit(0)

    def end_container() -> None:
        """End the processes that the first one leaves: they may still hold its standard output."""
        process.wait()
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if other.pid not in (os.getpid(), deleter) and other.environ().get(_TAG) == os.environ[_TAG]:
                    other.kill()

    end = threading.Thread(target=end_container)
    end.start()
    assert process.stdout
    with (folder / "log").open("wb", buffering=0) as log:
        for line in process.stdout:
            for text in [*content["noise"], line.decode(errors="replace").rstrip("\n")]:
                log.write(f"{_now()} {text}\n".encode())
    end.join()
    code = process.wait()
    os.kill(deleter, signal.SIGKILL)
    os.waitpid(deleter, 0)
    part = folder / "exit.part"
    part.write_text(str(code if code >= 0 else 128 - code))
    part.rename(folder / "exit")


def _address() -> str:
    """Return an IPv4 address of this host other than loopback."""
    addresses = [each for interface in psutil.net_if_addrs().values() for each in interface]
    return next(
        each.address for each in addresses if each.family == socket.AF_INET and not each.address.startswith("127.")
    )


def _terminate_when_deleted(folder: Path, pid: int, grace_s: float) -> None:
    """Send SIGTERM to the container's first process when the pod is deleted, and SIGKILL after the grace period."""
    while not (folder / "delete").exists():
        time.sleep(_POLL_S)
    os.kill(pid, signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(pid, signal.SIGKILL)


def forbidden(resource: str, namespace: str | None) -> str:
    """What kubectl prints if the user may not list a resource."""
    where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
    message = f'{resource} is forbidden: User "ada" cannot list resource "{resource}" in API group ""{where}'
    return f"Error from server (Forbidden): {message}\n"


def printed(items: Sequence[Object], output: str) -> str:
    """What ``kubectl get --output=OUTPUT`` prints: json, or a jsonpath that is a range of fields and texts."""
    if output == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}) + "\n"
    template = re.fullmatch(r"jsonpath=\{range \.items\[\*\]\}(.*)\{end\}", output)
    assert template, output
    parts = re.findall(r"\{(.*?)\}", template[1])
    return "".join(json.loads(part) if part[0] == '"' else _field(item, part) for item in items for part in parts)


def _field(item: Object, path: str) -> str:
    start, is_list, rest = path.partition("[*].")  # the values of a list have spaces between them
    if is_list:
        return " ".join(filter(None, (_field(each, rest) for each in _value(item, start) or [])))
    value = _value(item, path)
    return (
        ""
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, sort_keys=True, separators=(",", ":"))
    )


def _value(item: Object, path: str) -> Any:
    value: Any = item
    for key in re.split(r"(?<!\\)\.", path.removeprefix(".")):
        value = value.get(key.replace("\\", "")) if isinstance(value, dict) else None
    return value


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    position = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:position]), list(argv[position + 1 :])


def _selected(item: Object, selector: str | None) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in (selector or "").split(",") if part]
    return not [key for key, _, value in wanted if labels.get(key) != value]


def _is_created_by_seatrial(item: Object) -> bool:
    return str(item["metadata"].get("labels", {}).get("app.kubernetes.io/name")) == "seatrial"


def _owner(item: Object) -> str:
    return str(next((each["uid"] for each in item["metadata"].get("ownerReferences", [])), ""))


def _set_state(pod: Object, phase: str, state: Object) -> None:
    pod["status"] = {"phase": phase, "containerStatuses": [{"name": "seatrial", "state": state}]}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def main(folder: str, argv: Sequence[str]) -> None:
    """Run one call of kubectl and exit."""
    sys.exit(Cluster(Path(folder)).call(argv))
