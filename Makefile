# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
# The torch that is installed when .venv has none. On a GPU machine: make demo TORCH="torch>=2.9"
TORCH ?= torch==2.13.0

# LOCKED=1 installs the tested version of everything else, and nothing whose hash is not in requirements.lock.
LOCKED ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed$(if $(LOCKED),-locked)

.DEFAULT_GOAL := help
.PHONY: help install lock oracles transformers-4 lm-eval browser slurm peers demo moe-demo test test-fast fuzz lint bench clean

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {sub(/\$$\(DEMO_TIME\)/, "$(DEMO_TIME)"); printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv with megalite and what it needs; LOCKED=1: tested versions, checked by their hashes

# Over what torch brought along too, which was not checked by a hash
FROM_LOCK := --force-reinstall --no-deps --require-hashes --requirement

# What training needs, without what tests and some options do: all of it is there when the demo has run
BASE := $(if $(LOCKED),$(INSTALLED),$(VENV)/.base)

define make_venv
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "megalite needs Python 3.10 or newer; make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
endef

# torch first, so that no other package pulls a build of its own choice
ifdef LOCKED
$(INSTALLED): setup.py pyproject.toml Makefile requirements.lock
	$(make_venv)
	sed '/^# To run with/q' requirements.lock > $(VENV)/build.lock
	$(BIN)/python -m pip install -q $(FROM_LOCK) $(VENV)/build.lock
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation $(FROM_LOCK) requirements.lock
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	$(BIN)/python -m pip check
	touch $(VENV)/.base $(VENV)/.installed $@
else
$(BASE): setup.py pyproject.toml Makefile
	$(make_venv)
	$(BIN)/python -m pip install -q "setuptools>=68" wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation -e .
	touch $@

$(INSTALLED): $(BASE)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation -e ".[dev,data,fast,ray,wandb,sweep,quantized,semantic]"
	touch $@
endif

lock: $(INSTALLED)  ## write requirements.lock anew, from what is in .venv
	$(BIN)/python -m pip install -q --target $(VENV)/uv "uv>=0.8"
	$(BIN)/python tools/packaging/lock.py --uv $(VENV)/uv/bin/uv

# Programs that some tests compare with, each without what it depends on, so that they touch nothing of .venv
ORACLES := $(VENV)/oracles

oracles: $(ORACLES)/.installed  ## other people's programs, which some tests ask

# spaCy cuts words for datatrove; this is all of it that cutting needs
SPACY := spacy==3.8.18 thinc==8.3.14 blis==1.3.4 cymem==2.0.16 preshed==3.0.15 murmurhash==1.0.16 srsly==2.5.6 \
	catalogue==2.0.10 wasabi==1.1.3 confection==1.3.4 weasel==1.0.1 spacy-legacy==3.0.12 spacy-loggers==1.0.5

# Transformer Engine's Python alone, apart from the others: Megatron-core uses it where it finds it
TE_PYTHON := $(VENV)/transformer-engine

$(ORACLES)/.installed: $(INSTALLED) Makefile
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(ORACLES) $(SPACY) \
		|| echo "spaCy could not be fetched: the tests that ask it will be skipped"
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(TE_PYTHON) transformer-engine==2.20.2 \
		|| echo "the Python of Transformer Engine could not be fetched: the tests that ask it will be skipped"
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(ORACLES) \
		datatrove==0.10.1 loguru==0.7.3 humanize==4.17.0 megatron-core==0.16.1 torchao==0.18.0 && touch $@ \
		|| echo "datatrove, Megatron-core and torchao could not be fetched: their tests will be skipped"

# transformers 4.57 beside the one in .venv, for the tests that read exported models with both
TRANSFORMERS_4 := $(VENV)/transformers-4

transformers-4: $(TRANSFORMERS_4)/.installed  ## an older transformers, which some tests ask

$(TRANSFORMERS_4)/.installed: $(INSTALLED) Makefile
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --target $(@D) \
		transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2 && touch $@ \
		|| echo "transformers 4.57 could not be fetched: its tests will be skipped"

# lm-evaluation-harness with the little that a local task needs of what it depends on (100 MB), for one test, and PEFT for another
LM_EVAL := $(VENV)/lm-eval

lm-eval: $(LM_EVAL)/.installed  ## the evaluation harness and PEFT, which one test each asks

$(LM_EVAL)/.installed: $(INSTALLED) Makefile
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(LM_EVAL) \
		lm-eval==0.4.13 accelerate==1.15.0 evaluate==0.4.6 sacrebleu==2.6.0 portalocker==4.4.2 tabulate==0.10.0 \
		colorama==0.4.6 lxml==6.1.3 more-itertools==11.2.1 peft==0.21.2 && touch $@ \
		|| echo "lm-evaluation-harness and PEFT could not be fetched: their tests will be skipped"

# The demo's layout is two ranks on the CPU; on a machine with GPUs it is one rank in bf16.
DEMO_LAYOUT := $(if $(shell nvidia-smi -L 2>/dev/null),parallel.tp=1 precision.dtype=bf16,)

# Measured in a fresh clone; docs/install.md says the same
DEMO_TIME := 5 min on two cores, installation included

demo: $(BASE)  ## from raw text to a Hugging Face model: $(DEMO_TIME)
	@echo "From raw text to a Hugging Face model: $(DEMO_TIME)."
	$(BIN)/megalite doctor
	$(BIN)/megalite data prepare configs/data/demo.yaml
	$(BIN)/megalite train configs/demo.yaml $(DEMO_LAYOUT)
	$(BIN)/megalite convert to-hf runs/demo runs/demo/hf --overwrite
	$(BIN)/megalite generate runs/demo/hf --prompt "def main("
	@echo
	@echo "The data is in data/demo, the run in runs/demo (metrics.jsonl, events.jsonl, checkpoints), the model in runs/demo/hf."
	@echo "Next: tensorboard --logdir runs/demo          the curves"
	@echo "      megalite train configs/demo.yaml train.steps=600   go on; then convert again"
	@echo "      megalite train configs/demo.yaml run.dir=runs/pp parallel.tp=1 parallel.pp=2   a pipeline instead"
	@echo "      megalite plan configs/llama-70b.yaml --world-size 512   find a layout for something larger"
	@echo "(megalite is in $(BIN); activate it with: source $(BIN)/activate)"

moe-demo: $(BASE)  ## the same with experts over two ranks: Mixtral, and DeepSeek-V3, in small
	$(BIN)/megalite data prepare configs/data/demo.yaml
	for name in moe-debug moe-deepseek-debug; do \
		$(BIN)/megalite train configs/$$name.yaml train.device=cpu && $(BIN)/megalite report runs/$$name \
			&& $(BIN)/megalite convert to-hf runs/$$name runs/$$name/hf --overwrite \
			&& $(BIN)/megalite generate runs/$$name/hf --prompt "def main(" || exit; \
	done
	@echo "runs/moe-debug/report.html and runs/moe-deepseek-debug/report.html show how tokens went to experts."

# A browser, where root may install one with apt; elsewhere the tests that look at pages take one from PATH, or are skipped
APT_INSTALL := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y -o DPkg::Lock::Timeout=60 install --no-install-recommends

browser:  ## chromium, with which some tests look at pages
	@command -v chromium chromium-browser google-chrome google-chrome-stable chrome >/dev/null \
		|| { test "$$(id -u)" = 0 && { apt-get -qq update || true; $(APT_INSTALL) chromium >/dev/null; }; } \
		|| echo "there is no browser, and none could be installed: the tests that look at pages will be skipped"

PEERS := oracles transformers-4 lm-eval browser slurm

# Behind the browser: two apt-get wait for no lock of each other's lists
slurm: browser  ## a small real Slurm, which some tests submit to
	@tools/slurm_testbed.sh install || true

peers: $(PEERS)  ## all that tests compare with

test: $(INSTALLED)  ## all tests
	@$(MAKE) --no-print-directory -j5 peers
	tools/run_tests.sh $(BIN)/python

test-fast: $(INSTALLED)  ## the tests that take less than half a second each
	tools/run_tests.sh $(BIN)/python -m "not slow"

# Of every kind; configs take five times as many, and config.json is compared with both generations of transformers
FUZZ ?= 2000

fuzz: $(INSTALLED) transformers-4  ## thousands of inputs that nobody would write; make fuzz FUZZ=20000
	$(BIN)/python -m pytest tests/fuzz --fuzz $(FUZZ) --timeout 7200
	PYTHONPATH=$(TRANSFORMERS_4) $(BIN)/python -m pytest tests/fuzz/test_hf_config.py --fuzz $(FUZZ) --timeout 7200

lint: $(INSTALLED)  ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## training speed on this CPU against peers
	$(BIN)/python tools/benchmarks/train_cpu.py

clean:  ## remove what make, runs and the demo left behind
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs data/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
