# Everything a new clone needs: `make demo` and `make test` set up .venv by themselves.
# PYTHON chooses the interpreter that .venv is made with (3.11 or later).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
# Compiled modules are kept beside their sources, whatever the environment says: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## show this text
	@echo "make TARGET, where TARGET is one of:"
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: demo
demo: $(READY)  ## start a small cluster, ask it questions, check the answers, stop it
	@$(BIN)/baton demo --model-dir build/demo-model

.PHONY: test
test: check  ## check, then run the tests that are quick
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

.PHONY: test-all
test-all: check  ## check, then run all tests, with those that are slow by nature
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: check
check: $(READY)  ## lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: test-rdma
test-rdma: $(READY)  ## RDMA for real: Soft-RoCE in an emulated virtual machine (root, Debian; minutes)
	@PYTHON=$(BIN)/python tests/rdma/run.sh

NIXL := build/nixl
.PHONY: test-ucx
test-ucx: $(READY) $(NIXL)/.ready  ## the transport ucx, on NIXL, which is fetched into build/nixl (69 MB)
	@PYTHONPATH=$(CURDIR)/$(NIXL) $(BIN)/pytest -n 2 --dist loadfile -k ucx \
	    tests/conformance/test_transport_conformance.py tests/cluster/test_ucx.py

# Beside .venv, not in it: what is tested there is to run without it.
$(NIXL)/.ready: constraints.txt $(READY)
	@rm -rf $(NIXL)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -c constraints.txt \
	    --target $(NIXL) nixl-cu12
	@touch $@

CLIENTS ?=
.PHONY: test-clients
test-clients: $(READY)  ## run clients that people use against a cluster, each in an environment of its own: CLIENTS="openai llm"
	@$(BIN)/python -m tests.clients $(CLIENTS)

.PHONY: explore
explore: $(READY)  ## walk the ownership protocol's states with larger bounds than the tests do (minutes)
	@$(BIN)/python -m tests.explorer --large

SEED ?= 1
STEPS ?= 1000
PROFILE ?= small
SEEDS ?= 1
JOBS ?= $(shell nproc)
.PHONY: sim
sim: $(READY)  ## simulate a cluster under faults: SEED=n STEPS=m PROFILE=small|wide|...; SEEDS=k in JOBS=j processes
	@$(BIN)/python -m tests.sim --seed $(SEED) --seeds $(SEEDS) --jobs $(JOBS) --steps $(STEPS) --profile $(PROFILE) \
	    $(if $(GAP),--fault-gap-s $(GAP)) $(FLAGS)

ROUNDS ?= 118
LONG_LOG ?= build/sim-long.jsonl
# A command that each piece is run through (a queue, nice, ...).
THROUGH ?=
.PHONY: sim-long
sim-long: $(READY)  ## simulate a million requests in pieces of a few minutes, and add them up (an hour): ROUNDS=n
	@mkdir -p $(dir $(LONG_LOG))
	@for round in $$(seq $(SEED) $$(($(SEED) + $(ROUNDS) - 1))); do \
	    for run in wide:8000 routers:200 tangled:100 small:100 pair:100; do \
	        $(THROUGH) $(BIN)/python -m tests.sim --seed $$round --profile $${run%:*} --steps $${run#*:} \
	            --log $(LONG_LOG) || exit; \
	    done; \
	done
	@$(BIN)/python -m tests.sim --sum $(LONG_LOG)

.PHONY: faults
faults: $(READY)  ## kill, stop and cut off real processes at every stage of a request (minutes): SEED=n PART=1/2
	@$(BIN)/python -m tests.faults $(if $(PART),--part $(PART)) $(if $(SEED),--seed $(SEED))

MINUTES ?= 15
.PHONY: fuzz
fuzz: $(READY)  ## send what nobody has seen to every parser that strangers reach: MINUTES=n; failures become seeds
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

.PHONY: soak
soak: MINUTES = 10
soak: $(READY)  ## throw garbage at every port of a cluster beside twenty streams: MINUTES=10 SEED=n
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

.PHONY: proto
proto: $(READY)  ## generate proto/batonpb from proto/*.proto
	@PYTHON=$(BIN)/python proto/generate.sh

.PHONY: clean
clean:  ## remove what the other targets have made, .venv too
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kvtransfer engine -name "*.so" -delete -o -name "*.part" -delete

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Python 3.11 or later is needed, and '$(PYTHON)' is older or not there." >&2; \
	    echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; }
	@echo "Setting up $(VENV); the first time takes some minutes (PyTorch is large)."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' \
	    | while read -r line; do \
	        case "$$line" in Collecting*|Installing*) if [ -t 1 ]; then printf '\r\033[K%.70s' "$$line"; fi;; esac; \
	    done
	@if [ -t 1 ]; then printf '\r\033[K'; fi; echo "$(VENV) is ready."
	@touch $@
