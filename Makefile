# `make demo` and `make test` each do all of their own set-up, and are quick the second time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

CC     ?= cc
C_SOURCES := $(wildcard csrc/*.c csrc/*.h)

.PHONY: demo test check bench stress suite clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	$(BIN)/phalanx run --nproc-per-node 4 examples/reference.py

test: check
	$(BIN)/python -m pytest

check: $(VENV)/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(CC) -std=c11 -O1 -Wall -Wextra -Werror -fsyntax-only csrc/*.c tests/native/*.c

bench: $(VENV)/ready-bench
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/ddp_step.py

stress: $(VENV)/ready-dev
	$(BIN)/python tests/native/stress.py --seconds 60

suite: $(VENV)/ready-dev
	$(BIN)/python tests/suite/run.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }

$(VENV)/ready: pyproject.toml setup.py constraints.txt $(C_SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/ready-bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@
