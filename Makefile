# jaxplan: every command that the README names. `make` alone lists them.
#
# Variables: PYTHON (which Python makes the environment), VENV (where it lives), PYTEST_ARGS (what pytest is
# told besides), EXTRAS (what is installed besides jaxplan itself), DATA (where the contest's files are).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
EXTRAS ?= test,tpu-aot
# The contest's files, asplos-2025-iopddl-<letter>.json.gz of https://github.com/google/iopddl.
DATA ?= $(firstword $(wildcard data/iopddl shared/data/iopddl ../shared/data/iopddl) data/iopddl)
# Without libtpu, for machines that it isn't made for.
EXTRAS_PORTABLE := test
# Each worker holds eight devices and its own compiled programs: more than four only eat memory.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile

# The first Python that runs, is new enough and can make environments; a name on PATH alone proves none of it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	if $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)

# jax 0.11 and later need Python 3.12.
PYTHON_LATEST ?= $(shell for p in python3.12 python3.13 python3 python; do \
	if $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)

BIN := $(VENV)/bin
# Written last: an environment without it was interrupted, and is completed by the next command.
STAMP := $(VENV)/.complete
PYTEST := $(BIN)/python -m pytest
# models/ and experiments/ are used from the repository.
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python

.PHONY: help
help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: $(STAMP) ## Make the environment in .venv (every command does so when it is missing)

$(STAMP): pyproject.toml
	@python="$(PYTHON)"; if [ -z "$$python" ]; then \
		echo "No Python >= 3.11 with the venv module was found. Install one, or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; fi; \
	echo "Making $(VENV) with $$($$python --version): a few minutes the first time"; \
	$$python -m venv $(VENV)
	@install() { $(BIN)/python -m pip install --disable-pip-version-check -e ".[$$1]" \
		| sed -un 's/^Collecting \([A-Za-z0-9_.-]*\).*/  \1/p; s/^Successfully installed.*/  done/p'; }; \
	if ! install "$(EXTRAS)"; then \
		echo "[$(EXTRAS)] could not be installed: without libtpu now, so tests marked aot_tpu will be skipped" >&2; \
		install "$(EXTRAS_PORTABLE)"; fi
	@echo "Compiling the search's kernels, once" && $(BIN)/python -c "from jaxplan.search import warm; warm.compile_all()"
	@touch $@

.PHONY: demo
demo: $(STAMP) ## Train a small Llama-style model on real text over 8 forced host devices, planned by jaxplan
	@$(RUN) experiments/demo/run.py

.PHONY: demo-processes
demo-processes: $(STAMP) ## The demo in two processes of four devices, connected by jax.distributed
	@$(RUN) experiments/demo/run.py --processes 2

.PHONY: test
test: lint contract types ## Lint, import contract, types and every test that takes seconds
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## The tests that take minutes
	$(PYTEST) $(PYTEST_ARGS) -m slow

.PHONY: test-aot
test-aot: $(STAMP) ## Everything that is compiled for TPU and GPU meshes, without either
	$(PYTEST) $(PYTEST_ARGS) -m "aot_tpu or aot_gpu or aot_broad"

.PHONY: test-latest
test-latest: ## The default tests with the newest jax, which wants Python 3.12, in .venv-latest
	@if [ -z "$(PYTHON_LATEST)" ]; then \
		echo "No Python >= 3.12 with the venv module was found: make test-latest PYTHON_LATEST=/path/to/python" >&2; \
		exit 1; fi
	@$(MAKE) --no-print-directory venv VENV=.venv-latest PYTHON="$(PYTHON_LATEST)"
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e ".[$(EXTRAS)]"
	.venv-latest/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: test-ecosystem
test-ecosystem: .venv-ecosystem/.complete ## Train steps of public packages, planned and compiled for TPU (own environment)
	.venv-ecosystem/bin/python -m pytest -m ecosystem tests/ecosystem

.venv-ecosystem/.complete: pyproject.toml
	@echo "Making .venv-ecosystem: some thirty packages, about 8 GB"
	@$(PYTHON) -m venv .venv-ecosystem
	@.venv-ecosystem/bin/python -m pip install --disable-pip-version-check -q -e ".[ecosystem]"
	@touch $@

.PHONY: lint
lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

.PHONY: contract
contract: $(STAMP) ## The layers of pyproject.toml: who may import whom
	$(BIN)/lint-imports --no-cache

.PHONY: types
types: $(STAMP) ## mypy
	$(BIN)/mypy

.PHONY: bench
bench: $(STAMP) ## What a call costs, and what planning takes by stage at published sizes
	@$(RUN) experiments/bench/run.py; called=$$?; $(RUN) experiments/planning/run.py && exit $$called

.PHONY: bench-quality
bench-quality: $(STAMP) ## Plans and templates of every model as the TPU and GPU compilers make them (hours; goes on)
	@$(RUN) experiments/quality/run.py --whole && $(RUN) experiments/quality/page.py

.PHONY: bench-gpu
bench-gpu: $(STAMP) ## Planned against measured on one H100, step by step and kernel by kernel (a minute; no GPU)
	@$(RUN) experiments/gpu_truth/table.py

.PHONY: bench-filled
bench-filled: $(STAMP) ## Does what is promised to fit, fit? The largest batches of five models, compiled for v5e (half an hour)
	@$(RUN) experiments/quality/filled.py resnet:resnet18 resnet:resnet50 alexnet:alexnet vgg:vgg16 gpt:gpt2

.PHONY: bench-iopddl
bench-iopddl: $(STAMP) ## The contest's problems in DATA within its limits (absent files are named)
	@$(RUN) experiments/iopddl/run.py --data "$(DATA)"

.PHONY: bench-tensoropt
bench-tensoropt: $(STAMP) ## TensorOpt's experiment: time against devices and memory on V100 nodes, simulated
	@$(RUN) experiments/tensoropt_frontier/run.py

.PHONY: bench-budgets
bench-budgets: $(STAMP) ## Frontiers of three models against the exact search at fifty memory budgets each
	@$(RUN) experiments/frontier_budgets/run.py

.PHONY: bench-planning
bench-planning: $(STAMP) ## Proved gaps on 8 to 512 devices, and what depth costs the search
	@$(RUN) experiments/planning/run.py --depth
	@$(RUN) experiments/planning/run.py --gaps

.PHONY: bench-flexflow
bench-flexflow: $(STAMP) ## FlexFlow's networks on its clusters, searched in six ways; delta simulation against full
	@$(RUN) experiments/flexflow_search/run.py && $(RUN) experiments/flexflow_search/page.py

.PHONY: format
format: $(STAMP) ## Sort imports and format the code
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## Remove what the commands made (caches, out/, build/), but not .venv
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find jaxplan models tests experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
