"""One node has another version of torch than the others."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, set_variables, settings
from seatrial.drill.injection import Injection


def plant_metadata(injection: Injection) -> None:
    """Put the metadata of an old torch on the Python path of the node, as if an old installation were still there."""
    folder = injection.folder / "old" / "torch-2.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n", encoding="utf-8")
    set_variables(injection, PYTHONPATH=str(folder.parent))


DRILL = Drill(
    name="version-differs",
    title="one of three nodes has a fake package entry (dist-info) of torch 2.1.0",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.connectivity": {}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="nodes.connectivity",
        metric="nodes_differing",
        cause="node_differs",
        place=rf"^{NODE}: .*torch: 2\.1\.0",
        command=rf"nodelist={NODE} python3 -m torch.utils.collect_env",
        action="fix-config",
    ),
    needs=cluster_needs(3),
    prepare=plant_metadata,
)
