"""Commands of hooks: hook prolog, epilog, health, install, uninstall, list."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from seatrial.cli.options import DRAIN_SHARE, DRAIN_WINDOW_MIN, AsJson, DrainShareOption, DrainWindowOption
from seatrial.cli.output import discard, print_json
from seatrial.model import SeatrialError, UsageError

if TYPE_CHECKING:
    from seatrial.launch.hook_files import HookSite
    from seatrial.operate.hook import Expected, Request

hook = typer.Typer(
    no_args_is_help=True,
    help="Fast checks of this node for Slurm, soperator, node-problem-detector and systemd.\n\n"
    "Each caller expects other exit codes: docs/hooks.md has the table.",
)
_DETAIL_DESCRIPTOR = 3  # file descriptor; soperator appends text that it reads from it to the reason of a drained node
_LIST_TIMEOUT_S = 10.0  # a filesystem in use answers within seconds
_RECORDS = "/var/log/seatrial/hook.jsonl"

CallerOption = Annotated[
    Literal["slurm", "soperator", "npd", "systemd"], typer.Option(help="The caller, which decides the exit code.")
]
SiteOption = Annotated[
    str | None, typer.Option("--site", metavar="FILE", help="The site's trial: expected nodes and GPUs per node.")
]
GpusOption = Annotated[int | None, typer.Option(min=0, help="Expected GPUs of this node; 0: none.")]
ModelOption = Annotated[str | None, typer.Option(help="Text that the name of each GPU must contain, such as H200.")]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Nodes of the cluster, of which --drain-share is a share.")
]
# Paths are text: typer would call stat on a Path, which never returns on a filesystem that does not answer
StateOption = Annotated[
    str | None,
    typer.Option(
        help="Directory, shared by all nodes, that records which nodes hooks took out of service; --drain-share needs "
        "it. Without it, no hook takes a node out of service."
    ),
]
TimeLimitOption = Annotated[
    int, typer.Option("--time-limit", metavar="SECONDS", min=3, max=50, help="Each hook ends within this time.")
]
FailClosedOption = Annotated[
    bool, typer.Option("--fail-closed", help="An unmeasured check counts as failed; by default it passes.")
]
RecordsOption = Annotated[str, typer.Option(help="File of records, one line each; on a disk of this node.")]
StatusOption = Annotated[
    str | None, typer.Option(help="File that gets the result for node-problem-detector: its exit code and the reason.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Write no record, and no entry into --state-dir.")]


def _add_command(kind: Literal["prolog", "epilog", "health"], default_caller: str, text: str) -> None:
    @hook.command(kind, help=text)
    def command(
        caller: CallerOption = default_caller,  # type: ignore[assignment]
        site: SiteOption = None,
        gpus_per_node: GpusOption = None,
        gpu_model: ModelOption = None,
        nodes: NodesOption = None,
        state_dir: StateOption = None,
        share: DrainShareOption = DRAIN_SHARE,
        window_min: DrainWindowOption = DRAIN_WINDOW_MIN,
        time_limit_s: TimeLimitOption = 8,
        fail_closed: FailClosedOption = False,
        records: RecordsOption = _RECORDS,
        status: StatusOption = None,
        dry_run: DryRunOption = False,
        as_json: AsJson = False,
    ) -> None:
        from seatrial.operate.hook import Request
        from seatrial.util import processes

        if name := os.environ.get("SLURMD_NODENAME"):  # can differ from the host name
            os.environ.setdefault("SEATRIAL_NODE", name)
        request = Request(
            kind=kind,
            caller=caller,
            started=time.monotonic() - processes.age_s(),  # the time limit includes the start of Python
            records=Path(records),
            status=Path(status) if status else None,
            site=site,
            gpus_per_node=gpus_per_node,
            gpu_model=gpu_model,
            nodes=nodes,
            state_dir=Path(state_dir) if state_dir else None,
            drain_share=share,
            drain_window_s=60 * window_min,
            time_limit_s=time_limit_s,
            fail_closed=fail_closed,
            dry_run=dry_run,
            job=os.environ.get("SLURM_JOB_ID", ""),
        )
        _run(request, as_json)


_EXIT_CODES_HELP = (
    "Exit codes: 0 passed, 1 failed. docs/hooks.md has the exit codes of a refused drain and of an unmeasured check."
)
_add_command(
    "prolog",
    "slurm",
    f"Check this node before a job. On exit code 1 Slurm drains it and requeues the job. {_EXIT_CODES_HELP}",
)
_add_command(
    "epilog", "slurm", f"Check this node after a job, also for processes that the job left. {_EXIT_CODES_HELP}"
)
_add_command("health", "systemd", f"Check this node at any time, also while jobs run on it. {_EXIT_CODES_HELP}")


def _run(request: Request, as_json: bool) -> None:
    from seatrial.operate.hook import run

    record, write_error = run(request)
    try:
        if as_json:
            print_json(record)
        else:
            print(record.reason if request.caller == "npd" else record.text())
        sys.stdout.flush()
    except OSError:  # no reader, or a full disk. Keep the exit code of the record: another code could drain the node
        discard(sys.stdout)
    with contextlib.suppress(OSError):
        if write_error:
            print(f"seatrial: the record could not be written: {write_error}", file=sys.stderr)
    if request.caller == "soperator" and record.exit_code:
        with contextlib.suppress(OSError):  # started by a person, without descriptor 3
            os.write(_DETAIL_DESCRIPTOR, record.reason.encode())
    raise typer.Exit(record.exit_code)


@hook.command()
def install(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory, at the same path on every node.")],
    site: SiteOption = None,
    gpus_per_node: GpusOption = None,
    gpu_model: ModelOption = None,
    nodes: NodesOption = None,
    state_dir: StateOption = None,
    share: DrainShareOption = DRAIN_SHARE,
    window_min: DrainWindowOption = DRAIN_WINDOW_MIN,
    time_limit_s: TimeLimitOption = 8,
    fail_closed: FailClosedOption = False,
    records: RecordsOption = _RECORDS,
    soperator_cluster: Annotated[
        str, typer.Option(help="Name of the SlurmCluster, for the ActiveCheck.")
    ] = "soperator",
    soperator_tag: Annotated[str, typer.Option(help="Tag of soperator's images; writes an ActiveCheck.")] = "",
    caller: Annotated[
        list[str] | None,
        typer.Option(help="slurm, systemd, npd or soperator: only its files and next steps; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")] = False,
) -> None:
    """Write scripts and configuration of hooks to DIR, and print the next steps. Changes nothing outside DIR.

    With --state-dir, also creates the record of drained nodes in that directory.
    """
    from seatrial import __version__
    from seatrial.launch.hook_files import CALLERS, render
    from seatrial.operate import drain_limit
    from seatrial.operate import hook_install as installation
    from seatrial.operate.hook import Expected

    callers = caller or CALLERS
    if unknown := sorted(set(callers) - set(CALLERS)):
        raise UsageError(f"--caller {unknown[0]}: expected {', '.join(CALLERS)}")
    from_options = Expected(gpus_per_node, gpu_model, nodes)
    hook_site = _hook_site(folder, site, from_options, state_dir, records)._replace(
        drain_share=share,
        drain_window_min=window_min,
        time_limit_s=time_limit_s,
        fail_closed=fail_closed,
        soperator_cluster=soperator_cluster,
        soperator_tag=soperator_tag,
    )
    files = render(hook_site, callers)
    if dry_run:
        print("\n".join(f"===== {hook_site.folder}/{name}\n{text}" for name, text in files.items()), end="")
        return
    if state_dir is not None:
        try:
            drain_limit.prepare(Path(state_dir))
        except OSError as error:
            raise UsageError(
                f"--state-dir {state_dir}: {error.strerror}; expected an existing shared directory"
            ) from error
    installation.install(Path(hook_site.folder), files, __version__)
    for name in sorted(files):
        print(f"{hook_site.folder}/{name}")
    print("\n".join(_next_steps(hook_site, callers)))


def _hook_site(folder: Path, site: str | None, from_options: Expected, state_dir: str | None, records: str) -> HookSite:
    """Return the settings of an installation. Raises UsageError.

    Values that the options do not set are taken from the trial file ``site``.
    """
    from seatrial.launch.hook_files import HookSite
    from seatrial.operate.hook import read_site

    expected = from_options.or_else(read_site(site)) if site else from_options
    if state_dir is not None and expected.nodes is None:
        raise UsageError(
            "--state-dir needs the number of nodes, of which --drain-share is a share: set --nodes or --site"
        )
    folder_path, records_path = os.path.abspath(folder), os.path.abspath(records)
    state_path = os.path.abspath(state_dir) if state_dir else None
    paths = filter(None, (folder_path, records_path, state_path))
    if unusable := [path for path in paths if not re.fullmatch(r"[\w./+@=-]+", path)]:
        raise UsageError(f"{unusable[0]!r}: slurm.conf and systemd need a path of letters, digits and ./_+@=-")
    if expected.model and not re.fullmatch(r"[\w .,()/+-]+", expected.model):
        raise UsageError(
            f"--gpu-model {expected.model!r}: expected letters, digits, spaces and .,()/+- of a GPU's name"
        )
    return HookSite(
        folder=folder_path,
        seatrial=os.path.abspath(Path(sys.prefix) / "bin" / "seatrial"),
        records=records_path,
        status=str(Path(records_path).with_name("health.status")),
        state_dir=state_path,
        gpus_per_node=expected.gpus,
        gpu_model=expected.model,
        nodes=expected.nodes,
    )


def _next_steps(site: HookSite, callers: Collection[str]) -> list[str]:
    """Return what the person who installs hooks does next: one line for the drain limit, and one per caller."""
    limit_text = (
        f"{site.state_dir}/drains" if site.state_dir else "no --state-dir was given: failures are only recorded"
    )
    timer = f"systemctl link {site.folder}/systemd/seatrial-health.*; systemctl enable --now seatrial-health.timer"
    steps = {
        "slurm": f"Slurm: copy lines of {site.folder}/slurm.conf.lines to slurm.conf, then: scontrol reconfigure",
        "systemd": f"systemd: {timer}",
        "npd": f"node-problem-detector: on each node {timer}; put npd/ into NPD's ConfigMap, see docs/hooks.md",
        "soperator": "soperator: helm upgrade with soperator/values.yaml, see docs/hooks.md",
    }
    return [f"Drain limit: {limit_text}", *(step for name, step in steps.items() if name in callers)]


@hook.command()
def uninstall(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of `seatrial hook install`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; remove nothing.")] = False,
) -> None:
    """Remove the files that `seatrial hook install` wrote; fails if one of them was changed.

    Remove the lines of slurm.conf first: Slurm drains a node if its Prolog is missing.
    """
    from seatrial.operate import hook_install as installation

    for path in installation.uninstall(folder, dry_run):
        print(path)


@hook.command("list")
def list_drains(
    state_dir: Annotated[str, typer.Option(help="The directory that the hooks have as --state-dir.")],
) -> None:
    """Print the nodes that hooks took out of service, each with the scontrol command that stores the reason in Slurm.

    Changes nothing.
    """
    from seatrial.operate import drain_limit
    from seatrial.operate.drain_limit import Drain
    from seatrial.operate.hook import call_until
    from seatrial.util.text import printable

    def read() -> list[object]:
        return [drain.model_dump(mode="json") for drain in drain_limit.read(Path(state_dir))]

    no_answer = f"{state_dir} does not answer within {_LIST_TIMEOUT_S:.0f} s: run `df {state_dir}` on another host"
    drains, error = call_until(read, time.monotonic() + _LIST_TIMEOUT_S, no_answer)
    if error:
        raise SeatrialError(error)
    for drain in map(Drain.model_validate, drains):
        node, reason = printable(drain.node), printable(drain.reason)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(drain.time))} {node}: {reason}")
        print(f"  {shlex.join(['scontrol', 'update', f'NodeName={node}', f'Reason={reason}'])}")
