"""The command of each container runtime, and combinations that a launcher refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.config.schema import Config, Container
from seatrial.launch.container import python_array, python_name, unsupported_reason
from tests.launch.scripted import CLUSTER_CHECK, job

CPU_JOB = job(CLUSTER_CHECK)
GPU_JOB = CPU_JOB.model_copy(update={"device": "cuda"})
RUNTIMES = ("apptainer", "docker", "podman")


def config(runtime: str = "none", image: str | None = None, venv: str | None = None) -> Config:
    container = {"runtime": runtime, "image": image, "mounts": ["/mnt/my data:/data:ro"] if image else []}
    return Config.model_validate({"name": "t", "checks": {}, "container": container, "environment": {"venv": venv}})


def words(settings: Config, job: object, folder: Path, **env: str) -> list[str]:
    """Run the lines in bash, with tools that print a fixed answer; return the words of the array."""
    for tool in ("docker", "podman"):
        (folder / tool).write_text("#!/bin/sh\necho sha256:1\n")
        (folder / tool).chmod(0o755)
    lines = ["set -euo pipefail", *python_array(settings, job), "printf '%s\\n' \"${python[@]}\""]  # type: ignore[arg-type]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "SEATRIAL_RUN_DIR": "/run dir", **env}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_python_without_a_container(tmp_path: Path) -> None:
    assert words(config(), CPU_JOB, tmp_path) == [sys.executable]
    assert words(config(venv="/v"), CPU_JOB, tmp_path) == ["/v/bin/python"]
    assert words(config("pyxis", "i"), CPU_JOB, tmp_path) == ["python3"]
    assert python_name(config(venv="/v")) == "/v/bin/python"


def test_apptainer(tmp_path: Path) -> None:
    data = ["--bind", "/mnt/my data:/data:ro"]
    assert words(config("apptainer", "/a b.sif"), GPU_JOB, tmp_path) == [
        *("apptainer", "exec", "--nv", "--bind", "/run dir:/run dir", *data, "/a b.sif", "python3")
    ]
    cache = words(config("apptainer", "/a b.sif"), CPU_JOB, tmp_path, HF_HOME=str(tmp_path))
    assert "--nv" not in cache
    assert f"{tmp_path}:{tmp_path}" in cache


@pytest.mark.parametrize(("runtime", "gpus"), [("docker", "--gpus=all"), ("podman", "--device=nvidia.com/gpu=all")])
def test_docker_and_podman(runtime: str, gpus: str, tmp_path: Path) -> None:
    env = {"NCCL_IB_HCA": "mlx5_0", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/host", "SEATRIAL_JOB_TAG": "tag"}
    job = GPU_JOB.model_copy(update={"env": {"NOTE": "x"}})
    argv = words(config(runtime, "my/image"), job, tmp_path, **env, NOTE="x")
    assert argv[:5] == [runtime, "run", "--rm", "--pull=never", "--label=seatrial=tag"]
    assert argv[-2:] == ["--entrypoint=python3", "my/image"]
    cache = f"{tmp_path}/.cache/huggingface"
    assert {gpus, "--ipc=host", "--pid=host", "--network=host"} <= set(argv)
    assert {"--volume=/run dir:/run dir", "--volume=/mnt/my data:/data:ro", f"--volume={cache}:{cache}"} <= set(argv)
    assert {"--env=NCCL_IB_HCA", "--env=CUDA_VISIBLE_DEVICES", "--env=NOTE", "--env=HF_HOME"} <= set(argv)
    assert not {"--env=LD_LIBRARY_PATH", "--env=PATH"} & set(argv), "those of the image hold"
    assert {"--ulimit=memlock=-1", "--ulimit=stack=67108864"} <= set(argv) or "--ulimit=host" in argv
    assert gpus not in words(config(runtime, "my/image"), CPU_JOB, tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (config("pyxis", "i"), "container.runtime is pyxis"),
        (config("none", "i"), "container.runtime is none"),
        (Config(name="t", checks={}, container=Container(mounts=("/a:/b",))), "container.runtime is none"),
        (config("docker"), "container.image is not set"),
        (config("docker", "i", venv="/v"), "environment.venv /v"),
    ],
)
def test_refusal_names_the_setting(settings: Config, named: str) -> None:
    assert named in (unsupported_reason(settings, RUNTIMES) or "")


@pytest.mark.parametrize("settings", [config(), config(venv="/v"), *(config(name, "i") for name in RUNTIMES)])
def test_what_a_launcher_can_provide_is_not_refused(settings: Config) -> None:
    assert unsupported_reason(settings, RUNTIMES) is None
