from __future__ import annotations

from typing import Any

import pytest

from seatrial.discover.slurm_facts import UNKNOWN, Gres, JobRecord, Partition, Settings, SlurmNode


def settings(**given: object) -> Settings:
    return Settings.model_validate({}).model_copy(update=given)


def node(state: str = "IDLE", *flags: str, **more: Any) -> SlurmNode:
    return SlurmNode(
        name="n0",
        state=state,
        flags=flags,
        reason=more.pop("reason", ""),
        cpus=8,
        memory_bytes=2**30,
        gres=more.pop("gres", ()),
        partitions=("gpu",),
        **more,
    )


@pytest.mark.parametrize(
    ("storage", "enabled"),
    [("accounting_storage/slurmdbd", True), ("accounting_storage/none", False), ("none", False), (None, False)],
)
def test_accounting_is_enabled_unless_the_storage_is_none(storage: str | None, enabled: bool) -> None:
    assert settings(accounting_storage_type=storage).accounting_enabled is enabled


@pytest.mark.parametrize(
    ("parameters", "cpus", "memory"),
    [
        (("CR_Core",), True, False),
        (("CR_CPU_Memory",), True, True),
        (("CR_Socket_Memory", "CR_ONE_TASK_PER_CORE"), True, True),
        (("CR_Memory",), False, True),
        (("CR_ONE_TASK_PER_CORE",), False, False),
        ((), False, False),
    ],
)
def test_consumable_resources(parameters: tuple[str, ...], cpus: bool, memory: bool) -> None:
    current = settings(select_type_parameters=parameters)
    assert (current.cpus_are_consumable, current.memory_is_consumable) == (cpus, memory)


def test_only_select_linear_allocates_whole_nodes() -> None:
    assert settings(select_type="select/linear").allocates_whole_nodes
    assert not settings(select_type="select/cons_tres").allocates_whole_nodes


def test_cgroups_constrain_only_what_cgroup_conf_sets() -> None:
    constrained = {"constrain_cores": "yes", "constrain_devices": "yes", "constrain_ram_space": "yes"}
    memory = {"select_type_parameters": ("CR_Core_Memory",)}
    enabled = settings(task_plugin=("task/cgroup",), **constrained, **memory)
    assert (enabled.constrains_cpus, enabled.constrains_devices, enabled.constrains_memory) == (True, True, True)
    unused = settings(task_plugin=("task/none",), **constrained, **memory)
    assert (unused.constrains_cpus, unused.constrains_devices, unused.constrains_memory) == (False, False, False)
    default = settings(task_plugin=("task/cgroup",), constrain_devices="no", **memory)
    assert (default.constrains_cpus, default.constrains_devices, default.constrains_memory) == (False, False, False)


def test_memory_that_is_not_consumable_is_not_constrained() -> None:
    assert not settings(task_plugin=("task/cgroup",), constrain_ram_space="yes").constrains_memory


def test_task_affinity_binds_tasks_and_constrains_cpus_without_cgroups() -> None:
    current = settings(task_plugin=("task/affinity",))
    assert (current.task_binding_enabled, current.constrains_cpus, current.constrains_devices) == (True, True, False)
    assert not settings(task_plugin=("task/cgroup",)).task_binding_enabled


@pytest.mark.parametrize(
    ("state", "flags", "up", "not_in_service", "usable"),
    [
        ("IDLE", (), True, False, True),
        ("MIXED", ("POWERED_DOWN",), True, False, True),  # Slurm powers it up
        ("IDLE", ("DRAIN",), True, True, False),
        ("IDLE", ("REBOOT_REQUESTED",), True, True, False),
        ("MIXED", ("CLOUD", "NOT_RESPONDING", "POWERING_UP"), True, False, True),
        ("DOWN", ("CLOUD", "NOT_RESPONDING", "POWERING_DOWN"), False, False, False),
        ("DOWN", (), False, False, False),
        ("IDLE", ("NOT_RESPONDING",), False, False, False),
        ("DOWN", ("DRAIN", "INVALID_REG"), False, True, False),
        (UNKNOWN, (), False, False, False),
    ],
)
def test_usable_nodes(state: str, flags: tuple[str, ...], up: bool, not_in_service: bool, usable: bool) -> None:
    checked = node(state, *flags)
    assert (checked.up, checked.not_in_service, checked.usable) == (up, not_in_service, usable)


@pytest.mark.parametrize(
    ("flags", "node_reservation", "job_reservation", "blocked"),
    [
        ((), "", None, False),
        ((), "", "mine", False),
        (("RESERVED",), "mine", None, True),
        (("RESERVED",), "mine", "mine", False),
        (("RESERVED",), "other", "mine", True),
        (("RESERVED",), "mine", "other,mine", False),
        (("MAINT",), "", "mine", False),  # this Slurm version does not show the reservation
        (("MAINT",), "", None, True),
    ],
)
def test_a_reserved_node_accepts_only_jobs_of_its_reservation(
    flags: tuple[str, ...], node_reservation: str, job_reservation: str | None, blocked: bool
) -> None:
    assert node("IDLE", *flags, reservation=node_reservation).blocked_by_reservation(job_reservation) is blocked


def test_gpus_of_all_types_are_counted() -> None:
    gres = (
        Gres(name="gpu", type="h100", count=4),
        Gres(name="gpu", type=None, count=2),
        Gres(name="nic", type="", count=8),
    )
    assert node(gres=gres).gpus == 6
    assert node().gpus == 0


def test_the_text_of_a_node_has_flags_and_reason() -> None:
    assert str(node("IDLE", "DRAIN", reason="fan broken")) == "IDLE+DRAIN: fan broken"
    assert str(node()) == "IDLE"


@pytest.mark.parametrize(("state", "up"), [("UP", True), ("DOWN", False), ("DRAIN", False), ("INACTIVE", False)])
def test_a_partition_is_up_only_in_state_up(state: str, up: bool) -> None:
    partition = Partition(name="gpu", state=state, nodes="n[0-3]", default=True, max_time_s=None, default_time_s=None)
    assert partition.up is up


@pytest.mark.parametrize(
    ("state", "has_state", "pending", "ended"),
    [
        ("PENDING", True, True, False),
        ("CONFIGURING", True, True, False),
        ("RUNNING", True, False, False),
        ("COMPLETING", True, False, False),  # processes remain on its nodes
        ("COMPLETED", True, False, True),
        ("NODE_FAIL", True, False, True),
        ("TIMEOUT", True, False, True),
        (UNKNOWN, False, False, False),
    ],
)
def test_the_states_of_a_job(state: str, has_state: bool, pending: bool, ended: bool) -> None:
    job = JobRecord(id="7", state=state)
    assert (job.has_state, job.pending, job.ended) == (has_state, pending, ended)


def test_the_text_of_a_job_has_reason_exit_code_and_signal() -> None:
    assert str(JobRecord(id="7", state="FAILED", reason="NonZeroExitCode", exit_code=7, signal=0)) == (
        "FAILED (NonZeroExitCode), exit code 7"
    )
    assert str(JobRecord(id="7", state="FAILED", exit_code=0, signal=9)).endswith(", signal 9")
