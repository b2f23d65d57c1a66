"""The switches and racks that the nodes of a cluster are connected to."""

from pydantic import Field

from seatrial.model.base import Frozen


class Topology(Frozen):
    """Switches and racks by node; a node that is not listed is unknown."""

    source: str = Field(description="the file, or Slurm's command")
    is_file: bool = Field(
        default=True, description="whether a user wrote the file for this trial; it must then list all nodes"
    )
    switches: dict[str, tuple[str, ...]] = Field(description="node → its switches, from the leaf switch to the top")
    racks: dict[str, str] = Field(default={}, description="node → its rack")
    rails: dict[str, tuple[str, ...]] = Field(
        default={},
        description="leaf switch that stands for one switch per rail → these switches, by GPU index",
    )

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((*self.switches, *self.racks))

    def knows(self, node: str) -> bool:
        return bool(self._listed_name(node))

    def switches_above(self, node: str) -> tuple[str, ...]:
        """The switches of a node, from the leaf switch to the top; without switches its rack; empty if unknown."""
        name = self._listed_name(node)
        return self.switches.get(name) or ((self.racks[name],) if name in self.racks else ())

    def leaf(self, node: str) -> str:
        """The leaf switch of a node, else its rack; empty if unknown."""
        return next(iter(self.switches_above(node)), "")

    def rack(self, node: str) -> str:
        """The rack of a node; empty if unknown."""
        return self.racks.get(self._listed_name(node), "")

    def rail_switch(self, node: str, gpu: int) -> str:
        """The switch of the rail of the GPU with index ``gpu``; empty if unknown."""
        rails = self.rails.get(self.leaf(node), ())
        return rails[gpu] if gpu < len(rails) else ""

    def path(self, a: str, b: str) -> tuple[str, ...]:
        """The switches between two nodes; empty if unknown."""
        return switch_path(self.switches_above(a), self.switches_above(b))

    def _listed_name(self, node: str) -> str:
        """The name that this topology lists a node under: with or without its domain; empty if it is not listed."""
        names = (node, node.partition(".")[0])
        return next((name for name in names if name in self.switches or name in self.racks), "")


def switch_path(up: tuple[str, ...], down: tuple[str, ...]) -> tuple[str, ...]:
    """The switches between two nodes: from ``up`` to the lowest common switch, then the reverse of ``down``.

    ``up`` and ``down`` are the switches of the nodes, from the leaf switch to the top. Empty without a common switch.
    """
    common = next((switch for switch in up if switch in down), None)
    if common is None:
        return ()
    return (*up[: up.index(common)], common, *reversed(down[: down.index(common)]))
