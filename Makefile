# make quickstart   see reinforcement learning work, in minutes on two CPU cores
# make test         lint, types and tests
# Both make .venv on their first run and install nothing on the next.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORE := $(VENV)/.core
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
SEED ?= 0
ALGORITHM ?= grpo

export TOKENIZERS_PARALLELISM := false
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help quickstart test lint types unit format clean

help:
	@sed -n 's/^# \{0,1\}//;1,3p' Makefile

$(CORE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing lowpeak and what it needs (torch is large: this takes a while, once)"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

$(READY): $(CORE)
	@echo "installing what the tests need"
	@$(PIP) --editable '.[test]'
	@echo "compiling what DeepSpeed needs on CPUs (once, with gcc)"
	@DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.accelerator import get_accelerator as of; of().create_op_builder('ShareMemCommBuilder').load(verbose=False)" >/dev/null
	@touch $@

quickstart: $(CORE)
	$(BIN)/python examples/quickstart.py --algorithm $(ALGORITHM) --seed $(SEED)

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore tests/distributed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/distributed

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .ci-wheel build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
