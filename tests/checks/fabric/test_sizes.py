from __future__ import annotations

from seatrial.checks.fabric._sizes import (
    CPU_SIZES,
    CUDA_GRAPH_SIZES,
    GPU_SIZES,
    MANY_NODES,
    CollectiveOptions,
    default_gpu_sizes,
    expand_size_sweep,
    mode_sizes,
    omitted_sizes,
    timed_sizes,
)
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import parse_bytes

GIB, GIB8 = parse_bytes("1GiB"), parse_bytes("8GiB")
SLOW, FAST = TcpNetwork(nodes=4, gpus=8, gbps=10), TcpNetwork(nodes=4, gpus=8, gbps=100)


def test_size_sweep_multiplies_by_factor_up_to_its_end() -> None:
    assert expand_size_sweep({"from": "8B", "to": "1KiB", "factor": 4}) == [8, 32, 128, 512]
    assert expand_size_sweep({"from": "8B", "to": "32B"}) == [8, 16, 32]
    assert expand_size_sweep(["8B"]) == ["8B"]


def test_sizes_are_from_the_trial_or_the_device_in_descending_order() -> None:
    sizes, default = default_gpu_sizes("all_gather"), CollectiveOptions()
    assert mode_sizes("back_to_back", default, sizes, gpu=True) == sorted(GPU_SIZES, reverse=True)
    assert mode_sizes("back_to_back", default, sizes, gpu=False) == sorted(CPU_SIZES, reverse=True)
    assert mode_sizes("cuda_graph", default, sizes, gpu=True) == sorted(CUDA_GRAPH_SIZES, reverse=True)
    requested = CollectiveOptions.model_validate({"sizes": ["8B", "1KiB", "8B"]})
    assert mode_sizes("back_to_back", requested, sizes, gpu=True) == [1024, 8]
    assert max(default_gpu_sizes("all_reduce")) == 2**33, "published acceptance values use 8 GiB"


def test_sizes_on_a_tcp_network() -> None:
    assert timed_sizes("all_reduce", CollectiveOptions(), SLOW)["back_to_back"][0] == GIB
    assert timed_sizes("all_reduce", CollectiveOptions(), FAST)["back_to_back"][0] == GIB8
    requested = CollectiveOptions.model_validate({"sizes": ["8GiB"], "modes": ["back_to_back", "percentiles"]})
    assert timed_sizes("all_reduce", requested, SLOW) == {"back_to_back": [GIB8], "percentiles": [GIB]}


def test_default_sizes_that_a_network_is_too_slow_for() -> None:
    assert omitted_sizes("all_reduce", CollectiveOptions(), SLOW) == [GIB8]
    assert omitted_sizes("all_reduce", CollectiveOptions(), FAST) == []
    assert omitted_sizes("all_reduce", CollectiveOptions(), None) == []
    requested = CollectiveOptions.model_validate({"sizes": ["8GiB"]})
    assert omitted_sizes("all_reduce", requested, SLOW) == [], "the trial asks for it"
    many_nodes = TcpNetwork(MANY_NODES, 8, 1)
    assert omitted_sizes("all_gather", CollectiveOptions(), many_nodes) == [GIB8]
    assert max(default_gpu_sizes("all_gather", MANY_NODES, many_nodes)) == GIB
