# demo and test set everything up in .venv first; a second time that costs nothing.
#
#   make demo      a prompt becomes a video on eight simulated chips: out/
#   make test      the fast tests, in two processes (WORKERS=4 for more: some 4 GB of memory each)
#   make test-all  every test
#   make mutants   plants the faults of examples/tpu/results/mutants/ one by one: the fast tests must see them (quarter of an hour)
#   make coverage  upstream's pipelines, each tiny on eight simulated chips against upstream: those without a result, and the tables
#                  (hours if all; goes on where it was stopped)
#   make upstream  TESTS=DIR, the folder of upstream's own tests in a checkout: those that plain upstream passes, with the path on, and
#                  the tables (hours; goes on where it was stopped)
#   make records   every file of examples/tpu/results/ whose programs these sources make otherwise, and the tables of the pages
#                  from them: minutes to see which, hours to make all; goes on where it was stopped
#   make tables    the tables of the pages alone, from the files that are there
#   make lint      ruff, on our files
#   make clean     removes .venv and out

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# Every test that starts a process imports torch, JAX and transformers: 8 s with bytecode, 13 s without.
export PYTHONDONTWRITEBYTECODE :=

MODEL := examples/tpu/models/wan-shapes
PROMPT := a red circle moving right
SHOWS := red circle right
VIDEO := out/red-circle-right.mp4

# A worker takes neighbouring tests, which share models, and at the end some of the other's.
WORKERS ?= 2
# The folder `tests` of a checkout of huggingface/diffusers.
TESTS ?=
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all mutants coverage upstream records tables lint clean

demo: $(INSTALLED)
	@DIFFUSERS_TPU=cpu $(BIN)/diffusers-tpu generate $(MODEL) --prompt "$(PROMPT)" --height 64 --width 64 \
	  --num-frames 9 --num-inference-steps 16 --guidance-scale 2 --seed 6 --output $(VIDEO)
	@echo "The scorer, which knows nothing of the model, looks at the video; asked for was: $(PROMPT)"
	@$(BIN)/python examples/tpu/models/score_wan_shapes.py $(VIDEO) | tee out/score.txt
	@grep -q "$(SHOWS)" out/score.txt || { echo "expected the video to show: $(SHOWS)" >&2; exit 1; }

test: $(INSTALLED)
	$(PYTEST) -m "not slow" tests/tpu

test-all: $(INSTALLED)
	$(PYTEST) tests/tpu

mutants: $(INSTALLED)
	$(BIN)/python examples/tpu/results/mutants/run.py

coverage: $(INSTALLED)
	$(BIN)/python examples/tpu/results/sweep/run.py
	$(BIN)/python examples/tpu/results/sweep/run.py --layouts
	$(BIN)/python examples/tpu/results/make_records.py --tables

upstream: $(INSTALLED)
	@test -d "$(TESTS)" || { echo "expected TESTS=DIR, the folder 'tests' of a checkout of upstream, got '$(TESTS)'" >&2; exit 1; }
	$(BIN)/python examples/tpu/results/upstream/run.py $(TESTS) --workers $(WORKERS)
	$(BIN)/python examples/tpu/results/make_records.py --tables

records: $(INSTALLED)
	$(BIN)/python examples/tpu/results/make_records.py

tables: $(INSTALLED)
	$(BIN)/python examples/tpu/results/make_records.py --tables

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

clean:
	rm -rf .venv out

# Lays upstream's release into src/, applies patches/series and installs the tree for editing, with the versions that were tested.
# Python compiles a module when it is first imported: half of what pip would compile, nobody imports.
$(INSTALLED): setup.py pyproject.toml requirements-lock.txt $(wildcard patches/*)
	@echo "Setting up .venv (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --no-compile -e '.[test]' -c requirements-lock.txt | awk ' \
	  /^ *(Collecting|Building|Getting|Installing)/ { n++; printf "\r  %d %-60.60s", n, $$0; fflush() } \
	  /^ERROR|^ *error|edited by hand/ { print } END { print "" }'
	@touch $@
