# `make demo` and `make test` each do all of their own set-up, and are quick the second time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONTACT := .venv-contact

COMPILERS := gcc clang aarch64-linux-gnu-gcc
C_SOURCES := $(wildcard csrc/*.c csrc/*.h)

.PHONY: demo demo-fault test check aarch64 mpirun sshd slurm bench stress suite contact test-torch test-python clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready-demo
	$(BIN)/phalanx run --nproc-per-node 2 examples/digits.py

demo-fault: $(VENV)/ready-demo
	PYTHON=$(BIN)/python examples/survive.sh

test: aarch64 check mpirun sshd slurm
	$(BIN)/python -m pytest -m "not alone" -n 3 --dist worksteal
	$(BIN)/python -m pytest -m alone

check: $(VENV)/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	@missing=; for compiler in $(COMPILERS); do \
		if echo '#include <stdio.h>' | $$compiler -fsyntax-only -x c - 2>/dev/null; then \
			$$compiler -std=c11 -O1 -Wall -Wextra -Werror -fsyntax-only csrc/*.c tests/native/*.c || exit; \
		else missing="$$missing $$compiler"; fi; \
	done; [ -z "$$missing" ] || echo "not there, so the C library was not compiled with:$$missing"

# From Debian's packages, and what is skipped without them, to an installation as root.
define install
[ "$$(id -u)" != 0 ] || { echo "installing Debian's $(1)"; install="apt-get install -qq -y --no-install-recommends $(1)"; \
		{ $$install || { apt-get update -qq && $$install; }; } >/dev/null || echo "it cannot be installed; $(2)"; }
endef

# One test runs beside Open MPI. Without it, and without the right to install it, that test says why it is skipped.
mpirun: $(VENV)/ready-dev
	@command -v mpirun >/dev/null || $(call install,openmpi-bin,the test beside Open MPI will be skipped)

# The tests of one command for many machines run ssh's server in their virtual nodes. Where systemd would start it for the
# whole machine, it is not installed: that is for the machine's owner to decide.
sshd: $(VENV)/ready-dev
	@[ -x /usr/sbin/sshd ] || [ -d /run/systemd/system ] || \
		$(call install,openssh-server openssh-client,the tests over ssh will be skipped)

# The tests with SLURM run its daemons in their virtual nodes. The same holds for systemd here.
slurm:
	@[ -x /usr/sbin/slurmctld -a -x /usr/sbin/munged ] || [ -d /run/systemd/system ] || \
		$(call install,slurm-wlm munge,the tests with SLURM will be skipped)

# The C library is compiled for aarch64, and its stress test runs there, in an emulator.
aarch64:
	@{ command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64-static; } >/dev/null || $(call install,gcc-aarch64-linux-gnu \
		libc6-dev-arm64-cross qemu-user-static,the C library will not be tested for aarch64)

bench: $(VENV)/ready-bench mpirun
	$(BIN)/phalanx bench launch --out benchmarks/results
	$(BIN)/phalanx bench collectives --out benchmarks/results
	$(BIN)/python benchmarks/ddp_step.py
	$(BIN)/python benchmarks/sampler.py
	$(BIN)/python benchmarks/track.py
	$(BIN)/python benchmarks/stop_point.py
	$(BIN)/python benchmarks/recorder.py
	$(BIN)/python benchmarks/dp_vs_ddp.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/preemption.py
	$(BIN)/python benchmarks/agent_imports.py
	$(BIN)/python benchmarks/nodes.py

stress: $(VENV)/ready-dev
	MOMENTS=200 $(BIN)/python -m pytest -o timeout=7200 \
		tests/faults/test_checkpoint_kills.py tests/faults/test_shm_kills.py tests/ranks/test_shm_programs.py
	$(BIN)/python tests/native/stress.py --seconds 60

suite: $(VENV)/ready-dev
	$(BIN)/python tests/suite/run.py

# Other people's code and attackers, at full size; writes docs/contact.md.
contact: $(CONTACT)/ready slurm
	CONTACT=full $(CONTACT)/bin/python -m pytest -o timeout=3600 tests/contact tests/faults/test_preemption*.py tests/faults/test_helpers.py

# The smoke tests with another torch, or with another Python: one of pyenv's, or on PATH.
test-torch:
	$(call smoke,$(PYTHON),torch-$(VERSION),torch==$(VERSION))

test-python:
	$(call smoke,$(or $(lastword $(wildcard $(HOME)/.pyenv/versions/$(VERSION)*/bin/python)),python$(VERSION)),python-$(VERSION),-c constraints.txt)

# From a Python, a name and what pip has to be told, to a virtual environment of its own that is gone afterwards.
define smoke
@[ -n "$(VERSION)" ] || { echo "which one? make $@ VERSION=…"; exit 2; }
trap 'rm -rf .venv-$(2)' EXIT INT TERM; $(1) -m venv .venv-$(2) && \
.venv-$(2)/bin/python -m pip install --quiet --disable-pip-version-check -e . 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' $(3) && \
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
