from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import NEW_ERRORS_PREFIX, Check, Context, Needs, Options
from seatrial.checks.declare import Answer, metric
from seatrial.config.expect import threshold_unit_error
from seatrial.model import Phase, Scope, SeatrialError, Threshold


def context(device: str, **fields: Any) -> Context:
    where = {"node": "node3", "rank": 9, "world_size": 16, "local_rank": 1, "expected_gpus": 8}
    return Context(device=device, artifacts_dir=Path("/run/a"), run_dir=Path("/run"), **{**where, **fields})


@pytest.mark.parametrize(
    ("device", "index", "subject"),
    [
        ("cuda:1", None, "node3/gpu1"),
        ("cuda:1", 5, "node3/gpu5"),  # CUDA_VISIBLE_DEVICES=4,5: NVML's index is that of the hardware
        ("cuda:0", 0, "node3/gpu0"),
        ("cpu", None, "node3/rank9"),
    ],
)
def test_subject_is_the_gpu_or_without_one_the_rank(device: str, index: int | None, subject: str) -> None:
    assert context(device, nvml_index=index).subject == subject


def _measure(context: Context, options: Any) -> Iterator[Answer]:
    yield from ()


@pytest.mark.parametrize(
    ("phase", "name", "counted"),
    [
        (Phase.SINGLE_GPU, "tflops", True),
        (Phase.INTERCONNECT, "busbw.*", True),
        (Phase.ENVIRONMENT, "nodes", False),
        (Phase.SINGLE_GPU, f"{NEW_ERRORS_PREFIX}ecc", False),  # it reads the counters itself
    ],
)
def test_error_counters_are_read_around_checks_that_load_gpus(phase: Phase, name: str, counted: bool) -> None:
    check = Check(
        name="t.t", title="t", phase=phase, scope=Scope.GPU, declared=(metric(name),), measure=_measure, limit_s=1
    )
    assert check.reads_error_counters is counted


def test_metric_declared_twice_is_an_error_on_load() -> None:
    with pytest.raises(SeatrialError, match="declares twice: a"):
        Check(
            name="t.t",
            title="t",
            phase=Phase.DEVICE,
            scope=Scope.GPU,
            declared=(metric("a", unit="s"), metric("b"), metric("a", "yes")),
            measure=_measure,
            limit_s=1,
        )


@pytest.mark.parametrize("name", catalog())
def test_check_that_may_skip_itself_declares_when(name: str) -> None:
    check = catalog()[name]
    measure = getattr(check.measure, "func", check.measure)  # of a partial
    source = inspect.getsource(sys.modules[measure.__module__])
    skipping = ("raise NotApplicable", "@needs_slurm", "options.settings()", "several_nodes(", "select_compute_ports(")
    skips_itself = any(text in source for text in skipping)
    assert not skips_itself or check.skip_if or check.needs != Needs()
    assert skips_itself or not check.skip_if


@pytest.mark.parametrize(
    "options",
    [
        check.options
        for check in catalog().values()
        if not any(field.is_required() for field in check.options.model_fields.values())
    ],
)
def test_default_options_are_valid(options: type[Options]) -> None:
    """The settings of a check without any are not validated when a trial is loaded."""
    assert options.model_validate(options().model_dump()) == options()


def test_a_check_by_name_imports_only_files_of_that_name() -> None:
    program = "import sys; from seatrial.checks import catalog; print(catalog()['gpu.inventory'].name)\n"
    program += "print(*(name for name in sys.modules if name.startswith('seatrial.checks.') and name[16:].count('.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gpu.inventory", "seatrial.checks.gpu.inventory"]


@pytest.mark.parametrize("name", catalog())
def test_check_is_found_by_its_name(name: str) -> None:
    """Otherwise the catalog imports the files of all checks to find it."""
    check = catalog()[name]
    declared = ((module, vars(module).get("CHECKS") or (vars(module).get("CHECK"),)) for module in sys.modules.values())
    module = next(module for module, checks in declared if any(each is check for each in checks))
    assert f"_{module.__name__.rpartition('.')[2]}_" in f"_{name.replace('.', '_')}_"


def test_a_test_of_another_tool_has_one_check() -> None:
    checks: dict[str, set[str]] = {}
    for name, check in catalog().items():
        for test in (test for each in check.declared for test in each.also_measured_by):
            checks.setdefault(test, set()).add(name)
    assert {"nccl-tests", "nvbandwidth"} <= {test.partition(" ")[0] for test in checks}
    assert {test: names for test, names in checks.items() if len(names) > 1} == {}


def test_a_threshold_can_state_the_unit_of_each_metric() -> None:
    units = {unit for check in catalog().values() for unit in check.units.values()}
    assert "B" in units
    assert [unit for unit in units if threshold_unit_error(Threshold.parse(f"<= 1 {unit}"), unit)] == []


def test_order_and_names_of_the_catalog() -> None:
    """`--set checks.GROUP.WORD...` relies on the form of the names."""
    phases = [check.phase for check in catalog().values()]
    assert phases == sorted(phases, key=list(Phase).index)
    assert {name: name.count(".") for name in catalog()} == {check.name: 1 for check in catalog().values()}
    assert len(catalog()) == len(set(map(id, catalog().values())))
    assert not {"gpu._name", "gpu.kernel_log_", "x.inventory", "gpu", "gpu/inventory", "..", ""} & set(catalog())
    assert "x.inventory" not in catalog()  # in a file of this name there is another check
