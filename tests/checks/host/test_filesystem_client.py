from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks.check import Context
from seatrial.checks.host.filesystem_client import CHECK, ClientOptions
from seatrial.discover import filesystem_quota
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.util.processes import CommandResult
from seatrial.worker import measure
from tests.paths import FIXTURES

FOLDER = FIXTURES / "filesystems"
Outcomes = dict[str, set[Outcome]]
Tools = dict[str, str | int]  # name of a tool → its output, or its exit code


class Node:
    """A node whose paths are on the filesystems of mountinfo rows, with fake tools."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.rows, self.paths, self.tools = root, list[str](), dict[str, str](), Tools()
        self.commands: list[list[str]] = []
        monkeypatch.setattr(filesystem_quota, "run_command", self.run)

    def mount(self, tier: str, kind: str, options: str, source: str = "server:/x") -> None:
        path = self.root / tier
        path.mkdir()
        self.paths[tier] = str(path)
        self.rows.append(f"{len(self.rows)} 1 0:{len(self.rows)} / {path} rw,relatime - {kind} {source} rw,{options}")

    def run(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        self.commands.append(list(argv))
        answer = self.tools.get(argv[0])
        if answer is None:
            raise FileNotFoundError(argv[0])
        return CommandResult(0, answer, "") if isinstance(answer, str) else CommandResult(answer or None, "", "refused")

    def measure(self) -> Measurement:
        (self.root / "proc/self").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/mountinfo").write_text("\n".join(self.rows) + "\n")
        context = Context(
            node="n0",
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=None,
            artifacts_dir=self.root,
            run_dir=self.root,
            root=self.root,
        )
        measurement = measure(CHECK, context, {"paths": self.paths})
        assert measurement.error is None
        return measurement

    def evidence(self, name: str) -> JsonValue:
        (evidence,) = (metric.evidence for metric in self.measure().metrics if metric.name == name)
        return evidence

    def outcomes(self) -> Outcomes:
        by_metric: Outcomes = {}
        for verdict in judge_check(CHECK, [self.measure()], {}, "t"):
            by_metric.setdefault(verdict.metric, set()).add(verdict.outcome)
        return by_metric


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def read(name: str) -> str:
    return (FOLDER / name).read_text()


def test_lustre_with_quota_and_a_full_server_disk(node: Node) -> None:
    node.mount("run_directory", "lustre", "flock,lazystatfs")
    node.tools["lfs"] = read("lfs-df-full-ost.txt")
    assert node.outcomes()["target_used.run_directory"] == {Outcome.WARN}
    node.tools["lfs"] = read("lfs-df-expanse.txt")
    outcomes = node.outcomes()
    assert outcomes["target_used.run_directory"] == outcomes["targets_down.run_directory"] == {Outcome.PASS}
    assert outcomes["quota_used.run_directory"] == {Outcome.UNJUDGED}  # the output of lfs df is no quota
    assert outcomes["unwise_settings"] == {Outcome.PASS}
    assert outcomes["quota_used.home"] == {Outcome.SKIP}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("lfs-quota-mila.txt", {Outcome.PASS, Outcome.WARN}),  # 99.99 % of the bytes
        ("lfs-quota-expanse.txt", {Outcome.PASS}),
        ("lfs-quota-nig.txt", {Outcome.PASS, Outcome.WARN}),  # no limit of files
        ("lfs-quota-inaccurate.txt", {Outcome.UNJUDGED}),
        ("beegfs-ctl-table.txt", {Outcome.UNJUDGED}),
    ],
)
def test_quota(node: Node, output: str, expected: set[Outcome]) -> None:
    node.mount("home", "lustre", "flock")
    node.tools["lfs"] = read(output)
    assert node.outcomes()["quota_used.home"] == expected


def test_a_used_up_quota_fails(node: Node) -> None:
    node.mount("home", "nfs4", "vers=4.2,rsize=1048576,wsize=1048576,hard,local_lock=none")
    node.tools["quota"] = read("quota-over.txt")
    assert node.outcomes()["quota_used.home"] == {Outcome.FAIL, Outcome.WARN}
    assert "quota -u" in str(node.evidence("quota_used.home"))
    assert node.commands[0] == ["quota", "-u", "-v", "-w", "-f", node.paths["home"]]


@pytest.mark.parametrize("tools", [{}, {"lfs": 0}, {"lfs": 3}, {"lfs": ""}], ids=["missing", "hangs", "fails", "empty"])
def test_a_tool_without_an_answer_is_inconclusive(node: Node, tools: Tools) -> None:
    node.mount("home", "lustre", "flock")
    node.tools = tools
    outcomes = node.outcomes()
    assert outcomes["quota_used.home"] == outcomes["target_used.home"] == {Outcome.UNJUDGED}
    assert {metric.name for metric in node.measure().metrics} == {
        "unknown_tiers",
        "paths_not_found",
        "unwise_settings",
        "paths_misplaced",
    }


def test_unwise_settings_and_a_misplaced_path(node: Node) -> None:
    node.mount("local_scratch", "nfs", "vers=3,rsize=8192,wsize=1048576,soft,local_lock=all")
    outcomes = node.outcomes()
    assert outcomes["unwise_settings"] == outcomes["paths_misplaced"] == {Outcome.WARN}
    unwise: Any = node.evidence("unwise_settings")
    assert set(unwise) == {f"{setting} of local_scratch" for setting in ("rsize", "recovery", "local_lock")}
    assert node.evidence("paths_misplaced") == {"local_scratch": "NFS"}


def test_a_local_disk_has_no_quota_tool_and_no_servers(node: Node) -> None:
    node.mount("local_scratch", "xfs", "noquota")
    outcomes = node.outcomes()
    assert Outcome.SKIP in outcomes["quota_used.local_scratch"] | outcomes["target_used.local_scratch"]
    assert node.commands == []


def test_two_mounts_of_beegfs_are_not_mixed_up(node: Node) -> None:
    for tier in ("home", "hf_cache"):
        node.mount(tier, "beegfs", "cfgFile=/none", "beegfs_nodev")
    node.tools["beegfs"] = read("beegfs-8.ndjson")
    assert node.outcomes()["quota_used.home"] == {Outcome.UNJUDGED}
    assert node.commands == []


def test_an_unknown_tier_is_recorded_and_not_judged(node: Node) -> None:
    node.mount("archive", "lustre", "localflock")
    node.tools["lfs"] = read("lfs-quota-mila.txt")
    outcomes = node.outcomes()
    assert outcomes["unknown_tiers"] == {Outcome.UNJUDGED}
    assert outcomes["unwise_settings"] == {Outcome.WARN}  # settings are judged by the filesystem
    assert "quota_used.archive" in {metric.name for metric in node.measure().metrics}


def test_a_path_that_does_not_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(call: Callable[[], object]) -> Any:
        raise TimeoutError

    node.mount("home", "nfs", "hard")
    hung = type("Hung", (), {"result": staticmethod(hang)})
    monkeypatch.setattr("seatrial.util.threads.start_in_thread", lambda call: hung)
    assert node.outcomes()["paths_not_found"] == {Outcome.FAIL}


def test_a_path_that_does_not_exist_is_not_looked_up_in_its_parent(node: Node) -> None:
    node.mount("home", "nfs", "hard")
    node.paths["hf_cache"] = str(node.root / "home" / "not" / "mounted")
    assert node.outcomes()["paths_not_found"] == {Outcome.FAIL}
    assert "No such file" in str(node.evidence("paths_not_found"))


def test_default_paths_are_those_of_this_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(node.root / "not_yet" / "huggingface"))
    node.rows.append("1 1 0:1 / / rw - ext4 /dev/sda rw")
    filesystems: Any = node.measure().facts["filesystems"]
    assert set(filesystems) == {"run_directory", "home", "hf_cache", "local_scratch"}
    assert filesystems["hf_cache"].startswith("local (ext4)")


@pytest.mark.parametrize("paths", [{"home": "relative"}, {"No Tier": "/x"}])
def test_invalid_options(paths: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="paths"):
        ClientOptions.model_validate({"paths": paths})
