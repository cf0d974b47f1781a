# Two commands do everything on a fresh machine with Python >= 3.10: `make demo` and `make test`.
#
#   make VENV=/path/to/venv test      use an environment that is there
#   make PYTHON=python3.12 test       make the environment with another interpreter
#   make test PYTEST_ARGS="-k units"  hand arguments to pytest
#   make VENV=.old TORCH=2.11.0 test  another torch than constraints.txt has

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TORCH ?=
VERSIONS ?= .versions
PROJECTS ?= .projects
BIN := $(VENV)/bin

# The environment is installed again when what it is made from changes, or when another checkout has used it since.
STAMP := $(VENV)/.lightning-rotor
KEY := $(shell cat pyproject.toml constraints.txt | cksum) $(CURDIR) $(TORCH)

.PHONY: demo test test-all test-gpu test-versions lint types suite docs features bench projects release-check format clean
.DEFAULT_GOAL := test

# torch's profiler, which sees memory on the CPU, would warn of blocks that are older than the profile: there always are some.
demo: $(STAMP)
	TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python examples/mnist/train.py

# Types take a minute and a half of one core, so the suite begins meanwhile. Its summary closes the output, since it lasts
# longer, and make ends with an error if either fails.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types suite

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

suite: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The wide grids, too.
test-all: lint types
	$(BIN)/python -m pytest --all $(PYTEST_ARGS)

# On real devices; without any, `make test` runs these tests on simulated ones. One process: they measure memory.
test-gpu: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device here: make test runs these tests on simulated ones")'
	$(BIN)/python -m pytest -n0 -m gpu $(PYTEST_ARGS)

# The site, into site/; a broken link is an error. `$(BIN)/mkdocs serve` shows it while you write.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The table of what works, docs/features.md, from the tests that show it.
features: $(STAMP)
	$(BIN)/python -m pytest --features=docs/features.md

# Before a release: the core of the suite and the demo under each torch, in environments that are made in VERSIONS (5 GB each) or are there.
# docs/compatibility.md has the figures; `$(BIN)/python -m tests.compatibility suite` adds those of the whole suite under fewer instructions.
test-versions: $(STAMP)
	$(BIN)/python -m tests.compatibility run --environments $(VERSIONS)

# Before a tag: versions agree, and the wheel that is built from the source distribution works in an empty environment.
# It gets its dependencies from the registry; ARGS=--borrow takes those that are here.
release-check: $(STAMP)
	$(BIN)/python -m tests.release $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.planner

# Programs of other packages, in an environment of their own (8 GB), made once. It goes on where it stopped; ARGS="--only NAME" and others.
projects: $(PROJECTS)/.lightning-rotor
	$(PROJECTS)/bin/python -m benchmarks.projects $(ARGS)

$(PROJECTS)/.lightning-rotor: pyproject.toml constraints.txt benchmarks/project_programs/constraints.txt
	@test -x $(PROJECTS)/bin/python || $(PYTHON) -m venv $(PROJECTS)
	$(PROJECTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --constraint benchmarks/project_programs/constraints.txt --editable '.[projects]'
	@touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Leaves the environment alone: VENV may not be ours to delete.
clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/*/output
	find . -path ./.git -prune -o -path './$(VENV)' -prune -o -path './$(PROJECTS)' -prune -o -name __pycache__ -type d -exec rm -rf {} +

ifneq ($(strip $(shell cat $(STAMP) 2>/dev/null)),$(strip $(KEY)))
.PHONY: $(STAMP)
endif

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or \
	    sys.exit("lightning-rotor needs Python >= 3.10, but $(PYTHON) is %d.%d: run make PYTHON=python3.12" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -z '$(TORCH)' ]; then cat constraints.txt; else \
	    grep -v -e '^torch==' -e '^torchvision==' constraints.txt; echo 'torch==$(TORCH)'; fi > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@echo '$(KEY)' > $@
