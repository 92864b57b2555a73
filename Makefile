# Everything needs Python 3.11 or newer with venv, and no compiler.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types unit docs install clean

demo: install  ## Run the main job: a device slows down, the job re-plans and migrates
	$(BIN)/malleus demo $(ARGS)

test: lint types unit  ## All checks and tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy malleus_ds

# Tests of one process run side by side; those of many ranks one after the other, for they need all cores.
unit: install
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/property $(ARGS)
	$(BIN)/python -m pytest tests/distributed $(ARGS)

docs: $(VENV)/docs.stamp  ## HTML pages in docs/_build
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build

install: $(VENV)/install.stamp

# torch first: DeepSpeed's own set-up looks for it.
$(VENV)/install.stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/docs.stamp: $(VENV)/install.stamp
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) docs/_build
