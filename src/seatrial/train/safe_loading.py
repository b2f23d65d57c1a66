"""Loads checkpoints without running code that their pickles name: a checkpoint may come from someone else."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from seatrial.util.input_files import open_file

# (module, name) of the classes and functions that torch.distributed.checkpoint (2.11 to 2.13) writes to .metadata,
# besides dtypes
_ALLOWED = {
    *(
        (metadata.__name__, name)
        for name in vars(metadata)
        if name.endswith(("Metadata", "Meta", "Index", "Properties"))
    ),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"),
    (filesystem.__name__, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
}


class Reader(FileSystemReader):
    """FileSystemReader that rejects metadata with functions or classes other than those that DCP writes.

    Raises UnpicklingError.
    """

    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        for path in sorted(Path(self.path).glob("*.metadata")):
            with open_file(path) as file:
                _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **options)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's metadata names {module}.{name}, which DCP never writes")


class Planner(DefaultLoadPlanner):
    """DefaultLoadPlanner that rejects values other than tensors and plain Python types. Raises UnpicklingError."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def weights_only(*allowed: type) -> Iterator[None]:
    """Context manager: torch.load raises UnpicklingError for functions and classes that are not ``allowed``.

    The functions and classes that torch.load accepts with ``weights_only=True`` are always allowed. Needed since
    DeepSpeed loads its checkpoints with ``weights_only=False``.
    """
    # the variable overrides the argument weights_only=False of torch.load
    variable = patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
    with variable, torch.serialization.safe_globals(list(allowed)):
        yield
