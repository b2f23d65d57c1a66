"""Options of the collective checks, their default sizes and size sweeps, and the sizes omitted on slow TCP networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from seatrial.checks.check import Options, Seconds
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import ByteSize, parse_bytes

# The largest size saturates the links. At 1 MiB the launch by the host dominates: two runs on one machine gave 13 and
# 16 us. For small sizes, use mode cuda_graph.
GPU_SIZES = tuple(map(parse_bytes, ("10MiB", "64MiB", "1GiB")))
# Published acceptance figures of the all-reduce use 8 GiB
ALL_REDUCE_GPU_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
# For CPU-only runs: a few seconds on two cores; gloo moves the data through the CPU.
CPU_SIZES = tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB")))
# Sizes at which the launch by the host takes longer than the operation on the device. Six sizes: NCCL changes protocol
# in this range, and the latency fit of each protocol needs three sizes.
CUDA_GRAPH_SIZES = tuple(map(parse_bytes, ("8B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB")))
# The 300 operations that a 99th percentile needs take one to two seconds at this size.
GPU_PERCENTILE_SIZES = (parse_bytes("1GiB"),)
CPU_PERCENTILE_SIZES = (parse_bytes("1MiB"),)

# On this number of nodes or more, 1 GiB measures the latency of the many steps instead of the bandwidth
# (data/network_limits.yaml), and MANY_NODES_SIZE is one more default size
MANY_NODES, MANY_NODES_SIZE = 16, parse_bytes("8GiB")

ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # dtype → bytes


def expand_size_sweep(sizes: Any) -> Any:
    """The list of sizes of ``{from: 8B, to: 1KiB, factor: 2}``; any other value unchanged."""
    if not isinstance(sizes, Mapping):
        return sizes
    missing, unknown = {"from", "to"} - set(sizes), set(sizes) - {"from", "to", "factor"}
    if wrong_keys := missing or unknown:
        names = ", ".join(map(str, wrong_keys))
        raise ValueError(f"missing or unknown in the size sweep: {names}; expected from, to and factor (default 2)")
    first, last, factor = parse_bytes(sizes["from"]), parse_bytes(sizes["to"]), sizes.get("factor", 2)
    if not isinstance(factor, int) or factor < 2 or not 0 < first <= last:
        raise ValueError(
            f"size sweep from {first} B to {last} B by {factor}: expected 0 < from <= to and an integer factor >= 2"
        )
    expanded = [first]
    while expanded[-1] * factor <= last:
        expanded.append(expanded[-1] * factor)
    return expanded


SizeList = Annotated[tuple[ByteSize, ...] | None, BeforeValidator(expand_size_sweep)]


class CollectiveOptions(Options):
    """Options of the collective checks.

    ``sizes``: bytes of the buffer on each rank, a list or a sweep; the default depends on the device.
    ``modes``: back_to_back times consecutive operations, as nccl-tests does; cuda_graph times them in a CUDA graph,
    so that the host does not launch each one; percentiles times each operation separately.
    ``in_place``: ``both`` measures an operation in place and out of place, if the API supports both.
    ``buffers``: the allocator of the buffers; ``registered``: NCCL's allocator with user buffer registration.
    ``seconds_per_size``: maximum timed duration of one size. Timing ends earlier when the 95 % interval of the median
    is within 1 %; on a GPU it continues up to twice this duration while the interval exceeds 3 %.
    ``min_seconds_per_size``: minimum duration of mode back_to_back at each size, for a burn-in.
    """

    # Metric → the option that lists its sizes; for all other metrics the option is ``sizes``
    size_option_by_metric: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("cuda_graph_latency", "cuda_graph_busbw"), "cuda_graph_sizes"),
        **dict.fromkeys(("p50", "p95", "p99", "p99_ratio", "cv"), "percentile_sizes"),
    }

    modes: tuple[Literal["back_to_back", "cuda_graph", "percentiles"], ...] = Field(
        default=("back_to_back",), min_length=1
    )
    sizes: SizeList = Field(default=None, min_length=1)
    cuda_graph_sizes: SizeList = Field(default=None, min_length=1)
    percentile_sizes: SizeList = Field(default=None, min_length=1)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    in_place: Literal["default", "both"] = "default"
    buffers: Literal["torch", "nccl", "registered"] = "torch"
    seconds_per_size: Seconds = 2.0
    min_seconds_per_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _require_whole_elements(self) -> CollectiveOptions:
        element_bytes = ELEMENT_SIZES[self.dtype]
        for size in (*(self.sizes or ()), *(self.cuda_graph_sizes or ()), *(self.percentile_sizes or ())):
            if size == 0 or size % element_bytes:
                raise ValueError(f"size {size} B is not a whole number of {self.dtype} elements of {element_bytes} B")
        return self


def mode_sizes(mode: str, options: CollectiveOptions, default_gpu_sizes: Sequence[int], *, gpu: bool) -> Sequence[int]:
    """The sizes of a mode in descending order, so that torch serves smaller buffers from the largest's memory.

    nccl-tests has one buffer for all sizes. With separate allocations, all-gather of 64 MiB on H200 was up to 1.2 %
    slower, depending on the allocation (docs/results). ``default_gpu_sizes``: of mode back_to_back.
    """
    sizes_by_mode = {
        "back_to_back": options.sizes or (default_gpu_sizes if gpu else CPU_SIZES),
        "cuda_graph": options.cuda_graph_sizes or CUDA_GRAPH_SIZES,
        "percentiles": options.percentile_sizes or (GPU_PERCENTILE_SIZES if gpu else CPU_PERCENTILE_SIZES),
    }
    return sorted(set(sizes_by_mode[mode]), reverse=True)


def default_gpu_sizes(name: str, nodes: int = 1, network: TcpNetwork | None = None) -> list[int]:
    """The default sizes of the operation ``name`` on this number of nodes, without sizes too slow for ``network``."""
    sizes = ALL_REDUCE_GPU_SIZES if name == "all_reduce" else GPU_SIZES
    sizes = sizes if nodes < MANY_NODES else tuple({*sizes, MANY_NODES_SIZE})
    too_slow = network.too_slow_sizes(name, sizes) if network else []
    return [size for size in sizes if size not in too_slow]


def omitted_sizes(name: str, options: CollectiveOptions, network: TcpNetwork | None) -> list[int]:
    """The default sizes that are not timed because the network is too slow for them; empty without a network.

    A size that the option ``sizes`` requests is timed on any network.
    """
    if network is None:
        return []
    too_slow = network.too_slow_sizes(name, default_gpu_sizes(name, network.nodes))
    return [size for size in too_slow if size not in (options.sizes or ())]


def timed_sizes(name: str, options: CollectiveOptions, network: TcpNetwork) -> dict[str, Sequence[int]]:
    """The sizes that GPUs time in each mode of the operation ``name`` on a TCP network."""
    sizes = default_gpu_sizes(name, network.nodes, network)
    return {mode: mode_sizes(mode, options, sizes, gpu=True) for mode in options.modes}
