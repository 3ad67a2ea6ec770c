# make demo           train a small model and see what its uncertainty means
# make test           lint, type check, and run the tests, but those of benchmarks, research and data scripts only
#                     where a change since BASE reaches them: tests/support/affected.py
# make test-system    run the tests that need Debian packages; installs them, needs root
# make test-all       all tests, and the documentation
# make lint           ruff, its formatter, and mypy
# make docs           build the documentation site into site/
# make fuzz           run the fuzz tests for minutes instead of seconds
# make bench          measure the speed and memory claims against open_clip
# Each target first creates .venv if it is missing. Only test-system needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
PARALLEL = $(PYTEST) -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# The commit from which `make test` looks for changes, where it is not the merge base with main or the one before it.
BASE ?=
# The open_clip to test with, where it is not the one that pip chooses: a requirement, or the folder of a source tree.
OPEN_CLIP ?=
ifneq ($(wildcard $(OPEN_CLIP)/src/open_clip),)
export PYTHONPATH := $(abspath $(OPEN_CLIP))/src
endif
# Test files that run in parallel; each uses one thread.
PROCESSES ?= 2
DEBIAN := slurm-wlm munge iproute2 chromium

.PHONY: setup open-clip demo lint test test-system test-all docs fuzz bench clean
setup: $(VENV)/.ready

# The stamp is written last, so the next call finishes an interrupted install.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/pcmepp demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint open-clip
	$(PARALLEL) -m 'not system' tests $$($(BIN)/python tests/support/affected.py $(BASE))

# Installs what OPEN_CLIP names; a folder is put in front by PYTHONPATH.
open-clip: setup
	@if [ -n '$(OPEN_CLIP)' ] && [ ! -d '$(OPEN_CLIP)' ]; then $(BIN)/python -m pip install --quiet '$(OPEN_CLIP)'; fi

test-system: setup open-clip
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || { apt-get update && apt-get install -y --no-install-recommends $(DEBIAN); }
	$(PARALLEL) -m system tests

test-all: lint open-clip docs
	$(PARALLEL) -m 'not system' tests
	$(MAKE) test-system

docs: setup
	$(BIN)/mkdocs build --strict

fuzz: setup
	HYPOTHESIS_PROFILE=long $(PYTEST) -n $(PROCESSES) tests/test_fuzz_*.py

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache
