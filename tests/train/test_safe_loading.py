"""Checkpoints of a stranger: no code in their pickles runs, on any way to load them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from seatrial.train import checkpoint, cnn, safe_loading
from tests.train import ranks

pytestmark = pytest.mark.training


class Command:
    """Its pickle runs a shell command that creates ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_the_pickle_runs_a_command_without_precautions(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Command(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def _in_metadata(folder: Path, marker: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Command(marker)))


def _as_planner_data(folder: Path, marker: Path) -> None:
    """Correct metadata with one more object."""
    content: metadata.Metadata = pickle.loads((folder / ".metadata").read_bytes())
    content.planner_data = Command(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def _as_value(folder: Path, marker: Path) -> None:
    """In place of a value of the optimizer that is not a tensor, such as a learning rate."""
    content: metadata.Metadata = pickle.loads((folder / ".metadata").read_bytes())
    values = [
        key
        for key in content.storage_data
        if isinstance(content.state_dict_metadata[key.fqn], metadata.BytesStorageMetadata)
    ]
    torch.save(Command(marker), folder / "stranger.distcp")
    size = (folder / "stranger.distcp").stat().st_size
    for key in values:
        content.storage_data[key] = filesystem._StorageInfo("stranger.distcp", 0, size)
    assert values
    (folder / ".metadata").write_bytes(pickle.dumps(content))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 steps with a checkpoint."""
    out = tmp_path_factory.mktemp("native")
    settings = ranks.config("qwen2-tiny", checkpoint={"every": 2}, max_steps=2)
    assert not any(isinstance(result, ranks.Failed) for result in ranks.run(1, ranks.train, settings, out))
    return out


@pytest.mark.parametrize("attack", [_in_metadata, _as_planner_data, _as_value])
def test_checkpoint_of_stack_native(native: Path, tmp_path: Path, attack: Callable[[Path, Path], None]) -> None:
    out = shutil.copytree(native, tmp_path / "out")
    folder = checkpoint.step_folder(out, 2)
    attack(folder, tmp_path / "marker")
    manifest = json.loads((folder / checkpoint.MANIFEST_FILE).read_text())
    for path in folder.iterdir():  # the stranger writes a correct manifest
        entry = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        manifest["files"] |= {path.name: entry} if path.name != checkpoint.MANIFEST_FILE else {}
    (folder / checkpoint.MANIFEST_FILE).write_text(json.dumps(manifest))
    settings = ranks.config("qwen2-tiny", checkpoint={"every": 2, "resume": True}, max_steps=4)
    (result,) = ranks.run(1, ranks.train, settings, out)
    assert isinstance(result, ranks.Failed)
    assert f"cannot read checkpoint {folder}" in result.message
    assert not (tmp_path / "marker").exists()


def test_network_of_train_cnn(tmp_path: Path) -> None:
    torch.save(Command(tmp_path / "marker"), tmp_path / "net.pt")
    with pytest.raises(pickle.UnpicklingError):
        cnn.load(tmp_path / "net.pt", "cpu")
    assert not (tmp_path / "marker").exists()


class Allowed:
    """A class of a library's checkpoints."""


def test_torch_load_of_a_library_in_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed loads with weights_only=False."""
    torch.save({"command": Command(tmp_path / "marker")}, tmp_path / "optimizer.pt")
    torch.save({"object": Allowed(), "weight": torch.ones(1)}, tmp_path / "library.pt")
    for before in ("0", None):
        if before is None:
            monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        else:
            monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", before)
        with safe_loading.weights_only(Allowed):
            loaded: dict[str, Any] = torch.load(tmp_path / "library.pt", weights_only=False)
            with pytest.raises(pickle.UnpicklingError):
                torch.load(tmp_path / "optimizer.pt", weights_only=False)
        assert isinstance(loaded["object"], Allowed)
        assert os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD") == before
    assert not (tmp_path / "marker").exists()
