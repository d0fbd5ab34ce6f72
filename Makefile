# `make help` lists the commands. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Runnable modules; the others in benchmarks/ are shared helpers.
BENCHMARKS := $(basename $(notdir $(shell grep -l '^if __name__ == "__main__"' benchmarks/*.py)))

# Without bytecode caches, each of hundreds of processes compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-swarm test lint types unit test-all test-slow test-gpu hunt docs bench clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## train the demo recipe: a pipeline of processes, two of which are killed
	$(BIN)/planaria train demo

demo-swarm: $(VENV)/.installed  ## four peers learn to add from each other's completions, without trusting each other
	$(BIN)/planaria swarm train arithmetic_swarm

# mypy runs while tests wait for processes.
test: lint  ## lint, types and tests: about 20 minutes on two cores
	$(MAKE) --no-print-directory -j2 types unit

lint: $(VENV)/.installed-dev  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## check types
	$(BIN)/mypy

unit: $(VENV)/.installed-dev  ## tests of `make test` alone
	$(BIN)/pytest -n 2 --dist loadfile --durations=30 --durations-min=5

test-all: lint types unit test-slow  ## all tests that need no GPU: about an hour on two cores

test-slow: $(VENV)/.installed-dev  ## the tests that `make test` leaves out: more settings, and slow builds such as the wheel
	$(BIN)/pytest -m "slow and not gpu" -n 2 --dist loadfile --timeout 600

test-gpu: $(VENV)/.installed-dev  ## tests that need a CUDA device; skipped without one
	$(BIN)/pytest -m gpu

hunt: $(VENV)/.installed-dev  ## property tests with new random examples
	PLANARIA_EXAMPLES=hunt $(BIN)/pytest -n 2 --dist loadfile $(shell grep -lE "hypothesis" -r tests --include=test_*.py)

# The build fails on dead links, missing anchors and missing modules.
docs: $(VENV)/.installed-docs  ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(VENV)/.installed  ## run all benchmarks in turn; `make bench-edge` runs one
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; \
	  case $$? in 0) ;; 2) echo "(cannot run here)" ;; *) failed="$$failed $$name" ;; esac; \
	done; test -z "$$failed" || { echo "make bench: these benchmarks miss their claims:$$failed" >&2; exit 1; }

bench-%: $(VENV)/.installed
	$(BIN)/python -m benchmarks.$*

clean:  ## remove everything that these commands built, except runs/
	rm -rf $(VENV) build src/planaria.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# venv installs pip last: a folder without pip is incomplete.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "'$(PYTHON)' is not Python 3.11 or newer; use another, such as: make demo PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp older than pyproject.toml or constraints.txt triggers a new installation.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e '.[docs]'
	touch $(VENV)/.installed $@
