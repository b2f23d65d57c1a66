"""The pages known-failures.md and known-failures/ of the site: all signatures, causes and Xids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.errnos import errno_rows
from seatrial.diagnose.signature import Signature
from seatrial.diagnose.xid import xid_rows
from seatrial.discover.environment_variables import variables
from seatrial.util import data_files

ROOT = Path(__file__).parent.parent
_SIGNATURES = ROOT / "src" / "seatrial" / "data" / "signatures"
_EXAMPLE_LENGTH = 110
# File of data/signatures → title of its page, and the locations of its log lines
COMPONENTS: dict[str, tuple[str, str]] = {
    "cuda": ("CUDA", "output of a program"),
    "python": ("Python environment", "output of a program"),
    "reasons": ("Any program: error texts of the system, exit codes, refused values", "output of a program, journal"),
    "errnos": ("Errors of system calls, by the part of the system that speaks", "output of a program, journal"),
    "exceptions": ("Other Python errors and crashes", "output of a program"),
    "ddp-fsdp": ("PyTorch: DDP, FSDP, data loading, checkpoints", "output of a program"),
    "torchrun": ("torchrun and rendezvous", "output of a program"),
    "training": ("Training of seatrial", "output of a job of seatrial"),
    "huggingface": ("Hugging Face libraries", "output of a program"),
    "deepspeed": ("DeepSpeed", "output of a program"),
    "megatron": ("Megatron-LM", "output of a program"),
    "vllm": ("vLLM", "output of a program"),
    "ray": ("Ray", "output of a program, /tmp/ray"),
    "mpi": ("MPI", "output of mpirun"),
    "nccl": ("NCCL", "output with NCCL_DEBUG=WARN or INFO"),
    "infiniband": ("InfiniBand, RoCE and EFA", "output with NCCL_DEBUG=WARN, dmesg, ibstat"),
    "xid": ("Xid: GPU errors of the kernel log", "dmesg"),
    "sxid": ("SXid: NVSwitch errors of the kernel log", "dmesg"),
    "ecc": ("ECC and machine checks", "dmesg, nvidia-smi -q"),
    "nvlink": ("NVLink", "nvidia-smi nvlink, dmesg"),
    "fabricmanager": ("Fabric manager", "journal, /var/log/fabricmanager.log"),
    "driver": ("GPU driver", "dmesg, nvidia-smi"),
    "dcgm": ("DCGM", "output of dcgmi diag"),
    "thermal": ("Temperature and power", "nvidia-smi -q, dmesg, BMC"),
    "pcie": ("PCIe", "dmesg, lspci"),
    "host": ("Operating system", "dmesg, output of a program"),
    "filesystem": ("Filesystems", "dmesg, output of a program"),
    "network": ("Network services: DNS, ssh, time, users", "journal, output of a program"),
    "slurm": ("Slurm: jobs", "output of sbatch, srun and squeue"),
    "slurmd": ("Slurm: nodes", "slurmd.log, slurmctld.log, sinfo -R"),
    "slurmctld": ("Slurm: controller and database", "slurmctld.log, slurmdbd.log, journal"),
    "munge": ("MUNGE", "journal of munged, logs of Slurm"),
    "containers": ("Containers: Docker, enroot, pyxis, Apptainer", "output of a job"),
    "kubernetes": ("Kubernetes", "kubectl describe, kubectl get events"),
}
HEAD = """# Known failures

Find the cause of a line in a log. `seatrial explain PATH…` does this automatically for whole logs ([how](explain.md)).

| you have | look at |
| --- | --- |
| a line of a log | the page of the component that wrote it, in the table below |
| a line with a number after `Xid` | the [list of all Xids](known-failures/xid-catalog.md) |
| a report of seatrial that names a cause | the [causes of bad verdicts](known-failures/causes.md) |

The table of each page has an example line for each failure. Its link leads to the meaning, the first command to run,
the fix and the action. A failure marked *consequence* follows from another one: first look for that one, in other lines
or on other ranks or nodes.
"""


def pages() -> dict[str, str]:
    """Return all pages by their path in the site."""
    rows = {
        name: TypeAdapter(list[Signature]).validate_python(yaml.safe_load((_SIGNATURES / f"{name}.yaml").read_bytes()))
        for name in COMPONENTS
        if name != "errnos"
    }
    rows["errnos"] = TypeAdapter(list[Signature]).validate_python(list(errno_rows()))
    unlisted = {path.stem for path in _SIGNATURES.glob("*.yaml")} - set(COMPONENTS)
    if unlisted:
        raise ValueError(f"COMPONENTS has no title for {', '.join(sorted(unlisted))}")
    return {
        "known-failures.md": _index(rows),
        **{f"known-failures/{name}.md": _component_page(name, rows[name]) for name in COMPONENTS},
        "known-failures/xid-catalog.md": _xid_page(),
        "known-failures/causes.md": _causes_page(),
    }


def _index(rows: Mapping[str, list[Signature]]) -> str:
    lines = [HEAD, "| component | log locations | failures |", "| --- | --- | --- |"]
    lines += [
        f"| [{title}](known-failures/{name}.md) | {place} | {len(rows[name])} |"
        for name, (title, place) in COMPONENTS.items()
    ]
    return "\n".join([*lines, ""])


def _index_line(row: Signature) -> str:
    link = f"[{_text(row.name)}](#{_anchor(row.name)})"
    consequence = " (consequence)" if row.role == "cascade" else ""
    return f"| {_code(_shortened(row.examples[0].splitlines()[-1]))} | {link}{consequence} |"


def _component_page(name: str, rows: list[Signature]) -> str:
    title, place = COMPONENTS[name]
    lines = [f"# {title}", "", "Find the cause of a log line, the first command to run and the fix."]
    lines += [*_placeholders(rows), f"Log locations: {place}. [All components](../known-failures.md)."]
    lines += ["", "| line | failure |", "| --- | --- |"]
    lines += [_index_line(row) for row in rows if row.role != "advice"]
    for row in rows:
        lines += ["", f"## {_text(row.name)}", "", *_entry(row)]
    return "\n".join([*lines, ""])


def _placeholders(rows: list[Signature]) -> list[str]:
    """A line that explains placeholders if a title, fix or first command has one."""
    names = re.findall(r"\{[a-z_]+\}", " ".join(row.title + row.fix + row.first_command for row in rows))
    return (
        [f"`seatrial explain` replaces words in braces, such as `{names[0]}`, by values of the log line."]
        if names
        else []
    )


def _entry(row: Signature) -> Iterator[str]:
    roles = {
        "root": "root cause",
        "family": "a reason that any program can print (reported with confidence low if no signature names the cause)",
        "step": "a step that failed (the reason is in this line or another one)",
        "general": "any error of this kind (reported if no signature names its cause)",
        "cascade": "consequence (look for an earlier failure)",
        "confirmation": "evidence (other lines name the failure)",
        "advice": "advice (a program prints it with many failures)",
    }
    yield _text(row.cause)
    yield ""
    yield f"- Signature: `{row.id}`"
    yield f"- Type: {roles[row.role]}"
    yield f"- Fix: {_text(row.fix)}"
    yield f"- Action: `{row.action}`"
    yield f"- Source: {_text(row.source)}"
    if row.first_command:
        yield from ["", "Run first:", "", "```", row.first_command, "```"]
    yield from ["", "Looks like:", "", "```"]
    yield from (_shortened(example, 400) for example in row.examples)
    yield "```"


def _xid_page() -> str:
    catalog = data_files.read("xid_catalog.yaml")
    actions = data_files.read("xid_policy.yaml")["nvidia_actions"]
    rows = {row.id: row for row in map(Signature.model_validate, xid_rows())}
    lines = [
        "# Xids",
        "",
        "Look up an Xid, an error number of the NVIDIA driver in lines of the kernel log such as",
        "`NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.`",
        "[All components](../known-failures.md).",
        "",
        f"The columns of NVIDIA are from its catalog ({catalog['source']}). The columns of seatrial are advice,",
        "which a site can change ([how](../explain.md#signatures-of-your-site)).",
        "",
        "| Xid | NVIDIA: name | NVIDIA: meaning | NVIDIA: action | seatrial: action | seatrial: fix |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fact in catalog["xids"]:
        row = rows[f"xid.{fact['xid']}"]
        cells = [fact["mnemonic"], fact["meaning"], _nvidia_action(fact, actions), row.action, row.fix]
        lines.append(f"| {fact['xid']} | {' | '.join(map(_cell, cells))} |")
    lines += [
        "",
        "## NVLink errors: Xid 144 to 150",
        "",
        "The line names the unit and six status words; the first two decide. `-` is any bit.",
        "",
        "| Xid | unit | severity | first word, bits 31 to 0 | second word | NVIDIA: effect | NVIDIA: action |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fact in catalog["nvlink"]:
        bits = " or ".join(f"`{mask}`" for mask in fact["intrinfo"])
        cells = [
            fact["unit"],
            fact["severity"],
            bits,
            f"`{fact['status']}`",
            fact["effect"],
            _nvidia_action(fact, actions),
        ]
        lines.append(f"| {fact['xid']} | {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, ""])


def _nvidia_action(fact: Mapping[str, Any], actions: Mapping[str, str]) -> str:
    """NVIDIA's immediate and investigatory action in words, each once."""
    advice = dict.fromkeys(actions.get(fact[key], fact[key]) for key in ("immediate", "investigatory") if fact[key])
    return ", then ".join(advice) or "no advice"


def _causes_page() -> str:
    lines = [
        "# Causes of bad verdicts",
        "",
        "Look up a cause that a report names: its evidence, fix and first command. The report lists",
        "a cause above the failures that it explains. It fills in `{gpu}` (index), `{port}` (RDMA device, such as",
        "mlx5_0), `{node}`, `{paths}`, `{names}`, `{namespace}` and `{pod}`.",
        "[All components](../known-failures.md).",
    ]
    for cause in causes():
        evidence = [
            f"`{metric}` of {'any check' if check == '*' else f'`{check}`'}"
            for check, metrics in cause.evidence.items()
            for metric in metrics
        ]
        lines += [
            "",
            f"## {_text(cause.title[0].upper() + cause.title[1:])}",
            "",
            f"- Cause: `{cause.id}`",
            f"- Evidence: FAIL or WARN of {', '.join(evidence)}"
            if evidence
            else "- Evidence: a job or a probe pod does not start, with the message below",
            f"- Explains: {', '.join(f'`{check}`' for check in cause.explains)} of the same {cause.place}"
            if evidence
            else "- Explains: all checks that were not measured for this reason",
            f"- Fix: {_text(cause.fix)}",
            f"- Action: `{cause.action}`",
            *["", "Run first:", "", "```", cause.first_command, "```"],
            *(["", "Looks like:", "", "```", _shortened(cause.message.example, 400), "```"] if cause.message else []),
        ]
    lines += [
        "",
        "## Environment variables",
        "",
        "A variable with another value than its default is reported as a possible cause if an affected check is slow.",
        "Sources: nccl is the NCCL user guide (Environment Variables), cuda the CUDA programming guide, openmp the",
        "OpenMP specification, ucx the UCX documentation, torch the documentation of torch.distributed.",
        "",
        "| variable | default | effect of other values | source |",
        "| --- | --- | --- | --- |",
    ]
    for name, variable in variables().items():
        lines.append(f"| `{name}` | {_cell(variable.default)} | {_cell(variable.effect)} | {_cell(variable.source)} |")
    return "\n".join([*lines, ""])


def _shortened(text: str, length: int = _EXAMPLE_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _code(text: str) -> str:
    """A code span of a table cell."""
    fence = "``" if "`" in text else "`"
    padding = " " if fence == "``" else ""
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|")


def _text(text: str) -> str:
    return re.sub(r"([<\[\]*_])", r"\\\1", text)


def _cell(text: str) -> str:
    return (text if text.startswith("`") else _text(text)).replace("|", "\\|")


def _anchor(title: str) -> str:
    """The anchor that GitHub makes from a heading."""
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")
