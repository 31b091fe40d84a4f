# Every target works alone in a fresh clone: it makes .venv and installs the pinned packages first, once.
# Needs Python 3.11 or newer, git, make and a C compiler. Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
ABLATION := runs/ablation
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed

# The fast tests run in two processes, each on a core of its own: one imports torch, the other has no use for it.
# PYTHONDONTWRITEBYTECODE is empty wherever they run: pytest rewrites a test once, not in every run.
FAST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet -m "not slow and not docker and not sglang" --hypothesis-profile=quick
WITH_TORCH := tests/engine tests/policies

.DEFAULT_GOAL := help
.PHONY: help setup demo ablation sandbox-image sandbox-image-local sglang-environment test test-without-docker test-sglang coverage \
	test-chaos nightly fuzz check \
	fast-tests-with-torch fast-tests-without-torch format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-27s %s\n", $$1, $$2 }'

setup: $(INSTALLED) ## make .venv and install the pinned packages; again only after pyproject.toml or constraints.txt changed
	@echo "Installed in .venv"

# PIP_CONSTRAINT and not -c: it also holds for the packages that build this one.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2); name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv (once; a few minutes)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train the tiny model end to end; writes runs/demo/, replacing an earlier one
	$(BIN)/asterism run configs/tiny.toml --overwrite

ablation: $(INSTALLED) ## GRPO-RoC against plain GRPO from the same checkpoint, data and seed; writes runs/ablation/
	$(BIN)/asterism run configs/tiny.toml --set name=ablation/roc --overwrite
	$(BIN)/asterism run configs/tiny.toml --set name=ablation/grpo --overwrite \
		--set roc.enabled=false --set sft.steps=0 --set model.checkpoint=$(ABLATION)/roc/checkpoints/step_000000 \
		--set data.train=$(ABLATION)/roc/data/train.jsonl --set data.test=$(ABLATION)/roc/data/test.jsonl
	$(BIN)/python -m analysis.compare $(ABLATION)/roc $(ABLATION)/grpo --into $(ABLATION)

sandbox-image: $(INSTALLED) ## the image in which a model's code runs, on a public Python image
	$(BIN)/python -m sandbox.build_image

sandbox-image-local: $(INSTALLED) ## the same without a container registry, as root: a base by debootstrap; MIRROR=URL if wanted
	$(BIN)/python -m sandbox.build_image --local $(if $(MIRROR),--mirror $(MIRROR))

sglang-environment: $(INSTALLED) $(SGLANG_INSTALLED) ## .venv-sglang, where an SGLang server runs without a GPU; again only after constraints-sglang.txt changed
	@echo "Installed in $(SGLANG)"

# torch with what it needs where it comes from; then all as pinned, and nothing else: SGLang asks for CUDA's packages too.
$(SGLANG_INSTALLED): constraints-sglang.txt
	@command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(SGLANG)/bin/pip || $(PYTHON) -m venv --clear $(SGLANG)
	@echo "Installing SGLang into $(SGLANG) (once; 3 GB, a few minutes)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(SGLANG)/bin/pip install --quiet "$$(grep '^torch==' constraints-sglang.txt)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(SGLANG)/bin/pip install --quiet --no-deps --requirement constraints-sglang.txt
	@touch $@

test: $(INSTALLED) ## all tests but those of SGLang: those that start processes, that train, and that need a Docker engine or root too
	$(BIN)/python -m pytest -m "not sglang" --durations=25

test-without-docker: $(INSTALLED) ## the same but for those that need a Docker engine and the sandbox image, or root
	$(BIN)/python -m pytest -m "not docker and not hosts and not sglang"

test-sglang: $(INSTALLED) $(SGLANG_INSTALLED) ## the tests against a real SGLang server, on the CPU
	$(BIN)/python -m pytest -m sglang tests/sglang --durations=25

coverage: $(INSTALLED) ## all tests, and which lines of bus/ and actors/ they ran; fails under 90 %. TESTS=... are arguments of pytest
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m "not sglang" $(TESTS); tested=$$?; $(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$tested

simulate-faults: $(INSTALLED) ## the whole control plane under a virtual clock, everybody killed at any moment: 1,000 seeds
	$(BIN)/python -m tests.simulation.nightly 1000

nightly: $(INSTALLED) ## 10,000 seeds each of simulate-faults, and of lost engines and messages that are heard twice
	$(BIN)/python -m tests.simulation.nightly 10000
	$(BIN)/python -m tests.simulation.nightly 10000 --kind repeats

fuzz: $(INSTALLED) ## a million broken frames and parcels at the bus's codec and links; SEED=N tries the same again
	$(BIN)/python -m tests.bus.fuzz $(if $(SEED),--seed $(SEED))

test-chaos: $(INSTALLED) ## 40 runs whose processes are killed, stopped and cut off at random moments, and 20 that are resumed
	$(BIN)/python -m tests.chaos.campaign --runs 40
	$(BIN)/python -m tests.chaos.campaign --runs 20 --kind resumptions

check: $(INSTALLED) ## format, lint, types, import layers, fast tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	@$(MAKE) --no-print-directory --jobs=2 --output-sync fast-tests-with-torch fast-tests-without-torch

fast-tests-with-torch: $(INSTALLED)
	$(FAST) $(WITH_TORCH)

fast-tests-without-torch: $(INSTALLED)
	$(FAST) $(WITH_TORCH:%=--ignore=%) --ignore=tests/sandbox/hostile

format: $(INSTALLED) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, .venv-sglang and all caches; runs/ stays
	rm -rf .venv $(SGLANG) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
