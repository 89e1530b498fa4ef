# Targets first make .venv, once, with the versions in constraints.txt; without them pip would fetch the newest torch.
# pip's own settings (index, proxy, certificates) apply.

PYTHON ?= python3
RECIPE ?= switch_tiny
NPROC ?=
EP ?= auto
FLAGS ?=
WORKERS ?= auto
STAMP := .venv/.installed
# pip does not compile modules to bytecode, because Python compiles a module at its first import, and most are never imported.
# If PYTHONDONTWRITEBYTECODE is set, Python would not store the bytecode, so pip compiles.
UNCOMPILED := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
SOURCES := moe parallel tests

.DEFAULT_GOAL := help
.PHONY: help setup train check test docs style lint format clean

help:
	@echo "make train    train $(RECIPE) on all GPUs (a power of two), or on two CPU processes; to change it: RECIPE=glam_tiny NPROC=4 EP=2 FLAGS='--train.steps 50'"
	@echo "make check    ruff, mypy and the quick tests in tests/laws: before each commit, at most 3 minutes on two cores"
	@echo "make test     ruff, mypy and all tests, on all cores; WORKERS=1: on one core"
	@echo "make setup    only make .venv; PYTHON=python3.12 chooses the interpreter"
	@echo "make docs     build the documentation as a site, build/docs/index.html; fails on a broken link"
	@echo "make lint     ruff and mypy; make format lets ruff rewrite the files"
	@echo "make clean    remove .venv and caches; runs/ stays"

setup: $(STAMP)
	@:

# EP=auto takes the largest possible degree of expert parallelism: 2 for switch_tiny on 2 processes.
train: setup
	@.venv/bin/moe train "$(RECIPE)" --nproc $(or $(NPROC),$$(.venv/bin/python -c "from parallel.process.process import gpus; n = gpus(); print(1 << min(n, 16).bit_length() - 1 if n else 2)")) --degrees.ep $(EP) $(FLAGS)

# Left out, because they take most of the time: the tests of kills, resumes, the documentation site and the wheel.
check: lint
	.venv/bin/pytest -q -n $(WORKERS) --dist worksteal tests/laws -k "not site and not type_errors" $(addprefix --ignore tests/laws/test_,kill.py resume.py wheel.py)

# mypy is one of the tests, since it takes one core for a minute in a clean clone
test: style
	.venv/bin/pytest -n $(WORKERS) --dist worksteal

docs: setup
	.venv/bin/python -m sphinx -q -W --keep-going -b html -c docs/site docs build/docs

style: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check $(SOURCES)

lint: style
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix --exit-zero --quiet $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# If the checkout was moved or copied, .venv is made again, because its scripts have the old path.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: $(PYTHON): got no such command, needed Python >= 3.11; fix: install it, or make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON): got $$("$(PYTHON)" --version 2>&1), needed Python >= 3.11; fix: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON): got no module venv, needed to make .venv; fix: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@command -v $${CXX:-g++} >/dev/null || echo "note: no C++ compiler found (g++); DeepSpeed needs one for the operations that it compiles, such as CPU offload" >&2
	@if [ -f $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; then rm -rf .venv; fi
	@echo "Installing Python packages into .venv, as constraints.txt says: once, 1 to 3 minutes (a CUDA build of torch: 3 GB more to fetch) ..."
	@"$(PYTHON)" -m venv .venv
	@# Python 3.11 brings a pip that takes three times as long to choose files: 135 and 41 s of a processor
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(UNCOMPILED) -c constraints.txt --upgrade pip 2>/dev/null || true
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(UNCOMPILED) -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" > $(STAMP)
