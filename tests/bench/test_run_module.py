from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
import gc, sys
print(__name__, sys.argv[1:], "torch" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 0)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seatrial.bench.run_module", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_module_runs_with_its_arguments_after_the_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(MODULE)
    (tmp_path / "torch.py").write_text("")  # in place of torch, whose import takes a second
    assert run(tmp_path, "shows", "-m", "x").stdout == "__main__ ['-m', 'x'] True True True\n"


def test_missing_torch_is_reported_by_the_module(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (tmp_path / "needs_torch.py").write_text("print('starts', flush=True)\nimport torch")
    ended = run(tmp_path, "needs_torch")
    assert (ended.returncode, ended.stdout) == (1, "starts\n")
    assert ended.stderr.endswith("No module named 'torch'\n")
