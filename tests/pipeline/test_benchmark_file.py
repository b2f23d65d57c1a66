"""pipeline/benchmark_file.py and `seatrial judge`: recognition by content, exit codes, JSON, input that is neither."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seatrial.model import UsageError
from seatrial.pipeline.benchmark_file import open_benchmark
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from seatrial.report.benchmark import lines
from tests.discover.test_nccl_tests_json import report as nccl_tests_report
from tests.discover.test_nvbandwidth_output import report as nvbandwidth_report
from tests.paths import FIXTURES, ROOT
from tests.pipeline.test_judge_nccl_tests import table
from tests.pipeline.test_load_trial import record
from tests.processes import call

FOLDER = FIXTURES / "nccl-tests" / "published"
SLOW, GOOD = FOLDER / "24.txt", FOLDER / "20.txt"
H100 = ("--gpus", "8xH100", "--nodes", "2", "--nics", "8x400")


def test_exit_codes() -> None:
    code, out, _ = call("judge", GOOD, *H100)
    assert (code, out.splitlines()[-1]) == (0, "Outcome: PASS")
    code, out, _ = call("judge", SLOW, *H100, "--fabric", "ib")
    assert (code, out.splitlines()[-1]) == (1, "Outcome: FAIL")
    assert call("judge", GOOD)[0] == 3


def test_answer_has_value_bound_expectation_source_and_path() -> None:
    _, out, _ = call("judge", SLOW, *H100)
    assert "155.57 GB/s" in out
    assert "bound: 480 GB/s" in out
    assert "published figures on 2 to 12 nodes" in out
    assert "over the network (rdma 8 x 400 Gb/s)" in out
    assert "next: " in out


def test_example_of_the_documentation() -> None:
    page = (ROOT / "docs" / "judge-nccl-tests.md").read_text()
    (command,) = re.findall(r"\$ seatrial judge slurm-1234.out (.*)", page)
    (example,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    _, out, _ = call("judge", SLOW, *command.split())
    assert out.replace(str(SLOW), "slurm-1234.out") == example


def test_json_document() -> None:
    code, out, _ = call("judge", GOOD, *H100, "--json")
    document = json.loads(out)
    assert (code, document["tool"], document["outcome"]) == (0, "nccl-tests", "PASS")
    (result,) = document["results"]
    assert result["bound"]["value"] == 480
    bases = [verdict["basis"] for verdict in result["verdicts"] if verdict["metric"].startswith("busbw")]
    assert {basis["kind"] for basis in bases} == {"fabric_model"}
    assert document["hardware"]["sources"]["nodes"] == "--nodes"


def test_baseline_of_the_site(tmp_path: Path) -> None:
    """The output reaches the published value and misses what the site requires."""
    run = {"path": "run", "host": "n1", "digest": "d"}
    value = {"gpus": 16, "nodes": 2, "value": 480, "required": 470, "unit": "GB/s", "source": "three runs", "runs": 3}
    value |= {"gpu": "NVIDIA H100 80GB HBM3", "fabric": "ib-8x400"}
    runs = [run | {"started": started, "digest": str(started)} for started in (1.0, 2.0, 3.0)]
    site = {"name": "here", "learned_from": runs, "expected": {"all_reduce.busbw.8GiB": [value]}}
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    code, out, _ = call("judge", GOOD, *H100, "--fabric", "ib", "--baseline", tmp_path / "site.yaml", "--json")
    (result,) = json.loads(out)["results"]
    kinds = {verdict["basis"]["kind"] for verdict in result["verdicts"] if verdict["outcome"] == "FAIL"}
    assert (code, kinds) == (1, {"site"})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_encodings(encoding: str, is_packed: bool, tmp_path: Path) -> None:
    content = GOOD.read_text().encode(encoding)
    path = tmp_path / "output"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    assert call("judge", path, *H100)[0] == 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_standard_input(is_packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = SLOW.read_bytes()
    path = tmp_path / "output"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        code, out, _ = call("judge", "-", *H100)
    assert (code, out.splitlines()[0]) == (1, "nccl-tests: standard input")


@pytest.mark.parametrize("document", [nccl_tests_report(), nvbandwidth_report()])
def test_json_reports(document: dict[str, object], tmp_path: Path) -> None:
    for name, text in (
        ("own.json", json.dumps(document)),
        ("sorted.json", json.dumps(document, sort_keys=True, indent=1)),
    ):
        (tmp_path / name).write_text(text)
        assert call("judge", tmp_path / name)[0] == 3
    (tmp_path / "cut.json").write_text(json.dumps(document)[:-20])
    code, out, _ = call("judge", tmp_path / "cut.json")
    assert code == 3
    assert "truncated" in out


@pytest.mark.parametrize(
    ("busbw", "copy", "outcomes"),
    [(470, "372.96", ["PASS", "PASS"]), (240, "372.96", ["FAIL", "PASS"]), (470, "162.45", ["PASS", "FAIL"])],
)
def test_log_with_the_output_of_both_tools(busbw: float, copy: str, outcomes: list[str], tmp_path: Path) -> None:
    """No result of one tool hides those of the other, whichever is first."""
    matrices = (FIXTURES / "nvbandwidth" / "h100-peers-0.4.txt").read_text().replace("372.96", copy)
    for parts in ((table(busbw, ranks=8), matrices), (matrices, table(busbw, ranks=8))):
        path = tmp_path / "slurm-1.out"
        path.write_text(f"\n{'text of the job' * 30000}\n".join(parts))
        _, out, _ = call("judge", path, "--gpus", "8xH100", "--nodes", "1", "--json")
        document = json.loads(out)
        assert [result["outcome"] for result in document["results"]] == outcomes
        assert document["outcome"] == min(outcomes)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "no results"),
        (b"hello\nworld\n", "no results"),
        (bytes(range(256)), "binary"),
        (b"\x1f\x8b\x08\x00truncated", "cannot read"),
        (gzip.compress(b'{"a": 1}', mtime=0), "is not a trial.json"),
        (gzip.compress(GOOD.read_bytes(), mtime=0)[:-30], "cannot read"),
        (gzip.compress(b" " * 2**20 * 20 + b"\n", mtime=0), "no results"),
        (b'{"a": 1}', "is not a trial.json"),
        (b"[" * 5000, "no results"),
        (b"\xff\xfe\x00", "no results"),
        (b"srun: error: node1: task 0: Exited with exit code 1\n", "no results"),
    ],
)
def test_content_that_is_neither(content: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    code, out, err = call("judge", path)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


def test_launcher_that_failed_before_the_first_result(tmp_path: Path) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_text("+ srun all_reduce_perf -b 8\nn1: Test CUDA failure common.cu:1000 'no CUDA-capable device'\n")
    code, out, _ = call("judge", path)
    assert code == 3
    assert "no CUDA-capable device" in out


def test_options_of_the_other_kind(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text(record())
    code, _, err = call("judge", path, "--gpus", "8xH100")
    assert code == 2
    assert "a record has its hardware" in err
    code, _, err = call("judge", tmp_path / "missing", "--gpus", "8xH100")
    assert code == 2
    assert "cannot read" in err
    code, _, err = call("judge", GOOD, "--why-not")
    assert code == 2
    assert "--why-not" in err


def test_terminal_sequences_are_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_text(f"#  Rank  0 Group  0 Pid 1 on n1 device  0 [0x0f] \x1b]0;title\x07evil\x9b31m\n{GOOD.read_text()}")
    _, out, _ = call("judge", path, *H100)
    assert "\x1b" not in out
    assert "\x9b" not in out


LINES = [*GOOD.read_text().splitlines(), *(FOLDER / "43.txt").read_text().splitlines(), *SLOW.read_text().splitlines()]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.lists(st.sampled_from(LINES) | st.text(max_size=40), max_size=12).map("\n".join),
    end=st.integers(0, 4000),
    damage=st.binary(max_size=8),
)
def test_lines_in_any_order_cut_and_damaged(text: str, end: int, damage: bytes, tmp_path: Path) -> None:
    """Any content has a judgement or one message."""
    content = text.encode(errors="replace")
    path = tmp_path / "output"
    path.write_bytes(content[:end] + damage + content[end + len(damage) :])
    with contextlib.suppress(UsageError):
        if benchmark := open_benchmark(path):
            judgement = benchmark.judge(HardwareOptions("8xH100", 2, "8x400"))
            assert lines(judgement)[-1] == f"Outcome: {judgement.outcome}"


def test_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        open_benchmark(Path("-"))
