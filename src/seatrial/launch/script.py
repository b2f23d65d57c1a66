"""The environment and the templates of the job scripts of all launchers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from functools import cache, partial

import jinja2

from seatrial.config.schema import Config
from seatrial.launch import container
from seatrial.launch.requirements import requirements
from seatrial.model import Job


def job_script(name: str, settings: Config, job: Job, attempt: int, **variables: object) -> str:
    """Return the text of the template ``name`` for a job: its environment and Python, and further ``variables``."""
    return template(name).render(
        job=job,
        attempt=attempt,
        umask=settings.umask,
        requirements=requirements(settings),
        environment=environment(settings, job),
        python=container.python_array(settings, job),
        python_name=container.python_name(settings),
        **variables,
    )


def environment(settings: Config, job: Job) -> list[str]:
    """Return the bash lines that set up the environment of a job."""
    config = settings.environment
    shellcheck = "# shellcheck source=/dev/null"  # the file is absent where shellcheck runs
    site_lines = [shellcheck, f"source {shlex.quote(config.source)} || exit"] if config.source else []
    site_lines += [f"module load {shlex.join(config.modules)} || exit"] if config.modules else []
    site_lines += [shellcheck, f"source {shlex.quote(f'{config.venv}/bin/activate')} || exit"] if config.venv else []
    if site_lines:  # files of a site may fail under `set -euo pipefail`, and may change the directory
        site_lines = ["job_cwd=$PWD", "set +euo pipefail", *site_lines, "set -euo pipefail", 'cd "$job_cwd"']
    hf_home = [f"export HF_HOME={shlex.quote(config.hf_home)}"] if config.hf_home else []
    variables = [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    if job.placement == "ranks" and job.ranks_per_node > 1 and settings.container.runtime == "none":
        # torchrun sets the same value, with a warning in the log of each job; an image can have a value of its own
        variables.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
    return [*site_lines, *hf_home, *variables]


def option_texts(options: Iterable[tuple[str, object]]) -> list[str]:
    """Return ``--name VALUE`` for each option with a value, quoted for a shell."""
    return [f"{name} {shlex.quote(str(value))}" for name, value in options if value is not None]


@cache
def template(name: str) -> jinja2.Template:
    """Return a template of this folder. Its filter ``quote`` quotes a value for a shell, ``yaml`` for a YAML file."""
    # no autoescape, which is for HTML
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("seatrial.launch", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["quote"] = shlex.quote
    templates.filters["yaml"] = partial(json.dumps, ensure_ascii=False)
    return templates.get_template(name)
