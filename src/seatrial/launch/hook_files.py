"""The files that `seatrial hook install` writes: scripts and configuration for each caller of a hook. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from typing import NamedTuple

from seatrial.launch.script import option_texts, template

EXTRA_WAIT_S = 2  # if seatrial hangs, the script ends this long after seatrial's own time limit
HEALTH_INTERVAL_S = 300  # seconds between two health checks of a node
# The programs that call a hook (npd: node-problem-detector). Each has its own folder of files, except Slurm:
# its files are in the top folder
CALLERS = ("slurm", "systemd", "npd", "soperator")
_OPTION_SEPARATOR = " \\\n        "  # one option per line of a script


class HookSite(NamedTuple):
    """The values of a site that the files contain. Paths are absolute."""

    folder: str  # folder of the written files
    seatrial: str  # the executable
    records: str  # file of the hooks' records
    status: str  # file with the last result, which node-problem-detector reads
    # folder that records drained nodes (node_state/drain_limit.py); None: failures are recorded, but drain no node
    state_dir: str | None
    gpus_per_node: int | None  # None: unknown
    nodes: int | None  # None: unknown
    gpu_model: str | None = None
    drain_share: float = 0.1  # largest share of the nodes, 0 to 1, that hooks may drain
    drain_window_min: float = 60
    time_limit_s: int = 8
    fail_closed: bool = False
    soperator_cluster: str = "soperator"
    soperator_tag: str = ""  # image tag of soperator's check jobs; empty: no ActiveCheck


_SLURM_SCRIPTS = {  # kind → title of the script `seatrial hook KIND`, and Slurm's action on exit code 1
    "prolog": (
        "Prolog of slurm.conf: checks this node before a job.",
        "Slurm drains the node and requeues the job",
    ),
    "epilog": ("Epilog of slurm.conf: checks this node after a job.", "Slurm drains the node"),
    "health": ("HealthCheckProgram of slurm.conf: checks this node.", "Slurm only logs it"),
}


def render(site: HookSite, callers: Collection[str] = CALLERS) -> dict[str, str]:
    """Return the content of each file by its path in the folder; files that end in .sh must be made executable.

    Only the files of ``callers`` are returned. npd needs the files of systemd too: it reads the result that the
    systemd timer writes.
    """
    values = {
        "site": site,
        "wait_s": site.time_limit_s + EXTRA_WAIT_S,
        "interval_s": HEALTH_INTERVAL_S,
    }
    if "npd" in callers:
        callers = {*callers, "systemd"}
    command = _command(site, '"$kind"', "slurm", _OPTION_SEPARATOR)
    files = {
        f"{kind}.sh": template("hook/hook.sh.j2").render(
            values, contexts=False, command=command, kind=kind, title=title, on_failure=on_failure
        )
        for kind, (title, on_failure) in _SLURM_SCRIPTS.items()
    }
    files["slurm.conf.lines"] = template("hook/slurm.conf.lines.j2").render(values)
    files |= _soperator(site, values)
    files["npd/seatrial-health.json"] = template("hook/npd.json.j2").render(values)
    files["npd/seatrial-health.sh"] = template("hook/npd.sh.j2").render(values)
    health = f"{_command(site, 'health', 'npd')} --status {shlex.quote(site.status)}"
    files["systemd/seatrial-health.service"] = template("hook/service.j2").render(values, command=health)
    files["systemd/seatrial-health.timer"] = template("hook/timer.j2").render(values)
    return {name: text for name, text in files.items() if (name.rpartition("/")[0] or "slurm") in callers}


def _soperator(site: HookSite, values: dict[str, object]) -> dict[str, str]:
    """Return the files of the caller soperator, by their paths."""
    script = template("hook/hook.sh.j2").render(
        values,
        contexts=True,
        kind="check",
        title="Check of soperator, with seatrial.sh.json: checks this worker before and after jobs, and between.",
        on_failure="soperator drains the worker",
        command=_command(site, '"$kind"', "soperator", _OPTION_SEPARATOR),
    )
    config = template("hook/soperator.json.j2").render(values)
    helm = template("hook/soperator-values.yaml.j2").render(values, script=script, config=config)
    files = {"soperator/seatrial.sh": script, "soperator/seatrial.sh.json": config, "soperator/values.yaml": helm}
    if site.soperator_tag:
        command = _command(site, "health", "soperator")
        files["soperator/activecheck.yaml"] = template("hook/activecheck.yaml.j2").render(values, command=command)
    return files


def _command(site: HookSite, kind: str, caller: str, separator: str = " ") -> str:
    """Return the command line of a hook. ``kind``: already quoted for the shell; ``separator``: before each option."""
    arguments = option_texts(
        [
            ("--caller", caller),
            ("--gpus-per-node", site.gpus_per_node),
            ("--gpu-model", site.gpu_model),
            ("--nodes", site.nodes),
            ("--state-dir", site.state_dir),
            ("--drain-share", f"{site.drain_share:g}" if site.state_dir else None),
            ("--drain-window", f"{site.drain_window_min:g}" if site.state_dir else None),
            ("--time-limit", site.time_limit_s),
            ("--records", site.records),
        ]
    )
    arguments += ["--fail-closed"] if site.fail_closed else []
    return separator.join([f"{shlex.quote(site.seatrial)} hook {kind}", *arguments])
