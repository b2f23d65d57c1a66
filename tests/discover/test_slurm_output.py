from __future__ import annotations

import json
from datetime import datetime

import pytest

from seatrial.discover import slurm_facts, slurm_output
from seatrial.discover.slurm_facts import Gres, JobRecord, Ping
from seatrial.model import SeatrialError
from tests.fakes.slurm import NEWER_NODES, recorded

# One line each: from the test cluster; from a public log of 2023 (a job with four tasks, two threads per core); and one
# with non-contiguous CPUs and GPUs.
ALLOCATIONS = """\
   JOB_GRES=gpu:h100:6
     Nodes=node[0-1] CPU_IDs=0-1 Mem=2000 GRES=gpu:fake:2(IDX:0-1)
     Nodes=inti6023 CPU_IDs=208-215 Mem=7500 GRES=
     Nodes=gpu1 CPU_IDs=0-3,64-67 Mem=0 GRES=gpu:h100:2(IDX:0,3)
   MinCPUsNode=2 MinMemoryCPU=1000M MinTmpDiskNode=0
"""


def jobs(state: str) -> tuple[JobRecord, ...]:
    return slurm_output.parse_jobs(recorded(f"scontrol-show-jobs-{state}.txt").out)


class TestParsers:
    @pytest.mark.parametrize(
        ("text", "resources"),
        [
            ("(null)", ()),
            ("", ()),
            ("gpu:8", (Gres(name="gpu", type=None, count=8),)),
            ("gpu:h200:8(S:0-1)", (Gres(name="gpu", type="h200", count=8),)),
            ("gpu:nvidia_h100_80gb_hbm3:8", (Gres(name="gpu", type="nvidia_h100_80gb_hbm3", count=8),)),
            ("gpu:1g.5gb:7", (Gres(name="gpu", type="1g.5gb", count=7),)),
            ("gpu:fake:0(IDX:N/A)", (Gres(name="gpu", type="fake", count=0),)),
            ("gpu:3(IDX:0,2-3)", (Gres(name="gpu", type=None, count=3),)),
            ("bandwidth:lustre:no_consume:4G", (Gres(name="bandwidth", type="lustre", count=4 * 2**30),)),
            ("gpu:3090:8(S:0-1)", (Gres(name="gpu", type="3090", count=8),)),
            ("gpu:(null):2(IDX:0-1)", (Gres(name="gpu", type=None, count=2),)),
            ("tmpfs:(null):1K", (Gres(name="tmpfs", type=None, count=1024),)),
            ("gpu:a:2,nvme", (Gres(name="gpu", type="a", count=2), Gres(name="nvme", type=None, count=1))),
        ],
    )
    def test_gres(self, text: str, resources: tuple[Gres, ...]) -> None:
        assert slurm_facts.parse_gres(text) == resources

    @pytest.mark.parametrize("text", ["gpu=8", "gpu:h200:8:9", ":8"])
    def test_malformed_gres(self, text: str) -> None:
        with pytest.raises(ValueError, match="is not a generic resource"):
            slurm_facts.parse_gres(text)

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("00:05:00", 300),
            ("1-02:00:30", 93630),
            ("UNLIMITED", "unlimited"),
            ("NONE", None),
            ("Partition_Limit", None),
        ],
    )
    def test_durations(self, text: str, seconds: object) -> None:
        assert slurm_facts.parse_duration(text) == seconds

    def test_allocations(self) -> None:
        first, two_threads, non_contiguous = slurm_output.parse_allocations(ALLOCATIONS)
        assert (first.nodes, first.cpus, first.memory_bytes) == ("node[0-1]", 2, 2000 * 2**20)
        assert (two_threads.cpus, two_threads.gres) == (8, ())
        assert non_contiguous.cpus == 8
        assert non_contiguous.gres == (Gres(name="gpu", type="h100", count=2),)

    def test_a_pending_job_has_no_allocation(self) -> None:
        assert slurm_output.parse_allocations(recorded("scontrol-show-jobs-busy.txt").out) == ()

    @pytest.mark.parametrize(
        ("parameters", "cpus", "memory"),
        [
            ("CR_CORE_MEMORY", True, True),
            ("CR_Core,CR_LLN", True, False),
            ("CR_CPU", True, False),
            ("CR_MEMORY", False, True),
            ("CR_CORE_DEFAULT_DIST_BLOCK", False, False),
            ("NONE", False, False),
        ],
    )
    def test_consumable_resources(self, parameters: str, cpus: bool, memory: bool) -> None:
        settings = slurm_output.parse_settings(f"SelectTypeParameters = {parameters}\n")
        assert (settings.cpus_are_consumable, settings.memory_is_consumable) == (cpus, memory)

    @pytest.mark.parametrize(
        ("plugins", "cgroup", "cpus", "devices", "memory"),
        [
            ("task/none", "yes", False, False, False),
            ("task/affinity", "yes", True, False, False),
            ("task/cgroup", "yes", True, True, True),
            ("task/cgroup", "no", False, False, False),
            ("task/affinity,task/cgroup", "no", True, False, False),
        ],
    )
    def test_constrained_resources(self, plugins: str, cgroup: str, cpus: bool, devices: bool, memory: bool) -> None:
        text = f"SelectTypeParameters = CR_CPU_MEMORY\nTaskPlugin = {plugins}\n"
        text += "".join(f"Constrain{resource} = {cgroup}\n" for resource in ("Cores", "Devices", "RAMSpace"))
        settings = slurm_output.parse_settings(text)
        assert (settings.constrains_cpus, settings.constrains_devices, settings.constrains_memory) == (
            cpus,
            devices,
            memory,
        )

    def test_malformed_duration(self) -> None:
        with pytest.raises(ValueError, match="'soon' is not a duration"):
            slurm_facts.parse_duration("soon")

    def test_pings(self) -> None:
        healthy = recorded("scontrol-ping-healthy.txt").out
        assert slurm_output.parse_pings(healthy) == (Ping(role="primary", host="ctl", up=True),)
        down = recorded("scontrol-ping-controller-down.txt").out + "Slurmctld(backup) at ctl2 is UP\n"
        assert [(ping.role, ping.up) for ping in slurm_output.parse_pings(down)] == [
            ("primary", False),
            ("backup", True),
        ]


class TestSettings:
    def test_recorded_configuration(self) -> None:
        settings = slurm_output.parse_settings(recorded("scontrol-show-config.txt").out)
        assert (settings.version, settings.cluster_name) == ("22.05.8", "seatrial")
        assert settings.select_type_parameters == ("CR_CORE_MEMORY",)
        assert settings.memory_is_consumable
        assert not settings.accounting_enabled
        assert settings.task_plugin == ("task/none",)
        assert settings.gres_types == ("gpu",)
        assert (settings.kill_wait_s, settings.slurmd_timeout_s, settings.min_job_age_s) == (2, 10, 300)
        assert settings.prolog is None
        assert settings.health_check_program is None
        assert settings.propagate_resource_limits == ("ALL",)
        assert settings.same_configuration is True

    @pytest.mark.parametrize(
        ("line", "field", "value"),
        [
            ("HASH_VAL                = Different Ours=0x16694b49 Slurmctld=0xfd050da5", "same_configuration", False),
            ("HASH_VAL                = Not Verified", "same_configuration", None),
            ("OverTimeLimit           = 5 min", "over_time_limit_s", 300),
            ("OverTimeLimit           = UNLIMITED", "over_time_limit_s", "unlimited"),
            ("TaskPlugin              = task/affinity,task/cgroup", "task_plugin", ("task/affinity", "task/cgroup")),
            ("Prolog[0]               = /etc/slurm/prolog.sh", "prolog", "/etc/slurm/prolog.sh"),
            ("HealthCheckProgram      = /usr/sbin/nhc -a b = c", "health_check_program", "/usr/sbin/nhc -a b = c"),
            ("PropagateResourceLimits = NONE", "propagate_resource_limits", ()),
            ("AccountingStorageType   = accounting_storage/slurmdbd", "accounting_enabled", True),
            ("ConstrainRAMSpace       = yes", "constrain_ram_space", "yes"),
        ],
    )
    def test_single_setting(self, line: str, field: str, value: object) -> None:
        assert getattr(slurm_output.parse_settings(line), field) == value


class TestNodes:
    def test_nodes_that_are_down_or_drained(self) -> None:
        nodes = slurm_output.parse_nodes(recorded("scontrol-show-nodes-troubled.txt").out)
        assert [(node.name, str(node), node.usable) for node in nodes] == [
            ("node0", "IDLE", True),
            ("node1", "DOWN+NOT_RESPONDING: Not responding", False),
            ("node2", "IDLE+DRAIN: fan broken", False),
            ("node3", "IDLE", True),
        ]
        node = nodes[0]
        assert (node.cpus, node.memory_bytes, node.gpus) == (8, 8000 * 2**20, 2)
        assert node.partitions == ("gpu", "short", "closed", "members")

    def test_free_text_with_equals_signs(self) -> None:
        text = (
            "NodeName=n1 Arch=x86_64 CoresPerSocket=1 \n   CPUAlloc=1 CPUEfctv=8 CPUTot=8 CPULoad=0.53\n"
            "   Gres=gpu:fake:2\n   GresUsed=gpu:fake:1(IDX:0)\n   OS=Linux State=DOWN #1\n"
            "   RealMemory=8000 AllocMem=8000\n   State=IDLE*+DRAIN ThreadsPerCore=1\n   Partitions=gpu \n"
            "   Reason=bad GPU = 3, State=IDLE [sic] check [root@2026-11-21T09:39:09]\n"
            "   Comment=CPUTot=9 State=MIXED\n"
        )
        (node,) = slurm_output.parse_nodes(text)
        assert str(node) == "IDLE+NOT_RESPONDING+DRAIN: bad GPU = 3, State=IDLE [sic] check"
        assert node.cpus == 8
        assert node.gpus == 2

    @pytest.mark.parametrize("state", ["healthy", "busy", "troubled"])
    def test_nodes_equal_the_json_of_sinfo(self, state: str) -> None:
        rows = json.loads(recorded(f"sinfo-{state}.json").out)["nodes"]
        assert {row["name"]: (row["state"].upper(), {*row["state_flags"]}, row["reason"] or "") for row in rows} == {
            node.name: (node.state, {*node.flags}, node.reason)
            for node in slurm_output.parse_nodes(recorded(f"scontrol-show-nodes-{state}.txt").out)
        }

    def test_states_of_24_11(self) -> None:
        nodes = {node.name: node for node in slurm_output.parse_nodes(NEWER_NODES.read_text())}
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
        assert [name for name, node in nodes.items() if node.not_in_service] == ["gpu3"]
        assert [name for name, node in nodes.items() if node.reserved] == ["gpu7"]
        assert nodes["gpu5"].usable  # in power saving: Slurm powers it up for a job
        node = nodes["gpu2"]
        assert (node.cpus, node.memory_bytes, node.gpus) == (224, 2063937 * 2**20, 8)
        assert node.partitions == ("main", "debug")

    def test_a_reason_of_several_lines(self) -> None:
        text = "NodeName=n1 CPUTot=8\n   State=IDLE+DRAIN\n   Reason=bad [a@b]\n          State=DOWN NodeName=x\n"
        (node,) = slurm_output.parse_nodes(text)
        assert str(node) == "IDLE+DRAIN: bad"

    def test_no_nodes(self) -> None:
        assert slurm_output.parse_nodes("No nodes in the system\n") == ()

    def test_a_truncated_record_is_an_error(self) -> None:
        text = recorded("scontrol-show-nodes-healthy.txt").out
        with pytest.raises(SeatrialError, match=r"State: required key is missing.* Run first: scontrol show node \w+$"):
            slurm_output.parse_nodes(text[: text.rindex("State=")])

    def test_an_unexpected_value_is_named_in_plain_words(self) -> None:
        record = "NodeName=node7 State=IDLE Gres=gpu:x:y:z"
        with pytest.raises(SeatrialError, match=r"Slurm: Gres: 'gpu:x:y:z' is not a generic resource") as error:
            slurm_output.parse_nodes(record)
        assert str(error.value).endswith("Run first: scontrol show node node7")


def test_partitions() -> None:
    parsed = slurm_output.parse_partitions(recorded("scontrol-show-partition.txt").out)
    assert [(p.name, p.up, p.default, p.nodes, p.max_time_s, p.default_time_s) for p in parsed] == [
        ("gpu", True, True, "node[0-3]", 3600, None),
        ("short", True, False, "node[0-1]", 300, None),
        ("closed", False, False, "node[0-3]", "unlimited", None),
        ("members", True, False, "node[0-3]", "unlimited", None),
    ]


class TestJobs:
    @pytest.mark.parametrize("state", ["busy", "ended", "impossible"])
    def test_jobs_equal_the_output_of_squeue(self, state: str) -> None:
        rows = [line.split("|") for line in recorded(f"squeue-{state}-fields.txt").out.splitlines()[1:]]
        parsed = {job.id: [job.id, job.state, job.reason or "None", job.nodes] for job in jobs(state)}
        assert parsed == {row[0]: row for row in rows}
        assert len(rows) > 10

    @pytest.mark.parametrize("state", ["busy", "ended", "impossible"])
    def test_jobs_equal_the_json_of_squeue(self, state: str) -> None:
        rows = json.loads(recorded(f"squeue-{state}.json").out)["jobs"]
        assert {str(row["job_id"]): (row["job_state"], row["exit_code"], row["nodes"] or "") for row in rows} == {
            job.id: (job.state, (job.exit_code or 0) << 8 | (job.signal or 0), job.nodes) for job in jobs(state)
        }

    def test_pending_jobs(self) -> None:
        pending = {job.reason: job for job in jobs("busy") if job.pending}
        assert {"Resources", "PartitionDown", "JobHeldUser", "ReqNodeNotAvail, UnavailableNodes:node3"} <= set(pending)
        assert not any(job.ended or job.nodes for job in pending.values())
        assert pending["PartitionNodeLimit"].time_limit_s == 300
        assert pending["PartitionDown"].time_limit_s == "unlimited"

    def test_a_running_job(self) -> None:
        (job,) = (job for job in jobs("busy") if job.state == "RUNNING")
        assert not job.pending
        assert not job.ended
        assert job.start is not None

    def test_ended_jobs(self) -> None:
        ended = [job for job in jobs("ended") if not job.pending]
        assert all(job.ended for job in ended)
        results = {(job.state, job.exit_code, job.signal) for job in ended if job.nodes}
        assert results >= {
            ("COMPLETED", 0, 0),
            ("FAILED", 3, 0),
            ("FAILED", 0, 11),
            ("CANCELLED", 0, 15),
            ("TIMEOUT", 0, 15),
        }
        assert "NODE_FAIL" in {job.state for job in ended}

    def test_text(self) -> None:
        texts = {str(job) for job in jobs("ended")}
        assert "FAILED (NonZeroExitCode), exit code 3" in texts
        assert "TIMEOUT (TimeLimit), exit code 0, signal 15" in texts

    def test_a_job_name_with_a_state(self) -> None:
        text = (
            "JobId=4 JobName=my JobState=RUNNING job\n   JobState=COMPLETING Reason=None\n   WorkDir=/a ExitCode=9:9\n"
        )
        (job,) = slurm_output.parse_jobs(text)
        assert (job.state, job.exit_code, job.ended) == ("COMPLETING", None, False)

    def test_output_of_sacct(self) -> None:
        text = (
            "7|CANCELLED by 0|0:15|node[0-1]|60|2026-11-21T09:40:00|None\n"
            "8|PENDING|0:0|None assigned|UNLIMITED|Unknown|Resources\n"
        )
        cancelled, pending = slurm_output.parse_sacct(text)
        start = datetime(2026, 11, 21, 9, 40).timestamp()
        assert cancelled == JobRecord(
            id="7", state="CANCELLED", nodes="node[0-1]", exit_code=0, signal=15, time_limit_s=3600, start=start
        )
        assert (pending.nodes, pending.time_limit_s, pending.start, pending.reason) == (
            "",
            "unlimited",
            None,
            "Resources",
        )
        with pytest.raises(SeatrialError, match=r"expected 7 fields \(got '7\|COMPLETED'\).* sacct .*--jobs 7 "):
            slurm_output.parse_sacct("7|COMPLETED\n")
