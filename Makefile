# make demo   train the demo recipe: a pipeline of real processes, two of which are killed on the way
# make demo-swarm   four peers learn to add from each other's completions, without trusting each other
# make test   lint, types and tests
# make test-all   every test that needs no GPU: about an hour on two cores
# make test-slow   those that make test leaves out: more settings, and what takes longest, such as the wheel
# make test-gpu   what needs a CUDA device; skipped, with the reason, where there is none
# make hunt   the property tests again, with new random examples each time
# make docs   the documentation as a site, in build/site
# make bench  every benchmark, one after the other; make bench-edge is one of them
# make clean  remove what these commands have built; runs/ is yours and stays
#
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Modules that can be run; the others in benchmarks/ are what these share.
BENCHMARKS := $(basename $(notdir $(shell grep -l '^if __name__ == "__main__"' benchmarks/*.py)))

# Hundreds of processes are started, and each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-swarm test lint types unit test-all test-slow test-gpu hunt docs bench clean

demo: $(VENV)/.installed
	$(BIN)/planaria train demo

demo-swarm: $(VENV)/.installed
	$(BIN)/planaria swarm train arithmetic_swarm

# Types are checked while tests wait for processes.
test: lint
	$(MAKE) --no-print-directory -j2 types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist loadfile --durations=30 --durations-min=5

test-all: lint types unit test-slow

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu" -n 2 --dist loadfile --timeout 600

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu

hunt: $(VENV)/.installed-dev
	PLANARIA_EXAMPLES=hunt $(BIN)/pytest -n 2 --dist loadfile $(shell grep -lE "hypothesis" -r tests --include=test_*.py)

# Dead links, missing anchors and modules that are gone fail the build.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(VENV)/.installed
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; \
	  case $$? in 0) ;; 2) echo "(cannot run here)" ;; *) failed="$$failed $$name" ;; esac; \
	done; test -z "$$failed" || { echo "make bench: not what was claimed:$$failed" >&2; exit 1; }

bench-%: $(VENV)/.installed
	$(BIN)/python -m benchmarks.$*

clean:
	rm -rf $(VENV) build src/planaria.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# pip is what `venv` makes last: a folder without it is a half-made one.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "planaria needs Python 3.11 or newer, which '$(PYTHON)' is not; name another, as in: make demo PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps say what was installed; they are older than these two files when it must be done again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --no-compile -c constraints.txt -e '.[docs]'
	touch $(VENV)/.installed $@
