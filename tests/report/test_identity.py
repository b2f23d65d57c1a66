"""The environment variables of the ranks, and the identity of hosts, on the first page of reports."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from seatrial import report
from seatrial.model import Measurement, Trial
from seatrial.report.identity import gpus_of, variable_lines
from tests.report import samples
from tests.report.test_terminal import printed


def trial(*measurements: Measurement, env: Mapping[str, str] | None = None) -> Trial:
    update = {"measurements": measurements, "config": {"env": dict(env or {})}, "origins": {"env.UCX_TLS": "mine.yaml"}}
    return samples.accepted().model_copy(update=update)


def process(node: str, **variables: str) -> Measurement:
    facts: dict[str, JsonValue] = {"variables": dict(variables)}
    return Measurement(check="host.process", subject=f"{node}/gpu0", facts=facts)


def transport(**settings: JsonValue) -> Measurement:
    return Measurement(check="collectives.transport", subject="n0/gpu0", facts={"settings": settings})


def test_each_variable_has_one_line_with_its_value_effect_and_origin() -> None:
    both = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_IB_TIMEOUT": "20", "UCX_TLS": "tcp"}
    settings = transport(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo (set by seatrial)", NCCL_DEBUG="INFO")
    run = trial(process("n0", **both), process("n1", **both, NCCL_IB_HCA="mlx5_1"), settings, env={"UCX_TLS": "tcp"})
    blocking, hca, timeout, nvls, interface, transports = variable_lines(run)
    assert blocking == "CUDA_LAUNCH_BLOCKING=1: each kernel launch blocks until the kernel has finished (default: 0)"
    assert hca.startswith("NCCL_IB_HCA=mlx5_1 on n1 only: uses only the RDMA ports")
    assert timeout == "NCCL_IB_TIMEOUT=20: no effect (default: 20)"
    assert nvls.startswith("NCCL_NVLS_ENABLE=0: ")
    assert interface.startswith("NCCL_SOCKET_IFNAME=lo: ")
    assert interface.endswith(", set by seatrial")
    assert transports.endswith(", set by env of the trial (mine.yaml)")


def test_the_first_page_and_the_terminal_show_the_lines() -> None:
    run, without = trial(process("n0", NCCL_PROTO="<b>LL</b>")), trial(process("n0"))
    page = report.render(run, "html")
    assert page.index("NCCL_PROTO=&lt;b&gt;LL") < page.index('id="problems"')
    assert "Environment variables" not in report.render(without, "html").partition('id="problems"')[0]
    assert "NCCL_PROTO=<b>LL" in printed(run)
    assert "Environment variable" not in printed(without)


def test_the_gpu_of_the_only_host_is_known_beside_checks_of_all_ranks() -> None:
    gpu: dict[str, JsonValue] = {"gpus": [{"index": 0, "uuid": "GPU-1", "serial": "1654"}]}
    measurements = [process("n0"), Measurement(check="train.ddp", subject="cluster", rank=0)]
    run = trial(*measurements).model_copy(update={"host": "n0", "environment": {"gpu": gpu}, "jobs": ()})
    assert gpus_of(run)["n0/gpu0"].serial == "1654"
    assert gpus_of(run.model_copy(update={"host": "login"})) == {}
    assert gpus_of(run.model_copy(update={"measurements": tuple(measurements[1:])})) == {}
