"""The command that returns repaired or new nodes to service: readmit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.cli.options import (
    DRAIN_SHARE,
    DRAIN_WINDOW_MIN,
    EXIT_CODES,
    EXIT_INTERRUPTED,
    AsJson,
    BaselineOption,
    DrainShareOption,
    DrainWindowOption,
    GpusOption,
    SetOption,
    collect_overrides,
    create_out_folder,
)
from seatrial.cli.output import print_json, stderr
from seatrial.model import UsageError

if TYPE_CHECKING:
    from seatrial.operate.node_changes import Candidates, Flags, Partner
    from seatrial.operate.readmit import Options, Readmission
    from seatrial.pipeline.preview import Preview

PartnerOption = Annotated[
    list[str] | None, typer.Option(metavar="NODE", help="A known-good partner; by default idle nodes are chosen.")
]
CommentOption = Annotated[bool, typer.Option("--comment", help="Slurm: write the decision to the node's comment.")]
DrainOption = Annotated[
    bool, typer.Option("--drain", help="Drain rejected nodes (Kubernetes: add the taint); needs --state-dir.")
]
UndrainOption = Annotated[
    bool, typer.Option("--undrain", help="Return accepted nodes that are drained (Kubernetes: remove the taint).")
]
ConditionOption = Annotated[
    bool, typer.Option("--condition", help="Kubernetes: set the node condition seatrial.dev/Accepted.")
]
ReasonPrefixOption = Annotated[
    str, typer.Option(metavar="TEXT", help="With --undrain: also return nodes whose reason starts with this text.")
]
# Text: typer would call stat on a Path, which never returns on a filesystem that does not answer
StateDirOption = Annotated[
    str | None, typer.Option(help="Shared directory that records drained nodes (docs/node-states.md).")
]
OutOption = Annotated[Path | None, typer.Option(help="Directory of the record: new or empty, on a shared filesystem.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print partners, plan and changes of node states; change nothing.")
]


def readmit(
    nodes: Annotated[
        list[str], typer.Argument(metavar="NODE...", help="Repaired or new nodes, also as a hostlist: n[1-2].")
    ],
    baseline: BaselineOption = None,
    partner: PartnerOption = None,
    launcher: Annotated[str, typer.Option(help="slurm or kubernetes.")] = "slurm",
    gpus_per_node: GpusOption = None,
    trial: Annotated[str, typer.Option(help="readmit, another trial or a YAML file.")] = "readmit",
    set_: SetOption = None,
    comment: CommentOption = False,
    drain: DrainOption = False,
    undrain: UndrainOption = False,
    condition: ConditionOption = False,
    reason_prefix: ReasonPrefixOption = "",
    state_dir: StateDirOption = None,
    drain_share: DrainShareOption = DRAIN_SHARE,
    drain_window: DrainWindowOption = DRAIN_WINDOW_MIN,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Test repaired or new nodes with known-good partners, and return them to service.

    Changes the state of a node only as the options say. Exit codes: 0 all nodes accepted, 1 a node rejected, 2 usage
    error, 3 incomplete.
    """
    from seatrial.operate.node_changes import Flags
    from seatrial.operate.readmit import Options, Session, choose_partners, preview_trial
    from seatrial.report.progress import Live

    flags = Flags(comment=comment, drain=drain, undrain=undrain, condition=condition)
    _require_consistent(launcher, flags, reason_prefix, state_dir)
    overrides = collect_overrides(set_, gpus_per_node=gpus_per_node)
    overrides += [("--baseline", "baseline", str(baseline.absolute()))] if baseline else []
    options = Options(
        nodes=_expanded(nodes),
        partners=_expanded(partner) if partner else (),
        trial=trial,
        overrides=tuple(overrides),
        flags=flags,
        state_dir=Path(state_dir) if state_dir else None,
        drain_share=drain_share,
        drain_window_s=60 * drain_window,
    )
    folder = Path("RUN") if dry_run else _new_folder(out)
    try:
        candidates = _candidates(options, launcher, folder.name, reason_prefix)
        pool = choose_partners(options, candidates)
        preview = preview_trial(options, candidates, pool)
    except BaseException:
        if not dry_run:
            folder.rmdir()  # nothing was started: the same --out can be used again
        raise
    if dry_run:
        _print_dry_run(options, candidates, pool, preview, as_json)
        return
    result = Session(options, candidates, folder, pool, lambda: Live(stderr()), _note).run()
    _print_result(result, folder, as_json)
    raise typer.Exit(EXIT_INTERRUPTED if result.interrupted else EXIT_CODES[result.decision])


def _require_consistent(launcher: str, flags: Flags, reason_prefix: str, state_dir: str | None) -> None:
    """Raise UsageError for options that do not fit together."""
    if launcher not in ("slurm", "kubernetes"):
        raise UsageError(f"--launcher {launcher}: expected slurm or kubernetes, which know the state of nodes")
    if launcher == "slurm" and flags.condition:
        raise UsageError("--condition is for --launcher kubernetes; in Slurm, --comment shows the decision")
    if launcher == "kubernetes" and (flags.comment or reason_prefix):
        raise UsageError("--comment and --reason-prefix are for Slurm; in Kubernetes, --condition shows the decision")
    if flags.drain and not state_dir:
        raise UsageError(
            "--drain needs --state-dir, the shared directory that records drained nodes: see docs/node-states.md"
        )
    if reason_prefix and not flags.undrain:
        raise UsageError("--reason-prefix needs --undrain")
    if reason_prefix and not reason_prefix.strip():
        raise UsageError("--reason-prefix is blank, which would return nodes drained for any reason")


def _candidates(options: Options, launcher: str, run_id: str, reason_prefix: str) -> Candidates[Any]:
    """Return the nodes to test, with their state in Slurm or Kubernetes.

    Raises SeatrialError if one of them cannot be tested.
    """
    from seatrial.pipeline.planned_jobs import resolve

    config = resolve(options.trial, [*options.overrides, ("--launcher", "launcher", launcher)]).config
    if launcher == "kubernetes":
        from seatrial.operate.kubernetes_nodes import KubernetesCandidates

        return KubernetesCandidates(options.nodes, options.flags, run_id, config.kubernetes)
    from seatrial.discover.slurm import NotConfigured
    from seatrial.launch.slurm import require_sbatch
    from seatrial.operate.slurm_nodes import SlurmCandidates

    require_sbatch()  # before a node is reserved
    try:
        return SlurmCandidates(
            options.nodes,
            options.flags,
            run_id,
            reason_prefix=reason_prefix,
            partition=config.slurm.partition,
            reservation=config.slurm.reservation,
        )
    except NotConfigured as error:
        raise NotConfigured(
            f"readmit reads the state of nodes from Slurm (from Kubernetes: --launcher kubernetes), but {error}"
        ) from error


def _expanded(names: list[str]) -> tuple[str, ...]:
    """Return the nodes of hostlists, each once. Raises UsageError."""
    from seatrial.util import hostlist

    try:
        return tuple(dict.fromkeys(node for text in names for node in hostlist.expand(text)))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _new_folder(out: Path | None) -> Path:
    from seatrial.cli.trial import new_run_folder

    if out is None:
        return new_run_folder("readmit")
    create_out_folder(out)
    return out.resolve()


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal does not end the readmission
        print(text, file=sys.stderr)


def _print_dry_run(
    options: Options, candidates: Candidates[Any], pool: Sequence[Partner], preview: Preview, as_json: bool
) -> None:
    from seatrial.checks import catalog
    from seatrial.operate.readmit import planned_changes
    from seatrial.report.plan_text import plan_lines

    partners = pool[: options.partners_needed]
    changes = planned_changes(options, candidates, pool)
    if as_json:
        print_json(
            {
                "candidates": options.nodes,
                "partners": partners,
                "jobs": [job for job, _ in preview.rendered],
                "changes": changes,
            }
        )
        return
    print(f"candidates: {', '.join(options.nodes)}")
    for partner in partners:
        print(f"partner {partner.node}: {partner.why}")
    lines = plan_lines(preview.plan.jobs, preview.plan.excluded_checks, catalog(), preview.plan.checks_not_run)
    for line in (*lines, *preview.notes):
        print(line)
    for decision, rows in changes.items():
        print(f"changes if every node is {decision}: {'' if rows else 'none'}")
        for change in rows:
            print(f"  {change}")


def _print_result(result: Readmission, folder: Path, as_json: bool) -> None:
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    for row in result.results:
        print(f"{row.decision} {row.node}: {row.reason}")
    for node, cause in result.suspects.items():
        print(f"partner {node} is at fault: {cause}")
    for change in result.changes:
        print(change)
    reports = ", ".join(f"{trial}/report.html" for trial in result.trials) or "no trial was started"
    print(f"{result.seconds:.0f} s; record: {folder / 'readmit.json'}; reports: {reports}")
