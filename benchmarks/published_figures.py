"""Compares published figures with the model of the network and with data/skus: the outcome that each would have.

    python benchmarks/published_figures.py [--figures FILE] [--json FILE] [--markdown FILE]

Each figure of published_figures.yaml that states the rate of its ports, the number of nodes and a size of 1 GiB or more
is judged as in a trial: its share of the bound of the network (hardware/network_bounds.py), by the limits in
data/network_limits.yaml. Figures of one GPU, of one node, and over NVLink between nodes are judged by the values in
data/skus. The others are listed with the reason why they are not modelled. Exits with 1 unless 97 % of the healthy
figures are PASS or WARN, 90 % of the slow ones FAIL or WARN, and 75 % FAIL.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from seatrial.hardware.fabric_model import ModelValue, model_value
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import NO_PEERS, Reference, References, Sku, Spec, skus
from seatrial.model import parse_bytes
from seatrial.util import data_files

FIGURES = Path(__file__).with_name("published_figures.yaml")
GIB = 2**30
REQUIRED_HEALTHY, REQUIRED_SLOW, REQUIRED_FAIL = 0.97, 0.90, 0.75
OPERATIONS = {"sendrecv": "send_receive"}
ALGORITHMS = {
    **{"Ring": "Ring", "Ring (forced)": "Ring", "Tree (forced)": "Tree", "NVLSTree": "NVLSTree", "SHARP": "NVLS"},
    **{"NVLS": "NVLS", "SHARP (CollNet)": "CollNetDirect"},
}
FAIL_BELOW, WARN_BELOW = 0.90, 0.95  # of a reference value, as in the rules of the checks
BY_REFERENCE = ("none", "mnnvl")  # values of ``nics``: no network, NVLink between nodes
# Models in the figures → NVML names in data/skus; several where the source leaves it open
SKU_NAMES = {
    "A100 SXM": ("NVIDIA A100-SXM4-80GB",),
    "A100 SXM 80GB": ("NVIDIA A100-SXM4-80GB",),
    "A100 SXM 40GB": ("NVIDIA A100-SXM4-40GB",),
    "A100 PCIe 80GB": ("NVIDIA A100 80GB PCIe",),
    "A100 PCIe 40GB": ("NVIDIA A100-PCIE-40GB",),
    "H100 PCIe": ("NVIDIA H100 PCIe",),
    "H100 NVL": ("NVIDIA H100 NVL",),
    "H20": ("NVIDIA H20",),
    "H20-3e": ("NVIDIA H20-3e",),
    "B300": ("NVIDIA B300 SXM6 AC",),
    "GB300": ("NVIDIA GB300",),
    "GH200 96GB": ("NVIDIA GH200 480GB",),
    "GH200 144GB": ("NVIDIA GH200 144G HBM3e",),
    "L4": ("NVIDIA L4",),
    "RTX PRO 6000 Server": ("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
    "H100 SXM": ("NVIDIA H100 80GB HBM3",),
    "H200 SXM": ("NVIDIA H200",),
    "H200 NVL": ("NVIDIA H200 NVL",),
    "B200": ("NVIDIA B200",),
    "B200 or H200 (the guide works for both)": ("NVIDIA B200", "NVIDIA H200"),
    "GB200": ("NVIDIA GB200",),
    "L40S": ("NVIDIA L40S",),
}
# Models without a file in data/skus
OTHER_SKUS = {
    "RTX 6000D": Sku(
        name="NVIDIA RTX 6000D",
        nvml_names=(),
        spec={"pcie": Spec(value=63, unit="GB/s", source="PCI Express 5.0 ×16; no NVLink")},
    ),
}
# Modelled figures whose outcome differs from what their source says of them, by source and size
EXPLANATIONS = {
    "old stack": "software of 2023 (aws-ofi-nccl 1.7.3); 438 GB/s at 2 GiB, and 488 with a later version at 16 GiB",
    "dcgmproftester": "another code: 0.76 of the peak; BabelStream, cuda-samples and seatrial reach 0.87 to 0.90",
    "lowest of the releases": "kernel of an older TensorRT-LLM; 1257 and 1243 with a later one, cuBLAS 1211 to 1250",
    "NVIDIA/nccl-tests#309": "0.80 of the bound: 0.79 to 0.83 has healthy and slow runs. At 1 GiB the same nodes FAIL",
}


@dataclass(frozen=True)
class Row:
    """One figure: its outcome by the model, or the reason why it is not modelled."""

    figure: dict[str, Any]
    reason: str = ""
    outcome: str = ""
    share: float = 0.0
    bound: float = 0.0
    name: str = ""
    arithmetic: str = ""
    explanation: str = ""

    @property
    def is_miss(self) -> bool:
        """Whether the outcome contradicts the source: a healthy figure fails, or a slow one does not."""
        return self.outcome == "FAIL" if self.figure["verdict"] == "healthy" else self.outcome in ("PASS", "WARN")


def judged(figure: dict[str, Any]) -> Row:
    """The outcome of one figure."""
    if reason := not_modelled(figure):
        return Row(figure, reason)
    models = [sku for sku in skus() if set(sku.nvml_names) & set(SKU_NAMES.get(figure["gpu"], ()))]
    models += [OTHER_SKUS[figure["gpu"]]] if figure["gpu"] in OTHER_SKUS else []
    if not models:
        return Row(figure, f"no links of {figure['gpu']} are known")
    operation, nodes = OPERATIONS.get(figure["op"], figure["op"]), figure["nodes"]
    algorithm = ALGORITHMS.get(figure.get("algo") or "", "")
    if figure["nics"] in BY_REFERENCE:
        return by_reference(figure, models[0])
    count, gbps = ports(figure["nics"]) or (0, 0.0)
    links = Links(
        ports=RdmaPorts("ib", count, gbps),
        network="rdma",
        algorithms={(operation, figure["size"]): algorithm} if algorithm else {},
    )
    ranks = nodes * figure["gpus_per_node"]
    environment = {
        "NCCL_NVLS_ENABLE": "0" if figure.get("nvls") == "off" else "1",
        "NCCL_MNNVL_ENABLE": "0" if "MNNVL off" in figure["fabric"] else "1",
    }
    facts = {"world_size": ranks, "nodes": nodes, "backend_environment": environment}
    model = model_value(f"{operation}.busbw.{figure['size']}", facts, models, links, None)
    if not isinstance(model, ModelValue):
        return Row(figure, model)
    busbw = figure["busbw"] * (2 * (ranks - 1) / ranks if "algbw" in figure.get("unit", "") else 1)
    share, limit = busbw / model.bound.value, model.limit
    outcome = "FAIL" if share < limit.fail_below else "WARN" if share < limit.warn_below else "PASS"
    return explained(Row(figure, "", outcome, share, model.bound.value, model.name, model.bound.arithmetic))


def by_reference(figure: dict[str, Any], sku: Sku) -> Row:
    """The outcome of a figure of one GPU, of one node, or over NVLink between nodes."""
    key = (
        figure["op"] if "." in figure["op"] else f"{OPERATIONS.get(figure['op'], figure['op'])}.busbw.{figure['size']}"
    )
    algorithm, nodes = ALGORITHMS.get(figure.get("algo") or "", ""), figure["nodes"]
    links = Links(
        network="mnnvl" if nodes > 1 else "",
        algorithms={(figure["op"], figure["size"]): algorithm} if algorithm else {},
    )
    facts = {"gpu": sku.nvml_names[0], "world_size": nodes * figure["gpus_per_node"], "nodes": nodes}
    reference = References(None, skus(), links=links).find(key, facts, NO_PEERS, figure.get("unit", "GB/s"))
    if not isinstance(reference, Reference):
        return Row(figure, reference)
    share = figure["busbw"] / reference.value
    fail_below = reference.required_value(FAIL_BELOW) / reference.value
    warn_below = WARN_BELOW if reference.warn_below is None else reference.warn_below
    outcome = "FAIL" if share < fail_below else "WARN" if share < warn_below else "PASS"
    return explained(Row(figure, "", outcome, share, reference.value, reference.label, "binding link: reference value"))


def explained(row: Row) -> Row:
    """The row with the explanation of its outcome, if that differs from what the source says."""
    text = f"{row.figure.get('cause', '')} {row.figure['source']}"
    explanation = next((why for mark, why in EXPLANATIONS.items() if row.is_miss and mark in text), "")
    return replace(row, explanation=explanation)


def not_modelled(figure: dict[str, Any]) -> str:
    """Why a figure is not compared with the model; empty if it is."""
    if figure["verdict"] == "threshold":
        return "a threshold, not a measurement"
    if figure["verdict"] not in ("healthy", "slow"):
        return "the source does not judge the value"
    if figure.get("nodes") is None:
        return "the source does not state the number of nodes"
    if figure["nics"] in BY_REFERENCE:
        return ""
    if ports(figure["nics"]) is None:
        return "the source does not state the rate of the ports"
    try:
        size = parse_bytes(figure["size"])
    except ValueError:
        return f"size: {figure['size']}"
    return "" if size >= GIB else f"size {figure['size']}, below 1 GiB"


def ports(text: str) -> tuple[int, float] | None:
    """Ports of a node and Gbit/s of each from ``8x400`` or ``8x2x200``; None for other text."""
    match = re.fullmatch(r"(\d+)x(?:(\d+)x)?(\d+)", text)
    return (int(match[1]) * int(match[2] or 1), float(match[3])) if match else None


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Outcome counts of the modelled figures, by the verdict of their source."""
    counts: dict[str, Counter[str]] = {"healthy": Counter(), "slow": Counter()}
    for row in (row for row in rows if row.outcome):
        counts[row.figure["verdict"]][row.outcome] += 1
    return {verdict: dict(sorted(outcomes.items())) for verdict, outcomes in counts.items()}


def meets_requirements(rows: Sequence[Row]) -> bool:
    """Whether the shares of PASS, WARN and FAIL are as required."""
    healthy, slow = (Counter(summary(rows)[verdict]) for verdict in ("healthy", "slow"))
    return (
        healthy["PASS"] + healthy["WARN"] >= REQUIRED_HEALTHY * healthy.total()
        and slow["FAIL"] + slow["WARN"] >= REQUIRED_SLOW * slow.total()
        and slow["FAIL"] >= REQUIRED_FAIL * slow.total()
    )


def markdown(rows: Sequence[Row]) -> str:
    """The page docs/results/published-figures.md."""
    modelled, others = [row for row in rows if row.outcome], [row for row in rows if not row.outcome]
    lines = [
        "# Published figures, judged by the limits between nodes and by the reference values",
        "",
        "With this page you see how seatrial judges figures that others published. A figure between nodes is compared",
        "if its source states the rate of the ports, the number of nodes and a size of 1 GiB or more. The bound is the",
        "bandwidth that the links allow, and the share of the bound decides",
        "([rules](../collectives.md#reference-values-between-nodes)). Figures of one GPU, of one node and over NVLink",
        "between nodes are compared with [data/skus](../../src/seatrial/data/skus/README.md).",
        "`benchmarks/published_figures.py` writes this page and its [JSON](published-figures.json) from",
        "`benchmarks/published_figures.yaml`, which has the sources of all figures.",
        "",
        "A figure such as `all_reduce 8GiB, 2×8 H100 SXM, 8x400` has operation and size, nodes × GPUs per node, GPU",
        'model, and network ports per node × Gb/s of each. "Repository unknown": a full-text search found the text.',
        "",
        "| the source says | figures | PASS | WARN | FAIL |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict, counts in summary(rows).items():
        cells = " | ".join(str(counts.get(outcome, 0)) for outcome in ("PASS", "WARN", "FAIL"))
        lines.append(f"| {verdict} | {sum(counts.values())} | {cells} |")
    lines += ["", "Figures whose outcome differs from what the source says:", ""]
    for row in (row for row in modelled if row.is_miss):
        lines.append(f"- {_figure_text(row.figure)}: {row.outcome} at {row.share:.2f}. {row.explanation}")
    lines += [
        "",
        "## Compared figures",
        "",
        "| figure | value | bound or reference | share | the source says | outcome | link of the bound; source |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in modelled:
        figure = row.figure
        values = (
            _figure_text(figure),
            f"{figure['busbw']:g}",
            f"{row.bound:.0f}" if row.bound >= 100 else f"{row.bound:.1f}",
            f"{row.share:.2f}",
            figure["verdict"],
            row.outcome,
            f"{row.arithmetic.rpartition('binding link: ')[2]}; {figure['source']}",
        )
        lines.append(f"| {' | '.join(values)} |")
    lines += ["", "## Figures that cannot be compared", ""]
    lines += ["| figure | GB/s | the source says | reason |", "| --- | --- | --- | --- |"]
    for row in others:
        figure = row.figure
        lines.append(f"| {_figure_text(figure)} | {figure['busbw']:g} | {figure['verdict']} | {row.reason} |")
    return "\n".join(lines) + "\n"


def _figure_text(figure: dict[str, Any]) -> str:
    nodes = "? nodes" if figure.get("nodes") is None else f"{figure['nodes']}×{figure['gpus_per_node']}"
    algorithm = f", {figure['algo']}" if figure.get("algo") else ""
    return f"{figure['op']} {figure['size']}, {nodes} {figure['gpu']}, {figure['nics']}{algorithm}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = [judged(figure) for figure in data_files.parse(options.figures.read_text(encoding="utf-8"))]
    for verdict, counts in summary(rows).items():
        print(f"{verdict}: {sum(counts.values())} modelled: {counts}")
    for row in rows:
        if row.outcome and row.is_miss:
            print(f"{row.outcome} at {row.share:.3f}: {_figure_text(row.figure)}; {row.explanation}")
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")
    return 0 if meets_requirements(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
