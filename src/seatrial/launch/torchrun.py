"""By hand: commands that a person starts on each node of a cluster without a scheduler, for torchrun to join.

seatrial starts and watches nothing here. What the ranks keep in the run directory is collected by ``run --resume``.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.config.schema import Config
from seatrial.launch import script
from seatrial.launch.base import Rendered, Running
from seatrial.model import Job, SeatrialError


class TorchrunLauncher:
    """Renders, and leaves the starting to a person."""

    name = "torchrun"

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def available(self, nodes: int) -> str | None:
        del nodes  # a person will find them
        return "pyxis is a plugin of Slurm" if self._settings.container.runtime == "pyxis" else None

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        text = script.template("torchrun.sh.j2").render(
            job=job,
            attempt=attempt,
            run_dir=str(run_dir),
            environment=script.environment(self._settings, job),
            python=script.python(self._settings),
        )
        return Rendered(argv=(), env={}, text=text)

    def start(self, rendered: Rendered, folder: Path) -> Running:
        """Raises SeatrialError always: what is asked for here is what a person has not started, or not to its end."""
        command = folder.parent / "torchrun.sh"
        command.write_text(rendered.text, encoding="utf-8")
        raise SeatrialError(
            f"not all of its ranks have measured it. Run first, on each node: bash {command} NODE; "
            f"if that has been done, read {folder.parent}/attempt*/logs"
        )
