"""Requirements of a node before Python can start there: shell tests, and the message if one fails. Pure."""

from __future__ import annotations

import shlex
import sys
from typing import NamedTuple

from seatrial.config.schema import Config, Container


class Requirement(NamedTuple):
    """A requirement of each node: a shell test, the message if it fails, and the first command to run then."""

    test: str
    message: str
    command: str


def requirements(settings: Config) -> list[Requirement]:
    """Return the requirements in the order of their tests: modules come before apptainer, which they may provide."""
    environment, container = settings.environment, settings.container
    required = []
    if environment.source:
        path = shlex.quote(environment.source)
        # a subshell first: a file that calls `exit` would end this test without a message
        sourced = f"[[ $(source {path} && echo complete) == *complete ]] && source {path}"
        test = f"# shellcheck source=/dev/null\n    {{ {sourced}; }} >/dev/null 2>&1"
        message = f"environment.source {environment.source} is not readable, fails or exits the shell"
        required.append(Requirement(test, message, shlex.join(["bash", "-x", environment.source])))
    if environment.modules:
        names = shlex.join(environment.modules)
        test = f"module load {names} >/dev/null 2>&1"
        message = f"environment.modules: cannot load {names}"
        required.append(Requirement(test, message, 'bash -lc "module avail"'))
    if environment.venv:
        python, activate = f"{environment.venv}/bin/python", f"{environment.venv}/bin/activate"
        required.append(_file("-x", python, f"environment.venv: {python} does not exist or is not executable"))
        # met without Python too, which the requirement above reports
        has_activate = _file("-e", activate, f"environment.venv: no {activate}")
        required.append(has_activate._replace(test=f"{_test('! -x', python)} || {has_activate.test}"))
    elif settings.launcher == "kubernetes":
        message = f"kubernetes.image: {settings.kubernetes.image} has no python3 in its PATH"
        required.append(Requirement("command -v python3 >/dev/null", message, "command -v python3"))
    elif container.runtime == "none":
        message = f"seatrial's Python {sys.executable} does not exist on this node: set environment.venv"
        required.append(_file("-x", sys.executable, message))
    return required + _container_requirements(container)


def _container_requirements(container: Container) -> list[Requirement]:
    runtime, image = container.runtime, container.image or ""
    if runtime == "none":
        return []
    if runtime == "pyxis":
        test, message = "srun --help 2>&1 | grep -q -e --container-image", "container.runtime: Slurm has no pyxis"
        required = [Requirement(test, message, "scontrol show config | grep -i plugstack")]
    else:
        installed = f"container.runtime: {runtime} is not installed"
        required = [Requirement(f"command -v {runtime} >/dev/null", installed, f"which {runtime}")]
    if runtime in ("docker", "podman"):
        command = shlex.join([runtime, "image", "inspect", image])
        # met without the runtime too, which the requirement above reports
        test = f"! command -v {runtime} >/dev/null || {command} >/dev/null 2>&1"
        message = f"container.image: {runtime} has no image {image}, or this user may not use {runtime}"
        required.append(Requirement(test, message, f"{command}; {runtime} pull {shlex.quote(image)}"))
    elif image.startswith(("/", "./")) or (runtime == "apptainer" and "://" not in image):  # others: from a registry
        required.append(_file("-e", image, f"container.image {image} does not exist"))
    return required


def _file(operator: str, path: str, message: str) -> Requirement:
    return Requirement(_test(operator, path), message, shlex.join(["ls", "-l", path]))


def _test(operator: str, path: str) -> str:
    return f"[ {operator} {shlex.quote(path)} ]"
