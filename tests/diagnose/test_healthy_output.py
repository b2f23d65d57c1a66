"""Help texts, legends and healthy output of tools are no failures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search

FIXTURES = Path(__file__).parent.parent / "fixtures"
FILES = (
    "help-texts.log",  # --help of mount, curl, wget, tar, systemctl, torchrun, accelerate, docker, kubectl and others
    "healthy-status-output.log",  # ibstat, rdma link, nvidia-smi, dcgmi, nvidia-imex-ctl, sinfo, their legends
    "healthy-retries-and-probes.log",
    "healthy-tool-output.log",
)


@pytest.mark.parametrize("name", FILES)
def test_healthy_output_has_no_finding(name: str) -> None:
    data = (FIXTURES / name).read_bytes()
    for shuffled in (data, b"\n".join(reversed(data.splitlines()))):
        findings = explain(search(io.BytesIO(shuffled), "x"))
        assert [(finding.signature, finding.evidence) for finding in findings] == []


def test_status_output_that_is_cut_in_the_middle_has_no_finding() -> None:
    data = (FIXTURES / "healthy-status-output.log").read_bytes()
    for end in range(0, len(data), 97):
        assert not explain(search(io.BytesIO(data[:end]), "x")), data[max(0, end - 200) : end]
