# A machine with Python 3.11 or newer and make is enough: `make test` builds everything else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup lint format types unit slow test table demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamgrad needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# From nothing to the report of all experiments; called again, it goes on where it was stopped.
demo: $(VENV)/.demo
	$(BIN)/streamgrad reproduce all --preset laptop --out runs/demo --resume

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamgrad needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cli]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/pyright

unit: setup
	$(BIN)/pytest -n 2 --dist worksteal --durations 10 -m "not slow"

# What `make test` leaves out for its time: more of the same pairs, and runs that are killed. CI runs both.
slow: setup
	$(BIN)/pytest -n 2 --dist worksteal --durations 10 -m slow

test: lint types unit

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist

table: setup
	$(BIN)/python -m tests.docs.test_readme
