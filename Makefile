# `make demo` and `make test` each do all of their own set-up, and are quick the second time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONTACT := .venv-contact

CC     ?= cc
INSTALL_SSHD := apt-get install -qq -y --no-install-recommends openssh-server openssh-client
C_SOURCES := $(wildcard csrc/*.c csrc/*.h)

.PHONY: demo demo-fault test check mpirun sshd bench stress suite contact test-torch test-python clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready-demo
	$(BIN)/phalanx run --nproc-per-node 2 examples/digits.py

demo-fault: $(VENV)/ready-demo
	PYTHON=$(BIN)/python examples/survive.sh

test: check mpirun sshd
	$(BIN)/python -m pytest -m "not alone" -n 3 --dist worksteal
	$(BIN)/python -m pytest -m alone

check: $(VENV)/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(CC) -std=c11 -O1 -Wall -Wextra -Werror -fsyntax-only csrc/*.c tests/native/*.c

# One test runs beside Open MPI. Without it, and without the right to install it, that test says why it is skipped.
mpirun: $(VENV)/ready-dev
	@command -v mpirun >/dev/null || [ "$$(id -u)" != 0 ] || { \
		echo "installing Debian's openmpi-bin"; \
		{ apt-get install -qq -y --no-install-recommends openmpi-bin || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends openmpi-bin; }; } >/dev/null || \
		echo "openmpi-bin cannot be installed; the test beside Open MPI will be skipped"; }

# The tests of one command for many machines run ssh's server in their virtual nodes. Where systemd would start it for the
# whole machine, it is not installed: that is for the machine's owner to decide.
sshd: $(VENV)/ready-dev
	@[ -x /usr/sbin/sshd ] || [ "$$(id -u)" != 0 ] || [ -d /run/systemd/system ] || { \
		echo "installing Debian's openssh-server"; \
		{ $(INSTALL_SSHD) || { apt-get update -qq && $(INSTALL_SSHD); }; } >/dev/null || \
		echo "openssh-server cannot be installed; the tests over ssh will be skipped"; }

bench: $(VENV)/ready-bench mpirun
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/ddp_step.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/track.py
	$(BIN)/python benchmarks/recorder.py
	$(BIN)/python benchmarks/dp_vs_ddp.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/nodes.py

stress: $(VENV)/ready-dev
	MOMENTS=200 $(BIN)/python -m pytest \
		tests/faults/test_checkpoint_kills.py tests/faults/test_shm_kills.py tests/ranks/test_shm_programs.py
	$(BIN)/python tests/native/stress.py --seconds 60

suite: $(VENV)/ready-dev
	$(BIN)/python tests/suite/run.py

# Other people's code and attackers, at full size; writes docs/contact.md.
contact: $(CONTACT)/ready
	CONTACT=full $(CONTACT)/bin/python -m pytest tests/contact

# The smoke tests with another torch, or with another Python: one of pyenv's, or on PATH.
test-torch:
	$(call smoke,$(PYTHON),torch-$(VERSION),torch==$(VERSION))

test-python:
	$(call smoke,$(or $(lastword $(wildcard $(HOME)/.pyenv/versions/$(VERSION)*/bin/python)),python$(VERSION)),python-$(VERSION),-c constraints.txt)

# From a Python, a name and what pip has to be told, to a virtual environment of its own that is gone afterwards.
define smoke
@[ -n "$(VERSION)" ] || { echo "which one? make $@ VERSION=…"; exit 2; }
trap 'rm -rf .venv-$(2)' EXIT INT TERM; $(1) -m venv .venv-$(2) && \
.venv-$(2)/bin/python -m pip install --quiet --disable-pip-version-check -e . 'pytest>=8' 'hypothesis>=6.100' $(3) && \
.venv-$(2)/bin/python -m pytest @tests/smoke.txt
endef

clean:
	rm -rf $(VENV) .venv-* build dist src/*.egg-info runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }

$(CONTACT)/ready: pyproject.toml setup.py constraints.txt $(C_SOURCES)
	$(PYTHON) -m venv $(CONTACT)
	$(CONTACT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,contact]'
	touch $@

$(VENV)/ready: pyproject.toml setup.py constraints.txt $(C_SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/ready-demo: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples]'
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/ready-bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@
