"""Plain text output of discover, checks, skus and explain, and the note before a run."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console
from tools import references_page

from seatrial.checks import catalog
from seatrial.hardware.references import Sku
from seatrial.model import Finding, ReferenceValue
from seatrial.report import inventory as inventory_module
from seatrial.report.inventory import (
    MAX_MOUNTS,
    checks_as_json,
    print_check_list,
    print_checks,
    print_findings,
    print_inventory,
)
from seatrial.report.reference_metrics import ReferenceMetric, UnjudgedMetric


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


def inventory(**facts: Any) -> list[str]:
    target, out = console()
    print_inventory(facts, target)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_each_component_has_a_table_of_its_parts() -> None:
    facts = {"kernel": "6.8", "memory_bytes": 2**30, "cpu": {"threads": 2, "numa": {"nodes": {"count": 2}}}}
    assert inventory(host=facts, empty={}) == [
        "host",
        "  kernel  6.8",
        "  memory  1 GiB",
        "  cpu     threads 2",
        "host cpu numa",
        "  nodes   count 2",
    ]


def test_empty_values_are_omitted_but_zero_is_not() -> None:
    assert inventory(a={"none": None, "text": "", "list": [], "dict": {}, "zero": 0, "no": False}) == [
        "a",
        "  zero  0",
        "  no    no",
    ]


def test_terminal_sequences_in_facts_are_removed() -> None:
    assert inventory(a={"name": "\x1b[31mred [bold]x[/bold]"}) == ["a", "  name  red [bold]x[/bold]"]


def mount(target: str, kind: str, size: int, responding: bool = True) -> dict[str, Any]:
    return {"target": target, "type": kind, "size_bytes": size, "responding": responding}


def test_of_many_mounts_the_largest_and_hung_ones_are_printed_and_the_others_counted() -> None:
    overlays = [mount(f"/var/lib/docker/overlay2/{number}/merged", "overlay", 2**40) for number in range(60)]
    disks = [mount(f"/data/{number}", "xfs", 2**43) for number in range(20)]
    relevant = [mount("/stale", "nfs4", 0, responding=False), mount("/lustre", "lustre", 2**50)]
    lines = inventory(host={"mounts": {"filesystems": overlays + disks + relevant}})
    targets = [line.split()[0] for line in lines[lines.index("host mounts filesystems") + 2 :]]
    assert len(targets) == MAX_MOUNTS
    assert targets[:2] == ["/stale", "/lustre"]
    assert all(target.startswith("/data/") for target in targets[2:])
    (rest,) = (line for line in lines if "filesystems not listed" in line)
    assert "70 more (60 overlay, 10 xfs)" in rest


def test_checks_are_printed_with_their_rules_and_needs() -> None:
    selected = {name: catalog()[name] for name in ("gpu.inventory", "train.sft_smollm")}
    target, out = console()
    print_checks(selected, target)
    for check in selected.values():
        assert check.title in out.getvalue()
        assert all(rule.metric in out.getvalue() for rule in check.rules)
    assert "FAIL unless >= 1 count, if trained == yes" in out.getvalue()


def test_metrics_without_a_rule_are_printed_with_their_units() -> None:
    name, check = next((name, check) for name, check in catalog().items() if check.rules)
    target, out = console()
    without_rules = tuple(replace(each, text="recorded", warn=(), also=()) for each in check.declared)
    print_checks({name: replace(check, declared=without_rules)}, target)
    rows = [line.split("no rule") for line in out.getvalue().splitlines() if "no rule" in line]
    expected = {metric: f"; in {unit}" if unit else "" for metric, unit in check.units.items()}
    assert {metric.strip(): unit.strip() for metric, unit in rows} == expected


def test_checks_are_listed_by_phase() -> None:
    target, out = console()
    print_check_list(catalog(), target)
    titles = [line for line in out.getvalue().splitlines() if not line.startswith(" ")]
    assert titles[0] == str(next(iter(catalog().values())).phase)
    assert sum(line.split()[0] in catalog() for line in out.getvalue().splitlines()) == len(catalog())


def test_checks_as_json_has_every_field_of_a_check() -> None:
    check = catalog()["train.sft_smollm"]
    (entry,) = checks_as_json({check.name: check})
    assert (entry["name"], entry["scope"], entry["limit_s"]) == (check.name, check.scope, check.limit_s)
    assert entry["needs"] == {"gpus": check.needs.gpus, "ranks": check.needs.min_ranks}
    assert entry["metrics"] == check.units
    assert [rule["metric"] for rule in entry["rules"]] == [rule.metric for rule in check.rules]
    assert set(entry["options"]["properties"]) == set(check.options.model_fields)


def test_findings_are_printed_with_cause_command_and_fix() -> None:
    finding = Finding(
        title="lost [GPU]",
        subject="n0",
        confidence="high",
        evidence="Xid 79",
        first_command="lspci",
        fix="reseat",
        source="log:1",
    )
    target, out = console()
    print_findings([finding], target)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0][:2] == ["lost", "[GPU]"]
    assert "(n0; log:1; confidence: high)" in out.getvalue()
    assert lines[1:] == [["cause", "Xid", "79"], ["run", "first", "lspci"], ["fix", "reseat"]]


GEMM = ReferenceMetric("device.gemm", "tflops.bf16", "gemm.bf16", is_optional=False, is_per_node=False)
REDUCE = ReferenceMetric("collectives.reduce", "busbw.1GiB", "reduce.busbw.1GiB", is_optional=True, is_per_node=False)
VALUES = tuple(
    ReferenceValue(gpus=gpus, nodes=nodes, fabric=fabric, value=300, required=250, unit="GB/s", source="a paper")
    for gpus, nodes, fabric in ((2, 1, ""), (8, 1, ""), (16, 2, "efa"))
)
SKU = Sku(name="NVIDIA Test", nvml_names=("NVIDIA T",), expected={REDUCE.key: VALUES, "reduce.busbw.8GiB": VALUES})


def test_the_note_names_each_check_and_the_networks_with_a_value() -> None:
    unjudged = [UnjudgedMetric("a", "x"), UnjudgedMetric("a", "y", ("efa", "ib-8x400")), UnjudgedMetric("b", "z")]
    first, *checks, _fix = inventory_module.unjudged_lines(unjudged, ["NVIDIA T"] * 8, nodes=2)
    assert "2 nodes with 8 × NVIDIA T" in first
    assert "3 metrics of 2 checks" in first
    assert checks == ["  a: x, y (except over efa or ib-8x400)", "  b: z"]
    assert list(inventory_module.unjudged_lines([], ["NVIDIA T"], nodes=1)) == []


def test_shapes_list_the_numbers_of_gpus_of_a_node_once() -> None:
    assert inventory_module.shapes(VALUES) == "2, 8 GPUs; 2×8 GPUs (efa)"
    assert inventory_module.shapes(()) == ""


def test_a_model_is_listed_with_sources_and_metrics_without_a_value() -> None:
    out = io.StringIO()
    inventory_module.print_model(SKU, [GEMM, REDUCE], Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 + len(VALUES) + 1
    assert all(text in lines[4] for text in ("2×8 GPUs (efa)", "300 GB/s, at least 250 GB/s", "a paper"))
    assert lines[-1].split() == ["device.gemm", "tflops.bf16", "–", "–", "UNJUDGED"]


def test_json_has_every_metric_and_value() -> None:
    (model,) = inventory_module.models_as_json([SKU], [GEMM, REDUCE])
    gemm, reduce = model["metrics"]
    assert (gemm["without_value"], gemm["values"]) == ("UNJUDGED", [])
    assert reduce["without_value"] == "SKIP"
    assert [value["gpus"] for value in reduce["values"]] == [2, 8, 16]


def test_the_page_has_a_column_for_each_model_with_values_and_names_the_others() -> None:
    other = Sku(name="NVIDIA None", nvml_names=("NVIDIA N",))
    page = references_page.page([SKU, other], [GEMM, REDUCE])
    assert "| metric | Test |\n" in page
    assert r"| `collectives.reduce` `busbw.1GiB` \* | 2, 8 GPUs; 2×8 GPUs (efa) |" in page
    assert "on: NVIDIA None." in page
    assert "in `expect`: `reduce.busbw.8GiB`." in page
