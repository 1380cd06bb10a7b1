# `make help` lists the targets. PYTHON=python3.12 selects the Python, PROFILE=cpu or cuda the profile.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=15
# Tests without Ray and vLLM share no process, port or folder: as many run at once as there are
# cores. Of the others two files run at once, the longest first: each waits much for processes that start.
# `make test` has the former beside the latter, at a lower priority, and prints what they said at the end.
AT_ONCE := -n logical --maxprocesses 8 --dist worksteal tests/pure tests/sim
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
IN_TURN := tests/e2e tests/hosts tests/gpu
# Documentation, deployment files, servers and pages: these tests matter where those files changed.
EDGES := tests/docs tests/deploy tests/browser tests/e2e/test_monitoring.py
CLIENTS := $(addprefix tests/pure/agents/test_,oracles.py published_agents.py recipes.py) tests/containers
# Settings of `make quickstart` and `make real` over their configurations, such as SET="run.seed=1 buffer.lookahead=0".
SET :=
# On a machine with one or two GPUs the quick start fits them: a rank and an engine share one, or have one each.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)
FIT_1 := trainer.ranks=1 weights.transport=ipc generator.gpu_memory_utilization=0.35
FIT_2 := trainer.ranks=1
# cpu or cuda, to override the detected profile.
PROFILE :=
export PYTHON
# Ray's workers and the processes of tests would compile this project each time.
unexport PYTHONDONTWRITEBYTECODE
BOOTSTRAP := $(if $(PROFILE),BATON_PROFILE=$(PROFILE)) scripts/bootstrap --venv $(VENV)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^ifneq/ {split($$0, part, /[ )]/); skip = system("test -e " part[3])} /^endif/ {skip = 0} \
	    /^[a-z-]+:.*## / && !skip {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv dev
venv: ## build .venv from the lock files (CPU or CUDA), or do nothing
	@$(BOOTSTRAP)
dev: ## the same, with the tools for lint, types and tests
	@$(BOOTSTRAP) --dev

HARBOR_PYTHONS := $(or $(PYTHON),python3.12 python3.13 python3.14 python3)
.PHONY: harbor
harbor: ## Harbor 0.26 and podman-compose in .venv-harbor, for tasks in containers (Python 3.12 or newer)
	@for python in $(HARBOR_PYTHONS) ""; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break; done; \
	    [ "$$python" ] || { echo "baton: Harbor needs Python 3.12 or newer: make harbor PYTHON=/path/to/python3.12" >&2; exit 2; }; \
	    "$$python" -m venv .venv-harbor
	@.venv-harbor/bin/pip install --quiet --disable-pip-version-check harbor==0.26.0 podman-compose==1.6.0

.PHONY: quickstart
quickstart: venv ## train a small model through vLLM, the buffer and FSDP (minutes)
	@echo "baton: training; configuration configs/quickstart.yaml"
	@$(BIN)/baton run --config configs/quickstart.yaml $(FIT_$(GPUS)) $(SET)

.PHONY: real
real: venv ## prepare SmolLM2-135M-Instruct and train it on a game in several turns (a quarter of an hour on two cores)
	@$(BIN)/python scripts/real_model.py
	@echo "baton: training; configuration configs/smollm2_guess.yaml"
	@$(BIN)/baton run --config configs/smollm2_guess.yaml $(SET)

.PHONY: cluster-demo
cluster-demo: venv ## the same over four Ray hosts on this machine (root, Linux); says how to look and disturb
	@$(BIN)/python -m tests.hosts.demo $(SET)

.PHONY: servers test test-fast test-edges test-clients test-slurm test-full test-chaos worlds soak
servers: dev ## Prometheus, Alertmanager, Chromium and Slurm for the tests, as root with apt-get (BATON_SERVERS=no: never)
	@$(BIN)/python scripts/servers.py
test: dev ## the test suite on CPU, real Ray, vLLM and FSDP included
	@echo "baton: testing, with real Ray and vLLM first; tests without them run beside that and are printed last"
	@rm -f build/slowest*.txt; said=$$(mktemp); failed=0; \
	    nice -n 10 $(PYTEST) --slowest build/slowest-pure.txt -m "not full" $(AT_ONCE) >$$said 2>&1 & \
	    beside=$$!; trap 'kill $$beside 2>/dev/null || true; rm -f $$said' EXIT; \
	    $(PYTEST) --slowest build/slowest-e2e.txt -m "not full" \
	        --ignore tests/e2e/test_monitoring.py $(TWO_FILES) $(IN_TURN) || failed=1; \
	    wait $$beside || failed=1; cat $$said; \
	    sort -rn build/slowest-pure.txt build/slowest-e2e.txt >build/slowest.txt; exit $$failed
test-fast: dev ## only the quick tests, which need neither Ray nor vLLM (one to two minutes)
	@$(PYTEST) -m "not slow and not full" -n logical --maxprocesses 8 --dist worksteal tests/pure
test-edges: dev servers ## documentation, deployment files, Prometheus, pages in a browser; .ci/run calls it if they changed
	@$(PYTEST) -m "not full" $(EDGES)
test-clients: dev ## SDKs, programs and containers that speak to agents' endpoints; .ci/run calls it if those changed
	@$(PYTEST) -m full -n logical --maxprocesses 8 $(CLIENTS)
test-slurm: dev servers ## deploy/slurm/train.sbatch on a real Slurm, as root; .ci/run calls it if that file changed
	@$(PYTEST) tests/hosts/test_slurm.py -k one_command
test-full: dev servers ## all tests that run on CPU, except test-chaos
	@$(PYTEST) --hypothesis-profile=fresh $(AT_ONCE)
	@$(PYTEST) --hypothesis-profile=fresh $(IN_TURN) $(EDGES)
test-chaos: dev ## kill processes of real runs, two and three at once (most of an hour)
	@$(PYTEST) -v tests/chaos
worlds: dev ## five thousand simulated runs with injected faults, and every pair of deaths, on one core (a quarter of an hour)
	@$(BIN)/python -m tests.sim --worlds 5000
	@$(PYTEST) -n 0 tests/sim/test_pairs.py
soak: dev ## the buffer under load for twenty minutes
	@$(BIN)/python -m benchmarks.soak

.PHONY: lint types check docs dist release format
lint: dev ## ruff, and the contracts of import-linter: who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=. $(BIN)/lint-imports --no-logo --no-cache
types: dev ## mypy --strict over service/ and actors/
	@$(BIN)/mypy
check: lint types test ## all checks that a change has to pass
docs: dev ## the documentation as a site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "baton: the site is in build/site; open build/site/index.html"
dist: dev ## the package as sdist and wheel in dist/
	@rm -rf dist
	@$(BIN)/hatchling build
release: dev ## the package, built twice and compared, and the list of what it needs (build/sbom.json)
	@rm -rf dist build/again
	@$(BIN)/hatchling build
	@$(BIN)/hatchling build -d build/again
	@diff -r dist build/again
	@$(BIN)/python -m pip install --quiet --upgrade --no-warn-conflicts --target build/cyclonedx cyclonedx-bom==7.5.0
	@PYTHONPATH=build/cyclonedx $(BIN)/python -m cyclonedx_py requirements requirements/cuda.txt --output-file build/sbom.json
	@echo "baton: dist/ holds the package, build/sbom.json what it needs"
format: dev ## format and fix with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench-handoff bench-learn bench-padded bench-peer bench-sequence-parallel gpu
bench-handoff: dev ## merging and batching against other systems, in one run
	@$(BIN)/python -m benchmarks.handoff
bench-padded: dev ## padded lengths of mini-batches, for three ways to form rows
	@$(BIN)/python -m benchmarks.padded_lengths
bench-peer: dev ## the quick start end to end against TRL, with fast and with slow environments (about an hour)
	@$(BIN)/python -m benchmarks.peer
gpu: ## what only a GPU can show, the most valuable first, in 35 minutes; needs no network; into build/gpu.json
	@$(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu
bench-learn: dev ## packed against padded learning, and shared prefixes against packed rows, in one run
	@$(BIN)/python -m benchmarks.learn
bench-sequence-parallel: dev ## memory of ranks that share tokens, and a row that no rank could train alone
	@$(BIN)/python -m benchmarks.sequence_parallel

.PHONY: lock clean
lock: dev ## resolve the dependencies again and write requirements/*.txt
	@$(BIN)/python scripts/lock.py
clean: ## remove the environment and the caches
	rm -rf $(VENV) .venv-harbor .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
