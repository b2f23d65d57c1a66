"""A strict fake of apptainer, docker and podman: it rejects unknown options, and runs the command on this host.

The command gets the environment that the real runtime would give it: with docker and podman only the variables that
the options name. ``python3`` of every image is the Python of the test.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = json.loads((Path(__file__).parent / "settings.json").read_text()) if __name__ == "__main__" else {}
# Options of `docker run` and `podman run`; those without a value end with nothing
RUN_OPTIONS = {
    "docker": ("--gpus=all", "--user=", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
    "podman": ("--device=nvidia.com/gpu=all", "--user=0:0", "--ulimit=host"),
}
COMMON_OPTIONS = (
    *("--rm", "--pull=never", "--label=seatrial=", "--network=host", "--ipc=host", "--pid=host"),
    *("--security-opt=label=disable", "--device=/dev/infiniband", "--env=", "--volume=", "--entrypoint=python3"),
)


def install(folder: Path, runtime: str, image: str, python: str = sys.executable) -> None:
    """Make the command ``runtime`` in ``folder``, which knows one image and starts ``python`` in it."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"image": image, "python": python}))
    (folder / "fake.py").write_text(Path(__file__).read_text())
    (folder / runtime).write_text(f'#!/bin/sh\nexec {sys.executable} -I {folder}/fake.py {runtime} "$@"\n')
    (folder / runtime).chmod(0o755)


def refuse(text: str) -> None:
    sys.exit(f"{sys.argv[1]}: {text}")


def apptainer(arguments: list[str]) -> None:
    if arguments.pop(0) != "exec":
        refuse("expected exec")
    while arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "--bind":
            require_source(arguments.pop(0))
        elif option != "--nv":
            refuse(f"unknown flag: {option}")
    image, program, *rest = arguments
    require_image(image)
    start(program, rest, {**os.environ, "APPTAINER_CONTAINER": image})


def docker_or_podman(runtime: str, arguments: list[str]) -> None:
    match arguments:
        case ["image", "inspect", image] | ["image", "inspect", "--format", "{{.Id}}", image]:
            require_image(image)
            print("sha256:0123")
        case ["ps", "--quiet", "--filter", label] if label.startswith("label=seatrial="):
            pass  # the command runs in place of this process: none outlives it
        case ["run", *words]:
            run(runtime, words)
        case _:
            refuse(f"unknown command: {arguments}")


def run(runtime: str, words: list[str]) -> None:
    environment = {"PATH": "/usr/bin:/bin"}
    while words[0].startswith("-"):
        option = words.pop(0)
        if not option.startswith((*COMMON_OPTIONS, *RUN_OPTIONS[runtime])):
            refuse(f"unknown flag: {option}")
        if option.startswith("--volume="):
            require_source(option.removeprefix("--volume="))
        if option.startswith("--env="):
            name, assigned, value = option.removeprefix("--env=").partition("=")
            environment |= {name: value} if assigned else {name: os.environ[name]} if name in os.environ else {}
    image, *rest = words
    require_image(image)
    start("python3", rest, environment)


def require_source(mount: str) -> None:
    if not Path(mount.split(":")[0]).exists():
        refuse(f"mount source {mount} does not exist")


def require_image(image: str) -> None:
    if image != SETTINGS["image"]:
        refuse(f"no such image: {image}")


def start(program: str, arguments: list[str], environment: dict[str, str]) -> None:
    if program != "python3":
        refuse(f"{program}: not found in the image")
    os.execve(SETTINGS["python"], [SETTINGS["python"], *arguments], environment)


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    apptainer(given) if name == "apptainer" else docker_or_podman(name, given)
