# `make help` says what there is. PYTHON=python3.12 names the Python, PROFILE=cpu or cuda the profile.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# What `make quickstart` is told beyond its configuration, such as SET="run.seed=1 buffer.lookahead=0".
SET :=
# cpu or cuda, where the machine's looks are to be overruled.
PROFILE :=
export PYTHON
BOOTSTRAP := $(if $(PROFILE),BATON_PROFILE=$(PROFILE)) scripts/bootstrap --venv $(VENV)

.PHONY: help
help: ## what there is
	@awk -F ':.*## ' '/^ifneq/ {split($$0, part, /[ )]/); skip = system("test -e " part[3])} /^endif/ {skip = 0} \
	    /^[a-z-]+:.*## / && !skip {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv dev
venv: ## build .venv from the lock files (CPU or CUDA), or do nothing
	@$(BOOTSTRAP)
dev: ## the same, with the tools for lint, types and tests
	@$(BOOTSTRAP) --dev

.PHONY: quickstart
quickstart: venv ## train a small model through vLLM, the buffer and FSDP (minutes)
	@echo "baton: training; configuration configs/quickstart.yaml"
	@$(BIN)/baton run --config configs/quickstart.yaml $(SET)

.PHONY: test test-fast test-full test-chaos soak
test: dev ## the test suite on CPU, real Ray, vLLM and FSDP included
	@echo "baton: testing"
	@$(PYTEST) -m "not full" tests
test-fast: dev ## only what needs no Ray and no vLLM
	@$(PYTEST) -m "not slow and not full" tests/pure
test-full: dev ## everything that runs on CPU
	@$(PYTEST) tests
ifneq ($(wildcard tests/chaos),)
test-chaos: dev ## kill processes in the middle of real runs
	@$(PYTEST) tests/chaos
endif
ifneq ($(wildcard benchmarks/soak.py),)
soak: dev ## the buffer under load for twenty minutes
	@$(BIN)/python -m benchmarks.soak
endif

.PHONY: lint types check format
lint: dev ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
types: dev ## mypy --strict over service/ and actors/
	@$(BIN)/mypy
check: lint types test ## what has to pass before a change lands
format: dev ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench-handoff bench-learn
bench-handoff: dev ## merging and batching against other systems, in one run
	@$(BIN)/python -m benchmarks.handoff
bench-learn: dev ## packed against padded learning, in one run
	@$(BIN)/python -m benchmarks.learn

.PHONY: lock clean
lock: dev ## resolve the dependencies anew and write requirements/*.txt
	@$(BIN)/python scripts/lock.py
clean: ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
