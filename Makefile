# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The version of torch that the peer tests were checked with; any torch >= 2.9 works.
TORCH  ?= torch==2.13.0
JOBS   ?= 2

# The newest Python >= 3.12 that runs here (on PATH, or installed by pyenv); empty if there is none.
NEWEST_PYTHON ?= $(firstword $(foreach v,14 13 12,$(shell \
	for p in python3.$(v) $$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$(v).*/bin/python 2>/dev/null); do \
	$$p -c 'import sys' >/dev/null 2>&1 && echo $$p && break; done)))

.PHONY: help demo test test-newest lint format bench clean

help:
	@echo "make demo         train Muon and AdamW on 8 simulated devices, draw both curves"
	@echo "make test         lint, types, tests (Python: $(PYTHON))"
	@echo "make test-newest  the same tests on the newest Python and JAX here"
	@echo "make bench        the optimizer-step benchmark"
	@echo "make format       apply the formatter"

$(VENV)/demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples]'
	@touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,torch]' '$(TORCH)'
	@touch $@ $(VENV)/demo

demo: $(VENV)/demo
	$(BIN)/python examples/train_gpt.py demo

test: $(VENV)/dev lint
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch has no part in it: its peer tests run in `make test`.
test-newest:
	@if [ -z "$(NEWEST_PYTHON)" ]; then echo "no Python 3.12 or newer here: nothing to test"; exit 1; fi
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]'
	.venv-newest/bin/python -c "import sys, jax; print('Python', sys.version.split()[0], 'JAX', jax.__version__)"
	.venv-newest/bin/python -m pytest -n $(JOBS)

bench: $(VENV)/demo
	$(BIN)/python benchmarks/optimizer_step.py

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-newest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
