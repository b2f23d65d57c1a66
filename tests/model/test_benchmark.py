"""model/benchmark.py: the document of `seatrial judge FILE --json`."""

from __future__ import annotations

from seatrial.model import Outcome, Verdict
from seatrial.model.benchmark import BenchmarkHardware, BenchmarkJudgement, BenchmarkResult, MeasuredSize


def test_document_is_read_back() -> None:
    verdict = Verdict(
        "collectives.all_reduce", "cluster", Outcome.FAIL, "busbw_in_place.8GiB", value=155.6, unit="GB/s"
    )
    measured = MeasuredSize(size=2**33, label="8GiB", in_place=155.6)
    result = BenchmarkResult(name="all_reduce", outcome=Outcome.FAIL, measured=(measured,), verdicts=(verdict,))
    judgement = BenchmarkJudgement(
        tool="nccl-tests",
        file="-",
        outcome=Outcome.FAIL,
        hardware=BenchmarkHardware(gpu="NVIDIA H200", nodes=2, sources={"nodes": "--nodes"}),
        results=(result,),
    )
    assert BenchmarkJudgement.model_validate_json(judgement.model_dump_json()) == judgement
