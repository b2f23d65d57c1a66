"""The path by NCCL's own word; the logs are real ones, the group is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.bench import group, rank
from seatrial.checks import collectives_path
from seatrial.checks.base import Place
from seatrial.checks.collectives_path import CHECK, PathOptions, Way
from seatrial.discover import nccl
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure

LOGS = Path(__file__).parent.parent / "fixtures" / "nccl"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        node="n0",
        rank=0,
        world_size=2,
        local_rank=0,
        device="cuda:0",
        promised_gpus=None,
        out=tmp_path,
        run_dir=tmp_path,
        root=tmp_path,
    )


def found(place: Place, monkeypatch: pytest.MonkeyPatch, log: Path, **options: bool) -> Measurement:
    monkeypatch.setattr(group, "connect", lambda _device: None)
    monkeypatch.setattr(group, "nccl_log", lambda: log)
    monkeypatch.setattr(rank, "gather", lambda value: [value, value])
    return measure(CHECK, place, PathOptions(**options).model_dump())


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    return {one.metric: one.outcome for one in judge_check(CHECK, [measurement], {}, "t")}


def active_port(root: Path) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")


def test_nvlink_is_a_good_path_and_told_of(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = found(place, monkeypatch, LOGS / "h200-nvlink-2.28.9.log")
    assert outcomes(measured) == {"past_rdma": Outcome.PASS, "without_gdr": Outcome.PASS}
    assert str(measured.facts["how"]).startswith("112 connections by P2P/CUMEM, as NCCL 2.28.9+cuda13.0 wrote")


def test_sockets_fail_where_a_port_for_rdma_is_up_and_only_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (place.root / "sys/class").mkdir(parents=True)
    assert outcomes(found(place, monkeypatch, log))["past_rdma"] is Outcome.PASS
    active_port(place.root)
    measured = found(place, monkeypatch, log)
    assert outcomes(measured)["past_rdma"] is Outcome.FAIL
    (verdict,) = [one for one in judge_check(CHECK, [measured], {}, "t") if one.outcome is Outcome.FAIL]
    assert "mlx5_0/1" in verdict.evidence
    assert outcomes(found(place, monkeypatch, log, sockets=True))["past_rdma"] is Outcome.SKIP


def test_sockets_are_an_error_where_no_port_can_be_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOGS / "h200-sockets-2.28.9.log"
    (place.root / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    measured = found(place, monkeypatch, log)
    assert "whether a port for RDMA is active cannot be read" in str(measured.error)
    assert "mlx5_0/1 state: " in str(measured.error)
    assert Outcome.PASS not in outcomes(measured).values()
    assert found(place, monkeypatch, log, sockets=True).error is None
    assert found(place, monkeypatch, LOGS / "h200-nvlink-2.28.9.log").error is None


def test_who_is_told_other_settings_is_named_and_ours_are_marked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "set_here", {"NCCL_SOCKET_IFNAME"})
    first = nccl.read(LOGS / "h200-nvlink-2.28.9.log")
    other = first.model_copy(update={"settings": {"NCCL_ALGO": "Ring"}})
    ways = [Way(path, (), "", "") for path in (first, first, other)]
    facts = collectives_path._facts(ways, ["n0/gpu0", "n0/gpu1", "n1/gpu0"], PathOptions())
    assert facts["settings"] == {"NCCL_SOCKET_IFNAME": "lo (set by seatrial)", "NCCL_NVLS_ENABLE": "0"}
    assert facts["unlike_the_first_rank"] == {"n1/gpu0": {"settings": {"NCCL_ALGO": "Ring"}}}
    assert "the network that there would be between nodes is Socket" in str(facts["how"])


def test_a_log_that_tells_nothing_is_an_error(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    measured = found(place, monkeypatch, tmp_path / "empty")
    assert "no line on how it connected" in str(measured.error)
    assert "No such file" in str(found(place, monkeypatch, tmp_path / "gone").error)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks NCCL to tell anything; what is set goes with the test."""
    monkeypatch.setattr(group, "set_here", set())
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", group.GRAPH_MIXING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("silent")
def test_nccl_is_made_to_tell_but_not_against_somebodys_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group.keep_nccl_log(tmp_path)
    assert group.nccl_log().parent == tmp_path
    assert group.nccl_log().name.endswith(".log")
    assert group.set_here == {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
    monkeypatch.setattr(group, "set_here", set())
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/elsewhere/%p")
    group.keep_nccl_log(tmp_path)
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("TRACE", "ALL")
    assert group.nccl_log() == Path(f"/elsewhere/{os.getpid()}")
    assert group.set_here == set()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("named", ["/dev/stderr", "/dev/fd/%p", "stdout", "/scratch/nccl.log", "/scratch/nccl.%h.log"])
def test_a_log_that_is_a_pipe_or_that_of_all_ranks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", named)
    group.keep_nccl_log(tmp_path)
    assert group.nccl_log().parent == tmp_path
    assert "NCCL_DEBUG_FILE" in group.set_here


@pytest.mark.usefixtures("silent")
def test_graph_mixing_is_ours_to_choose_only_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_here) == ("0", {group.GRAPH_MIXING})
    monkeypatch.setattr(group, "set_here", set())
    monkeypatch.setenv(group.GRAPH_MIXING, "1")
    group.disable_graph_mixing()
    assert (os.environ[group.GRAPH_MIXING], group.set_here) == ("1", set())
