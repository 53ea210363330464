# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
# The torch that is installed when .venv has none. On a GPU machine: make demo TORCH="torch>=2.9"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast lint bench clean

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv with megalite and what it needs

# torch first, so that no other package pulls a build of its own choice
$(INSTALLED): setup.py pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "megalite needs Python 3.10 or newer; make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q "setuptools>=68" wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

demo: $(INSTALLED)  ## from raw text to a Hugging Face model, in a few minutes
	$(BIN)/megalite demo

test: $(INSTALLED)  ## all tests
	$(BIN)/python -m pytest

test-fast: $(INSTALLED)  ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow"

lint: $(INSTALLED)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)  ## training speed on this CPU against peers
	$(BIN)/python tools/benchmarks/train_cpu.py

clean:  ## remove what make, runs and the demo left behind
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis runs data/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
