"""Waits and retries that ended well are no findings."""

from __future__ import annotations

import io

import pytest

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search
from seatrial.diagnose.signatures import all_signatures

REFUSED = "ssh: connect to host {} port 22: Connection refused"
ANSWERS = "Warning: Permanently added '{}' (ED25519) to the list of known hosts."
NO_MOUNT = '  Warning  FailedMount  32s  kubelet  MountVolume.SetUp failed for volume "x" : timed out'
STARTED = "  Normal   Started      5s   kubelet  Started container main"
LOST = (
    "Lustre: x-OST1-osc-ff: Connection to x-OST1 (at 10.0.0.1@o2ib) was lost; in progress operations using this service"
)
RESTORED = "Lustre: x-OST1-osc-ff: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)"


def places(*lines: str) -> list[tuple[str, str]]:
    findings = explain(search(io.BytesIO("\n".join(lines).encode()), "x"))
    return [(finding.signature, finding.subject) for finding in findings]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((REFUSED.format("n1"),), [("host.ssh", "host n1")]),
        ((REFUSED.format("n1"), ANSWERS.format("n1")), []),
        ((REFUSED.format("n1"), ANSWERS.format("n2")), [("host.ssh", "host n1")]),
        ((ANSWERS.format("n1"), REFUSED.format("n1")), [("host.ssh", "host n1")]),
        ((REFUSED.format("n1"), ANSWERS.format("n1"), REFUSED.format("n1")), [("host.ssh", "host n1")]),
        ((NO_MOUNT,), [("kubernetes.volume_mount", "")]),
        ((NO_MOUNT, STARTED), []),
        ((LOST,), [("filesystem.lustre_lost", "")]),
        ((LOST, RESTORED), []),
        (("error: connect to 10.0.0.1:80 failed: Connection refused", "connection established"), []),
    ],
)
def test_a_failure_that_a_later_line_ends_is_none(lines: tuple[str, ...], found: list[tuple[str, str]]) -> None:
    assert places(*lines) == found


def test_recoveries_end_known_signatures() -> None:
    recoveries = [signature for signature in all_signatures() if signature.role == "recovery"]
    others = [signature.id for signature in all_signatures()]
    assert recoveries
    for recovery in recoveries:
        for pattern in recovery.confirms:
            alone = recovery.model_copy(update={"confirms": (pattern,)})
            assert any(map(alone.confirms_signature, others)), (recovery.id, pattern)
