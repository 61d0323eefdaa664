#!/bin/sh
# Makes one virtual environment per peer: sh benchmarks/peers/make.sh [plain pfl flower fluke fedkeel]
# Versions are pinned, so that a table can be repeated. PYTHON names the interpreter.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
torch=torch==2.13.0

for name in ${*:-plain pfl flower fluke fedkeel}; do
    case $name in
        plain)   packages="numpy==2.3.5 pydantic safetensors" ;;
        pfl)     packages="pfl[pytorch]==0.6.0 pydantic safetensors tomli_w" ;;
        flower)  packages="flwr[simulation]==1.41.0" ;;
        fluke)   packages="fluke-fl==0.8.1" ;;
        fedkeel) packages="--editable $here/.." ;;
        *)       echo "unknown peer: $name" >&2; exit 2 ;;
    esac
    env=$here/.envs/$name
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # shellcheck disable=SC2086
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check $torch $packages
    "$env/bin/python" -c "import torch; print('$name: torch', torch.__version__)"
done
