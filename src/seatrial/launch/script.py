"""What the scripts of several launchers have in common: the environment of a job, its python, the templates."""

from __future__ import annotations

import shlex
import sys

import jinja2

from seatrial.model import Job
from seatrial.settings import Config


def environment(settings: Config, job: Job) -> list[str]:
    """Lines of bash that make the environment of a job."""
    wanted = settings.environment
    checked = "# shellcheck source=/dev/null"  # not there where the script is checked
    lines = [checked, f"source {shlex.quote(wanted.source)}"] if wanted.source else []
    lines += [f"module load {shlex.join(wanted.modules)}"] if wanted.modules else []
    lines += [checked, f"source {shlex.quote(wanted.venv)}/bin/activate"] if wanted.venv else []
    lines += [f"export HF_HOME={shlex.quote(wanted.hf_home)}"] if wanted.hf_home else []
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]


def python(settings: Config) -> str:
    """What starts Python on a node, in words of bash. pyxis needs nothing here, but flags for srun."""
    container = settings.container
    if container.runtime == "apptainer":
        binds = ['--bind "$RUN_DIR:$RUN_DIR"', *(f"--bind {shlex.quote(mount)}" for mount in container.mounts)]
        return " ".join(["apptainer exec --nv", *binds, shlex.quote(container.image or ""), "python3"])
    if container.runtime == "pyxis":
        return "python3"
    return "python" if settings.environment.venv else shlex.quote(sys.executable)


def template(name: str) -> jinja2.Template:
    """A template of this folder; ``quote`` in it makes a word of bash."""
    # no autoescape: this is a shell script, and every value in it goes through shlex.quote
    loader = jinja2.Environment(
        loader=jinja2.PackageLoader("seatrial.launch", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    loader.filters["quote"] = shlex.quote
    return loader.get_template(name)
