"""report/benchmark.py: the text of a judgement."""

from __future__ import annotations

from seatrial.report.benchmark import lines
from tests.paths import FIXTURES
from tests.pipeline.test_judge_nccl_tests import judged
from tests.pipeline.test_judge_nvbandwidth import PEERS
from tests.pipeline.test_judge_nvbandwidth import judged as judged_nvbandwidth

SLOW = (FIXTURES / "nccl-tests" / "published" / "24.txt").read_text()


def test_failed_operation() -> None:
    text = lines(judged(SLOW, gpus="8xH100", nodes=2, nics="8x400", fabric="ib"))
    assert text[0] == "nccl-tests: file"
    assert "model: NVIDIA H100 80GB HBM3 (--gpus)" in text[1]
    assert "network: ib 8 x 400 Gb/s (kind: --fabric, ports: --nics)" in text[1]
    assert any(line.startswith("FAIL all_reduce (float, sum), between 2 nodes, over the network") for line in text)
    assert any(line.split()[:5] == ["8GiB", "155.57", "GB/s", "155.56", "GB/s"] for line in text)
    assert sum(line.startswith("    next: ") for line in text) == 1  # the same fix is printed once
    assert text[-1] == "Outcome: FAIL"


def test_unjudged_operation_states_why() -> None:
    text = lines(judged(SLOW))
    assert any(line.startswith("  why: ") for line in text)
    assert text[-1] == "Outcome: UNJUDGED"


def test_many_subjects() -> None:
    """The worst values, and how many there are."""
    good = lines(judged_nvbandwidth(PEERS))
    assert "  56 values from 370.3 GB/s to 373 GB/s; 1 of them listed above" in good
    slow = lines(judged_nvbandwidth(PEERS.replace("372.96", "162.45")))
    assert any(line.startswith("  FAIL node/gpu2->gpu4: ") for line in slow)
