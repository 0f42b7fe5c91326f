# Everything starts here. `make demo` and `make test` do all set-up on a fresh machine: a virtual environment in .venv,
# filled by pip with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH  := $(shell grep '^torch==' constraints.txt)
INPUTS := pyproject.toml constraints.txt

# Two workers with one thread each: more threads than cores make small torch tests slower, not faster.
WORKERS ?= 2
PYTEST  := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format benchmark clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## prune a network of the digits by every criterion, compare; writes demo/
	$(BIN)/apoptosis demo

test: check ## what CI runs: format, lint, types, rooms, tests and doctests
	$(PYTEST) -m "not slow"

test-all: check ## the same with the slow tests
	$(PYTEST)

check: $(VENV)/.dev ## format, lint, types and rooms, without the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(VENV)/.dev ## cost of the curvature product against a training step
	$(BIN)/python benchmarks/cost.py --device cpu --peers

clean: ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch comes first and by its pin alone: that way pip takes the build its index offers for this machine (a CPU build where
# there is one) before anything else can ask for another.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "apoptosis needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(INPUTS)
	$(PIP) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(INPUTS)
	$(PIP) -c constraints.txt -e '.[dev,demo,models]'
	@touch $(VENV)/.demo $@
