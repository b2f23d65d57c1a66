"""The lines of bash that several launchers share; their golden files are in test_slurm.py and test_torchrun.py."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from seatrial.config.schema import Config, Container, Environment
from seatrial.launch.script import environment, python, template
from tests.launch.scripted import TOGETHER, job


def config(**fields: object) -> Config:
    return Config.model_validate({"name": "t", "checks": {}, **fields})


def ran(lines: list[str], script: str) -> subprocess.CompletedProcess[str]:
    text = "\n".join(["set -euo pipefail", *lines, script])
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)


def test_variables_arrive_whatever_is_in_them() -> None:
    value = 'it\'s "quoted" $HOME\n`date`'
    lines = environment(config(), job(TOGETHER).model_copy(update={"env": {"NOTE": value}}))
    assert ran(lines, 'printf %s "$NOTE"').stdout == value


def test_a_file_that_is_no_strict_script_and_changes_the_directory_is_sourced(tmp_path: Path) -> None:
    (tmp_path / "it's env.sh").write_text("echo $UNSET_VARIABLE; false; cd /; SITE=here\n")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("VENV=too\n")
    site = Environment(source=str(tmp_path / "it's env.sh"), venv=str(tmp_path / "venv"), hf_home="/shared/h f")
    lines = environment(config(environment=site), job(TOGETHER))
    done = ran([f"cd {shlex.quote(str(tmp_path))}", *lines], 'echo "$SITE $VENV $PWD $HF_HOME $-"')
    *words, options = done.stdout.split("\n")[-2].rsplit(" ", 1)
    assert words == [f"here too {tmp_path} /shared/h f"]
    assert {"e", "u"} <= set(options), "strict again"


@pytest.mark.parametrize("site", [Environment(source="/nowhere/env.sh"), Environment(modules=("cuda/99",))])
def test_what_is_missing_ends_the_script(site: Environment) -> None:
    done = ran(environment(config(environment=site), job(TOGETHER)), "echo reached")
    assert done.returncode != 0
    assert "reached" not in done.stdout


def test_python_is_our_own_that_of_the_venv_or_that_of_the_container() -> None:
    assert shlex.split(python(config())) == [sys.executable]
    assert python(config(environment=Environment(venv="/v"))) == "python"
    assert python(config(container=Container(runtime="pyxis", image="i"))) == "python3"
    apptainer = Container(runtime="apptainer", image="/a b.sif", mounts=("/m:/n:ro",))
    words = shlex.split(python(config(container=apptainer), "OUT"))
    assert words == ["apptainer", "exec", "--nv", "--bind", "$OUT:$OUT", "--bind", "/m:/n:ro", "/a b.sif", "python3"]


def test_a_value_that_a_template_lacks_is_an_error_and_no_empty_line() -> None:
    with pytest.raises(jinja2.UndefinedError):
        template("sbatch.sh.j2").render()
