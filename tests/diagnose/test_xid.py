"""Signatures of Xids: NVIDIA's facts with our policy, and the status words of NVLink errors."""

from __future__ import annotations

import re

import pytest

from seatrial.diagnose import explain, xid
from seatrial.diagnose.log_search import search_text
from seatrial.diagnose.signatures import signatures
from seatrial.util import data_files

NVLINK = "NVRM: Xid (PCI:0018:01:00): {}"


def found(line: str) -> list[str]:
    return [match.signature.id for match in search_text(line, "x")]


def test_each_xid_of_the_catalog_has_a_signature() -> None:
    catalog = data_files.read("xid_catalog.yaml")
    ids = {signature.id for signature in signatures()}
    assert len(catalog["xids"]) == 172
    assert {f"xid.{fact['xid']}" for fact in catalog["xids"]} <= ids


def test_policy_is_for_xids_of_the_catalog() -> None:
    policy, catalog = data_files.read("xid_policy.yaml"), data_files.read("xid_catalog.yaml")
    assert set(policy["xids"]) <= {fact["xid"] for fact in catalog["xids"]}
    facts = [*catalog["xids"], *catalog["nvlink"]]
    assert {fact["immediate"] for fact in facts} == set(policy["advice"])
    words = {fact[key] for fact in facts for key in ("immediate", "investigatory")} - {""}
    assert words == set(policy["nvidia_actions"])


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        # lines of GB200 nodes, leptonai/gpud xid/nvlink_logs_test.go; the same line without status words; older drivers
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x0 0x0)", "investigate_peer_device"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0)", "investigate_link_si"),
        ("149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x0 0x0)", "netir_reset_gpu_sympathetic_report_solo"),
        ("145, pid=922932, name=acctg, RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 (0x040868e2 0x00000008)", "xid_154_eval"),
        ("149, NETIR_LINK_EVT Fatal", "xid.149"),
        ("145, pid=1, name=(x, RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 (0x040868e2 0x00000777)", "xid.145"),
    ],
)
def test_nvlink_error_is_decoded(text: str, identifier: str) -> None:
    (match,) = found(NVLINK.format(text))
    assert identifier in match


@pytest.mark.parametrize(
    ("line", "identifier"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "xid.14"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).", "xid.94"),
        ("NVRM: Xid (PCI:0000:01:00): 999, new", "xid.other"),
    ],
)
def test_address_of_old_drivers_and_mig(line: str, identifier: str) -> None:
    assert found(line) == [identifier]


def test_command_names_the_gpu() -> None:
    (finding,) = explain(search_text("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE", "x"))
    assert (finding.action, finding.first_command) == (
        "reset-gpu",
        "nvidia-smi -q -d ECC,ROW_REMAPPER -i 0000:3b:00.0",
    )
    assert "{" not in finding.fix


def test_other_numbers_are_those_that_are_not_defined() -> None:
    defined = frozenset({"1", "13", "131", "7", "999999"})
    pattern = re.compile(xid.other_numbers(defined))
    numbers = [*map(str, range(3000)), "01", "000001", "131000", "999998", "999999"]
    assert [each for each in numbers if not pattern.fullmatch(each)] == ["1", "7", "13", "131", "999999"]
    assert not pattern.fullmatch("1234567")
