# make demo   train a small network on two devices and print the report
# make test   lint, types and tests, as CI runs them
# make zoo    the parity tests over many model families (long)
# make bench  the benchmarks (long)
# make clean  remove what building and testing left; virtual environments stay

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

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

bench: $(VENV)/.stamp-test
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	rm -f $(VENV)/.stamp-*
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[examples]"
	touch $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[test,dev]"
	touch $@
