# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check slow docs wheel install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Simulates, trains, tests; ends in ten minutes on two cores with metrics and a picture.
demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash docs/demo.sh

# Tests, linter, formatter, types and the import contract.
test: install
	$(BIN)/python -m pytest

# Linter, formatter, types and the import contract alone.
check: install
	$(BIN)/python -m pytest tests/test_style.py

slow: install
	$(BIN)/python -m pytest -m slow

# Pages that are written from the code; a test compares them.
docs: install
	$(BIN)/python scripts/reference.py

# One wheel for any machine, in dist/; needs no environment.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
