# The tasks of a contributor; CONTRIBUTING.md says when to run which. `make setup` once, then `make check test`.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 3

ROOM ?= all
MARKS ?= slow or random
FOLDER ?= tests
FULL ?= --full

# Tests start hundreds of programs: what they import is compiled once, also where the environment says never.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup check format test test-all test-deep mutants examples integrations bench docs

setup:  ## an environment with the versions that were tested
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs]'

check:  ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format:  ## put imports and lines in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test:  ## what a change must pass before it is shown to others: about five minutes on two cores
	$(BIN)/python -m pytest -q -n $(WORKERS)

test-all:  ## everything: slow tests too, and thousands of random cases where `test` runs some
	$(BIN)/python -m pytest -q -n $(WORKERS) --full

test-deep:  ## what `test-all` has and `test` has not, but for `integrations`
	$(BIN)/python -m pytest -q -n $(WORKERS) --full -m '$(MARKS)' --ignore=tests/integrations $(MORE) $(FOLDER)

mutants:  ## plausible mistakes, one at a time, in a copy: which do the tests of a ROOM notice? minutes a room
	$(BIN)/python tests/promises/mutants.py $(ROOM)

examples:  ## the examples that need nothing but the package; the one to copy is killed and resumed
	$(BIN)/python examples/text.py >/dev/null
	$(BIN)/python examples/video.py >/dev/null
	$(BIN)/python examples/per_worker_rnn.py >/dev/null
	$(BIN)/python -m pytest -q --full tests/pages/test_train.py -k 'ends_like and text'

integrations:  ## the trainers, in the versions that were tested
	$(BIN)/pip install -q -c constraints.txt -e '.[integrations]'
	$(BIN)/python -m pytest -q -n $(WORKERS) $(FULL) tests/integrations

bench:  ## all benchmarks, a quick look, compared with the one before; the figures in the docs are from full runs
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/all.py --quick

docs:  ## the site, in site/, without network: fails on a link that leads nowhere and a docstring that cannot be read
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	STREAM_DATALOADER_SITE=site $(BIN)/python -m pytest -q --full tests/pages/test_pages.py -k site
