from __future__ import annotations

import platform
from pathlib import Path

import pytest

from seatrial.checks.check import Context
from seatrial.checks.host.settings import CHECK, METRIC_BY_SETTING
from seatrial.judge.rules import judge_check
from seatrial.model import Outcome, Verdict
from seatrial.worker import measure
from tests.discover import trees
from tests.paths import FIXTURES


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    trees.gpu_host(tmp_path)
    return tmp_path


def verdicts(root: Path) -> dict[str, Verdict]:
    context = Context(
        node="node3",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=root,
        run_dir=root,
        root=root,
    )
    return {verdict.metric: verdict for verdict in judge_check(CHECK, [measure(CHECK, context, {})], {}, "test")}


def not_passed(root: Path) -> dict[str, Outcome]:
    return {
        metric: verdict.outcome
        for metric, verdict in verdicts(root).items()
        if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)
    }


def test_every_metric_has_one_rule_that_warns() -> None:
    assert sorted(rule.metric for rule in CHECK.rules) == sorted(CHECK.units)
    for rule in CHECK.rules:
        assert [limit.outcome for limit in rule.limits] == [Outcome.WARN]
        assert rule.meaning.endswith(".")
        assert len(rule.fix) > 20


def test_a_good_node(root: Path) -> None:
    outcomes = {metric: verdict.outcome for metric, verdict in verdicts(root).items()}
    assert outcomes.pop("gdrcopy_accessible") is Outcome.SKIP
    assert set(outcomes.values()) == {Outcome.PASS}


@pytest.mark.parametrize(
    ("metric", "files"),
    [
        (
            "open_kernel_module",
            {
                "proc/driver/nvidia/version": (FIXTURES / "host" / "nvidia-version-closed.txt").read_text(),
                "sys/module/nvidia_peermem/refcnt": "0\n",
            },
        ),
        ("gpudirect_rdma_available", {"proc/sys/kernel/osrelease": "5.4.0-216-generic\n"}),
        ("iommu_translates", {"sys/kernel/iommu_groups/0/type": "DMA\n"}),
        ("governor_performance", {"sys/devices/system/cpu/cpu9/cpufreq/scaling_governor": "schedutil\n"}),
        ("turbo_enabled", {"sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"}),
        ("transparent_hugepages_enabled", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}),
        ("numa_balancing_enabled", {"proc/sys/kernel/numa_balancing": "1\n"}),
        ("gdrcopy_accessible", {"sys/module/gdrdrv/refcnt": "0\n"}),
        (
            "performance_counters_readable",
            {"proc/driver/nvidia/params": (FIXTURES / "host" / "nvidia-params.txt").read_text()},
        ),
    ],
)
def test_each_setting_is_a_warning(root: Path, metric: str, files: dict[str, str]) -> None:
    trees.write(root, files)
    assert not_passed(root) == {metric: Outcome.WARN}


def test_acs_is_a_warning_that_names_the_bridge(root: Path) -> None:
    (root / "sys/bus/pci/devices" / trees.GPU_BRIDGE / "config").write_bytes(trees.pci_config(0x1D))
    assert not_passed(root) == {"acs_redirecting_bridges": Outcome.WARN}
    verdict = verdicts(root)["acs_redirecting_bridges"]
    assert verdict.value == 1
    assert trees.GPU_BRIDGE in verdict.evidence


def test_acs_is_skipped_for_users(root: Path) -> None:
    for config in root.rglob("config"):
        config.write_bytes(config.read_bytes()[:64])
    verdict = verdicts(root)["acs_redirecting_bridges"]
    assert verdict.outcome is Outcome.SKIP
    assert "only root" in verdict.detail


def test_an_unreadable_setting_is_an_error_with_its_reason(root: Path) -> None:
    trees.write(root, {"proc/sys/kernel/numa_balancing": "garbage\n"})
    verdict = verdicts(root)["numa_balancing_enabled"]
    assert verdict.outcome is Outcome.ERROR
    assert "garbage" in verdict.detail


def test_the_iommu_of_another_architecture_is_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    trees.write(root, {"sys/kernel/iommu_groups/0/type": "DMA\n"})
    assert verdicts(root)["iommu_translates"].outcome is Outcome.SKIP


@pytest.mark.parametrize("with_files", [True, False])
def test_everything_is_skipped_without_a_gpu(tmp_path: Path, with_files: bool) -> None:
    if with_files:
        trees.node(tmp_path)
        trees.write(tmp_path, {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"})
    outcomes = {verdict.outcome for verdict in verdicts(tmp_path).values()}
    assert outcomes == {Outcome.SKIP}
    assert len(METRIC_BY_SETTING) == len(verdicts(tmp_path))


def test_this_machine_has_no_error(tmp_path: Path) -> None:
    context_root = Path("/")
    assert Outcome.ERROR not in {verdict.outcome for verdict in verdicts(context_root).values()}
    assert not list(tmp_path.iterdir())
