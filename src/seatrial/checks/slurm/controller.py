"""slurm.controller: does Slurm's controller answer, and is it set up so that training jobs can be trusted to it?"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, facts, metrics
from seatrial.checks.slurm._probe_jobs import require_client
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
    "health_check": "bool",
    "memlock_limit_propagated": "bool",
}

# Both find a job's processes by their parents or group, which a daemon leaves behind: slurm.conf(5), ProctrackType.
_LOSING_TRACKERS = {"proctrack/linuxproc", "proctrack/pgid"}

RULES = (
    Rule(
        metric="controllers_up",
        evidence_facts=("controllers",),
        expect=">= 1 controllers",
        meaning="without a controller no job can be submitted, and none that runs is watched",
        fix="scontrol ping; on the controller's host: systemctl status slurmctld; journalctl -u slurmctld -n 50",
    ),
    Rule(
        metric="controllers_down",
        evidence_facts=("controllers",),
        expect="== 0 controllers",
        outcome_if_violated=Outcome.WARN,
        meaning="a backup controller that is down takes over from nobody",
        fix="systemctl status slurmctld on the host that is DOWN; scontrol ping",
    ),
    Rule(
        metric="configuration_differs",
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={"configuration_compared": "yes"},
        meaning="this machine's slurm.conf is not the controller's: the two may differ on ports, plugins and limits",
        fix="sha256sum /etc/slurm/slurm.conf, here and there; copy the controller's; then: scontrol reconfigure",
    ),
    Rule(
        metric="proctrack_loses_processes",
        evidence_facts=("proctrack_type",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Slurm finds a job's processes by parent or process group here: those that change it outlive the job, and "
        "keep its GPUs",
        fix="ProctrackType=proctrack/cgroup in slurm.conf, then restart slurmctld and every slurmd",
    ),
    Rule(
        metric="task_binding_enabled",
        evidence_facts=("task_plugin",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="no plugin binds tasks to CPUs: jobs that share a node disturb each other, and GPUs are fed from the far "
        "socket",
        fix="TaskPlugin=task/affinity,task/cgroup in slurm.conf, ConstrainCores=yes and ConstrainDevices=yes in "
        "cgroup.conf, then restart every slurmd",
    ),
    Rule(
        metric="gpu_gres_configured",
        evidence_facts=("gres_types",),
        expect="== 1 bool",
        applies_if={"gpus_expected": "yes"},
        meaning="GPUs were promised, and Slurm does not know of any: it cannot hand them out, nor keep jobs off them",
        fix="GresTypes=gpu in slurm.conf, Gres=gpu:N on each NodeName line, gres.conf (AutoDetect=nvml); restart "
        "slurmctld and every slurmd, then: sinfo -o '%N %G'",
    ),
    Rule(
        metric="kill_wait",
        # 30 s is Slurm's default. A job that wants longer for a checkpoint asks for a signal ahead: sbatch --signal.
        expect="<= 120 s",
        outcome_if_violated=Outcome.WARN,
        meaning="a hung training job that ignores SIGTERM keeps its nodes for so long after it was cancelled",
        fix="KillWait=30 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="dead_nodes_detected",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="SlurmdTimeout is 0: a node that dies is never set DOWN, and its jobs hang on it",
        fix="SlurmdTimeout=300 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="health_check",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="nothing looks after the nodes between jobs: one with a lost GPU goes on taking jobs, and fails them all",
        fix="HealthCheckProgram and HealthCheckInterval=300 in slurm.conf; scontrol reconfigure",
    ),
    Rule(
        metric="memlock_limit_propagated",
        evidence_facts=("propagate_resource_limits", "submit_host_memlock"),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="jobs inherit this machine's limit on locked memory, too little for RDMA: ibv_reg_mr fails in them",
        fix="PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, then: scontrol reconfigure",
    ),
)


def measure(context: Context, options: Options) -> Iterator[Observation]:
    """Raises NotApplicable without a Slurm client, SlurmUnavailable where the controller cannot be asked."""
    require_client()
    controllers = slurm.ping()
    yield Fact(name="controllers", value=[controller.model_dump() for controller in controllers])
    try:
        settings = slurm.settings()
    except slurm.ControllerDown:  # other errors may lie on this machine, and say nothing of the controller
        yield from metrics(METRICS, {"controllers_up": 0})
        raise
    up = sum(controller.up for controller in controllers)
    yield from metrics(METRICS, {"controllers_up": up, "controllers_down": len(controllers) - up})
    yield from facts(settings.model_dump(mode="json"))
    yield from _of_settings(settings, context.expected_gpus or 0)


def _of_settings(settings: Settings, promised_gpus: int) -> Iterator[Observation]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    compared = settings.same_configuration is not None
    yield from facts(
        {
            "configuration_compared": "yes" if compared else "no",
            "gpus_expected": "yes" if promised_gpus else "no",
            "submit_host_memlock": soft if limited else "unlimited",
        }
    )
    values: dict[str, float] = {
        "task_binding_enabled": bool(set(settings.task_plugin) - {"task/none", "none"}),
        "gpu_gres_configured": "gpu" in settings.gres_types,
        "health_check": settings.health_check_program is not None,
        "memlock_limit_propagated": limited and _propagates(settings, "MEMLOCK"),
    }
    if compared:
        values["configuration_differs"] = not settings.same_configuration
    if settings.proctrack_type is not None:
        values["proctrack_loses_processes"] = settings.proctrack_type in _LOSING_TRACKERS
    if isinstance(settings.kill_wait_s, int):
        values["kill_wait"] = settings.kill_wait_s
    if settings.slurmd_timeout_s is not None:
        values["dead_nodes_detected"] = settings.slurmd_timeout_s != 0
    yield from metrics(METRICS, values)


def _propagates(settings: Settings, limit: str) -> bool:
    """Whether jobs inherit this limit from where they are submitted: slurm.conf(5), PropagateResourceLimits."""
    if settings.propagate_resource_limits_except:
        return not {limit, "ALL"} & set(settings.propagate_resource_limits_except)
    return bool({limit, "ALL"} & set(settings.propagate_resource_limits))


CHECK = Check(
    name="slurm.controller",
    title="Slurm's controller answers, with settings that suit training",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=300,
)
