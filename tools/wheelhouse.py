"""Downloads the wheels of seatrial and of all that it needs, for machines without a network: wheelhouse.py FOLDER.

``pip install -r FOLDER/requirements.txt`` then installs them without an index and compares their hashes. The wheels are
for the Python and processor that run this script. Until it has all wheels, the folder is named FOLDER.partial.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# ``pip install .`` in a clone, also in an image, builds seatrial with these
BUILD_TOOLS = ("hatchling", "editables")


def main() -> int:
    folder = Path(sys.argv[1])
    if folder.exists():
        print(f"wheelhouse: {folder} exists: remove it, or choose another folder", file=sys.stderr)
        return 2
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _pip("wheel", "--no-deps", "--wheel-dir", str(partial), str(ROOT))
        (wheel,) = partial.glob("seatrial-*.whl")
        _download(partial, f"{wheel}[train,hf,docs]")
        (partial / "requirements.txt").write_text(requirements(sorted(partial.glob("*.whl"))))
        _download(partial, *BUILD_TOOLS)
    except subprocess.CalledProcessError as error:
        print(f"wheelhouse: pip failed (above), {folder} was not made", file=sys.stderr)
        return error.returncode
    partial.rename(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.0f} MB", file=sys.stderr)
    return 0


def requirements(wheels: list[Path]) -> str:
    """Return the requirements file: options of pip, and one line for each wheel with its version and SHA-256."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        f"# Wheels for Python {python}, {platform.system()} {platform.machine()}. Install them with the same Python:",
        f"#   python{python} -m venv VENV && VENV/bin/pip install -r THIS_FILE",
        "--no-index",
        "--find-links .",  # relative to this file
        "--require-hashes",
    ]
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}")
    return "\n".join([*lines, ""])


def _download(folder: Path, *packages: str) -> None:
    constraints = str(ROOT / "constraints.txt")
    _pip("download", "--only-binary", ":all:", "--constraint", constraints, "--dest", str(folder), *packages)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
