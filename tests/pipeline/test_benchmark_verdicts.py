"""The next step after a verdict on the output of another tool."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.config.schema import Config
from seatrial.judge import judge
from seatrial.model import CLUSTER, BasisKind, Outcome, Reason, Verdict
from tests.paths import FIXTURES
from tests.pipeline.test_judge_nccl_tests import judged, only_result, table


def test_the_next_step_without_ports_is_to_give_them() -> None:
    result = only_result(judged(table(470), gpus="8xH100", nodes=2))
    assert result.outcome is Outcome.UNJUDGED
    assert "no log of NCCL names it" in result.problems[0]
    assert {verdict.fix.partition(": ")[2][:20] for verdict in result.verdicts if verdict.fix} == {
        "--nics PORTSxGb/s, s"
    }


def test_the_next_step_of_an_unknown_model_lists_the_known_ones() -> None:
    result = only_result(judged(table(470), gpus="8xH300", nodes=2, nics="8x400"))
    assert result.outcome is Outcome.UNJUDGED
    fixes = [verdict.fix for verdict in result.verdicts if verdict.fix]
    assert fixes
    assert all("models with reference values: A100 PCIe 40GB" in fix and "H200 SXM" in fix for fix in fixes)


def test_error_on_the_whole_check_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an error of the judge on the coverage of the job."""

    def with_error(config: Config, *arguments: Any) -> tuple[Verdict, ...]:
        reasons = (Reason.PLAN_MISMATCH,)
        error = Verdict(next(iter(config.checks)), CLUSTER, Outcome.ERROR, reasons=reasons, detail="no rank 3")
        return (*judge(config, *arguments), error)

    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "8x400"}
    assert judged(table(470), **options).outcome is Outcome.PASS
    monkeypatch.setattr("seatrial.pipeline.benchmark_verdicts.judge", with_error)
    result = only_result(judged(table(470), **options))
    assert (result.outcome, result.problems) == (Outcome.UNJUDGED, ("no rank 3",))


H100 = "NVIDIA H100 80GB HBM3"


def devices(*names: str) -> str:
    return "".join(f"#  Rank {rank} Pid 1 on n0 device {rank} [0x0f] {name}\n" for rank, name in enumerate(names))


@pytest.mark.parametrize(
    ("names", "step", "other_step"),
    [
        ((H100, "Tesla V100-SXM2-32GB"), "run again on GPUs of one model", "--baseline"),
        (("NVIDIA A100-SXM4-80GB MIG 3g.40gb",) * 2, "nvidia-smi -i INDEX -mig 0", "--baseline"),
        (("AMD Instinct MI300X",) * 2, "the figures of AMD", "--baseline"),  # rccl-tests prints the same table
        (("NVIDIA H300",) * 2, "--baseline", "seatrial show skus"),
        (("NVIDIA A100 80GB PCIe",) * 8, "seatrial show skus 'A100 PCIe 80GB'", "models with reference values"),
    ],
)
def test_the_next_step_fits_the_reason(names: tuple[str, ...], step: str, other_step: str) -> None:
    result = only_result(judged(devices(*names) + table(20, ranks=len(names), size=2**30)))
    assert result.outcome is Outcome.UNJUDGED
    fixes = {verdict.fix for verdict in result.verdicts if verdict.fix}
    assert fixes
    assert all(step in fix and other_step not in fix for fix in fixes)


def test_the_next_step_of_an_unknown_network_is_its_kind() -> None:
    log = "n1:9:9 [0] NCCL INFO Using network Foo_v3\n"
    result = only_result(judged(log + table(100), gpus="8xH100", nodes=2))
    fixes = [verdict.fix for verdict in result.verdicts if verdict.fix]
    assert fixes
    assert all("give --fabric" in fix and "--nics" not in fix and "seatrial show skus" not in fix for fix in fixes)


def test_the_next_step_of_a_value_above_the_links_is_to_check_the_options() -> None:
    result = only_result(judged(table(2000, ranks=8), gpus="8xH200", nodes=1))
    assert {verdict.fix for verdict in result.verdicts if verdict.metric.startswith("busbw")} == {
        "check the options on the hardware, and run the benchmark again"
    }


def test_another_size_than_that_of_a_reference_value_is_compared_with_the_links() -> None:
    output = (FIXTURES / "nccl-tests/all_reduce_perf.txt").read_text()  # 4 GPUs, up to 1 GiB
    result = only_result(judged(output))
    assert result.outcome is Outcome.PASS
    bandwidths = [verdict for verdict in result.verdicts if verdict.metric.startswith("busbw")]
    assert {verdict.basis and verdict.basis.kind for verdict in bandwidths} == {BasisKind.PHYSICAL_LIMIT}
