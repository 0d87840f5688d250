# Every target sets up what it needs: `make demo` or `make test` is all a fresh machine needs,
# given Python 3.11 and make. TORCH picks the torch release: `TORCH=2.14.1 make test`.

TORCH  ?= 2.13.0
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)

VENV  := .venv
BIN   := $(VENV)/bin
# Named after the release, so that asking for another one installs it, and asking twice does not.
READY := $(VENV)/.ready-torch-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types pytest bench sanitize clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

setup: $(READY) ## create .venv and install meshnorm in it

# torch stands in the same install as everything else, pinned exactly, so that nothing can move it.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 on PATH; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)" -e ".[dev]"
	@touch $@

demo: $(READY) ## train a small language model on a mesh of four CPU ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_context_parallel.py

test: lint types pytest ## ruff, pyright, pytest

lint: $(READY) ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## rewrite the sources in ruff's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(READY) ## the tests alone
	$(BIN)/python -m pytest

bench: $(READY) ## time the norm beside the others that are installed, on the GPU if there is one
	$(BIN)/meshnorm bench

sanitize: $(READY) ## the kernels under compute-sanitizer's four tools, on a GPU
	$(BIN)/python benchmarks/sanitize.py

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
