# make demo: set up and run the main job.   make test: set up, lint, type-check and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types tests docs bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint types tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

tests: $(VENV)/.installed-test
	$(BIN)/python -m pytest

docs: $(VENV)/.installed
	$(BIN)/python docs/generate_rules.py
	$(BIN)/python -m benchmarks.compiled --write

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.views
	$(BIN)/python -m benchmarks.views --answers
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.redistribution

# torch first and by itself: the constraint picks the release that the tests are pinned to.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
