#!/usr/bin/env bash
# Makes the virtual environment and installs grpo into it. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${VENV:=.venv}" "${EXTRAS:=test,dev}"

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "grpo needs Python 3.11, 3.12 or 3.13; '$PYTHON' is $("$PYTHON" --version). Try: make install PYTHON=python3.11" >&2
    exit 2
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# DeepSpeed is published as source; its kernels are compiled at first use, on machines that have them.
DS_BUILD_OPS=0 "$VENV/bin/python" -m pip install --quiet --editable ".[$EXTRAS]"
# Where PYTHONDONTWRITEBYTECODE is set, as in many images, every start of grpo would compile its sources anew: 0.3 s.
"$VENV/bin/python" -m compileall -q src
