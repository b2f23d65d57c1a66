"""Torchrun launcher, for clusters without a scheduler: renders a script that the user starts on each node.

seatrial starts and watches nothing here; ``run --resume`` collects the ranks' results from the run directory.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.config.schema import Config
from seatrial.launch import container, script
from seatrial.launch.base import RenderedJob, StartedJob
from seatrial.launch.requirements import requirements
from seatrial.model import Job, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE


class TorchrunLauncher:
    """Renders torchrun scripts that the user starts."""

    name = "torchrun"

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def unavailable_reason(self, nodes: int) -> str | None:
        del nodes  # the user chooses them
        return container.unsupported_reason(self._settings, ("apptainer", "docker", "podman"))

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        text = script.template("torchrun.sh.j2").render(
            job=job,
            attempt=attempt,
            run_dir=str(run_dir),
            umask=self._settings.umask,
            requirements=requirements(self._settings),
            environment=script.environment(self._settings, job),
            python=container.python_array(self._settings, job),
            python_name=container.python_name(self._settings),
        )
        return RenderedJob(argv=(), text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> StartedJob:
        """Write the script, then always raise SeatrialError, which tells the user how to run the script.

        If the script has run already, its preflight errors are copied into ``launcher.err`` of this attempt.
        """
        script_file = folder.parent / "torchrun.sh"
        atomic_write(script_file, rendered.text.encode(), mode=PRIVATE)
        errors = [file.read_text(encoding="utf-8", errors="replace") for file in folder.parent.glob("preflight.*")]
        (folder / "launcher.err").write_text("".join(errors), encoding="utf-8")
        address = "MASTER_ADDR=HOST " if "MASTER_ADDR" in rendered.text else ""
        raise SeatrialError(
            f"seatrial does not start torchrun jobs. 1. Run on each node: {address}bash {script_file} NODE "
            f"(NODE: index of the node from 0{'; HOST: host name of node 0' if address else ''}). "
            f"2. seatrial run --resume {folder.parents[2]}. "
            f"If the script has run already, read the logs in {folder.parent}/attempt*/logs"
        )
