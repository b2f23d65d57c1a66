#!/bin/sh
# Makes a virtual environment with the pinned set in it: setup.sh .venv
set -eu
venv=$1

for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "setup: no Python >= 3.11 found (python3 is $(python3 --version 2>&1)); set PYTHON=/path/to/python" >&2
    exit 2
fi

# Debian and Ubuntu ship Python without its venv module
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q && apt-get install -y -q python3-venv
    else
        echo "setup: $python has no venv module: sudo apt-get install python3-venv" >&2
        exit 2
    fi
fi

echo "setup: $("$python" --version) in $venv; installing the pinned set (torch alone is 0.2 to 3 GB)" >&2
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[all]'
# DeepSpeed's setup imports torch, and would compile operators for GPUs: none is needed to train with ZeRO-3 on a CPU
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt setuptools
DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
