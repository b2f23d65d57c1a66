"""deploy/terraform/nebius: attributes against the schema of the provider; variables, references and the example.

Terraform itself is not run: the configuration is parsed by python-hcl2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import hcl2
import pytest
import yaml

from seatrial.checks import catalog
from seatrial.config.layers import resolve
from seatrial.config.schema import Config
from tests.paths import ROOT

FOLDER = ROOT / "deploy/terraform/nebius"
FACTS = ROOT / "tests/fixtures/terraform"
SCHEMA = yaml.safe_load((FACTS / "nebius-0.6.32.yaml").read_text())
CHARTS = yaml.safe_load((FACTS / "soperator-5.0.0.yaml").read_text())
META_ARGUMENTS = {"count", "depends_on"}  # of Terraform, for every resource
TEXT = "\f".join(path.read_text() for path in sorted(FOLDER.glob("*.tf")))  # a form feed between two files


@cache
def parsed(text: str) -> Any:
    return hcl2.loads(text)


def unquoted(value: str) -> str:
    return value.strip('"')


def blocks(kind: str, text: str = TEXT) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The labels and the body of each block, such as ``resource "TYPE" "NAME" {``."""
    for block in (block for file in text.split("\f") for block in parsed(file).get(kind, [])):
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
        schema, given = SCHEMA[kind]["arguments"], set(arguments(body)) - META_ARGUMENTS
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
        ('product_slug     = "nebius/nvidia-device-plugin"', "", "device_plugin: product_slug is missing"),
        ("{ drivers_preset = var.drivers_preset }", "{}", "template.gpu_settings.drivers_preset is missing"),
    ],
)
def test_a_wrong_argument_is_noticed(old: str, new: str, problem: str) -> None:
    assert old in TEXT
    assert any(problem in text for text in problems(TEXT.replace(old, new)))


def test_references_are_to_resources_and_attributes_that_exist() -> None:
    declared = {(kind, name) for (kind, name), _ in blocks("resource")}
    references = set(re.findall(r"\b(nebius_\w+)\.(\w+)(?:\[0\])?\.(\w+(?:\.\w+)?)", TEXT))
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


def chart_values(text: str = TEXT) -> dict[str, Any]:
    """The values of each chart of soperator, as they are written: expressions are not evaluated."""
    (values,) = [body["soperator_values"] for _, body in blocks("locals", text) if "soperator_values" in body]
    return {chart: keys for chart, keys in values.items() if not chart.startswith("__")}


def unknown_keys(chart: str, values: dict[str, Any]) -> list[str]:
    """Keys that the chart does not have. A key without keys below it in the facts is free-form."""
    known = set(CHARTS[chart])
    free = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}
    return [
        path
        for path in arguments(values)
        if path not in known and not any(path.startswith(f"{parent}.") for parent in free)
    ]


def test_values_of_charts_are_keys_that_the_charts_have() -> None:
    values = chart_values()
    assert values.keys() == CHARTS.keys()
    assert {chart: unknown_keys(chart, keys) for chart, keys in values.items()} == {chart: [] for chart in values}


@pytest.mark.parametrize(
    ("chart", "old", "new"),
    [
        ("nodesets", "replicas = var", "replica = var"),
        ("slurm-cluster", "sshRootPublicKeys  ", "sshPublicKeys  "),
        ("slurm-cluster-storage", "controllerSpool = { size", "spool = { size"),
    ],
)
def test_a_wrong_key_of_a_chart_is_noticed(chart: str, old: str, new: str) -> None:
    assert old in TEXT
    assert unknown_keys(chart, chart_values(TEXT.replace(old, new))[chart])


def test_auto_repair_and_the_taint_use_names_of_the_docs() -> None:
    (body,) = [body for (_, name), body in blocks("resource") if name == "gpu"]
    page = (ROOT / "docs/nebius.md").read_text()
    for name in ("seatrial.dev/Accepted", "seatrial.dev/not-accepted"):
        assert name in str(body)
        assert name in page


@pytest.mark.parametrize("page", ["docs/nebius.md", "deploy/terraform/nebius/README.md"])
def test_pages_say_that_the_configuration_was_not_applied(page: str) -> None:
    assert re.search(r"^\*\*Not applied\.\*\* ", (ROOT / page).read_text(), re.MULTILINE)


def test_trial_arguments_are_settings_of_seatrial() -> None:
    (body,) = [body for labels, body in blocks("output") if labels == ["trial_arguments"]]
    texts = [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', body["value"])]
    launchers = {value for option, value in pairwise(texts) if option == "--launcher"}
    assert launchers == {"kubernetes", "slurm"}
    schemas = catalog()
    for launcher in launchers & set(get_args(Config.model_fields["launcher"].annotation)):
        settings = [value.split("=", 1) for option, value in pairwise(texts) if option == "--set"]
        chosen = [("test", key, yaml.safe_load(value)) for key, value in settings if key.startswith(launcher)]
        assert chosen
        image = [("test", "kubernetes.image", "registry.example/seatrial:1")] if launcher == "kubernetes" else []
        overrides = [("test", "launcher", launcher), *image, *chosen]
        assert resolve("quick", environ={}, schemas=schemas, overrides=overrides).config.launcher == launcher
