from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.discover import slurm_json, slurm_text
from seatrial.discover.slurm_facts import Job
from tests.fakes.slurm import recorded
from tests.paths import FIXTURES


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FIXTURES / "slurm-json" / name).read_text())
    return loaded


def the_job(name: str) -> Job:
    (job,) = slurm_json.jobs(document(name))
    return job


@pytest.mark.parametrize("state", ["healthy", "busy", "troubled"])
def test_json_and_text_of_one_cluster_tell_the_same_nodes(state: str) -> None:
    from_json = slurm_json.nodes(json.loads(recorded(f"sinfo-{state}.json").out))
    from_text = slurm_text.nodes(recorded(f"scontrol-show-nodes-{state}.txt").out)
    assert [node.model_copy(update={"gres_used": None}) for node in from_json] == list(from_text)
    assert all(node.gres_used is not None for node in from_json)


@pytest.mark.parametrize("state", ["busy", "ended", "impossible"])
def test_json_and_text_of_one_queue_tell_the_same_jobs(state: str) -> None:
    def known(jobs: tuple[Job, ...]) -> dict[str, Job]:
        # 22.05 has null in JSON for a time that has no limit.
        return {job.id: job.model_copy(update={"time_limit_s": None}) for job in jobs if job.time_limit_s}

    from_json = slurm_json.jobs(json.loads(recorded(f"squeue-{state}.json").out))
    from_text = slurm_text.jobs(recorded(f"scontrol-show-jobs-{state}.txt").out)
    limited = [job for job in from_text if job.time_limit_s != "unlimited"]
    assert known(from_json) == known(tuple(limited))
    assert len(limited) >= 10


class TestNewerLayouts:
    def test_nodes_of_24_11(self) -> None:
        nodes = {node.name: node for node in slurm_json.nodes(document("nodes-24.11.json"))}
        assert {name: str(node) for name, node in nodes.items()} == {
            "gpu1": "IDLE",
            "gpu2": "MIXED+PLANNED",
            "gpu3": "IDLE+DRAIN: Xid 79 on gpu5 = lost, State=bad",
            "gpu4": "DOWN+NOT_RESPONDING: Not responding",
            "gpu5": "IDLE+CLOUD+POWERED_DOWN",
            "gpu6": "FUTURE",
            "gpu7": "IDLE+MAINTENANCE+RESERVED",
            "gpu8": "IDLE+INVALID_REG: gres/gpu count reported lower than configured (7 < 8)",
        }
        assert [name for name, node in nodes.items() if not node.up] == ["gpu4", "gpu8"]
        assert [name for name, node in nodes.items() if node.held_back] == ["gpu3"]
        assert [name for name, node in nodes.items() if node.reserved] == ["gpu7"]
        assert nodes["gpu5"].usable  # asleep: Slurm wakes it for a job
        node = nodes["gpu2"]
        assert (node.cpus, node.memory_bytes, node.gpus) == (224, 2063937 * 2**20, 8)
        assert node.gres_used is not None
        assert node.gres_used[0].count == 3
        assert node.partitions == ("main", "debug")

    def test_nodes_of_23_02(self) -> None:
        assert [str(node) for node in slurm_json.nodes(document("nodes-23.02.json"))] == [
            "ALLOCATED",
            "IDLE+DRAIN: ECC",
        ]

    def test_a_job_that_waits(self) -> None:
        job = the_job("job-pending-24.11.json")
        assert (job.id, job.state, job.reason) == ("41", "PENDING", "ReqNodeNotAvail, UnavailableNodes:gpu4")
        assert (job.time_limit_s, job.start, job.nodes) == (1800, 1760009999.0, "")

    def test_a_job_whose_nodes_are_still_being_cleared(self) -> None:
        job = the_job("job-completing-24.11.json")
        assert (job.state, job.flags) == ("COMPLETED", ("COMPLETING",))
        assert job.ended
        assert not job.gone

    @pytest.mark.parametrize(
        ("file", "exit_code", "signal"),
        [("job-failed-23.02.json", 7, 0), ("job-failed-23.11.json", 7, 0), ("job-signalled-23.11.json", 0, 9)],
    )
    def test_jobs_that_failed(self, file: str, exit_code: int, signal: int) -> None:
        job = the_job(file)
        assert (job.state, job.exit_code, job.signal) == ("FAILED", exit_code, signal)

    def test_no_limit(self) -> None:
        assert the_job("job-failed-23.11.json").time_limit_s == "unlimited"

    def test_a_job_that_is_not_known(self) -> None:
        assert slurm_json.jobs(document("job-unknown-24.05.json")) == ()
        assert not slurm_json.complaints(document("job-unknown-24.05.json"))
        (complaint,) = slurm_json.complaints(document("job-unknown-24.11.json"))
        assert "Invalid job id specified" in complaint


class TestOtherLayouts:
    @pytest.mark.parametrize("other", [{}, {"nodes": None}, {"nodes": {"node0": {}}}, {"nodes": ["node0"]}])
    def test_no_list_is_an_error_and_not_an_empty_cluster(self, other: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="no list of nodes"):
            slurm_json.nodes(other)

    def test_a_missing_key_is_named(self) -> None:
        with pytest.raises(ValueError, match="no name in a record"):
            slurm_json.nodes({"nodes": [{"hostname": "a", "state": "idle"}]})

    def test_a_missing_state_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no state"):
            slurm_json.nodes({"nodes": [{"name": "a", "state": []}]})

    def test_what_is_left_out_is_unknown(self) -> None:
        (node,) = slurm_json.nodes({"nodes": [{"name": "a", "state": "IDLE+DRAIN"}]})
        assert node.flags == ("DRAIN",)
        assert (node.cpus, node.memory_bytes, node.gres_used, node.partitions) == (None, None, None, ())
