"""The next step after a verdict without a reference value."""

from __future__ import annotations

from seatrial.model import Outcome
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


def test_the_next_step_of_another_size_names_the_sizes_with_a_reference_value() -> None:
    output = (FIXTURES / "nccl-tests/all_reduce_perf.txt").read_text()  # 4 GPUs, up to 1 GiB
    fixes = {verdict.fix for verdict in only_result(judged(output)).verdicts if verdict.fix}
    (fix,) = fixes
    assert "run again with -e 8G;" in fix
    assert "`seatrial skus 'H200 SXM'`" in fix
