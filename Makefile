# The commands of this project. Each does its own set-up; what is already done is not done again.
#
#   make serve [ARGS="--port 8123"]      install, fetch the model, serve on 127.0.0.1:8000
#   make test  [ARGS="tests/kv -k hash"] install, run the tests
#   make lint | types | bench            style, types, speed against the reference pipeline
#   make clean                           remove the environment and caches (never the models)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# The stamps live in the environment, so that they go when it goes. pyproject.toml alone makes them stale: the
# package is installed in place, and a change of its code needs no new installation.
SERVE_STAMP := $(VENV)/.installed
DEV_STAMP   := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input

.PHONY: help serve test lint types bench install install-dev clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

serve: $(SERVE_STAMP)
	@$(BIN)/tidegate serve $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ARGS) </dev/null

lint: $(DEV_STAMP)
	$(BIN)/ruff check tidegate tests

types: $(DEV_STAMP)
	$(BIN)/mypy

bench: $(SERVE_STAMP)
	@$(BIN)/tidegate bench offline $(ARGS)

install: $(SERVE_STAMP)
install-dev: $(DEV_STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "tidegate needs Python 3.11 or newer: apt install python3 python3-venv, or make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tidegate needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 serve"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python cannot create environments: apt install python3-venv, then run make again"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Order-only: the interpreter behind the link may be newer or older than the stamps, which says nothing about them.
$(SERVE_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing tidegate into $(VENV) (once; some hundred MB)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing tidegate and its development tools into $(VENV) (once; some hundred MB)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(SERVE_STAMP) $@
