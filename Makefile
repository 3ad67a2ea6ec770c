# make demo         see what a probabilistic CLIP does (sets itself up; no root)
# make test         linter, type checker and tests (sets itself up; no root)
# make test-system  the tests that need Debian's packages; installs them, needs root
# make fuzz         the fuzz tests for minutes instead of seconds
# make bench        the speed and memory claims, measured side by side
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Test files at a time; each uses one thread.
PROCESSES ?= 2
DEBIAN := slurm-wlm munge iproute2 chromium

.PHONY: setup demo test test-system fuzz bench clean
setup: $(VENV)/.ready

# The stamp is written last: an interrupted install is finished by the next call.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/pcmepp demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -n $(PROCESSES) --dist loadfile -m 'not system' tests

test-system: setup
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || { apt-get update && apt-get install -y --no-install-recommends $(DEBIAN); }
	$(PYTEST) -m system tests

fuzz: setup
	HYPOTHESIS_PROFILE=long $(PYTEST) -n $(PROCESSES) tests/test_fuzz_*.py

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
