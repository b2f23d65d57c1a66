"""The bad parts of a trial, their identity and their causes."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from tools.records import record_path

from seatrial import report
from seatrial.model import Finding, Measurement, Outcome, Trial, Verdict
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import markdown
from seatrial.report.identity import NO_SERIAL, gpus_of, serial_digest
from seatrial.report.parts import failing_text, parts, problems, with_real_values
from seatrial.report.terminal import summary
from tests.report import samples

GPU_FACTS = {"index": 1, "name": "H200", "uuid": "GPU-1", "pci_bus_id": "0000:07:00.0", "serial": "165", "vbios": "96"}
FAIL = Verdict("device.memory", "n/gpu1", Outcome.FAIL, "copy", value=1.0, unit="GB/s", fix="nvidia-smi -q -i INDEX")
WARN = replace(FAIL, outcome=Outcome.WARN)
CLUSTER_FAIL = replace(FAIL, check="collectives.all_reduce", subject="cluster", metric="busbw")


def trial(*verdicts: Verdict, findings: tuple[Finding, ...] = (), gpus: object = (GPU_FACTS,)) -> Trial:
    inventory = Measurement(check="gpu.inventory", subject="n", facts={"gpus": list(gpus)})  # type: ignore[call-overload]
    return samples.accepted().model_copy(
        update={"verdicts": verdicts, "findings": findings, "measurements": (inventory,), "environment": {}}
    )


def cause(subject: str, *verdicts: Verdict, title: str = "busy") -> Finding:
    explains = tuple(each.key for each in verdicts)
    return Finding(
        title=title, subject=subject, confidence="low", evidence="PID 7", first_command="ps", explains=explains
    )


def test_a_bad_gpu_has_its_serial_uuid_slot_and_all_its_figures() -> None:
    (part,) = parts(trial(FAIL, replace(FAIL, check="device.gemm", metric="tflops.bf16")))
    assert (part.kind, part.node, part.index, part.outcome) == ("GPU", "n", "1", Outcome.FAIL)
    assert (part.gpu.serial, part.gpu.uuid, part.gpu.slot) == ("165", "GPU-1", "0000:07:00.0")
    assert len(part.figures) == 2


def test_a_gpu_without_a_serial_says_so() -> None:
    for gpus in ((), ({**GPU_FACTS, "serial": None},), ("text",), ({"index": 1},)):
        (part,) = parts(trial(FAIL, gpus=gpus))
        assert part.gpu.serial == ""
        assert NO_SERIAL in part.identity


def test_explained_verdicts_belong_to_the_place_of_their_cause() -> None:
    (part,) = parts(trial(FAIL, CLUSTER_FAIL, findings=(cause("n/gpu1", FAIL, CLUSTER_FAIL),)))
    assert (part.name, part.cause, part.first_command, len(part.figures)) == ("n/gpu1", "busy", "ps", 2)


def test_failures_precede_the_cause_of_a_warning() -> None:
    warning = replace(WARN, subject="n/gpu0")
    names = [part.name for part in parts(trial(warning, FAIL, CLUSTER_FAIL, findings=(cause("n/gpu0", warning),)))]
    assert names == ["n/gpu1", "cluster", "n/gpu0"]


def test_of_equal_outcomes_parts_with_a_cause_come_first() -> None:
    other = replace(FAIL, subject="n/gpu9")
    names = [part.name for part in parts(trial(FAIL, other, findings=(cause("n/gpu9", other),)))]
    assert names == ["n/gpu9", "n/gpu1"]


def test_a_finding_without_verdicts_is_in_the_same_list() -> None:
    error = replace(FAIL, outcome=Outcome.ERROR, metric="")
    found = parts(trial(error, WARN, findings=(cause("n/gpu5", title="Xid 79"),)))
    assert [(part.outcome, part.cause) for part in found] == [(Outcome.ERROR, ""), (None, "Xid 79")]


def test_parts_with_the_same_figures_are_one_problem() -> None:
    warnings = [replace(WARN, subject=f"n{number}") for number in range(64)]
    first, second = problems(parts(trial(*warnings, FAIL)))
    assert (first.title, first.first.outcome) == ("n/gpu1", Outcome.FAIL)
    assert (second.title, len(second.parts), second.figures[0].n) == ("64 nodes", 64, 64)


def test_number_of_failing_parts() -> None:
    link = replace(FAIL, subject="n/gpu0->gpu1")
    assert failing_text(parts(trial(FAIL, link, CLUSTER_FAIL, WARN))) == "1 GPU and 1 link fail"
    assert failing_text(parts(trial(CLUSTER_FAIL))) == "1 figure of the cluster fails"
    assert failing_text(parts(trial(WARN))) == ""


def test_fixes_have_the_real_index_slot_and_run_directory() -> None:
    text = "nvidia-smi -q -i INDEX; lspci -vv -s PCI; `seatrial judge RUN`; seatrial baseline learn RUN… --out NAME"
    (verdict,) = with_real_values(trial(replace(FAIL, fix=text)), Path("runs/my run")).verdicts
    assert verdict.fix == (
        "nvidia-smi -q -i 1; lspci -vv -s 0000:07:00.0; `seatrial judge 'runs/my run'`; "
        "seatrial baseline learn RUN… --out NAME"
    )
    (node,) = with_real_values(trial(replace(FAIL, subject="n", fix=text)), None).verdicts
    assert node.fix == text


def test_the_first_command_of_an_unexplained_part_is_in_its_fix() -> None:
    (part,) = parts(
        with_real_values(trial(replace(FAIL, fix="see nvidia-smi -q -i INDEX during the check: heat?")), None)
    )
    assert part.first_command == "nvidia-smi -q -i 1"


def test_serials_of_a_real_run() -> None:
    gpus = gpus_of(load_trial(record_path("2026-11-23-2xh200/busy-gpu")))
    assert sorted(gpus) == ["vm/gpu0", "vm/gpu1"]
    serials = sorted(gpu.serial for gpu in gpus.values())
    assert serial_digest(gpus) == hashlib.sha256(f"{serials[0]}\n{serials[1]}\n".encode()).hexdigest()
    assert serial_digest({}) == ""


def test_the_same_error_of_several_checks_is_shown_once() -> None:
    errors = [Verdict(name, "cluster", Outcome.ERROR, detail="sbatch: no account") for name in ("a.one", "b.two")]
    rejected = trial(*errors)
    (problem,) = problems(parts(rejected))
    assert [figure.checks for figure in problem.figures] == [("a.one", "b.two")]
    screen = io.StringIO()
    summary(rejected, Console(file=screen, width=100))
    assert "a.one, b.two: sbatch: no account" in markdown.render(rejected)
    assert screen.getvalue().count("sbatch: no account") == 1
    assert "2 checks: sbatch: no account" in screen.getvalue()


def test_parts_whose_fixes_differ_in_more_than_numbers_are_several_problems() -> None:
    texts = ("nvidia-smi -i INDEX", "nvidia-smi -i INDEX", "replace the riser")
    verdicts = [replace(FAIL, subject=f"n/gpu{index}", fix=fix) for index, fix in enumerate(texts)]
    assert [len(problem.parts) for problem in problems(parts(with_real_values(trial(*verdicts), None)))] == [2, 1]


def test_every_format_names_the_serial_of_a_bad_gpu() -> None:
    bad = trial(FAIL)
    document = json.loads(report.render(bad, "summary"))
    assert document["parts"][0]["serial"] == "165"
    assert document["parts"][0]["figures"][0]["measured"] == 1
    for format in ("html", "markdown", "junit", "prometheus", "csv"):
        assert "165" in report.render(bad, format), format


def test_the_cause_of_a_warning_is_not_the_cause_of_a_failure_of_the_same_part() -> None:
    warning = replace(WARN, metric="triad")
    (part,) = parts(trial(warning, FAIL, findings=(cause("n/gpu1", warning, title="noise"),)))
    assert (part.outcome, part.cause, part.first_command) == (Outcome.FAIL, "", "nvidia-smi -q -i INDEX")
    assert [finding.title for finding in part.findings] == ["noise"]
    busy = cause("n/gpu1", FAIL, title="busy")
    (part,) = parts(trial(warning, FAIL, findings=(cause("n/gpu1", warning, title="noise"), busy)))
    assert (part.cause, [finding.title for finding in part.findings]) == ("busy", ["busy", "noise"])
