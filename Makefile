# One word each: `make demo`, `make test`, `make check`, `make bench`, `make fmt`, `make kernels`. The first makes its environment in .venv by itself.
#
# Variables, should you want them: PYTHON=python3.12  VENV=/elsewhere/venv  TORCH=torch==2.12.0  TORCH_INDEX=  (no other index than pip's own)

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin

# The first Python on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# PyPI's torch for Linux is built for CUDA and brings gigabytes of it along, which a machine without an NVIDIA GPU has no use for. There we
# install torch first, by exact version, from wherever pip finds a CPU build: pip ranks 2.13.0+cpu above 2.13.0, and PyTorch's own index (or a
# local one, if pip is configured so) has it. Where that index can't be reached, pip says nothing and takes PyPI's build: large, but it works.
# With a GPU nothing is named, and pip takes the newest CUDA build that pyproject.toml allows.
ifeq (,$(shell command -v nvidia-smi 2>/dev/null))
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

.PHONY: help demo test check bench fmt kernels venv
help:
	@echo "make demo   a video from the embedded model, then the whole road on two CPU cores: fine-tune with 4-bit attention, compare, report"
	@echo "make test   run the tests"
	@echo "make check  format, lint, types and import rules, without changing anything"
	@echo "make bench  time 4-bit attention beside torch's own, and how long the program takes to start"
	@echo "make fmt    format and mend what can be mended"
	@echo "make kernels  build the CUDA kernels for RTX 50-class GPUs (needs no GPU; fetches NVIDIA's compiler from PyPI where there is none)"

# Waiting threads sleep instead of spinning: where something else runs on the machine, too, that is much faster, and alone hardly slower.
demo: venv
	@OMP_WAIT_POLICY=passive $(BIN)/videoqat demo

# A worker more than there are cores, each with one torch thread (tests/conftest.py): many tests wait for processes that they started. A file stays with
# one worker, so that its fixtures are built once. In their own order: else files of one long test come last, one after the other on one core.
test: venv
	@$(BIN)/python -m pytest -q --numprocesses=$$($(BIN)/python -c 'import os; print(min(8, os.cpu_count() + 1))') --dist=loadfile --no-loadscope-reorder

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	@$(BIN)/videoqat bench attention num_tokens=2048 num_heads=8 head_dim=64
	@echo "import videoqat:" && time $(BIN)/python -c 'import videoqat'
	@echo "videoqat --help:" && time $(BIN)/videoqat --help >/dev/null

fmt: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

kernels: venv
	@PYTHONPATH=kernels $(BIN)/python -m videoqat_kernels.cuda.build --fetch-compiler

venv: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "videoqat needs Python 3.11 or newer; found $$(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "videoqat needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 2; }
	@echo "Making the environment in $(VENV) with $$($(PYTHON) --version) (some minutes, once)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "could not make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@if [ -n "$(TORCH)" ]; then \
		$(BIN)/python -m pip install -qq $(if $(TORCH_INDEX),--timeout 15 --retries 1 --extra-index-url $(TORCH_INDEX)) '$(TORCH)'; fi
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@
