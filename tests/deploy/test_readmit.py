"""deploy/readmit: objects against schemas, and names that must agree with the code."""

from __future__ import annotations

import re
import shlex
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from seatrial.operate.kubernetes_nodes import CONDITION_TYPE, READINESS_TAINTS
from tests.launch.test_kubernetes_objects import VERSIONS
from tests.paths import FIXTURES, ROOT
from tests.processes import call

FOLDER = ROOT / "deploy" / "readmit"
RULES = list(yaml.safe_load_all((FOLDER / "node-readiness-rules.yaml").read_text()))
VALUES = yaml.safe_load((FOLDER / "nvsentinel-values.yaml").read_text())
LIFECYCLE = VALUES["lifecycle-manager"]["config"]


def schema(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(yaml.safe_load((FIXTURES / "kubernetes" / f"{name}.yaml").read_text()))


def test_schemas_of_kubernetes_accept_the_rights() -> None:
    for document in yaml.safe_load_all((FOLDER / "rbac.yaml").read_text()):
        assert kubernetes_validate.validate(document, VERSIONS[0], strict=True) == VERSIONS[0]


def test_readiness_rules_fit_their_schema_and_the_code() -> None:
    validator = schema("node-readiness-rule")
    for rule in RULES:
        validator.validate(rule)
        (condition,) = rule["spec"]["conditions"]
        assert condition["type"] == CONDITION_TYPE
        assert rule["spec"]["dryRun"]
        # as the webhook of the controller requires
        assert ("defaultStatus" in condition) == (rule["spec"]["enforcementMode"] == "continuous")
    assert tuple(rule["spec"]["taint"]["key"] for rule in RULES) == READINESS_TAINTS
    other_prefix = {
        **RULES[0],
        "spec": {**RULES[0]["spec"], "taint": {"key": "seatrial.dev/x", "effect": "NoSchedule"}},
    }
    assert not validator.is_valid(other_prefix)


def test_values_of_nvsentinel_fit_their_schema() -> None:
    validator = schema("nvsentinel-lifecycle-manager")
    validator.validate(LIFECYCLE)
    assert not validator.is_valid({**LIFECYCLE, "test": {}})
    (test,) = LIFECYCLE["tests"].values()
    assert LIFECYCLE["providers"][test["provider"]]["templateFile"] in LIFECYCLE["templates"]
    (rule_set,) = VALUES["fault-quarantine"]["validation"]["ruleSets"]
    named = [*LIFECYCLE["defaultTests"], *LIFECYCLE["newNodeValidation"]["newNodeTests"], *rule_set["tests"]]
    assert set(named) == set(LIFECYCLE["tests"])


def rendered(template: str, values: dict[str, Any]) -> str:
    """Return a template of Go with the few actions that the example uses."""

    def one(text: str, item: Any) -> str:
        return re.sub(r"{{(?:quote )?\.(\w*)}}", lambda field: repr(item[field[1]] if field[1] else item), text)

    def repeated(match: re.Match[str]) -> str:
        return "".join(one(match[2], item) for item in values[match[1]])

    text = re.sub(r"\s*{{- range \.(\w+)}}(.*?)\s*{{- end}}", repeated, template, flags=re.DOTALL)
    text = text.replace("{{(index .Nodes 0).NodeName}}", "node7")
    return re.sub(r"{{\.(\w+)}}", lambda match: str(values[match[1]]), text)


def test_the_job_of_nvsentinel_starts_a_command_that_exists() -> None:
    (test,) = LIFECYCLE["tests"].values()
    fields = {"ValidationRequestName": "v", "TestGroupName": "g", "Namespace": "nvsentinel", "TimeoutSeconds": 1800}
    fields |= {"Image": "a/b", "Command": test["command"], "Env": [{"Name": "IMAGE", "Value": "a/b"}]}
    (template,) = LIFECYCLE["templates"].values()
    job = yaml.safe_load(rendered(template, fields))
    assert kubernetes_validate.validate(job, VERSIONS[0], strict=True) == VERSIONS[0]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {each["name"]: each["value"] for each in container["env"]} == {"NODE": "node7", "IMAGE": "a/b"}
    words = shlex.split(container["command"][2])
    assert words[:4] == ["exec", "seatrial", "readmit", "$NODE"]
    help_text = call("readmit", "-h")[1]
    assert all(word in help_text for word in words if word.startswith("--"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_readme_lists_every_file(path: Any) -> None:
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()
