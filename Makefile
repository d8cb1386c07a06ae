# A machine with Python 3.11 or newer and make is enough: `make test` builds everything else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := pytest -n 2 --dist worksteal --durations 10

.PHONY: setup lint format types unit slow test oldest newest newest-found table pages demo clean

setup: $(STAMP)

# $(call install,VENV,PYTHON,WHAT): an environment of its own with WHAT in it.
define install
	$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamgrad needs Python 3.11 or newer")'
	$(2) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3)
	touch $@
endef

$(STAMP): pyproject.toml lab/pyproject.toml
	$(call install,$(VENV),$(PYTHON),--editable ".[dev]" --editable ./lab)

# From nothing to a report of what one would like to see first; called again, it goes on where it was stopped.
demo: $(VENV)/.demo
	$(BIN)/streamgrad reproduce variance --preset laptop --out runs/demo --resume
	$(BIN)/streamgrad reproduce streams --settings agent --preset laptop --out runs/demo --resume

$(VENV)/.demo: pyproject.toml
	$(call install,$(VENV),$(PYTHON),--editable . --editable ./lab)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/pyright

unit: setup
	$(BIN)/$(PYTEST) -m "not slow"

# What `make test` leaves out for its time: more of the same pairs, and runs that are killed. CI runs both.
slow: setup
	$(BIN)/$(PYTEST) -m slow

test: lint types unit

# A short part of the suite with the oldest and with the newest JAX that is promised: what every estimator promises, how
# often it is traced, dtypes and batches; cells, with those of other libraries; training.
CONFORM := test_promise test_structures_are_stable test_one_trace_per_shape test_float32_in_float32_out \
	test_batched_is_the_mean_of_single_streams
SHORT := tests/base/test_imports.py tests/devices/test_sharded.py tests/cells tests/docs/test_readme.py \
	$(CONFORM:%=tests/estimators/test_conformance.py::%) \
	tests/estimators/test_exact.py::test_rtrl_is_the_textbook tests/estimators/test_unbiased.py::test_uoro_gir \
	tests/theory/test_objective.py::test_textbook_equations tests/lab/test_run_files.py::test_files_of_a_run \
	tests/lab/test_train.py::test_training_is_gradient_descent_on_the_mean_loss
OLDEST := jax==0.8.*
NEWEST := jax==0.12.*

oldest: .venv-oldest/.installed
	.venv-oldest/bin/$(PYTEST) -m "not slow" $(SHORT)

.venv-oldest/.installed: pyproject.toml Makefile
	$(call install,.venv-oldest,$(PYTHON),--editable ".[test]" --editable ./lab "$(OLDEST)")

# It needs a newer Python than 3.11: the first that runs, on the path or among pyenv's.
PYENV = $(shell pyenv root 2>/dev/null)/versions
NEWER = $(firstword $(foreach version,3.13 3.12,$(foreach python,python$(version) $(wildcard $(PYENV)/$(version).*/bin/python3),\
	$(shell $(python) -c 'import sys; print(sys.executable)' 2>/dev/null))))

newest:
	@if [ -z "$(NEWER)" ]; then echo "newest: skipped, as there is no Python 3.12 or 3.13 on this machine"; \
	else $(MAKE) --no-print-directory newest-found FOUND="$(NEWER)"; fi

newest-found: .venv-newest/.installed
	.venv-newest/bin/$(PYTEST) -m "not slow" $(SHORT)

.venv-newest/.installed: pyproject.toml Makefile
	$(call install,.venv-newest,$(FOUND),--editable ".[test]" --editable ./lab "$(NEWEST)")

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .pytest_cache .ruff_cache build dist

table: setup
	$(BIN)/python -m tests.docs.test_readme

# From docstrings and what was measured; `python -m benchmarks.pages` measures again.
pages: setup
	$(BIN)/python -m benchmarks.pages --write-only
