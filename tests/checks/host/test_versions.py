from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.check import Context
from seatrial.checks.host.versions import CHECK
from seatrial.discover import versions
from seatrial.discover.versions import InstalledVersion, InstalledVersions
from seatrial.judge.rules import judge_check
from seatrial.model import Outcome, Verdict
from seatrial.worker import measure
from tests.discover import trees

CURRENT = {
    "driver": "595.71.05",
    "container_toolkit": "1.20.0",
    "runc": "1.4.0",
    "dcgm": "4.7.0",
    "kernel": "6.8.0-137",
}


def installed(**changes: str) -> dict[str, InstalledVersions]:
    found = {name: [InstalledVersion(version=version)] for name, version in (CURRENT | changes).items()}
    return {**found, "nic_firmware": nics("28.46.3008", "28.46.3008")}


def nics(*firmware: str, model: str = "MT4129") -> InstalledVersions:
    devices = (
        InstalledVersion(version=version, place=f"mlx5_{index}", model=model) for index, version in enumerate(firmware)
    )
    return [*devices]


class Node:
    def __init__(self, root: Path) -> None:
        self.root, self.installed = root, installed()
        trees.gpu_host(root)

    def verdicts(self) -> dict[str, Verdict]:
        context = Context(
            node="node3",
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=None,
            artifacts_dir=self.root,
            run_dir=self.root,
            root=self.root,
        )
        return {verdict.metric: verdict for verdict in judge_check(CHECK, [measure(CHECK, context, {})], {}, "test")}

    def outcome(self, component: str) -> Outcome:
        return self.verdicts()[f"{component}_outdated"].outcome


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    monkeypatch.setattr(versions, "read", lambda _root: node.installed)
    return node


def test_current_versions_pass(node: Node) -> None:
    assert {verdict.outcome for verdict in node.verdicts().values()} == {Outcome.PASS}


@pytest.mark.parametrize(
    ("component", "version"),
    [
        ("driver", "580.95.05"),
        ("container_toolkit", "1.17.8"),
        ("runc", "1.2.5"),
        ("dcgm", "4.3.0"),
        ("kernel", "6.8.0-60"),
    ],
)
def test_an_older_version_is_a_warning_with_its_advisory(node: Node, component: str, version: str) -> None:
    node.installed = installed(**{component: version})
    verdicts = {metric: verdict for metric, verdict in node.verdicts().items() if verdict.outcome is not Outcome.PASS}
    (verdict,) = verdicts.values()
    assert verdict.metric == f"{component}_outdated"
    assert verdict.outcome is Outcome.WARN
    assert version in verdict.evidence
    assert "CVE-" in verdict.meaning
    assert "https://" in verdict.fix


def test_one_nic_with_older_firmware(node: Node) -> None:
    node.installed["nic_firmware"] = nics("28.46.3008", "28.39.1002")
    verdict = node.verdicts()["nic_firmware_outdated"]
    assert verdict.outcome is Outcome.WARN
    assert "mlx5_1" in verdict.evidence
    assert "mlx5_0" not in verdict.evidence


@pytest.mark.parametrize(
    ("component", "found"),
    [
        ("runc", "runc is not in PATH"),
        ("runc", [InstalledVersion(version="1.1.12-0ubuntu2~22.04.1")]),
        ("driver", [InstalledVersion(version="610.43.02")]),
        ("nic_firmware", nics("2.1", model="EFA")),
    ],
)
def test_an_unknown_version_is_skipped_with_its_reason(node: Node, component: str, found: InstalledVersions) -> None:
    node.installed[component] = found
    verdict = node.verdicts()[f"{component}_outdated"]
    assert verdict.outcome is Outcome.SKIP
    assert verdict.detail


def test_a_machine_without_gpu_is_skipped(node: Node) -> None:
    node.root = node.root / "empty"
    node.installed = installed(runc="1.0.0")
    assert {verdict.outcome for verdict in node.verdicts().values()} == {Outcome.SKIP}
