"""Verdicts without a record: output of other benchmarks, published figures, drills, hooks and readmissions."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Required, TypedDict, get_args
from unittest.mock import patch

from tools.records import record_paths

from benchmarks import published_figures
from seatrial.cli.options import EXIT_CODES
from seatrial.discover import nccl_tests_output, nvbandwidth_output
from seatrial.drill import catalog as drill_catalog
from seatrial.drill.evaluate import evaluate
from seatrial.model import DecisionValue, Outcome, Verdict
from seatrial.operate import drain_limit, hook, node_changes
from seatrial.operate.hook_exit_codes import Caller, Kind, Result, changes_node_state, exit_code
from seatrial.operate.node_checks import NodeResult
from seatrial.operate.readmit import Readmission
from seatrial.pipeline import judge_nccl_tests, judge_nvbandwidth
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from seatrial.pipeline.rejudge import rejudge
from seatrial.util import data_files
from tests.guard.changes import record
from tests.guard.observed import Observed, judgement
from tests.paths import FIXTURES

NCCL_TESTS, NVBANDWIDTH = FIXTURES / "nccl-tests", FIXTURES / "nvbandwidth"
DRILLS = "drills/"  # start of the names of records of drills


class _Source(TypedDict, total=False):
    """The source of a table of nccl-tests, with its options of `seatrial judge`."""

    file: Required[str]
    gpus: str
    nodes: int
    nics: str
    algorithm: str


def tables() -> Iterator[tuple[str, Observed]]:
    """All tables of nccl-tests and nvbandwidth, with the options of their source and with others."""
    for path in sorted(NCCL_TESTS.rglob("*.txt")):
        nccl_tests = nccl_tests_output.parse(path.read_text(encoding="utf-8").splitlines())
        for number, options in enumerate((_source_options().get(path.name, HardwareOptions()), *_nccl_tests_options())):
            judged = judge_nccl_tests.judge_output(nccl_tests, options, "file")
            yield f"nccl-tests {path.stem} {number}", judgement(judged)
    for path in sorted(NVBANDWIDTH.glob("*.txt")):
        nvbandwidth = nvbandwidth_output.parse(path.read_text(encoding="utf-8").splitlines())
        for number, gpus in enumerate((None, "8xH100", "8xA100 SXM 80GB")):
            judged = judge_nvbandwidth.judge_output(nvbandwidth, HardwareOptions(gpus), "file")
            yield f"nvbandwidth {path.stem} {number}", judgement(judged)


@cache
def _source_options() -> dict[str, HardwareOptions]:
    sources: list[_Source] = data_files.parse((NCCL_TESTS / "published" / "sources.yaml").read_text(encoding="utf-8"))
    return {
        each["file"]: HardwareOptions(
            each.get("gpus"), each.get("nodes"), each.get("nics"), algorithm=each.get("algorithm")
        )
        for each in sources
    }


@cache
def _nccl_tests_options() -> tuple[HardwareOptions, ...]:
    """Options for every table: none, one node, and several nodes with fabric and algorithm."""
    return (
        HardwareOptions(),
        HardwareOptions("8xH200", 1),
        HardwareOptions("8xH100", 2, "8x400", "ib"),
        HardwareOptions("8xH100", 2, "8x400", "roce", "Ring"),
        HardwareOptions("8xA100 SXM 80GB", 4, "1x100", "tcp"),
    )


def figures() -> Iterator[tuple[str, Observed]]:
    """The outcome of each published figure by the model of the network; they are numbered, since some are equal."""
    listed = data_files.parse(published_figures.FIGURES.read_text(encoding="utf-8"))
    for number, row in enumerate(map(published_figures.judged, listed)):
        bound = f", {row.name}: bound {row.bound:.6g} GB/s, share {row.share:.4g}" if row.outcome else ""
        text = f"{row.outcome or 'not modelled'}{bound}"
        yield f"figure {number} {row.figure['op']} {row.figure['size']}", {"outcome": text}


def drills() -> Iterator[tuple[str, Observed]]:
    """What each drill expects, and whether its record, judged by this version, is as expected."""
    for drill in drill_catalog().values():
        expected = drill.expected
        observed = {
            "cause": expected.cause,
            "verdict": f"{drill.expected_check} {expected.metric} {'|'.join(expected.outcomes)}",
            "place": expected.place,
            "action": str(expected.action),
            "refusal": expected.refusal,
        }
        if (name := f"{DRILLS}{drill.name}") in record_paths():
            result = evaluate(drill, rejudge(record(name)), "", 0.0)
            parts = ("seen", "located", "explained", "command_right", "action_right")
            observed |= {part.replace("_", " "): str(getattr(result, part)) for part in parts}
        yield drill.name, observed


def hook_exit_codes() -> Iterator[tuple[str, Observed]]:
    """The exit codes of hooks, for each caller, result and option."""
    callers: tuple[Caller, ...] = get_args(Caller)
    for caller, result, fail_closed in itertools.product(callers, Result, (False, True)):
        code = str(exit_code(caller, result, fail_closed))
        yield f"hook {caller} {result.value} fail_closed={fail_closed}", {"exit code": code}
    kinds: tuple[Kind, ...] = get_args(Kind)
    for caller, kind in itertools.product(callers, kinds):
        yield f"hook {caller} {kind}", {"changes the node's state": str(changes_node_state(caller, kind))}
        for fail_closed, state in itertools.product((False, True), ("none", "free", "used up")):
            yield (
                f"hook run {caller} {kind} fail_closed={fail_closed} drains={state}",
                _hook(caller, kind, fail_closed, state),
            )


def _hook(caller: Caller, kind: Kind, fail_closed: bool, state: str) -> Observed:
    """Result and exit code of runs on a good node, on a bad one and on one where a check did not end."""
    bad = Verdict("gpu.inventory", "n1", Outcome.FAIL, metric="gpus_missing", value=1, unit="GPUs")
    nodes = {
        "good": NodeResult({"gpu.inventory": 0.1}, {}, {}, (), ()),
        "bad": NodeResult({"gpu.inventory": 0.1}, {}, {}, (bad,), ()),
        "not measured": NodeResult({}, {"host.inventory": "no result"}, {}, (), ()),
    }
    observed = {}
    for name, node in nodes.items():
        with tempfile.TemporaryDirectory() as folder, patch.object(hook, "check_node", return_value=node):
            drain_limit.prepare(Path(folder))
            if state == "used up":
                limit = drain_limit.DrainLimit(0.0, 3600.0, 4)
                drain_limit.request_drain(Path(folder), "n2", "run", "fault", limit, time.time())
            state_dir = None if state == "none" else Path(folder)
            request = hook.Request(
                kind,
                caller,
                time.monotonic(),
                Path(folder) / "hook.jsonl",
                nodes=4,
                state_dir=state_dir,
                fail_closed=fail_closed,
                time_limit_s=60.0,
                dry_run=True,
            )
            result, _ = hook.run(request)
            observed[name] = f"{result.result.value}, exit code {result.exit_code}"
    return observed


def readmit_exit_codes() -> Iterator[tuple[str, Observed]]:
    """The decision and the exit code of a readmission of two nodes, for each result and outcome of a change."""
    decisions = tuple(DecisionValue)
    outcomes: tuple[node_changes.ChangeOutcome, ...] = get_args(node_changes.ChangeOutcome)
    for first, second, outcome in itertools.product(decisions, decisions, outcomes):
        change = node_changes.NodeChange(nodes=("n1",), action=node_changes.DRAIN, command=(), outcome=outcome)
        results = tuple(
            node_changes.NodeResult(node=node, decision=value, reason="")
            for node, value in (("n1", first), ("n2", second))
        )
        readmission = Readmission(
            run_id="run",
            command=(),
            started=0.0,
            seconds=0.0,
            trial="readmit",
            candidates=("n1", "n2"),
            partners=(),
            suspects={},
            trials=(),
            results=results,
            changes=(change,),
        )
        observed = {"decision": readmission.decision.value, "exit code": str(EXIT_CODES[readmission.decision])}
        yield f"readmit {first.value} {second.value} {outcome}", observed
