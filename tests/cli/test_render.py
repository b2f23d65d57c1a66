"""`seatrial render`: documents for kubectl, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import call

KINDS = {"kubernetes": ["Service", "Job"], "jobset": ["JobSet"], "trainjob": ["TrainJob"]}
OPTIONS = ("--nodes", "2", "--gpus-per-node", "8", "--set", "kubernetes.image=a/b")


@pytest.mark.parametrize("workload", KINDS)
def test_kubernetes_objects_are_one_file_of_documents(workload: str, tmp_path: Path) -> None:
    """Without kubectl; the job of this host, a script, is a comment in it."""
    trial = tmp_path / "t.yaml"
    trial.write_text("checks: {host.inventory: , train.ddp: , slurm.controller: }\n")
    code, out, err = call("render", workload, trial, *OPTIONS, env={"PATH": "/usr/bin:/bin"})
    assert code == 0, err
    documents = list(yaml.safe_load_all(out))
    assert [each["kind"] for each in documents] == KINDS[workload] * 2
    assert "# job control runs on the host of `seatrial run`: slurm.controller" in out
    launcher = "--launcher=kubernetes", f"--set=kubernetes.workload={'job' if workload == 'kubernetes' else workload}"
    _, plan, _ = call("run", trial, *launcher, *OPTIONS, "--dry-run", env={"PATH": "/usr/bin:/bin"})
    assert plan.endswith(out)
    assert list(yaml.safe_load_all(plan)) == documents
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)


def test_wrong_options_are_refused() -> None:
    assert (
        "--gpus-per-node is required with --launcher kubernetes"
        in call("render", "kubernetes", "quick", *OPTIONS[4:])[2]
    )
    code, _, err = call("render", "jobsets")
    assert (code, "unknown LAUNCHER 'jobsets'; did you mean 'jobset'?; expected slurm, local" in err) == (2, True)
    for launcher, name in (("kubernetes", "kubernetes"), ("jobset", "kubernetes (jobset)")):
        code, _, err = call("render", launcher, "--nodes", "1", "--gpus-per-node", "8")
        assert (code, f"with launcher {name}: --set kubernetes.image=IMAGE" in err) == (2, True), err
    assert "render oumi needs a CONFIG" in call("render", "oumi")[2]
    assert "--out requires torchrun" in call("render", "kubernetes", "quick", *OPTIONS, "--out", "x")[2]


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_render_imports_only_its_launcher_and_the_checks_of_the_trial(launcher: str, tmp_path: Path) -> None:
    """Judge, report and other checks take half of its time, modules that only measurements need 50 ms, and the options
    of other commands 25 ms. Nor are GPUs and software of this host read: the jobs run on others.
    """
    program = """
import sys
from seatrial.cli import app, main
from seatrial.discover import gpu, host
gpu.read_with_timeout = host.read = None
for group in app.app.registered_groups:
    group.typer_instance = None
try:
    main()
finally:
    packages = ["analysis", "diagnose", "drill", "judge", "report", "pipeline.run", "pipeline.preview"]
    packages += ["launch.torchrun", OTHER]
    heavy = {"jsonschema", "numpy", "pynvml", "rich", "torch", *(f"seatrial.{name}" for name in packages)}
    modules = {name: vars(module).keys() for name, module in sys.modules.items() if name.startswith("seatrial.checks.")}
    loaded = {name for name, names in modules.items() if names & {"CHECK", "CHECKS"}}
    trial = {f"seatrial.checks.{name}" for name in ("host.load", "fabric.collectives", "host.nodes_reachable")}
    print(*sorted(heavy & set(sys.modules)), *sorted(loaded ^ trial), file=sys.stderr)
"""
    other = {"slurm": "launch.kubernetes", "kubernetes": "launch.slurm"}[launcher]
    program = program.replace("OTHER", repr(other))
    trial = tmp_path / "t.yaml"
    trial.write_text("checks: {host.load: , collectives.all_reduce: , nodes.reachable: }\n")
    argv = [sys.executable, "-c", program, "render", launcher, str(trial), *OPTIONS]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_declarations_import_nothing_that_only_measurements_need() -> None:
    """These modules take about 50 ms of the time of `seatrial render slurm acceptance`."""
    program = "import sys; from seatrial.checks import catalog; list(catalog()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    facts = ("fabric", "filesystem", "host", "kubernetes", "nccl_log", "perftest", "settings", "slurm_task", "software")
    heavy = {"concurrent.futures", "jinja2", "jsonschema", "logging", "numpy", "psutil", "pynvml", "rich", "torch"}
    heavy |= {"seatrial.hardware.references", "seatrial.telemetry", "seatrial.train.train_config"}
    heavy |= {f"seatrial.discover.{name}" for name in facts}
    assert heavy & set(done.stdout.split()) == set()


def test_records_that_every_command_imports_have_no_annotations_as_strings() -> None:
    """pydantic compiles such annotations one by one."""
    program = """
import sys
import seatrial.config.schema, seatrial.model
modules = {record.__module__ for record in seatrial.model.Frozen.__subclasses__()}
print(*(name for name in modules if "annotations" in vars(sys.modules[name])))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
