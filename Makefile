# make demo   train a small network on two devices and print the report
# make test   lint, types and tests, as CI runs them
# make zoo    the parity tests over many model families (long)
# make bench  meshwise beside DDP and other frameworks, in an environment of its own (about half an hour)
# make clean  remove what building and testing left; virtual environments stay

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt
BENCH_VENV ?= .venv-bench
BENCH_INSTALL := $(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt

.PHONY: demo test lint zoo bench clean

demo: $(VENV)/.stamp-demo
	$(BIN)/meshwise train examples/digits_mlp.py --devices 2

test: lint
	$(BIN)/python -m pytest -q -m "not zoo"

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/mypy

zoo: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -q -m zoo

# The peers one by one, so that one which cannot be installed is a row of the table that says so. DeepSpeed's own
# build looks for torch, and for the C++ compiler later.
bench: $(BENCH_VENV)/.stamp-bench
	$(BENCH_VENV)/bin/python -m benchmarks

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	rm -f $(VENV)/.stamp-* $(BENCH_VENV)/.stamp-*
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[examples]"
	touch $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[test,dev]"
	touch $@

$(BENCH_VENV)/.stamp-bench: pyproject.toml constraints.txt benchmarks/peers.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_INSTALL) -e ".[bench]" setuptools wheel
	sed -n 's/ *#.*//; /==/p' benchmarks/peers.txt | while read peer; do \
	  PATH="$(abspath $(BENCH_VENV))/bin:$$PATH" DS_BUILD_OPS=0 $(BENCH_INSTALL) --no-build-isolation "$$peer" \
	    || echo "$$peer could not be installed"; done
	touch $@
