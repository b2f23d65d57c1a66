from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seatrial.train import architecture, loop, lora, metrics, parallel, weights
from seatrial.train.decoder import Decoder, dropout
from seatrial.train.train_config import ALL_LINEAR
from tests.train import ranks
from tests.train.decoders import CPU
from tests.train.ranks import config
from tests.train.test_decoder import tokens, transformers_model

SHAPE = architecture.load("qwen2-tiny")
EXPORTED = config("qwen2-tiny", use_lora=True, lora_r=4, lora_alpha=16, lora_dropout=0.0)


def adapted(
    targets: tuple[str, ...] = ALL_LINEAR,
    rank: int = 4,
    folder: Path | None = None,
) -> Decoder:
    model = weights.build_on_meta(SHAPE, torch.float, torch.float)
    lora.attach(model, targets, rank, alpha=16, dropout=0.0)
    model.to_empty(device="cpu")
    random_source = weights.random_weights(0, 0.02)
    weights.fill(model, weights.from_folder(str(folder), random_source) if folder else random_source, CPU)
    return model


def test_only_adapters_have_gradients() -> None:
    model = adapted(("q_proj", "v_proj"))
    model(tokens(), tokens()).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name in dict(model.named_parameters()) if "lora_" in name}
    assert len(trained) == 2 * 2 * SHAPE.num_hidden_layers
    expected = SHAPE.num_hidden_layers * 4 * (2 * 64 + 64 + 32)  # r · (in + out) of q and v
    assert metrics.parameter_counts(model)[0] == expected


def test_new_adapters_do_not_change_the_output() -> None:
    plain = weights.build_on_meta(SHAPE, torch.float, torch.float).to_empty(device="cpu")
    weights.fill(plain, weights.random_weights(0, 0.02), CPU)
    torch.testing.assert_close(adapted()(tokens()), plain(tokens()), rtol=0, atol=1e-6)


def test_peft_loads_the_export_and_computes_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    base = transformers_model("qwen2-tiny", tmp_path / "base")
    ours = adapted(folder=tmp_path / "base")
    with torch.no_grad():
        for parameter in lora.adapter_parameters(ours).values():
            parameter.normal_(0, 0.1)
    lora.export(lora.gather_adapters(ours), tmp_path / "adapter", EXPORTED)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def load(model: nn.Module, folder: Path) -> None:
    """Copies the exported adapters to ``model``."""
    saved = load_file(folder / lora.WEIGHTS_FILE)
    parameters = lora.adapter_parameters(model)
    assert parameters.keys() == saved.keys()
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])


def test_an_export_contains_only_adapters_and_loads(tmp_path: Path) -> None:
    first, second = adapted(), adapted()
    with torch.no_grad():
        for parameter in lora.adapter_parameters(first).values():
            parameter.normal_()
    lora.export(lora.gather_adapters(first), tmp_path, EXPORTED)
    assert (tmp_path / lora.WEIGHTS_FILE).stat().st_size < 4 * metrics.parameter_counts(first)[0] + 10_000
    load(second, tmp_path)
    assert torch.equal(first(tokens()), second(tokens()))


def _train_and_reload(out: Path) -> dict[str, set[str]]:
    """Names of the parameters that a run changes, and of those that differ after loading its export."""
    settings = config("qwen2-tiny", use_lora=True, max_steps=3, parallel={"strategy": "fsdp2"})
    built: list[parallel.BuiltModel] = []
    original = parallel.build

    def build(*arguments: Any) -> parallel.BuiltModel:
        built.append(original(*arguments))
        return built[-1]

    with parallel.process_group(60) as world, patch.object(parallel, "build", build):
        loop.train(settings, out)
        trained = {name: parallel.unshard(parameter) for name, parameter in built[0].model.named_parameters()}
        world.barrier()  # rank 0 writes
    fresh = adapted(rank=settings.lora_r)
    first = {name: parameter.clone() for name, parameter in fresh.named_parameters()}
    load(fresh, out / "final")
    return {
        "trained": {name for name in trained if not torch.equal(trained[name], first[name])},
        "other": {name for name, parameter in fresh.named_parameters() if not torch.equal(parameter, trained[name])},
    }


@pytest.mark.training
def test_a_run_changes_only_adapters_and_exports_them_exactly(tmp_path: Path) -> None:
    """FSDP2 on two ranks; the export is loaded into a model with the same seed."""
    names = {name for name, _ in adapted().named_parameters() if "lora_" in name}
    for names_by_kind in ranks.run(2, _train_and_reload, tmp_path):
        assert names_by_kind == {"trained": names, "other": set()}
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == [lora.CONFIG_FILE, lora.WEIGHTS_FILE]


def test_dropout_probability_independence_and_scale() -> None:
    torch.manual_seed(0)
    x = torch.ones(64, 500, 40, dtype=torch.double).requires_grad_()
    first, second = dropout(x, 0.05), dropout(x, 0.05)
    torch.manual_seed(0)
    assert torch.equal(dropout(x, 0.05), first)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, first)
    dropped = torch.stack([first, second]) == 0
    torch.testing.assert_close(first[~dropped[0]], torch.full_like(first[~dropped[0]], 1 / 0.95))
    assert dropped.float().mean().item() == pytest.approx(0.05, abs=6e-4)  # 4 σ of 2.56 million
    for dim_kept in (1, 2, 3):  # uniform along each dimension: 5 σ
        mean, count = (
            dropped.float().mean([dim for dim in range(4) if dim != dim_kept]),
            dropped.numel() / dropped.shape[dim_kept],
        )
        assert (mean - 0.05).abs().max() < 5 * (0.05 * 0.95 / count) ** 0.5
    pairs = [dropped[0] & dropped[1], *(dropped[0] & dropped[0].roll(by, dim) for by in (1, 2, 4) for dim in (0, 1, 2))]
    assert all(both.float().mean().item() == pytest.approx(0.0025, abs=2.5e-4) for both in pairs)  # 5 σ


def test_dropout_is_active_in_training() -> None:
    model = weights.build_on_meta(SHAPE, torch.float, torch.float)
    lora.attach(model, ALL_LINEAR, 4, alpha=16, dropout=0.5)
    model.to_empty(device="cpu")
    weights.fill(model, weights.random_weights(0, 0.02), CPU)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(model).values():
            parameter.normal_(0, 0.1)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
