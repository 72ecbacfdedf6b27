# Two commands for a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCHMARKS := generation chaos prepare glance train capture
ARGS ?=
CACHE := $(or $(EYAS_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/eyas)
AXE := axe-core@4.14.1

.PHONY: help install quickstart test browser conformance bench lint fix target clean

help:  ## Show the targets.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[quickstart,test]'
	touch $@

install: $(INSTALLED)  ## Create .venv and install Eyas with the tested versions.

target: $(INSTALLED)  ## Fetch and convert the quick start's target, once.
	@$(BIN)/eyas target

quickstart: target  ## From nothing to a trained, exported, measured draft.
	$(BIN)/eyas run recipes/quickstart.yaml

test: lint target  ## Lint, types, tests: what CI runs.
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

browser:  ## Fetch what the test of a run's page needs: Chromium (Debian, as root) and axe-core (npm).
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || ! command -v apt-get >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; }
	@test -e $(CACHE)/axe/node_modules/axe-core/axe.min.js || ! command -v npm >/dev/null \
	  || npm install --silent --no-fund --no-audit --prefix $(CACHE)/axe $(AXE)

conformance: target  ## Set the stock SGLang server up once, then ask it and the embedded engine the same.
	$(BIN)/python -m tests.conformance.sglang_cpu.set_up
	$(BIN)/python -m pytest tests/conformance -m conformance

bench: $(addprefix bench-,$(BENCHMARKS))  ## All benchmarks, long form; bench-NAME is one, ARGS=--short a look.

bench-%: $(INSTALLED)
	$(BIN)/python benchmarks/$*.py $(ARGS)

lint: $(INSTALLED)  ## Style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(INSTALLED)  ## Mend what the linter can mend.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv and the caches in this folder; runs/ stays.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
