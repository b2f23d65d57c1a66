"""Signatures of a site: they add and change, and a wrong one is named with its file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.diagnose import log_search
from seatrial.diagnose.log_search import search_text
from seatrial.diagnose.signatures import _loaded, check_signatures, signatures
from seatrial.model import UsageError
from tests.diagnose.test_signature import ROW
from tests.processes import call

XID_79 = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus."
OWN = {**ROW, "id": "site.storage", "pattern": "storage of hall 3 is down", "examples": ["storage of hall 3 is down"]}


@pytest.fixture(autouse=True)
def _empty_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SEATRIAL_SIGNATURES", str(tmp_path))
    caches = (_loaded, log_search._database, log_search._revocable)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def write(folder: Path, rows: Any, name: str = "a.yaml") -> None:
    (folder / name).write_text(rows if isinstance(rows, str) else yaml.safe_dump(rows))


def test_site_adds_a_signature_and_changes_a_policy(tmp_path: Path) -> None:
    write(tmp_path, [OWN])
    write(tmp_path, [{"id": "xid.79", "action": "replace-hardware", "fix": "Call the hotline."}], "b.yaml")
    matches = search_text(f"{XID_79}\n{OWN['examples'][0]}", "x")
    assert [(match.signature.id, match.signature.action) for match in matches] == [
        ("xid.79", "replace-hardware"),
        ("site.storage", "none"),
    ]
    assert matches[0].signature.title == "Xid 79: the GPU fell off the bus"


def test_default_folder_and_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_SIGNATURES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "site.storage" not in {signature.id for signature in signatures()}
    folder = tmp_path / "seatrial" / "signatures"
    folder.mkdir(parents=True)
    write(folder, [OWN])
    write(folder, "# nothing yet\n", "empty.yaml")
    _loaded.cache_clear()
    assert "site.storage" in {signature.id for signature in signatures()}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([OWN, {**OWN, "id": "site.b", "pattern": "(a"}], "row 2 (site.b): pattern '(a' is not a regular expression"),
        ([{**OWN, "examples": []}], "row 1 (site.storage): examples: tuple should have at least 1 item"),
        ([{**OWN, "counter_examples": []}], "row 1 (site.storage): counter_examples: "),
        ([{"id": "site.b", "action": "none"}], "row 1 (site.b): title: field required"),
        ([{"id": "xid.79", "action": "pray"}], "row 1 (xid.79): action: input should be 'none'"),
        ([{"id": "xid.79", "acton": "none"}], "row 1 (xid.79): acton: "),
        ([{**OWN, "pattern": "(a+)+"}], "row 1 (site.storage): pattern '(a+)+' repeats a repetition"),
        ([{**OWN, "pattern": "a*"}], "row 1 (site.storage): pattern 'a*' matches every line"),
        ([{**OWN, "pattern": r"st\u006frage of hall"}], "is not supported by the search of logs: "),
        ([{**OWN, "pattern": "other"}], "row 1 (site.storage): the pattern does not match the example"),
        ([{**OWN, "counter_examples": OWN["examples"]}], "row 1 (site.storage): the pattern matches the counter-"),
        ([OWN, OWN], "row 2 (site.storage): the same id is in "),
        (["x"], "row 1: expected a mapping with an id"),
        ({"signatures": [OWN]}, "expected a list of signatures (- id: ...), found dict"),
        ("- [", "not valid YAML: "),
        ("#" * (2**20 + 1), "larger than 1048576 bytes"),
    ],
)
def test_wrong_row_is_named(rows: Any, reason: str, tmp_path: Path) -> None:
    write(tmp_path, rows)
    with pytest.raises(UsageError) as error:
        check_signatures()
    assert str(error.value).startswith(str(tmp_path / "a.yaml"))
    assert reason in str(error.value)


def test_folder_of_the_variable_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_SIGNATURES", str(tmp_path / "nosuch"))
    with pytest.raises(UsageError, match="this is not a directory"):
        check_signatures()


def test_explain_names_a_wrong_row_and_uses_the_others(tmp_path: Path) -> None:
    write(tmp_path, [{**OWN, "pattern": "(a"}, {"id": "xid.79", "action": "replace-hardware"}])
    write(tmp_path, "- [", "b.yaml")
    log = tmp_path / "x.log"
    log.write_text(XID_79 + "\n")
    code, out, err = call("explain", log, "--json")
    assert (code, json.loads(out)[0]["action"], "Traceback" in err) == (0, "replace-hardware", False)
    assert f"{tmp_path}/a.yaml, row 1 (site.storage): pattern" in err
    assert f"{tmp_path}/b.yaml: not valid YAML" in err
    assert call("show", "checks")[0] == 0
