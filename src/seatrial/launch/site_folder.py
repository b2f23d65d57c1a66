"""The files of a site's folder: environment, acceptance trial, and one sbatch script per workload. Pure."""

from __future__ import annotations

from typing import NamedTuple

from seatrial import __version__
from seatrial.config.slurm_options import option_lines
from seatrial.launch.script import option_texts, template
from seatrial.util import data_files

FOLDERS = ("huggingface", "jobs", "logs", "runs", "tokens")


class SiteValue(NamedTuple):
    """A value of a site. ``note``: where the value comes from; for the value None, why it is not known."""

    value: str | int | None
    note: str


class Site(NamedTuple):
    """The values of a site in its files. ``folder`` is an absolute path; 0 GPUs per node: CPU only.

    ``slurm_error``: why Slurm could not be read; empty if it could.
    """

    folder: str
    venv: SiteValue
    partition: SiteValue
    account: SiteValue
    nodes: SiteValue
    gpus_per_node: SiteValue
    max_minutes: SiteValue
    slurm_error: str = ""

    def settings(self) -> dict[str, SiteValue]:
        """Return the settings by their names."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, SiteValue)}


class Workload(NamedTuple):
    """A job script."""

    name: str
    title: str
    nodes: int  # 0: all nodes of the site
    gpus: int  # GPUs per node; 0: all
    minutes: int
    config: str = ""  # config of `seatrial train run`
    template: str = "train"
    evaluated: bool = False  # whether `seatrial train evaluate` runs after the training
    whole_nodes: bool = True  # whether the job gets all CPUs, GPUs and memory of its nodes


_LORA = "LoRA on Mistral-7B, with the whole model on every GPU (DDP)"
_FSDP = "Full fine-tune of Mistral-7B, sharded over all GPUs (FSDP2); ends with a checkpoint of 87 GB"
_WORKLOADS = (
    Workload("discovery", "Hardware and software of every node; reads only", 0, 0, 10, template="discovery"),
    Workload("train_1gpu", "Full fine-tune of Mistral-7B on one GPU", 1, 1, 30, "sft-mistral-7b-1gpu"),
    Workload("ddp_1node", _LORA, 1, 0, 60, "lora-mistral-7b-ddp"),
    Workload("ddp_2nodes", _LORA, 2, 0, 60, "lora-mistral-7b-ddp"),
    Workload("fsdp_1node", _FSDP, 1, 0, 60, "fsdp-mistral-7b"),
    Workload("fsdp_2nodes", _FSDP, 2, 0, 60, "fsdp-mistral-7b"),
    Workload(
        "preprocess",
        "Rows to tokens, without a GPU; function_calling then starts at once",
        nodes=1,
        gpus=0,
        minutes=60,
        config="function-calling-qwen2-7b",
        template="preprocess",
        whole_nodes=False,
    ),
    Workload(
        "function_calling",
        "Qwen2-7B learns to call functions (LoRA, ZeRO-3; FSDP2 without DeepSpeed), scored before and after",
        nodes=1,
        gpus=0,
        minutes=60,
        config="function-calling-qwen2-7b",
        evaluated=True,
    ),
    Workload("oumi", "SmolLM-135M with Oumi in an Apptainer container, on one GPU", 1, 1, 40, template="oumi"),
)


def render(site: Site) -> dict[str, str]:
    """Return the content of each file by its path in the folder.

    Workloads that need more nodes than the site has are left out; if this number is unknown, two nodes are assumed.
    """
    workloads = [workload for workload in _WORKLOADS if workload.nodes <= int(site.nodes.value or 2)]
    needed = {name: site.settings()[name] for name in ("nodes", "gpus_per_node", "partition", "venv")}
    values = {
        "site": site,
        "version": __version__,
        "cpu_only": site.gpus_per_node.value == 0,
        "checks": data_files.text("trials/acceptance.yaml").partition("\nchecks:\n")[2],
        "workloads": workloads,
        "unknown": {name: setting for name, setting in needed.items() if setting.value is None},
        "nightly_options": _nightly_options(site),
    }
    names = ("README.md", "env.sh", "site.yaml", "infrastructure.yaml", "nightly.sh", "oumi.yaml")
    files = {name: template(f"site/{name}.j2").render(values) for name in names}
    files[".gitignore"] = template("site/gitignore.j2").render()
    return files | {f"jobs/{workload.name}.sbatch": _script(site, workload, values) for workload in workloads}


def _nightly_options(site: Site) -> list[str]:
    """Return the options of the nightly ``seatrial run quick``, quoted for a shell.

    They repeat values of site.yaml, which that command does not read.
    """
    options = [
        ("--nodes", site.nodes.value),
        ("--gpus-per-node", site.gpus_per_node.value),
        ("--set", site.partition.value and f"slurm.partition={site.partition.value}"),
        ("--set", site.account.value and f"slurm.account={site.account.value}"),
        ("--set", f"environment.source={site.folder}/env.sh"),
        ("--set", site.venv.value and f"environment.venv={site.venv.value}"),
    ]
    return ["--launcher slurm", *option_texts(options)]


def _script(site: Site, workload: Workload, values: dict[str, object]) -> str:
    cpu_only, gpus = site.gpus_per_node.value == 0, workload.gpus or site.gpus_per_node.value
    nodes, limit = workload.nodes or site.nodes.value, site.max_minutes.value
    options: list[tuple[str, object]] = [
        ("job-name", workload.name),
        ("partition", site.partition.value),
        ("account", site.account.value),
        ("nodes", nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", None if workload.whole_nodes else 4),
        ("gres", f"gpu:{gpus}" if gpus and not cpu_only and workload.whole_nodes else None),
        ("mem", 0 if workload.whole_nodes else None),  # 0: all memory of a node
        ("time", min(workload.minutes, limit) if isinstance(limit, int) else workload.minutes),
        ("chdir", site.folder),
        ("output", f"{site.folder}/logs/%x-%j.out"),
        ("open-mode", "append"),  # a second start of the job keeps the output of the first
    ]
    return template(f"site/{workload.template}.sbatch.j2").render(
        values,
        workload=workload,
        script=f"jobs/{workload.name}.sbatch",
        config=f"tiny/{workload.config}" if cpu_only and workload.config else workload.config,
        gpus=gpus,
        nodes=nodes,
        # other jobs on the node would change the speed; a second start would find the files of the first
        sbatch_options=[*option_lines(options), *(["--exclusive"] if workload.whole_nodes else []), "--no-requeue"],
    )
