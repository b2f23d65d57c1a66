"""The tiers of the tests, their order, and the tests that share a worker of pytest-xdist (see the Makefile)."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from seatrial.util.signals import STOP_SIGNALS
from tests.paths import ROOT
from tests.processes import Program

# The files of each tier that take longest start first, so that no worker still runs one when the others have ended.
LONGEST = (
    "tests/launch/test_unshared_on_rig.py",
    "tests/launch/test_slurm_on_rig.py",
    "tests/checks/slurm/test_slurm_on_rig.py",
    "tests/checks/faults/test_train_failure_on_rig.py",
    "tests/launch/test_lost_nodes_on_rig.py",
    "tests/launch/test_bad_sites_on_rig.py",
    "tests/launch/test_left_over_on_rig.py",
    "tests/pipeline/test_training_trial.py",
    "tests/checks/faults/test_train_failure.py",
    "tests/train/hf/test_run.py",
    "tests/train/test_checkpoint.py",
    "tests/test_guard.py",
    "tests/launch/test_crashes.py",
    "tests/test_bad_input.py",
    "tests/pipeline/test_run.py",
    "tests/test_docs.py",
    "tests/test_hostile_input.py",
    "tests/bench/test_child_ranks.py",
    "tests/cli/test_trial.py",
    "tests/checks/fabric/test_real_groups.py",
    "tests/deploy/test_wheelhouse.py",
    "tests/pipeline/test_node_environments.py",
    "tests/pipeline/test_mutations.py",
    "tests/checks/training/test_command.py",
    "tests/launch/test_torchrun.py",
)

# nohup, or a shell that starts pytest in the background, ignores these signals, which tests send.
for stop in STOP_SIGNALS:
    if signal.getsignal(stop) is signal.SIG_IGN:
        signal.signal(stop, signal.default_int_handler if stop is signal.SIGINT else signal.SIG_DFL)

# Times of single examples say nothing on a machine that runs other tests at the same time.
settings.register_profile("seatrial", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seatrial")

gc.disable()  # until all is imported: see pytest_collection_finish


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmarked = [item.nodeid for item in items if _uses_rig(_file(item)) and not item.get_closest_marker("cluster")]
    if unmarked:
        raise pytest.UsageError(f"tests of a file that imports tests.rig need pytest.mark.cluster: {unmarked}")
    rank = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_file(item), len(rank)))


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules, about a million, from garbage collection: they stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Restore the umask after each test: opening a run directory sets that of the process."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let torch use one thread: threads wait actively for each other, which takes minutes if other tests use the cores.

    Before each test, because code that opens a process group sets the number of threads.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return FilePerWorker(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of the test's programs to the report of a failure, and kill those that still run."""
    report = yield
    if report.failed:
        report.sections += [("seatrial process", program.report()) for program in Program.started]
    if report.failed or report.when == "teardown":
        Program.started.clear()
    return report


class FilePerWorker(LoadScopeScheduling):  # type: ignore[misc]
    """All tests of a file run in one worker, also those of its classes: they share the fixtures of the module."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@cache
def _uses_rig(file: str) -> bool:
    return "tests.rig" in (ROOT / file).read_text(encoding="utf-8")
