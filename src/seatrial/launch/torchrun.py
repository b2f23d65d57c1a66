"""Torchrun launcher, for clusters without a scheduler: renders a script that the user starts on each node.

seatrial starts and watches nothing here; ``run --resume`` collects the ranks' results from the run directory.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.config.schema import Config
from seatrial.launch import script
from seatrial.launch.base import RenderedJob, StartedJob
from seatrial.model import Job, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE


class TorchrunLauncher:
    """Renders torchrun scripts that the user starts."""

    name = "torchrun"

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def available(self, nodes: int) -> str | None:
        del nodes  # the user chooses them
        pyxis = self._settings.container.runtime == "pyxis"
        return "container.runtime is pyxis, which is a Slurm plugin: use apptainer or none" if pyxis else None

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        text = script.template("torchrun.sh.j2").render(
            job=job,
            attempt=attempt,
            run_dir=str(run_dir),
            environment=script.environment(self._settings, job),
            python=script.python(self._settings),
        )
        return RenderedJob(argv=(), env={}, text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> StartedJob:
        """Write the script, then always raise SeatrialError: only the user can run it."""
        command = folder.parent / "torchrun.sh"
        atomic_write(command, rendered.text.encode(), mode=PRIVATE)
        raise SeatrialError(
            f"measurements of some ranks are missing. Run on each node: bash {command} NODE (its index from 0); "
            f"if it has run already, read the logs in {folder.parent}/attempt*/logs"
        )
