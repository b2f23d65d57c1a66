"""Launchers implement the protocol; where jobs run."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

from seatrial.config.schema import Config, Container
from seatrial.launch import runs_as_root
from seatrial.launch.base import Allocation, Launcher, RenderedJob, StartedJob, WaitState
from seatrial.launch.local import LocalJob, LocalLauncher
from seatrial.launch.slurm import SlurmLauncher
from seatrial.launch.slurm_job import SlurmJob
from seatrial.launch.torchrun import TorchrunLauncher


def methods(protocol: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(f) for name, f in vars(protocol).items() if name[0] != "_" and inspect.isfunction(f)
    }


@pytest.mark.parametrize("launcher", [LocalLauncher, SlurmLauncher, TorchrunLauncher])
def test_a_launcher_has_a_name_and_every_method(launcher: type) -> None:
    further = {"require_access", "node_shortage", "cancel_earlier_jobs"}
    assert set(methods(Launcher)) == {"unavailable_reason", "render", "start"} | further
    assert isinstance(vars(launcher)["name"], str)
    for name, signature in methods(Launcher).items():
        assert list(inspect.signature(getattr(launcher, name)).parameters) == list(signature.parameters), name


@pytest.mark.parametrize("job", [LocalJob, SlurmJob])
def test_a_started_job_has_every_method(job: type) -> None:
    assert set(methods(StartedJob)) == {
        *(
            "allocation",
            "wait_state",
            "poll",
            "completing_code",
            "exit_reason",
            "node_state",
            "node_is_free",
            "run_on_nodes",
            "cancel",
        ),
    }
    for name, signature in methods(StartedJob).items():
        assert list(inspect.signature(getattr(job, name)).parameters) == list(signature.parameters), name


def test_names_of_launchers_differ() -> None:
    assert len({LocalLauncher.name, SlurmLauncher.name, TorchrunLauncher.name}) == 3


def test_without_a_scheduler_a_job_has_no_id_and_no_nodes() -> None:
    assert (Allocation().id, Allocation().nodes) == ("", "")


def test_a_rendered_job_is_not_changed_and_has_nothing_else() -> None:
    rendered = RenderedJob(argv=("sh",), text="sh")
    with pytest.raises(ValidationError):
        rendered.text = "rm"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        RenderedJob.model_validate({"argv": ("sh",), "env": {}, "text": "sh", "shell": True})
    with pytest.raises(ValidationError):
        WaitState.model_validate({"reason": "Resources"})


@pytest.mark.parametrize(
    ("overrides", "uid", "expected"),
    [
        ({"launcher": "local"}, 0, True),
        ({"launcher": "local"}, 1000, False),
        ({"launcher": "local", "container": Container(runtime="podman", image="x")}, 0, False),
        ({"launcher": "slurm"}, 0, False),
    ],
)
def test_jobs_run_as_root_only_on_this_host(
    overrides: dict[str, object], uid: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert runs_as_root(Config(name="t", checks={}).model_copy(update=overrides)) is expected
