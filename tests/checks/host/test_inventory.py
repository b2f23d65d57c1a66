from __future__ import annotations

import resource
from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.checks.check import Context, Options
from seatrial.checks.host.inventory import CHECK
from seatrial.discover import clock, fabric, filesystem
from seatrial.judge.rules import judge_check
from seatrial.model import Absent, Fact, Measurement, Metric, Outcome
from seatrial.util import resolver
from tests.discover import trees

GIB = 2**30
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def measure(root: Path, out: Path) -> Measurement:
    context = Context(
        node="node3",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=out,
        run_dir=out,
        root=root,
    )
    observations = list(CHECK.observe(context, Options()))
    return Measurement(
        check=CHECK.name,
        subject=context.node,
        metrics=tuple(item for item in observations if isinstance(item, Metric)),
        absent=tuple(item for item in observations if isinstance(item, Absent)),
        facts={item.name: item.value for item in observations if isinstance(item, Fact)},
    )


class Node:
    """A healthy fake node: files, and answers of its kernel; each test changes one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.free = {"/dev/shm": 900 * GIB, "/tmp": 500 * GIB}
        self.read_only: set[str] = set()
        self.limits = {resource.RLIMIT_MEMLOCK: UNLIMITED, resource.RLIMIT_NOFILE: (1048576, 1048576)}
        self.synchronised: bool | None = True
        self.addresses: tuple[str, ...] = ("10.0.4.3",)
        trees.node(root)

    def usage(self, root: Path, path: str) -> filesystem.Usage:
        assert root == self.root
        free = self.free.get(path, GIB)
        return filesystem.Usage(max(free, 2 * GIB), free, path not in self.read_only, path)

    def adjtimex(self) -> tuple[bool, float]:
        if self.synchronised is None:
            raise OSError("adjtimex: Operation not permitted")
        return self.synchronised, 0.001

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.limits.get(which, UNLIMITED)

    def measurement(self) -> Measurement:
        return measure(self.root, self.root)

    def evidence(self, name: str) -> JsonValue:
        (evidence,) = (metric.evidence for metric in self.measurement().metrics if metric.name == name)
        return evidence

    def outcomes(self) -> dict[str, Outcome]:
        verdicts = judge_check(CHECK, [self.measurement()], {}, "test")
        return {verdict.metric: verdict.outcome for verdict in verdicts}

    def not_passed(self) -> dict[str, Outcome]:
        """Return outcomes other than PASS and SKIP by metric."""
        return {
            metric: outcome
            for metric, outcome in self.outcomes().items()
            if outcome not in (Outcome.PASS, Outcome.SKIP)
        }


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path / "root")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(filesystem, "usage", node.usage)
    monkeypatch.setattr(clock, "adjtimex", node.adjtimex)
    monkeypatch.setattr(resource, "getrlimit", node.getrlimit)
    monkeypatch.setattr(resolver, "resolve", lambda _name: node.addresses)
    monkeypatch.setattr(fabric, "interface_addresses", lambda: {"eno1": ("10.0.4.3",)})
    return node


def test_this_machine(tmp_path: Path) -> None:
    """All declared metrics with their units, and no ERROR or UNJUDGED, on any machine."""
    measurement = measure(Path("/"), tmp_path)
    units = {metric.name: metric.unit for metric in measurement.metrics}
    assert units == {name: unit for name, unit in CHECK.units.items() if name in units}
    # not readable on some kernels; no RDMA device on most machines
    without = {"clock_synchronised", "rdma_inaccessible_devices", "rdma_inactive_ports"}
    assert set(CHECK.units) - set(units) <= without
    outcomes = {verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "test")}
    assert not outcomes & {Outcome.ERROR, Outcome.UNJUDGED}
    areas = {"os", "cpu", "memory", "mounts", "nics", "rdma", "limits", "hostname", "clock", "software", "unreadable"}
    assert areas <= set(measurement.facts)
    assert not list(tmp_path.iterdir())


def test_every_metric_has_a_rule_with_meaning_and_fix() -> None:
    assert sorted(rule.metric for rule in CHECK.rules) == sorted(CHECK.units)
    for rule in CHECK.rules:
        assert rule.threshold is not None
        assert rule.threshold.unit == CHECK.units[rule.metric]
        assert rule.meaning.endswith(".")
        assert len(rule.fix) > 20


def test_healthy_node(node: Node) -> None:
    outcomes = node.outcomes()
    assert set(outcomes) == set(CHECK.units)
    assert node.not_passed() == {}
    skipped = {metric for metric, outcome in outcomes.items() if outcome is Outcome.SKIP}
    assert skipped == {"memlock_unlimited", "rdma_inaccessible_devices", "rdma_inactive_ports"}


@pytest.mark.parametrize(
    ("path", "free", "metric", "outcome"),
    [
        ("/dev/shm", GIB, "shm_free", Outcome.PASS),
        ("/dev/shm", GIB - 1, "shm_free", Outcome.WARN),
        ("/tmp", GIB, "tmp_free", Outcome.PASS),
        ("/tmp", 0, "tmp_free", Outcome.WARN),
    ],
)
def test_free_space(node: Node, path: str, free: int, metric: str, outcome: Outcome) -> None:
    node.free[path] = free
    assert node.outcomes()[metric] is outcome


def test_small_dev_shm(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "usage", lambda _root, path: filesystem.Usage(64 * 2**20, 64 * 2**20, True, path))
    assert node.outcomes()["shm_bytes"] is Outcome.FAIL


def test_missing_dev_shm(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(root: Path, path: str) -> filesystem.Usage:
        if path == "/dev/shm":
            raise FileNotFoundError(2, "No such file or directory", path)
        return node.usage(root, path)

    monkeypatch.setattr(filesystem, "usage", usage)
    assert node.outcomes()["shm_bytes"] is Outcome.FAIL


def test_unreadable_dev_shm_is_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_root: Path, path: str) -> filesystem.Usage:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(filesystem, "usage", usage)
    assert node.outcomes()["shm_bytes"] is Outcome.ERROR


def test_read_only_folders_are_a_warning(node: Node) -> None:
    node.read_only |= {"/root", "/tmp"}
    assert node.not_passed() == {"home_writable": Outcome.WARN, "tmp_free": Outcome.WARN}


def test_hung_mount(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = filesystem.read(node.root)
    hung = mounts.filesystems[-1].model_copy(update={"responding": False})
    changed = mounts.model_copy(update={"filesystems": (*mounts.filesystems[:-1], hung)})
    monkeypatch.setattr(filesystem, "read", lambda _root: changed)
    assert node.outcomes()["hung_mounts"] is Outcome.FAIL
    assert node.evidence("hung_mounts") == ["/shared"]


def test_unreadable_mounts_are_an_error(node: Node) -> None:
    (node.root / "proc/self/mountinfo").unlink()
    assert node.outcomes()["hung_mounts"] is Outcome.ERROR
    reasons = {absent.metric: absent.reason for absent in node.measurement().absent}
    assert "proc/self/mountinfo" in reasons["hung_mounts"]


@pytest.mark.parametrize(
    ("soft", "hard", "not_passed"),
    [
        (4096, 4096, {}),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, {}),
        (1024, 1048576, {"nofile_soft": Outcome.WARN}),
        (1024, 4095, {"nofile_soft": Outcome.WARN, "nofile_hard": Outcome.FAIL}),
    ],
)
def test_open_files(node: Node, soft: int, hard: int, not_passed: dict[str, Outcome]) -> None:
    node.limits[resource.RLIMIT_NOFILE] = (soft, hard)
    assert node.not_passed() == not_passed


def limit_memlock(node: Node, limit: int = 8 * 2**20) -> None:
    node.limits[resource.RLIMIT_MEMLOCK] = (limit, limit)


def test_limited_memlock_without_rdma_is_skipped(node: Node) -> None:
    limit_memlock(node)
    assert node.outcomes()["memlock_unlimited"] is Outcome.SKIP


def test_limited_memlock_with_rdma(node: Node) -> None:
    limit_memlock(node)
    trees.eight_mlx5(node.root)
    assert node.outcomes()["memlock_unlimited"] is Outcome.FAIL


def test_memlock_above_total_memory_or_with_capability(node: Node) -> None:
    trees.eight_mlx5(node.root)
    limit_memlock(node, 4 * 2**40)
    assert node.outcomes()["memlock_unlimited"] is Outcome.PASS
    limit_memlock(node)
    trees.write(node.root, {"proc/self/status": "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-7\n"})
    assert node.outcomes()["memlock_unlimited"] is Outcome.PASS


def test_inactive_port(node: Node) -> None:
    trees.eight_mlx5(node.root)
    assert node.not_passed() == {"rdma_inactive_ports": Outcome.WARN}
    assert node.evidence("rdma_inactive_ports") == ["mlx5_7/1 (DOWN, Polling)"]


def test_inaccessible_rdma_device(node: Node) -> None:
    limit_memlock(node)
    trees.hca(node.root, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    (node.root / "dev/infiniband/uverbs0").unlink()
    assert node.not_passed() == {"rdma_inaccessible_devices": Outcome.WARN}
    assert node.evidence("rdma_inaccessible_devices") == ["mlx5_0"]


def test_unreadable_rdma_device_is_a_warning(node: Node) -> None:
    trees.hca(node.root, "mlx5_0", "garbage", "5: LinkUp", "400 Gb/sec (4X NDR)")
    assert node.not_passed() == {"rdma_status_readable": Outcome.WARN}


def test_unsynchronised_clock(node: Node) -> None:
    node.synchronised = False
    assert node.not_passed() == {"clock_synchronised": Outcome.WARN}


def test_unreadable_clock_status_is_a_warning(node: Node) -> None:
    node.synchronised = None
    assert node.not_passed() == {"clock_status_readable": Outcome.WARN}
    assert node.outcomes()["clock_synchronised"] is Outcome.SKIP


def test_host_name_resolves_to_loopback(node: Node) -> None:
    node.addresses = ("127.0.1.1",)
    assert node.not_passed() == {"hostname_resolves": Outcome.WARN}


def test_machine_without_files(tmp_path: Path) -> None:
    verdicts = judge_check(CHECK, [measure(tmp_path, tmp_path)], {}, "test")
    outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    assert outcomes["shm_bytes"] is Outcome.FAIL
    assert outcomes["hung_mounts"] is Outcome.ERROR
    assert outcomes["rdma_status_readable"] is Outcome.WARN
