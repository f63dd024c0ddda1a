# onelag: every target sets up its own environment (.venv, plain pip) from requirements.lock the first time.
#   make reproduce              the main job at the cpu tier: about 30 minutes on 2 cores
#   make reproduce TIER=smoke   the same code, under 3 minutes: proves the plumbing
#   make test                   the whole test suite
PYTHON ?= python3
TIER ?= cpu
# Another wheel index for torch, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu (small, no CUDA) or .../whl/cu128
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help reproduce smoke table-1 table-2 figures report test test-slow lint theory theory-slow bench bench-pipeline plan-10b rehearse-10b clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "onelag needs Python 3.11 or newer; this is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) "$$(grep -i '^torch==' requirements.lock)")
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

reproduce: $(READY) ## every experiment at TIER=smoke|cpu|cpu-full|gpu (default cpu), cached, interruptible, resumable
	$(BIN)/onelag reproduce --tier $(TIER)

smoke: $(READY) ## the whole path in under 3 minutes (figures carry a "smoke" watermark)
	$(BIN)/onelag reproduce --tier smoke

table-1: $(READY) ## optimizer x sync / delayed
	$(BIN)/onelag reproduce table-1 --tier $(TIER)

table-2: $(READY) ## optimizer x sync / delayed / delayed with error feedback
	$(BIN)/onelag reproduce table-2 --tier $(TIER)

figures report: $(READY) ## tables, figures and CLAIMS.md again from the committed result files; trains nothing
	$(BIN)/onelag report

theory: $(READY) ## all symbolic, numeric and worst-case checks of the theory, with figures: about 5 minutes
	$(BIN)/python -m theory

theory-slow: $(READY) ## the same with the long semidefinite programs
	$(BIN)/python -m theory --slow

bench: $(READY) ## overhead of the wrappers, speed of Muon and of the loop: ratios in one run
	$(BIN)/python code/benchmarks/bench.py

bench-pipeline: $(READY) ## bubble, throughput and memory of the real pipeline against torch's schedules
	$(BIN)/python code/benchmarks/bench_pipeline.py

plan-10b: $(READY) ## memory, time and cost of the 10B run, without a GPU
	$(BIN)/onelag plan moe-10b --figure results/plan/moe-10b.png

test: $(READY) ## the whole suite: under 10 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "not slow"

test-slow: $(READY) ## the long tests: soaks, kills, long semidefinite programs
	$(BIN)/python -m pytest -q -m slow

rehearse-10b: $(READY) ## the 10B mixture rehearsed on CPU: its depth trained, killed and resumed over 4 processes, one stage at full size
	$(BIN)/python -m pytest tests/launch/test_rehearsal.py -q -m slow

lint: $(READY) ## ruff
	$(BIN)/ruff check .

clean: ## removes the environment and scratch runs; keeps results
	rm -rf $(VENV) runs build
