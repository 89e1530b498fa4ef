# make train, make test: each makes .venv first (once, with the versions of constraints.txt), then runs.
# pip's own settings (index, proxy, certificates) hold; without a constraint pip would fetch whatever torch is newest.

PYTHON ?= python3
RECIPE ?= switch_tiny
NPROC ?=
EP ?= auto
FLAGS ?=
WORKERS ?= auto
STAMP := .venv/.installed
# Python compiles a module when it is first imported, and most of these never are. Where it may not keep what it compiles, pip does it.
UNCOMPILED := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
SOURCES := moe parallel tests

.DEFAULT_GOAL := help
.PHONY: help setup train check test docs lint format clean

help:
	@echo "make train    train $(RECIPE) on every GPU, or on two processes without one; RECIPE=glam_tiny NPROC=4 EP=2 FLAGS='--train.steps 50' change it"
	@echo "make check    ruff, mypy and the quick laws: before each commit, at most 3 minutes on two cores"
	@echo "make test     ruff, mypy and the tests, on every core; WORKERS=1 on one"
	@echo "make setup    only make .venv; PYTHON=python3.12 chooses the interpreter"
	@echo "make docs     the documentation as a site, build/docs/index.html; fails where a link leads nowhere"
	@echo "make lint     ruff and mypy; make format rewrites the files as ruff wants them"
	@echo "make clean    remove .venv and caches; runs/ stays"

setup: $(STAMP)
	@:

# The degree of expert parallelism `auto` is the largest that fits: 2 for switch_tiny on 2 processes.
train: setup
	@.venv/bin/moe train "$(RECIPE)" --nproc $(or $(NPROC),$$(.venv/bin/python -c "from parallel.process.process import gpus; n = gpus(); print(1 << min(n, 16).bit_length() - 1 if n else 2)")) --degrees.ep $(EP) $(FLAGS)

# Kills, resumes, the site and the wheel take most of the laws' time.
check: lint
	.venv/bin/pytest -q -n $(WORKERS) --dist worksteal tests/laws -k "not site" $(addprefix --ignore tests/laws/test_,kill.py resume.py wheel.py)

test: lint
	.venv/bin/pytest -n $(WORKERS) --dist worksteal

docs: setup
	.venv/bin/python -m sphinx -q -W --keep-going -b html -c docs/site docs build/docs

lint: setup
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix --exit-zero --quiet $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# A checkout that was moved or copied has a .venv whose scripts point to the old place: it is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: $(PYTHON): got no such command, needed Python >= 3.11; fix: install it, or make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON): got $$("$(PYTHON)" --version 2>&1), needed Python >= 3.11; fix: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON): got no module venv, needed to make .venv; fix: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@command -v $${CXX:-g++} >/dev/null || echo "note: no C++ compiler found (g++); DeepSpeed needs one for the operations that it compiles, such as CPU offload" >&2
	@if [ -f $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; then rm -rf .venv; fi
	@echo "Installing Python packages into .venv, as constraints.txt says: once, 2 to 4 minutes (a CUDA build of torch: 3 GB more to fetch) ..."
	@"$(PYTHON)" -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(UNCOMPILED) -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" > $(STAMP)
