# Each target does its own set-up: a fresh checkout needs nothing before it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint aot notebooks bench doctor clean

PYTHON := .venv/bin/python
SOURCES := jax_mla bridge bench notebooks tests

help:  ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r a b; do printf '%-18s %s\n' "$$a" "$$b"; done

setup:  ## Make .venv with everything in it (instant when it is there).
	@.ci/setup

demo: setup  ## Serve a tiny DeepSeek-V3.2 with SGLang and measure it against transformers (four servers, some minutes).
	@$(PYTHON) -m bridge demo

test: lint  ## Lint, type-check and run all tests.
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-gpu: setup  ## Tests of the compiled kernels, on a machine with a GPU (python with the [cuda] or [rocm] extra).
	JAX_MLA_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest tests/gpu

lint: setup  ## Only the linter, the formatter's check and the type checker.
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	.venv/bin/pyrefly check

aot: setup  ## Compile every kernel for gfx942, gfx950 and sm_90, and say what came out; needs no GPU.
	@$(PYTHON) -m jax_mla.aot --set ci

notebooks: setup  ## Execute the notebooks; the results go to build/notebooks.
	$(PYTHON) -m notebooks

bench: setup  ## Measure the kernels on this machine.
	$(PYTHON) -m bench kernels

doctor: setup  ## Say whether this machine can serve, and what to do if not.
	@$(PYTHON) -m bridge doctor

clean:  ## Remove what was built: build/ and caches, and .venv too.
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
