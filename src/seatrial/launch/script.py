"""What the scripts of several launchers have in common: the environment of a job, its python, the templates."""

from __future__ import annotations

import shlex
import sys
from functools import cache

import jinja2

from seatrial.config.schema import Config
from seatrial.model import Job


def environment(settings: Config, job: Job) -> list[str]:
    """Lines of bash that make the environment of a job."""
    wanted = settings.environment
    checked = "# shellcheck source=/dev/null"  # not there where the script is checked
    foreign = [checked, f"source {shlex.quote(wanted.source)} || exit"] if wanted.source else []
    foreign += [f"module load {shlex.join(wanted.modules)} || exit"] if wanted.modules else []
    foreign += [checked, f"source {shlex.quote(f'{wanted.venv}/bin/activate')} || exit"] if wanted.venv else []
    if foreign:  # a site's files are not written for such a strict shell, and some change the directory
        foreign = ["here=$PWD", "set +euo pipefail", *foreign, "set -euo pipefail", 'cd "$here"']
    lines = [f"export HF_HOME={shlex.quote(wanted.hf_home)}"] if wanted.hf_home else []
    return [*foreign, *lines, *(f"export {name}={shlex.quote(value)}" for name, value in job.env.items())]


def python(settings: Config, run_dir: str = "RUN_DIR") -> str:
    """What starts Python on a node, in words of bash. pyxis needs nothing here, but flags for srun.

    ``run_dir`` is the name of the variable that holds the run directory.
    """
    container = settings.container
    if container.runtime == "apptainer":
        binds = [f'--bind "${run_dir}:${run_dir}"', *(f"--bind {shlex.quote(mount)}" for mount in container.mounts)]
        return " ".join(["apptainer exec --nv", *binds, shlex.quote(container.image or ""), "python3"])
    if container.runtime == "pyxis":
        return "python3"
    return "python" if settings.environment.venv else shlex.quote(sys.executable)


@cache
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
