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

# What DeepSpeed and torchft want stays out of .venv: theirs is a second one, which sees the first through base.pth.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/installed
# And the frameworks of test-integrations in a third, at the versions of tests/integrations/requirements.txt.
INTEGRATIONS := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS)/installed
# Where it is set, as in many containers, every process of the tests would compile the package and the tests once more.
unexport PYTHONDONTWRITEBYTECODE
SUDO := $(shell test "$$(id -u)" = 0 || echo "sudo -n")
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help setup browser demo test test-thorough test-all test-integrations fuzz mutants check bench bench-peers soak docs clean distclean

help:
	@echo "make setup        create .venv and install phalanx into it with everything below needs"
	@echo "make demo         train a small GPT on two workers and show what happened"
	@echo "make test         the test suite: every feature, and every mistake that was made once"
	@echo "make test-thorough  what crosses more options, sizes and numbers of ranks (test-all: both)"
	@echo "make test-integrations  Accelerate, Transformers, Lightning, timm and Ray on phalanx, in .venv-integrations"
	@echo "make fuzz         training programs drawn at random, against the mean by hand (SECONDS=600 SEED=0)"
	@echo "make mutants      deliberate mistakes in a copy of the package: does the fuzzer, or a test, notice?"
	@echo "make browser      install chromium for the tests of the report, where apt and the right to use it are there"
	@echo "make check        ruff, mypy, import layers, public names"
	@echo "make bench        side by side with torch's own classes, and a dated report of it"
	@echo "make bench-peers  side by side with FSDP2, DeepSpeed and torchft, installed into .venv-peers"
	@echo "make soak         thousands of injected faults, ends of every kind, and how soon a death is seen"
	@echo "make docs         the HTML documentation, in docs/_build"
	@echo "make clean        remove what the others made; distclean removes the environments as well"

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

# For the tests that open the report in a browser. Without one they are replaced by a warning; CI insists on them.
browser:
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	  && command -v chromedriver >/dev/null; then echo "browser: already there"; \
	elif command -v apt-get >/dev/null && $(SUDO) apt-get install -y -q chromium chromium-driver; then echo "browser: installed"; \
	else echo "browser: install chromium and its chromedriver to have the report tested in a real browser"; fi

# More workers than cores: most tests wait for processes to start or for a time limit to pass.
TEST_WORKERS ?= 4
test: $(STAMP)
	$(BIN)/python -m pytest tests -n $(TEST_WORKERS)

# What `make test` leaves out, and nothing else; see tests/breadth.py.
test-thorough: $(STAMP)
	$(BIN)/python -m pytest tests -n $(TEST_WORKERS) -m 'thorough and not soak'

test-all: test test-thorough

# Installed with torch pinned; see constraints.txt.
$(INTEGRATIONS_STAMP): $(STAMP) tests/integrations/requirements.txt
	test -x $(INTEGRATIONS)/bin/python || $(BIN)/python -m venv $(INTEGRATIONS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" > "$$($(INTEGRATIONS)/bin/python -c '$(PURELIB)')/base.pth"
	$(INTEGRATIONS)/bin/python -m pip install -q -c constraints.txt -r tests/integrations/requirements.txt
	touch $@

test-integrations: $(INTEGRATIONS_STAMP)
	PHALANX_INTEGRATIONS=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations -p no:xdist -rs

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ONLY)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_public_names.py

bench: $(STAMP)
	$(BIN)/phalanx bench all

# A peer that cannot be installed here is left out, and the table says so.
$(PEERS_STAMP): $(STAMP)
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" > "$$($(PEERS)/bin/python -c '$(PURELIB)')/base.pth"
	$(PEERS)/bin/python -m pip install -q -c constraints.txt "setuptools>=77" wheel
	for peer in deepspeed torchft; do \
	  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install -q -c constraints.txt --no-build-isolation $$peer \
	    || echo "bench-peers: $$peer cannot be installed here and will be left out"; \
	done
	touch $@

bench-peers: $(PEERS_STAMP)
	$(PEERS)/bin/python -m bench.peers

soak: $(STAMP)
	$(BIN)/python -m pytest tests -m soak --timeout=3600

docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

clean:
	rm -rf build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PEERS) $(INTEGRATIONS)
