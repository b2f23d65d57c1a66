"""Plain text output of discover, checks and explain."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from seatrial.checks import catalog
from seatrial.model import Finding
from seatrial.report.inventory import MAX_MOUNTS, checks_as_json, print_checks, print_findings, print_inventory


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


def inventory(**facts: Any) -> list[str]:
    target, out = console()
    print_inventory(facts, target)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_each_component_has_a_line_with_its_parts_below() -> None:
    assert inventory(host={"kernel": "6.8", "memory_bytes": 2**30, "numa": {"nodes": 2}}, empty={}) == [
        "host  kernel 6.8, memory 1 GiB",
        "  numa  nodes 2",
    ]


def test_each_record_of_a_list_has_a_line_and_an_inner_list_its_length() -> None:
    links = [{"link": 0}, {"link": 1}]
    lines = inventory(gpu={"gpus": [{"index": 0, "ecc": True, "mig": False, "links": links}, {"index": 1}]})
    assert lines == ["gpu", "  gpus", "    index 0, ecc yes, mig no, links 2", "    index 1"]


def test_empty_values_are_omitted_but_zero_is_not() -> None:
    assert inventory(a={"none": None, "text": "", "list": [], "dict": {}, "zero": 0, "no": False}) == [
        "a  zero 0, no no"
    ]


def test_terminal_sequences_in_facts_are_removed() -> None:
    assert inventory(a={"name": "\x1b[31mred [bold]x[/bold]"}) == ["a  name red [bold]x[/bold]"]


def mount(target: str, kind: str, size: int, responding: bool = True) -> dict[str, Any]:
    return {"target": target, "type": kind, "size_bytes": size, "responding": responding}


def test_of_many_mounts_the_relevant_ones_are_printed_and_the_others_counted() -> None:
    overlays = [mount(f"/var/lib/docker/overlay2/{number}/merged", "overlay", 2**40) for number in range(60)]
    volumes = [mount(f"/run/volumes/{number}", "tmpfs", 2**44) for number in range(30)]
    disks = [mount(f"/data/{number}", "xfs", 2**43) for number in range(20)]
    relevant = [
        mount("/", "overlay", 2**40),
        mount("/dev/shm", "tmpfs", 2**30),
        mount("/home", "nfs4", 2**20),
        mount("/stale", "nfs4", 0, responding=False),
        mount("/lustre", "lustre", 2**50),
    ]
    paths = {"shm": "/dev/shm", "tmp": "/tmp", "home": "/home/user", "root": "/"}
    directories = {name: {"path": path} for name, path in paths.items()}
    lines = inventory(host={"mounts": {"filesystems": overlays + volumes + disks + relevant, **directories}})
    targets = [line.split()[1].rstrip(",") for line in lines if line.strip().startswith("target")]
    assert len(targets) == MAX_MOUNTS
    assert {row["target"] for row in relevant} < set(targets)
    assert not any("overlay2" in target or "volumes" in target for target in targets)
    (rest,) = (line for line in lines if line.strip().startswith("and "))
    assert "103 more (60 overlay, 30 tmpfs, 13 xfs)" in rest


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
    _, _, recorded = " ".join(out.getvalue().split()).partition("no rule: ")
    assert recorded.split(", ") == [f"{metric} ({unit})" if unit else metric for metric, unit in check.units.items()]


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
