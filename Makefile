# make demo   install into .venv and run `autoprec demo`: a search on this machine
# make test   the whole test suite           make lint   ruff and mypy
# make check ROOM=optim   that room's tests, and those of the architecture
# make durations   the whole suite, and how long each of its files took written down: the order of the next run
# make docs   write docs/cli.md, then test every page      make site   build the pages as a site, in site/
# make gpu    two commands of five minutes on a GPU; make gpu-bundle collects the wheels a GPU machine may lack

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
KEY    := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# What is installed: READY is what AutoPrec needs to run, STAMP what its development needs as well.
READY  := $(VENV)/.ready-$(KEY)
STAMP  := $(VENV)/.installed-$(KEY)
INDEX  := https://download.pytorch.org/whl/cpu
# A working nvidia-smi means a GPU that this user can train on; TORCH=cpu or TORCH=cuda overrides.
TORCH  ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Compiling every module of every package takes longer than the installation. So what every script imports is compiled
# once, by importing it, PyTorch while pip is busy with the rest: a trial writes no bytecode, and each would compile it
# again.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
ADD    := $(PIP) install --no-compile -c $(VENV)/constraints.txt

.PHONY: ready demo test check durations lint gpu gpu-bundle docs site clean install
.DEFAULT_GOAL := demo

install: $(STAMP)
ready: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "AutoPrec needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# PyTorch first and alone: where the configured index has the pinned build it is taken from there, else from PyTorch's.
# That index has builds for CPUs only, so a GPU machine never asks it, whatever went wrong with the first. What
# development needs holds what running needs, so that AutoPrec itself is built once for either.
$(READY): EXTRA := ui
$(STAMP): EXTRA := dev
$(READY) $(STAMP): $(BIN)/python
	@echo "installing PyTorch ($(TORCH)) and AutoPrec with its extra '$(EXTRA)' into $(VENV), once"
	@if [ "$(TORCH)" = cpu ]; then cp constraints.txt $(VENV)/constraints.txt; \
	 else sed 's/^torch==.*/torch==2.13.0/' constraints.txt | uniq > $(VENV)/constraints.txt; fi
	@$(ADD) torch numpy$(if $(filter cpu,$(TORCH)), 2>/dev/null || $(ADD) --extra-index-url $(INDEX) torch numpy)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch._dynamo" & $(ADD) -e '.[$(EXTRA)]' && wait
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch._dynamo, optuna, mlflow, autoprec.trial.inside.agent"
	@rm -f $(VENV)/.ready-* $(VENV)/.installed-*
	@touch $(READY) $@

demo: $(READY)
	$(BIN)/autoprec demo

# Two processes take one file after the other, the longest first (tests/schedule.py); PYTEST= is for one process.
PYTEST ?= -n 2 --dist loadscope --no-loadscope-reorder
test: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST) $(RECORD)

# One room of autoprec/: its own tests but those of real processes (tests/e2e).
check: $(STAMP)
	@test -d "autoprec/$(ROOM)" -a -n "$(ROOM)" || { echo "make check ROOM=one of: $$(ls -d autoprec/*/ | xargs -n1 basename | tr '\n' ' ')"; exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST) tests/$(ROOM) tests/test_architecture.py

durations: RECORD := --record-durations
durations: test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Offline, with whatever Python has PyTorch: nothing is installed but the wheels of gpu-bundle, in a temporary folder.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu/first.py
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu/second.py

gpu-bundle: $(STAMP)
	$(BIN)/python benchmarks/gpu/bundle.py

docs: $(STAMP)
	$(BIN)/python docs/reference.py docs/cli.md
	$(BIN)/python -m tests.cli.test_wording
	$(BIN)/python -m pytest tests/test_readme.py tests/test_docs.py tests/test_examples.py

# A dead link, or a page that the navigation lacks, ends it.
site: $(READY)
	@$(ADD) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
