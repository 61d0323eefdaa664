# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo lint test test-all test-flower test-flower-versions attack release docs format clean

demo: $(READY)
	$(BIN)/fedkeel compare --preset digits --out runs/digits

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile

test-all: lint docs release
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not processes"

test-flower: $(READY)
	$(BIN)/python -m pytest -m processes tests/flower

# The oldest promised flwr and the newest that was tested, each in an environment of its own.
FLWR_VERSIONS := 1.40.0 1.42.0

test-flower-versions:
	for version in $(FLWR_VERSIONS); do \
		$(PYTHON) -m venv build/flwr-$$version && \
		build/flwr-$$version/bin/python -m pip install --quiet --disable-pip-version-check \
			-c constraints.txt -e ".[dev]" flwr==$$version && \
		build/flwr-$$version/bin/python -m pytest -m "processes or not slow" tests/flower \
			|| exit 1; \
	done

# Lies, settings and damaged files at random, for about half an hour: see tests/attack/README.md.
attack: $(READY)
	for script in replies settings files; do \
		PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/attack/$$script.py || exit 1; \
	done

# sdist and wheel: built, looked into, installed into a bare environment and tried.
release:
	$(PYTHON) release/check.py

# From the pages as they are committed; a test fails where they are not what the code says.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)
