"""Script parts that several launchers share."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import jinja2
import pytest

from seatrial.config.schema import Config, Environment
from seatrial.launch.script import environment, template
from tests.launch.scripted import CLUSTER_CHECK, job


def config(**fields: object) -> Config:
    return Config.model_validate({"name": "t", "checks": {}, **fields})


def run_script(lines: list[str], script: str) -> subprocess.CompletedProcess[str]:
    text = "\n".join(["set -euo pipefail", *lines, script])
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)


def test_variables_are_quoted() -> None:
    value = 'it\'s "quoted" $HOME\n`date`'
    lines = environment(config(), job(CLUSTER_CHECK).model_copy(update={"env": {"NOTE": value}}))
    assert run_script(lines, 'printf %s "$NOTE"').stdout == value


def test_environment_file_may_fail_under_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "it's env.sh").write_text("echo $UNSET_VARIABLE; false; cd /; SITE=here\n")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("VENV=too\n")
    site = Environment(source=str(tmp_path / "it's env.sh"), venv=str(tmp_path / "venv"), hf_home="/shared/h f")
    lines = environment(config(environment=site), job(CLUSTER_CHECK))
    result = run_script([f"cd {shlex.quote(str(tmp_path))}", *lines], 'echo "$SITE $VENV $PWD $HF_HOME $-"')
    *values, options = result.stdout.split("\n")[-2].rsplit(" ", 1)
    assert values == [f"here too {tmp_path} /shared/h f"]
    assert {"e", "u"} <= set(options), "strict again"


@pytest.mark.parametrize("site", [Environment(source="/nowhere/env.sh"), Environment(modules=("cuda/99",))])
def test_missing_environment_ends_the_script(site: Environment) -> None:
    result = run_script(environment(config(environment=site), job(CLUSTER_CHECK)), "echo reached")
    assert result.returncode != 0
    assert "reached" not in result.stdout


def test_undefined_template_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        template("sbatch.sh.j2").render()
