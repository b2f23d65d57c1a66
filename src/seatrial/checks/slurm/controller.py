"""slurm.controller: state of the Slurm controllers, and slurm.conf settings that affect training jobs."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, RuleFact, SkipIf, facts, metrics
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Settings
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope

METRICS = {
    "controllers_up": "controllers",
    "controllers_down": "controllers",
    "configuration_differs": "bool",
    "proctrack_loses_processes": "bool",
    "task_binding_enabled": "bool",
    "gpu_gres_configured": "bool",
    "kill_wait": "s",
    "dead_nodes_detected": "bool",
    "health_check_configured": "bool",
    "memlock_limit_propagated": "bool",
}

# Plugins that track processes by parent or process group. A daemon changes both: slurm.conf(5), ProctrackType
_INCOMPLETE_PROCTRACK = {"proctrack/linuxproc", "proctrack/pgid"}

RULES = (
    Rule(
        metric="controllers_up",
        evidence_facts=("controllers",),
        expect=">= 1 controllers",
        meaning="no controller answers: jobs cannot be submitted, and running jobs are not monitored",
        fix="scontrol ping; on the controller host: systemctl status slurmctld; journalctl -u slurmctld -n 50",
    ),
    Rule(
        metric="controllers_down",
        evidence_facts=("controllers",),
        expect="== 0 controllers",
        outcome_if_violated=Outcome.WARN,
        meaning="a controller is DOWN: it cannot take over if the controller in use fails",
        fix="systemctl status slurmctld on the host that is DOWN; scontrol ping",
    ),
    Rule(
        metric="configuration_differs",
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={"configuration_compared": "yes"},
        meaning="slurm.conf on this machine differs from the controller's: ports, plugins or limits may not match",
        fix="sha256sum /etc/slurm/slurm.conf on both hosts; copy the controller's file; then: scontrol reconfigure",
    ),
    Rule(
        metric="proctrack_loses_processes",
        evidence_facts=("proctrack_type",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Slurm tracks processes by parent or process group: processes that change their parent or group "
        "survive the job and keep its GPUs",
        fix="ProctrackType=proctrack/cgroup in slurm.conf, then restart slurmctld and every slurmd",
    ),
    Rule(
        metric="task_binding_enabled",
        evidence_facts=("task_plugin",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="TaskPlugin has no task/affinity: srun binds no task to CPUs, so that processes may run on another "
        "socket than their GPU",
        fix="TaskPlugin=task/affinity,task/cgroup in slurm.conf, ConstrainCores=yes and ConstrainDevices=yes in "
        "cgroup.conf, then restart every slurmd",
    ),
    Rule(
        metric="gpu_gres_configured",
        evidence_facts=("gres_types",),
        expect="== 1 bool",
        applies_if={"gpus_expected": "yes"},
        meaning="GPUs are expected, but Slurm has no gpu GRES: it cannot allocate them or restrict access to them",
        fix="GresTypes=gpu in slurm.conf, Gres=gpu:N on each NodeName line, gres.conf (AutoDetect=nvml); restart "
        "slurmctld and every slurmd, then: sinfo -o '%N %G'",
    ),
    Rule(
        metric="kill_wait",
        # Default: 30 s. A job that needs more time for a checkpoint uses sbatch --signal.
        expect="<= 120 s",
        outcome_if_violated=Outcome.WARN,
        meaning="a cancelled job that ignores SIGTERM keeps its nodes for KillWait seconds",
        fix="KillWait=30 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="dead_nodes_detected",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="SlurmdTimeout is 0: a failed node is never set DOWN, and its jobs hang",
        fix="SlurmdTimeout=300 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="health_check_configured",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="no HealthCheckProgram: a node with a lost GPU keeps accepting jobs, which all fail",
        fix="HealthCheckProgram and HealthCheckInterval=300 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="memlock_limit_propagated",
        evidence_facts=("propagate_resource_limits", "submit_host_memlock"),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="jobs inherit the memlock limit of this machine: RDMA cannot register more memory than "
        "that (ibv_reg_mr)",
        fix="PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, then: scontrol reconfigure",
    ),
)


@needs_slurm
def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield the states of the controllers and the settings with rules.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    controllers = slurm.ping()
    yield Fact(name="controllers", value=[controller.model_dump() for controller in controllers])
    try:
        settings = slurm.settings()
    except slurm.ControllerDown:  # only this error means that no controller works; other errors may be local
        yield from metrics(METRICS, {"controllers_up": 0})
        raise
    up_count = sum(controller.up for controller in controllers)
    yield from metrics(METRICS, {"controllers_up": up_count, "controllers_down": len(controllers) - up_count})
    yield from facts(settings.model_dump(mode="json"))
    yield from _settings_metrics(settings, context.expected_gpus or 0)


def _settings_metrics(settings: Settings, expected_gpus: int) -> Iterator[Observation]:
    """Yield a metric for each setting that has a rule and could be read."""
    soft_memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock_limited = soft_memlock != resource.RLIM_INFINITY
    compared = settings.same_configuration is not None
    yield from facts(
        {
            "configuration_compared": "yes" if compared else "no",
            "gpus_expected": "yes" if expected_gpus else "no",
            "submit_host_memlock": soft_memlock if memlock_limited else "unlimited",
        }
    )
    values: dict[str, float] = {
        "task_binding_enabled": settings.task_binding_enabled,
        "gpu_gres_configured": "gpu" in settings.gres_types,
        "health_check_configured": settings.health_check_program is not None,
        "memlock_limit_propagated": memlock_limited and _is_propagated(settings, "MEMLOCK"),
    }
    if compared:
        values["configuration_differs"] = not settings.same_configuration
    if settings.proctrack_type is not None:
        values["proctrack_loses_processes"] = settings.proctrack_type in _INCOMPLETE_PROCTRACK
    if isinstance(settings.kill_wait_s, int):
        values["kill_wait"] = settings.kill_wait_s
    if settings.slurmd_timeout_s is not None:
        values["dead_nodes_detected"] = settings.slurmd_timeout_s != 0
    yield from metrics(METRICS, values)


def _is_propagated(settings: Settings, limit: str) -> bool:
    """Whether jobs inherit ``limit`` from the submit host: slurm.conf(5), PropagateResourceLimits."""
    if settings.propagate_resource_limits_except:
        return not {limit, "ALL"} & set(settings.propagate_resource_limits_except)
    return bool({limit, "ALL"} & set(settings.propagate_resource_limits))


CHECK = Check(
    name="slurm.controller",
    title="Slurm controllers and their settings",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    rule_facts={
        "configuration_compared": RuleFact(
            reason="scontrol shows no hash of slurm.conf, so that the file of this machine was not compared"
        ),
        "gpus_expected": RuleFact(reason="cluster.gpus_per_node is not set"),
    },
    measure=measure,
    limit_s=300,
    skip_if=(SkipIf.NO_SLURM,),
)
