"""slurm.controller: state of the Slurm controllers, and slurm.conf settings that affect training jobs."""

from __future__ import annotations

import resource

from seatrial.checks.check import Check, Context, Options, SkipIf, facts
from seatrial.checks.declare import Answers, absent, metric, unreadable, value, warning
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Settings
from seatrial.model import Phase, Scope

# Plugins that track processes by parent or process group. A daemon changes both: slurm.conf(5), ProctrackType
_INCOMPLETE_PROCTRACK = {"proctrack/linuxproc", "proctrack/pgid"}


@needs_slurm
def measure(context: Context, _options: Options) -> Answers:
    """Yield the states of the controllers and the settings with rules.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    controllers = slurm.ping()
    evidence = {"controllers": [controller.model_dump() for controller in controllers]}
    try:
        settings = slurm.settings()
    except slurm.ControllerDown:  # only this error means that no controller works; other errors may be local
        yield value("controllers_up", 0, evidence=evidence)
        raise
    up_count = sum(controller.up for controller in controllers)
    yield value("controllers_up", up_count, evidence=evidence)
    yield value("controllers_down", len(controllers) - up_count, evidence=evidence)
    yield from facts(settings.model_dump(mode="json"))
    yield from _settings_metrics(settings, context.expected_gpus or 0)


def _settings_metrics(settings: Settings, expected_gpus: int) -> Answers:
    """Yield a metric for each setting that has a rule and could be read."""
    if settings.same_configuration is None:
        reason = "scontrol shows no hash of slurm.conf, so that the file of this machine was not compared"
        yield absent("configuration_differs", reason)
    else:
        yield value("configuration_differs", not settings.same_configuration)
    if settings.proctrack_type is not None:
        is_incomplete = settings.proctrack_type in _INCOMPLETE_PROCTRACK
        yield value("proctrack_loses_processes", is_incomplete, evidence={"proctrack_type": settings.proctrack_type})
    plugins = {"task_plugin": list(settings.task_plugin)}
    yield value("task_binding_enabled", settings.task_binding_enabled, evidence=plugins)
    if expected_gpus:
        types = {"gres_types": list(settings.gres_types)}
        yield value("gpu_gres_configured", "gpu" in settings.gres_types, evidence=types)
    else:
        yield absent("gpu_gres_configured", "cluster.gpus_per_node is not set")
    if isinstance(settings.kill_wait_s, int):
        yield value("kill_wait", settings.kill_wait_s)
    if settings.slurmd_timeout_s is not None:
        yield value("dead_nodes_detected", settings.slurmd_timeout_s != 0)
    yield value("health_check_configured", settings.health_check_program is not None)
    soft_memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = soft_memlock != resource.RLIM_INFINITY
    # whether jobs inherit the limit from the submit host: slurm.conf(5), PropagateResourceLimits
    named = settings.propagate_resource_limits_except or settings.propagate_resource_limits
    is_propagated = bool({"MEMLOCK", "ALL"} & {*named}) is not bool(settings.propagate_resource_limits_except)
    yield value(
        "memlock_limit_propagated",
        is_limited and is_propagated,
        evidence={
            "propagate_resource_limits": list(settings.propagate_resource_limits),
            "submit_host_memlock": soft_memlock if is_limited else "unlimited",
        },
    )
    yield unreadable("*", "scontrol show config does not show the setting as a number or a name")


CHECK = Check(
    name="slurm.controller",
    title="Slurm controllers and their settings",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=300,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric(
            "controllers_up",
            ">= 1 controllers",
            "no controller answers: jobs cannot be submitted, and running jobs are not monitored",
            "scontrol ping; on the controller host: systemctl status slurmctld; journalctl -u slurmctld -n 50",
        ),
        warning(
            "controllers_down",
            "== 0 controllers",
            "a controller is DOWN: it cannot take over if the controller in use fails",
            "systemctl status slurmctld on the host that is DOWN; scontrol ping",
        ),
        warning(
            "configuration_differs",
            "no",
            "slurm.conf on this machine differs from the controller's: ports, plugins or limits may not match",
            "sha256sum /etc/slurm/slurm.conf on both hosts; copy the controller's file; then: scontrol reconfigure",
        ),
        warning(
            "proctrack_loses_processes",
            "no",
            "Slurm tracks processes by parent or process group: processes that change their parent or group "
            "survive the job and keep its GPUs",
            "ProctrackType=proctrack/cgroup in slurm.conf, then restart slurmctld and every slurmd",
        ),
        warning(
            "task_binding_enabled",
            "yes",
            "TaskPlugin has no task/affinity: srun binds no task to CPUs, so that processes may run on another "
            "socket than their GPU",
            "TaskPlugin=task/affinity,task/cgroup in slurm.conf, ConstrainCores=yes and ConstrainDevices=yes in "
            "cgroup.conf, then restart every slurmd",
        ),
        metric(
            "gpu_gres_configured",
            "yes",
            "GPUs are expected, but Slurm has no gpu GRES: it cannot allocate them or restrict access to them",
            "GresTypes=gpu in slurm.conf, Gres=gpu:N on each NodeName line, gres.conf (AutoDetect=nvml); restart "
            "slurmctld and every slurmd, then: sinfo -o '%N %G'",
        ),
        warning(
            "kill_wait",
            "<= 120 s",  # default: 30 s. A job that needs more time for a checkpoint uses sbatch --signal.
            "a cancelled job that ignores SIGTERM keeps its nodes for KillWait seconds",
            "KillWait=30 in slurm.conf; scontrol reconfigure",
        ),
        warning(
            "dead_nodes_detected",
            "yes",
            "SlurmdTimeout is 0: a failed node is never set DOWN, and its jobs hang",
            "SlurmdTimeout=300 in slurm.conf; scontrol reconfigure",
        ),
        warning(
            "health_check_configured",
            "yes",
            "no HealthCheckProgram: a node with a lost GPU keeps accepting jobs, which all fail",
            "HealthCheckProgram and HealthCheckInterval=300 in slurm.conf; scontrol reconfigure",
        ),
        warning(
            "memlock_limit_propagated",
            "no",
            "jobs inherit the memlock limit of this machine: RDMA cannot register more memory than that (ibv_reg_mr)",
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, then: scontrol reconfigure",
        ),
    ),
)
