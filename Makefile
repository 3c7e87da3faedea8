# `make` lists the targets.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := src tests benchmarks examples tools

VLLM := .venv-vllm
AUDIT := .venv-audit
# The venv if there is one, else the Python that has PyTorch.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help install vllm demo gsm8k test ci test-all test-faults test-cluster check audit bench bench-growth bench-service bench-scale bench-defaults gpu-check docs site clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(INSTALLED)  ## create $(VENV) for demo, tests and checks; the other targets do this first

# Reinstalled when the requirements change. pip first: the one of Python 3.11 needs three times as long to find the
# versions. Then torch, alone, so that the other packages fit it, from the index TORCH_INDEX if it is set. At last all
# modules are compiled, on every core; pip would do so on one. Some are for other versions of Python and stay as they are.
# pip prints errors only: it warns of an extra that a package spells in another way.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt --editable '.[serve,dev,hub]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(abspath $(VENV))/lib $(CURDIR)/src || true
	touch $@

vllm: $(VLLM)/.installed  ## create $(VLLM) with vLLM for CPUs, for `tinsmith serve --sampler vllm`

# No dependencies are resolved: vLLM requires packages that text does not need, some with a CUDA build of torch.
$(VLLM)/.installed: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	touch $@

demo: install  ## train SmolLM2-135M on two-digit addition and show the result: 3 to 15 minutes on 2 cores
	$(BIN)/tinsmith demo

gsm8k: install  ## train SmolLM2 with both of Trinity-RFT's files on GSM8K: make gsm8k DATA=FOLDER
	@test -n "$(DATA)" || { echo "Set DATA to a folder with GSM8K's train.jsonl and test.jsonl: make gsm8k DATA=FOLDER"; exit 2; }
	$(BIN)/python examples/gsm8k/compare.py $(DATA)

# One process per core with one thread each, because engines on shared cores wait for each other. Each may take 2 GB.
# Tests start many programs, so bytecode is kept even where the environment says otherwise.
# Files run in order of their names: sorted by number of tests, the tutorials (few and long) would come last.
# A process that crashes ends the run with the failure of its test: pytest-xdist 3.8 hands out the files of a crashed process
# again, those that it had ended as well, and then waits for ever (its issue 1378).
PARALLEL = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 \
	--max-worker-restart 0 --dist loadfile --no-loadscope-reorder
UNATTENDED = not slow and not gpu and not faults and not cluster

test: install  ## the quick tests, one process per core, at most 4; names those of more than 2 s
	$(PARALLEL) -m 'not e2e and $(UNATTENDED)' --durations 10 --durations-min 2

ci: install  ## also the tests of programs, whole runs and the checks: what CI runs
	$(PARALLEL) -m '$(UNATTENDED)'

test-all: install  ## also the slow tests: real models, whole runs, an unmodified cookbook
	$(BIN)/python -m pytest -m 'not gpu and not faults and not cluster'

test-faults: install  ## a thousand kills and more, and power cuts: up to an hour; FAULTS=COUNT
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults $(if $(FAULTS),--faults $(FAULTS)) tests/faults

test-cluster: install  ## the tests that start many processes; with the extra `cluster` also those on Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster

check: install  ## style, types, import contracts, and the rules of tests/test_gates.py
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_gates.py

# In a venv of its own: pip-audit is no part of the project.
audit:  ## known vulnerabilities of the exact versions in constraints.txt; needs the network
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	@$(AUDIT)/bin/python -c 'import socket; socket.create_connection(("api.osv.dev", 443), 10).close()' 2>/dev/null || { \
	    echo "The vulnerability service api.osv.dev cannot be reached from here, so nothing was audited."; exit 1; }
	$(AUDIT)/bin/pip-audit --vulnerability-service osv --no-deps --disable-pip --requirement constraints.txt

docs: install  ## rewrite the generated parts of docs/ from the sources
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.pictures

site: install  ## build the documentation as a website in site/; a broken link fails the build
	$(BIN)/mkdocs build --strict --clean

bench: install  ## speed and memory against the common ways, into benchmarks/results
	$(BIN)/python -m benchmarks.speed

bench-growth: install  ## cost against tenants, rank, length, group size, batch and prefixes
	$(BIN)/python -m benchmarks.growth

bench-service: install  ## overhead of the service, into benchmarks/results
	$(BIN)/python -m benchmarks.service

bench-scale: install  ## many GPUs in simulated time, checked against processes
	$(BIN)/python -m benchmarks.scale.replicas
	$(BIN)/python -m benchmarks.scale.check
	$(BIN)/python -m benchmarks.scale.check --torch --counts 1 2
	$(BIN)/python -m benchmarks.scale.experiments
	$(BIN)/python -m benchmarks.scale.report

bench-defaults: install  ## what SmolLM2 learns of five tasks with the defaults, into benchmarks/results
	$(BIN)/python -m benchmarks.defaults

# Without an install step, so that it runs on a machine that reaches no registry: benchmarks/NOTES.md.
gpu-check:  ## check and measure the engine on a GPU, then its tests there; without one, list the steps
	@status=0; export PYTHONPATH="$(CURDIR)/src:$(CURDIR):$$PYTHONPATH"; \
	$(GPU_PYTHON) -m benchmarks.gpu_check --without-gpu-ok || status=$$?; \
	if $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    $(GPU_PYTHON) -m pytest -m gpu -o filterwarnings=default --confcutdir tests/gpu tests/gpu || status=$$?; \
	fi; exit $$status

clean:  ## remove everything that the other targets made, including the venv
	rm -rf $(VENV) $(VLLM) $(AUDIT) .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist site
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
