# Everything from a fresh clone: `make demo` runs the main job, `make test` the tests.
# Needs make and Python 3.10+, and the package index once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
PYTEST_ARGS ?=
TORCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-triton lint typecheck clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create .venv and install the package with all that the rest needs

demo: $(STAMP)  ## Train plainly and under a budget, and compare
	$(BIN)/python examples/glue/demo.py

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-triton: $(STAMP)  ## Run the Triton kernels in the interpreter, and compile them
	$(PIP) -c constraints.txt -e ".[triton]"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_triton.py $(PYTEST_ARGS)
	$(BIN)/python benchmarks/triton_compile.py --quick

lint: $(STAMP)  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)  ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## Remove .venv, builds, caches and outputs
	rm -rf $(VENV) build dist outputs *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that TORCH_ARGS can choose its build; for one without CUDA:
#   make demo TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10+ is needed")'
	@echo "== Creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== Installing torch"
	$(PIP) -c constraints.txt $(TORCH_ARGS) torch
	@echo "== Installing daf-hf with all that the demo and the tests need"
	$(PIP) -c constraints.txt -e ".[dev]"
	@$(BIN)/python -c 'from daf_hf.kernels import get_backend; \
		print("== Installed; kernels:", get_backend("auto").name)'
	@touch $@
