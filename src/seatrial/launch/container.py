"""The command that starts Python on a node: directly, or in a container of apptainer, docker or podman. Pure."""

from __future__ import annotations

import shlex
import sys

from seatrial.config.schema import Config, Container
from seatrial.model import Job

# Exported variables of the shell that a container of docker or podman gets; apptainer and pyxis pass all of them
_PASSED_VARIABLES = (
    "^(CUDA|FI|GLOO|HF|NCCL|NVIDIA|OMP|SEATRIAL|TORCH|UCX)_"
    "|^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|PYTHONSAFEPATH)$"
)

# Label of a container. Its value is the tag of the process (util.processes) by which the local launcher ends the job
LABEL = "seatrial"


def unsupported_reason(settings: Config, runtimes: tuple[str, ...]) -> str | None:
    """Return why a launcher that supports these runtimes cannot start the container of the trial; None if it can."""
    container, expected = settings.container, ", ".join(("none", *runtimes))
    if container.runtime == "none" and (container.image or container.mounts):
        return f"container.runtime is none, but container.image or mounts are set: expected {expected}"
    if container.runtime == "none":
        return None
    if container.runtime not in runtimes:
        return f"container.runtime is {container.runtime}, which this launcher cannot run: expected {expected}"
    if not container.image:
        return f"container.runtime is {container.runtime}, but container.image is not set"
    if settings.environment.venv:
        return (
            f"environment.venv {settings.environment.venv} is not visible in the container {container.image}: set "
            "environment.venv to null, or container.runtime to none and container.image to null"
        )
    return None


def python_array(settings: Config, job: Job) -> list[str]:
    """Return the bash lines that set the array ``python``: the command and options that start Python on a node.

    A container has the run directory under the same path. For pyxis, the options are flags of srun instead.
    """
    container = settings.container
    if container.runtime == "apptainer":
        return _apptainer(container, job)
    if container.runtime in ("docker", "podman"):
        return _docker_or_podman(container, job)
    if container.runtime == "pyxis":
        return ["python=(python3)"]
    return [f"python=({python_name(settings)})"]


def python_name(settings: Config) -> str:
    """Return the shortest command that starts the Python of ``python_array``, for messages.

    For pyxis, the text must follow ``srun`` on the command line.
    """
    # not ``python``: if the venv was moved, its activate script sets a wrong PATH, and ``python`` is another Python
    python = f"{settings.environment.venv}/bin/python" if settings.environment.venv else sys.executable
    image = shlex.quote(settings.container.image or "")
    return {
        "none": shlex.quote(python),
        "apptainer": f"apptainer exec {image} python3",
        "docker": f"docker run --rm --entrypoint=python3 {image}",
        "podman": f"podman run --rm --entrypoint=python3 {image}",
        "pyxis": f"--container-image={image} python3",
    }[settings.container.runtime]


def _apptainer(container: Container, job: Job) -> list[str]:
    """Return the array for apptainer, which mounts the home folder and passes all variables by default."""
    gpus = ["--nv"] if job.device == "cuda" else []
    mounts = [
        '--bind "$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" "${hf_home[@]}"',
        *(f"--bind {shlex.quote(mount)}" for mount in container.mounts),
    ]
    command = " ".join(["apptainer exec", *gpus, *mounts, shlex.quote(container.image or ""), "python3"])
    return ["hf_home=()", '[ ! -d "${HF_HOME:-}" ] || hf_home=(--bind "$HF_HOME:$HF_HOME")', f"python=({command})"]


def _docker_or_podman(container: Container, job: Job) -> list[str]:
    """Return the array for docker or podman. The container shares network, shared memory and process ids with the host.

    Without network=host NCCL finds no RDMA device, without ipc=host /dev/shm has 64 MiB, and without pid=host neither
    seatrial nor NVML knows the processes by their pids.
    """
    runtime, image = container.runtime, shlex.quote(container.image or "")
    passed_variables = "|".join([_PASSED_VARIABLES, *(f"^{name}$" for name in job.env)])
    gpus = {"docker": "--gpus=all", "podman": "--device=nvidia.com/gpu=all"}[runtime]
    return [
        f"SEATRIAL_IMAGE_ID=$({runtime} image inspect --format '{{{{.Id}}}}' {image})",
        "SEATRIAL_HOST_NAMESPACE=$(readlink /proc/self/ns/mnt) # the preflight compares it with the container's",
        "export SEATRIAL_IMAGE_ID SEATRIAL_HOST_NAMESPACE HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}",
        'mkdir -p "$HF_HOME" || true # the preflight reports it',
        f"mapfile -t variables < <(compgen -e | grep -E {shlex.quote(passed_variables)})",
        "devices=()",
        "[ ! -e /dev/infiniband ] || devices=(--device=/dev/infiniband)",
        "python=(",
        f'    {runtime} run --rm --pull=never --label="{LABEL}=${{SEATRIAL_JOB_TAG:-}}"',
        "    --network=host --ipc=host --pid=host --security-opt=label=disable",
        f"    {_USER_AND_LIMITS[runtime]}",
        f'    {gpus} "${{devices[@]}}"' if job.device == "cuda" else '    "${devices[@]}"',
        '    "${variables[@]/#/--env=}"',
        '    --volume="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" --volume="$HF_HOME:$HF_HOME"',
        *(f"    --volume={shlex.quote(mount)}" for mount in container.mounts),
        f"    --entrypoint=python3 {image}",
        ")",
    ]


_USER_AND_LIMITS = {
    # torch needs the user's home and name; the user of this shell has neither in the image.
    # RDMA locks the memory of its buffers; 64 MiB of stack as in NVIDIA's instructions for its images.
    "docker": '--user="$(id -u):$(id -g)" --env=HOME=/tmp --env=USER="$(id -un)" --ulimit=memlock=-1 '
    "--ulimit=stack=67108864",
    # root of a rootless container is the user of this shell, who may not raise the limits of the host
    "podman": "--user=0:0 --ulimit=host",
}
