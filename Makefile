# make demo: set up and run the main job.   make test: set up, lint, type-check and run the tests.
# The tests of make test are a fixed set, and few more that the commit draws (tests/conftest.py). make thorough: the tests with all parameters.
# make quick: one in six of those of layouts, shardings and views, and a program on four processes.
# make golden: what has changed of the golden table (tests/golden/); WRITE=1 writes it.
# make coverage: the tests again, and the lines that none of them reaches.
# make test TORCH=2.15.0 does so with another release of torch, in an environment of its own; make releases with all that are supported.
# make docs: the site, in site/; a broken link is an error. make pages: writes the pages of docs/ that are made by a command.
# make bench: the benchmarks. make bench-smallest: each once at its smallest size, to see that all run.
# make upstream: the patches for PyTorch, in build/upstream/ (docs/upstream.md).
# make dist: wheel and sdist in dist/, and the wheel checked in an empty environment. FIRST=torch==2.13.0 installs that there first.
PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Two at a time; what a file sets up is shared by its tests. In the order of their names the long ones come first.
PYTEST_ARGUMENTS ?= -n 2 --dist loadfile --no-loadscope-reorder
# The vendor's layout algebra, an oracle of the tests, may ask for CUDA packages that a newer torch cannot have beside it: the tests that need it then say so.
EXTRAS := $(if $(filter $(PINNED),$(TORCH)),test,checks)

.PHONY: demo test lint types tests quick thorough golden coverage releases docs pages bench bench-smallest upstream \
	dist clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint types tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

tests: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS) --one-in 6 \
		tests/layout tests/sharding tests/propagation tests/dtensor/run/test_processes.py::test_views_on_four

thorough: PYTEST_ARGUMENTS += --one-in 1
thorough: tests

golden: $(VENV)/.installed-test
	$(BIN)/python -m tests.golden $(if $(WRITE),--write)

coverage: $(VENV)/.installed-test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_ARGUMENTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

releases:
	$(PYTHON) docs/generate_releases.py

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

pages: $(VENV)/.installed-test
	$(BIN)/python docs/generate_rules.py
	$(BIN)/python docs/generate_patches.py
	$(BIN)/python docs/generate_gallery.py
	$(BIN)/python docs/generate_tutorial.py
	$(BIN)/python -m benchmarks.compiled --write

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.views
	$(BIN)/python -m benchmarks.views --answers
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.plans
	$(BIN)/python -m benchmarks.redistribution
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.profiled
	$(BIN)/python -m benchmarks.strategies

bench-smallest: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

upstream: $(VENV)/.installed-test
	$(BIN)/python -m upstream

dist: $(VENV)/.installed-dist
	rm -rf dist build .venv-wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv .venv-wheel
	$(if $(FIRST),.venv-wheel/bin/pip install --quiet $(FIRST))
	.venv-wheel/bin/pip install --quiet dist/*.whl
	.venv-wheel/bin/python -E tests/check_wheel.py

# torch first and by itself, of the release that is asked for.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "1 of 2: an environment in $(VENV), and PyTorch: 0.8 GB for CPUs, 4.7 GB with CUDA; some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	@echo "2 of 2: this package"
	$(PIP) torch==$(TORCH) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "what the tests need; a minute or two"
	$(PIP) torch==$(TORCH) -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) torch==$(TORCH) -e ".[docs]"
	touch $@

$(VENV)/.installed-dist: $(VENV)/.installed
	$(PIP) torch==$(TORCH) -e ".[dist]"
	touch $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
