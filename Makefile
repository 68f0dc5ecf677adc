# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without make's own variables, with bytecode kept; a second try for each test that fails.
PYTEST := env -u MAKEFLAGS -u MAKELEVEL -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --reruns 1 -r aR
# Of the slow tests: part K/N of all, and the time (seconds since 1970) from which none begins.
PART ?= 0/1
UNTIL ?= 0

.PHONY: demo test pytest slow lint ruff format mypy imports docs wheel install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Simulates, trains, tests; ends in ten minutes on two cores with metrics and a picture.
demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash docs/demo.sh

# Tests and, beside them, linter, formatter, types and the import contract; names what failed, and
# what was left in the checkout.
test: install
	@scripts/leaves_nothing.sh $(MAKE) --keep-going --jobs 2 pytest lint

pytest: install
	$(PYTEST)

slow: install
	@scripts/leaves_nothing.sh $(PYTEST) -m slow --part $(PART) --until $(UNTIL)

lint: ruff format mypy imports

ruff: install
	$(BIN)/ruff check .

format: install
	$(BIN)/ruff format --check .

mypy: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# Every page and notebook that is written from code; tests compare them.
docs: install
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/doctor_rules.py
	$(BIN)/python tests/support/zoo_page.py
	$(BIN)/python notebooks/make.py

# One wheel for any machine, in dist/; needs no environment.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
