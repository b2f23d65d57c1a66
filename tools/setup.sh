#!/bin/sh
# Makes or completes a virtual environment with pinned versions: setup.sh VENV trial|docs|test
#   trial   what `make trial` needs: seatrial with torch
#   docs    what `make docs` needs: seatrial without torch, mkdocs
#   test    also the Hugging Face libraries, DeepSpeed, linters and test tools
# pip's own variables apply: PIP_EXTRA_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS (docs/install.md)
set -eu
venv=$1
case $2 in
    trial) extras=train ;;
    docs) extras=docs ;;
    test) extras=all ;;
    *) echo "setup: unknown set '$2': expected trial, docs or test" >&2; exit 2 ;;
esac

for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "setup: no Python >= 3.11 found (python3 is $(python3 --version 2>&1)); set PYTHON=/path/to/python;" \
        "for Ubuntu 22.04 see docs/install.md" >&2
    exit 2
fi

# Debian and Ubuntu ship Python without its venv module: python3-venv, or python3.12-venv for python3.12
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    package=$(basename "$python")-venv
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: $python has no venv module; as root: apt-get install $package" >&2
        apt-get update -q
        apt-get install -y -q "$package"
    else
        echo "setup: $python has no venv module: sudo apt-get install $package" >&2
        exit 2
    fi
fi

echo "setup: $("$python" --version) in $venv; installing the pinned set '$2' (docs/install.md: sizes)" >&2
if ! grep -qsx 0x10de /sys/bus/pci/devices/*/vendor && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ]; then
    echo "setup: no NVIDIA device. torch without CUDA is 0.2 instead of 3 GB:" \
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ..." >&2
fi
echo "setup: pip prints nothing for up to a minute while it installs what it has downloaded" >&2
"$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --constraint constraints.txt "$@"; }
install --editable ".[$extras]"
if [ "$2" = test ]; then
    # DeepSpeed's setup imports torch, and would compile operators for GPUs: none is needed to train with ZeRO-3 on a CPU
    install setuptools
    DS_BUILD_OPS=0 install --no-build-isolation deepspeed
fi
