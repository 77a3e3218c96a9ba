# Needs Python 3.11 or later and make; everything else goes into .venv, always through constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where else to look for packages, e.g. https://download.pytorch.org/whl/cpu for torch without CUDA.
EXTRA_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DOCS_STAMP := $(VENV)/installed-docs
# Build isolation is off because pip does not pass constraints on to isolated builds.
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt $(if $(EXTRA_INDEX),--extra-index-url $(EXTRA_INDEX))
EDITABLE := $(INSTALL) --no-build-isolation -e

.PHONY: help setup demo test check bench soak docs clean distclean

help:
	@echo "make setup   create .venv and install phalanx into it with everything below needs"
	@echo "make demo    train a small GPT on two workers and show what happened"
	@echo "make test    the whole test suite"
	@echo "make check   ruff, mypy, import layers, public names"
	@echo "make bench   side by side with torch's own classes"
	@echo "make soak    thousands of injected faults"
	@echo "make docs    the HTML documentation, in docs/_build"
	@echo "make clean   remove what the others made; distclean removes .venv as well"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "setuptools>=77"
	$(EDITABLE) ".[dev]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(EDITABLE) ".[docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/phalanx demo

test: $(STAMP)
	$(BIN)/python -m pytest tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_public_names.py

bench: $(STAMP)
	$(BIN)/phalanx bench all

soak: $(STAMP)
	$(BIN)/python -m pytest tests -m soak --timeout=3600

docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

clean:
	rm -rf build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
