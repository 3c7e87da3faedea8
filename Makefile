# Everything a checkout is asked to do. `make` alone says what there is.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := src tests benchmarks examples tools

VLLM := .venv-vllm

.PHONY: help install vllm demo gsm8k test test-all check bench bench-growth bench-service gpu-check docs site clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(INSTALLED)  ## make $(VENV) with what demo, tests and checks need; the others do this first

# Made anew when what is to be installed has changed. Torch goes first and alone: everything else fits itself to it.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hub]'
	touch $@

vllm: $(VLLM)/.installed  ## make $(VLLM) with vLLM for CPUs, for `tinsmith serve --sampler vllm`

# It asks for packages that text does not need, and some of those for a CUDA build of torch: so nothing is resolved.
$(VLLM)/.installed: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	touch $@

demo: install  ## train SmolLM2-135M to add two-digit numbers and show it: 10 to 15 minutes on 2 cores
	$(BIN)/tinsmith demo

gsm8k: install  ## train SmolLM2 by both of Trinity-RFT's files on GSM8K and draw the curves: make gsm8k DATA=FOLDER
	@test -n "$(DATA)" || { echo "DATA is a folder with GSM8K's train.jsonl and test.jsonl: make gsm8k DATA=FOLDER"; exit 2; }
	$(BIN)/python examples/gsm8k/compare.py $(DATA)

# A process for each core, of one thread each: engines that share cores wait for each other's threads. Each may hold 2 GB.
test: install  ## the tests that take seconds each, in a process for each core, up to 4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test-all: install  ## also the slow ones: real models, whole runs, an unmodified cookbook
	$(BIN)/python -m pytest -m 'not gpu'

check: install  ## style, types, walls between folders, and the gates of tests/test_gates.py
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_gates.py

docs: install  ## rewrite the generated parts of docs/ from the sources
	$(BIN)/python -m tools.reference

site: install  ## build the documentation as a website in site/; a broken link fails the build
	$(BIN)/mkdocs build --strict --clean

bench: install  ## everything promised of speed and memory, against the common ways, into benchmarks/results
	$(BIN)/python -m benchmarks.speed

bench-growth: install  ## how cost grows with tenants, rank, length, groups, batch and prefixes: curves
	$(BIN)/python -m benchmarks.growth

bench-service: install  ## what the service costs beside its engine, into benchmarks/results
	$(BIN)/python -m benchmarks.service

gpu-check: install  ## tests and benchmarks that need a GPU; without one, says what it would run
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    $(BIN)/python -m pytest -m gpu && $(BIN)/python -m benchmarks.gpu; \
	else \
	    echo "PyTorch finds no GPU here, so nothing was checked. With one, this runs:"; \
	    echo "    $(BIN)/python -m benchmarks.gpu   (into benchmarks/results/gpu.md)"; \
	    echo "    $(BIN)/python -m pytest -m gpu"; \
	    $(BIN)/python -m pytest -m gpu --collect-only -q -W ignore | sed 's/^/    /'; \
	fi

clean:  ## remove what the others made, the venv included
	rm -rf $(VENV) $(VLLM) .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist site
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
