# A machine with Python 3.11 or newer and make is enough: `make test` builds everything else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := pytest -n 2 --dist worksteal --durations 10

.PHONY: setup lint format types unit slow test oldest newest newest-found library wheels generated demo clean

setup: $(STAMP)

# Two packages, the library here and the laboratory in lab/: on one command line, for pip to find the first when the second
# asks for it.
BOTH := --editable . --editable ./lab

# $(call install,VENV,PYTHON,PACKAGES): an environment of its own with these packages in it.
define install
	$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamgrad needs Python 3.11 or newer")'
	$(2) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3)
	touch $@
endef

$(STAMP): pyproject.toml lab/pyproject.toml
	$(call install,$(VENV),$(PYTHON),--editable ".[dev]" --editable ./lab)

# From nothing to a first report; called again, it goes on where it was stopped.
demo: $(VENV)/.demo
	$(BIN)/streamgrad reproduce variance --preset laptop --out runs/demo --resume
	$(BIN)/streamgrad reproduce streams --settings agent --preset laptop --out runs/demo --resume

$(VENV)/.demo: pyproject.toml lab/pyproject.toml
	$(call install,$(VENV),$(PYTHON),$(BOTH))

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

# The tests that `make test` leaves out for their time: more of the same pairs, and runs that are killed. CI runs both.
slow: setup
	$(BIN)/$(PYTEST) -m slow

test: lint types unit

# A short part of the suite with the oldest and with the newest JAX that is promised: the promises of every estimator, how
# often it is traced, dtypes and batches; cells, with those of other libraries; training.
CONFORM := test_promise test_structures_are_stable test_one_trace_per_shape test_float32_in_float32_out \
	test_batched_is_the_mean_of_single_streams
SHORT_LIBRARY := tests/base/test_imports.py tests/devices/test_sharded.py tests/cells tests/docs/test_readme.py \
	$(CONFORM:%=tests/estimators/test_conformance.py::%) \
	tests/estimators/test_exact.py::test_rtrl_is_the_textbook tests/estimators/test_unbiased.py::test_uoro_gir \
	tests/theory/test_objective.py::test_textbook_equations
SHORT_LAB := tests/lab/test_run_files.py::test_files_of_a_run \
	tests/lab/test_train.py::test_training_is_gradient_descent_on_the_mean_loss
SHORT := $(SHORT_LIBRARY) $(SHORT_LAB)
OLDEST := jax==0.8.*
NEWEST := jax==0.12.*

oldest: .venv-oldest/.installed
	.venv-oldest/bin/$(PYTEST) -m "not slow" $(SHORT)

.venv-oldest/.installed: pyproject.toml lab/pyproject.toml Makefile
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

.venv-newest/.installed: pyproject.toml lab/pyproject.toml Makefile
	$(call install,.venv-newest,$(FOUND),--editable ".[test]" --editable ./lab "$(NEWEST)")

# The packages as users get them: from wheels, of which each holds one package. The tests run in a folder that has neither
# package, so that the installed ones are imported; `library` without the laboratory, `wheels` with it.
WHEELS := build/wheels
ALONE := build/alone
SMALL := tests/base tests/cells/test_cells.py tests/docs/test_readme.py \
	tests/estimators/test_exact.py::test_rtrl_is_the_textbook tests/estimators/test_unbiased.py::test_uoro_gir \
	tests/theory/test_objective.py::test_textbook_equations

# $(call on_wheels,VENV,PACKAGES,TESTS): build, check and install the wheels of these packages, and run the tests on them.
define on_wheels
	rm -rf $(WHEELS) $(ALONE)
	$(1)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEELS) . ./lab
	$(1)/bin/python -m tests.base.wheels $(WHEELS)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $(2:%=$(WHEELS)/%-*.whl)
	mkdir -p $(ALONE)/lab
	cp -r tests docs README.md CONTRIBUTING.md CHANGELOG.md pyproject.toml $(ALONE)
	cp lab/README.md $(ALONE)/lab
	cd $(ALONE) && $(CURDIR)/$(1)/bin/$(PYTEST) -m "not slow" $(3)
endef

library: .venv-library/.installed
	$(call on_wheels,.venv-library,streamgrad,$(SMALL))

.venv-library/.installed: pyproject.toml Makefile
	$(call install,.venv-library,$(PYTHON),".[test]")

wheels: .venv-wheels/.installed
	$(call on_wheels,.venv-wheels,streamgrad streamgrad_lab,tests/base/test_imports.py $(SHORT_LAB) tests/lab/test_public_names.py)
	.venv-wheels/bin/streamgrad --version

.venv-wheels/.installed: pyproject.toml lab/pyproject.toml Makefile
	$(call install,.venv-wheels,$(PYTHON),".[test]" ./lab)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-library .venv-wheels .pytest_cache .ruff_cache build dist

# Text that follows from the registry and from docstrings: exports, the README's table, and a page for each estimator, with
# the numbers that were measured; `python -m benchmarks.pages` measures again.
generated: setup
	$(BIN)/python -m tests.docs.generated
	$(BIN)/python -m benchmarks.pages --write-only
