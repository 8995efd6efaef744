# Each target does all of its own set-up: a virtual environment in $(VENV), made once, refreshed when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
CUDA ?= cuda13
JAX ?=
WORKERS ?= 2
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test nightly long gpu real lint types smoke docs tables budget clean

demo: $(VENV)/run
	$(BIN)/jspec demo

test: $(VENV)/test  # everything but the long statistical tier and what needs a GPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

nightly: $(VENV)/test  # cross products of what `make test` covers in pairs
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "nightly and not long and not gpu"

long: $(VENV)/test  # the statistical tests at full power, minutes each
	$(BIN)/python -m pytest -m long

gpu: $(VENV)/gpu  # kernels against their reference implementations on the card; CUDA=cuda12 for older drivers
	$(BIN)/python -m pytest -m gpu

real: $(VENV)/test  # real models against transformers: JSPEC_REAL_MODELS names their folder
	$(BIN)/python -m pytest -m real tests/real

lint: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# Lowering of the kernels, the decode step as XLA compiles it for a card that is not here, and a trip through every layer,
# with another Python or jax in an environment of its own:
#     make smoke PYTHON=python3.12 JAX=0.12.0.1 VENV=.venv312-jax0.12.0.1
# TIER="-m nightly" has it run what these files leave to the nightly tier, and COMPILED= leaves out the decode step.
TIER ?=
COMPILED = tests/compiled
SMOKE = tests/pallas/test_lowering.py tests/pallas/matmul/test_matmul_lowering.py \
	tests/pallas/matmul/test_few_tokens.py tests/pallas/matmul/test_matmul_table.py \
	tests/pallas/attention/test_prefill_sm90.py \
	tests/pallas/test_sums.py tests/pallas/test_triton.py tests/pallas/delta_net/test_verify.py tests/pallas/norm/test_rms_norm.py \
	tests/pallas/sampling/test_threefry.py tests/pallas/mla/test_mla_prefill.py tests/pallas/collectives \
	$(COMPILED) tests/engine/multihost/test_packets.py tests/test_api.py tests/drafting/test_greedy.py \
	tests/benchmarks/test_benchmark_prefill_attention.py tests/docs/test_lowerings.py
smoke: export JAX_PLATFORMS = cpu
smoke: export JAX_SKIP_CUDA_CONSTRAINTS_CHECK = 1
smoke: $(VENV)/smoke
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TIER) $(SMOKE)

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/docs  # the site, in build/site; a broken link is an error
	$(BIN)/python -m mkdocs build --quiet --strict

tables: $(VENV)/test  # every table of figures in README and docs, from benchmarks/results
	$(BIN)/python -m benchmarks.tables

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/smoke: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[test]' $(if $(JAX),jax==$(JAX))
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(PIP) --no-deps jax-$(CUDA)-plugin==$$version jax-$(CUDA)-pjrt==$$version \
	|| echo "no CUDA plugin: tests/compiled will be left out"
	@touch $@

$(VENV)/test: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[test,parity]'
	@touch $@

$(VENV)/gpu: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[test,$(CUDA)]'
	@touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[test,parity,dev]'
	@touch $@

budget: $(VENV)/test  # the costs of the last `make test` become what later ones may cost
	$(BIN)/python tests/helpers/costs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
