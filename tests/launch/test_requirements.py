"""Requirements of a node: each shell test, run by bash on a machine that has or lacks what it asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.config.schema import Config
from seatrial.launch.requirements import requirements
from tests.fakes import container_runtime


def unmet(folder: Path, path: str = "", **fields: object) -> list[str]:
    """Return the messages of the requirements that this machine does not meet; ``path``: a folder of commands."""
    config = Config.model_validate({"name": "t", "checks": {}, **fields})
    environment = {"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin"}
    return [
        requirement.message
        for requirement in requirements(config)
        if subprocess.run(["bash", "-c", requirement.test], env=environment, cwd=folder, check=False).returncode
    ]


def test_this_python_meets_the_default(tmp_path: Path) -> None:
    assert unmet(tmp_path) == []
    assert sys.executable in requirements(Config(name="t", checks={}))[0].command


def test_venv(tmp_path: Path) -> None:
    path = tmp_path / "my venv"
    (missing,) = unmet(tmp_path, environment={"venv": str(path)})
    assert f"{path}/bin/python does not exist" in missing
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    (missing,) = unmet(tmp_path, environment={"venv": str(path)})
    assert f"{path}/bin/activate" in missing
    (path / "bin" / "activate").touch()
    assert unmet(tmp_path, environment={"venv": str(path)}) == []


def test_source_and_modules(tmp_path: Path) -> None:
    messages = unmet(tmp_path, environment={"source": "/nowhere/env.sh", "modules": ["cuda/99"]})
    assert ["/nowhere/env.sh" in messages[0], "cuda/99" in messages[1], len(messages)] == [True, True, 2]


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_docker_and_podman(runtime: str, tmp_path: Path) -> None:
    def container(image: str) -> dict[str, str]:
        return {"runtime": runtime, "image": image}

    if runtime == "podman":  # docker may be installed here
        (missing,) = unmet(tmp_path, container=container("my/image"))
        assert "podman is not installed" in missing
    container_runtime.install(tmp_path / "bin", runtime, "my/image")
    assert unmet(tmp_path, str(tmp_path / "bin"), container=container("my/image")) == []
    (missing,) = unmet(tmp_path, str(tmp_path / "bin"), container=container("other/image"))
    assert "other/image" in missing


@pytest.mark.parametrize("image", ["/nowhere/torch.sif", "torch.sif"])
def test_image_file(image: str, tmp_path: Path) -> None:
    container_runtime.install(tmp_path / "bin", "apptainer", image)
    (missing,) = unmet(tmp_path, str(tmp_path / "bin"), container={"runtime": "apptainer", "image": image})
    assert f"{image} does not exist" in missing


def test_image_of_a_registry_is_left_to_apptainer(tmp_path: Path) -> None:
    container_runtime.install(tmp_path / "bin", "apptainer", "x")
    container = {"runtime": "apptainer", "image": "docker://pytorch/pytorch"}
    assert unmet(tmp_path, str(tmp_path / "bin"), container=container) == []
