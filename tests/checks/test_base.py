from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.checks import catalog
from seatrial.checks.base import NEW_ERRORS_PREFIX, Check, Context, Needs, Options, RuleFact
from seatrial.model import Observation, Phase, Rule, Scope, SeatrialError, Threshold


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


def _measure(context: Context, options: Any) -> Iterator[Observation]:
    yield from ()


@pytest.mark.parametrize(
    ("phase", "metrics", "counted"),
    [
        (Phase.SINGLE_GPU, {"tflops": "TFLOP/s"}, True),
        (Phase.INTERCONNECT, {"busbw.*": "GB/s"}, True),
        (Phase.ENVIRONMENT, {"nodes": "nodes"}, False),
        (Phase.SINGLE_GPU, {f"{NEW_ERRORS_PREFIX}ecc": "count"}, False),  # it reads the counters itself
    ],
)
def test_error_counters_are_read_around_checks_that_load_gpus(
    phase: Phase, metrics: dict[str, str], counted: bool
) -> None:
    check = Check(
        name="t.t", title="t", phase=phase, scope=Scope.GPU, metrics=metrics, rules=(), measure=_measure, limit_s=1
    )
    assert check.reads_error_counters is counted


def check_with(rule: Rule, facts: dict[str, RuleFact]) -> Check:
    return Check(
        name="t.t",
        title="t",
        phase=Phase.DEVICE,
        scope=Scope.GPU,
        metrics={"m": "s"},
        rules=(rule,),
        rule_facts=facts,
        measure=_measure,
        limit_s=1,
    )


@pytest.mark.parametrize("field", ["applies_if", "reference_if"])
@pytest.mark.parametrize(
    ("required", "facts", "text"),
    [
        ("yes", {}, r"link = 'yes'.*rule_facts"),
        ("yes", {"other": RuleFact()}, r"link = 'yes'.*rule_facts"),
        ("nvlink", {"link": RuleFact("NVLink|PCIe")}, r"link = 'nvlink'.*NVLink\|PCIe"),
        ("True", {"link": RuleFact()}, r"link = 'True'.*yes\|no"),
    ],
)
def test_rule_on_an_undeclared_fact_or_value_is_an_error_on_load(
    field: str, required: str, facts: dict[str, RuleFact], text: str
) -> None:
    rule = Rule(metric="m", expect=Threshold.parse("< 1 s"), meaning="", fix="", **{field: {"link": required}})
    with pytest.raises(SeatrialError, match=text):
        check_with(rule, facts)
    assert check_with(rule, {"link": RuleFact(required)})


def test_rule_cannot_require_another_type_than_text() -> None:
    with pytest.raises(ValidationError, match="applies_if"):
        Rule.model_validate({"metric": "m", "applies_if": {"link": True}, "meaning": "", "fix": ""})


@pytest.mark.parametrize(
    ("fact", "accepted", "rejected"),
    [
        (RuleFact(), ["yes", "no", "no: too old", "not_supported", "permission_denied: root only"], ["yes: new", "No"]),
        (RuleFact("nccl|gloo"), ["nccl", "not_supported: no NCCL"], ["no", "no: NCCL", "nccl: 2.28", "nccl\n", "mpi"]),
        (RuleFact(r"all|\d+"), ["all", "12"], ["", 12, True, None, [], {}, 1.0]),
    ],
)
def test_values_of_a_fact(fact: RuleFact, accepted: list[Any], rejected: list[Any]) -> None:
    assert all(map(fact.accepts, accepted))
    assert not any(map(fact.accepts, rejected))


@pytest.mark.parametrize("name", catalog())
def test_check_that_may_skip_itself_declares_when(name: str) -> None:
    check = catalog()[name]
    measure = getattr(check.measure, "func", check.measure)  # of a partial
    source = inspect.getsource(sys.modules[measure.__module__])
    skips_itself = "raise NotApplicable" in source or "@needs_slurm" in source or "options.settings()" in source
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


def test_order_and_names_of_the_catalog() -> None:
    """`--set checks.GROUP.WORD...` relies on the form of the names."""
    phases = [check.phase for check in catalog().values()]
    assert phases == sorted(phases, key=list(Phase).index)
    assert {name: name.count(".") for name in catalog()} == {check.name: 1 for check in catalog().values()}
    assert len(catalog()) == len(set(map(id, catalog().values())))
    assert not {"gpu._name", "gpu.kernel_log_", "x.inventory", "gpu", "gpu/inventory", "..", ""} & set(catalog())
    assert "x.inventory" not in catalog()  # in a file of this name there is another check
