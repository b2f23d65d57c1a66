"""deploy/terraform/nebius: attributes against the schema of the provider; variables, references and the example.

Terraform itself is not run: the configuration is parsed by python-hcl2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/terraform/nebius"
SCHEMA = yaml.safe_load((ROOT / "tests/fixtures/terraform/nebius-0.6.32.yaml").read_text())
TEXT = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.tf")))


@cache
def parsed(text: str) -> Any:
    return hcl2.loads(text)


def unquoted(value: str) -> str:
    return value.strip('"')


def blocks(kind: str, text: str = TEXT) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The labels and the body of each block, such as ``resource "TYPE" "NAME" {``."""
    for block in parsed(text).get(kind, []):
        labels: list[str] = []
        while "__is_block__" not in block:
            ((label, block),) = block.items()
            labels.append(unquoted(label))
        yield labels, block


def arguments(body: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The path of each argument, such as ``template.boot_disk.type``; also of objects in conditional expressions."""
    for name, value in body.items():
        if name.startswith("__"):
            continue
        yield prefix + name
        if isinstance(value, str) and (conditional := re.fullmatch(r"\$\{.* \? ([\[{].*) : null\}", value, re.DOTALL)):
            value = hcl2.loads(f"value = {conditional[1]}\n")["value"]
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from arguments(item, f"{prefix}{name}.")


def problems(text: str) -> list[str]:
    """Arguments that the provider does not have, and required ones that are missing."""
    found = []
    for (kind, name), body in blocks("resource", text):
        schema, given = SCHEMA[kind]["arguments"], set(arguments(body))
        found += [f"{kind}.{name}: no argument {path}" for path in sorted(given - schema.keys())]
        for path, description in schema.items():
            parent = path.rpartition(".")[0]
            is_needed = description.startswith("required") and (not parent or parent in given) and path not in given
            if is_needed and not str(value_at(body, parent)).startswith("${local."):  # an object of locals
                found.append(f"{kind}.{name}: {path} is missing")
    return found


def value_at(body: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        body = body[0] if isinstance(body, list) else body
        body = body.get(name) if isinstance(body, dict) else body
    return body


def test_arguments_are_those_of_the_provider() -> None:
    assert problems(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("infiniband_fabric = var", "fabric = var", "no argument fabric"),
        ("mount_tag           =", "tag           =", "no argument template.filesystems.tag"),
        ('effect = "NO_SCHEDULE"', "", "template.taints.effect is missing"),
        ("{ drivers_preset = var.drivers_preset }", "{}", "template.gpu_settings.drivers_preset is missing"),
    ],
)
def test_a_wrong_argument_is_noticed(old: str, new: str, problem: str) -> None:
    assert old in TEXT
    assert any(problem in text for text in problems(TEXT.replace(old, new)))


def test_references_are_to_resources_and_attributes_that_exist() -> None:
    declared = {(kind, name) for (kind, name), _ in blocks("resource")}
    references = set(re.findall(r"\b(nebius_\w+)\.(\w+)\.(\w+(?:\.\w+)?)", TEXT))
    assert references
    for kind, name, attribute in references:
        assert (kind, name) in declared
        assert attribute in SCHEMA[kind]["attributes"]


def test_each_variable_is_described_and_used() -> None:
    variables = {labels[0]: body for labels, body in blocks("variable")}
    assert variables.keys() == set(re.findall(r"\bvar\.(\w+)", TEXT))
    for name, body in variables.items():
        assert {"description", "type"} <= body.keys(), name
        for validation in body.get("validation", []):
            assert f"var.{name}" in validation["condition"]


def test_the_example_sets_each_variable_without_a_default() -> None:
    example = hcl2.loads((FOLDER / "terraform.tfvars.example").read_text())
    variables = {labels[0]: body for labels, body in blocks("variable")}
    required = {name for name, body in variables.items() if "default" not in body}
    assert required <= {name for name in example if not name.startswith("__")} <= variables.keys()
