# Everything sets itself up: `make test`, `make demo` work on a fresh clone. PYTHON and VENV can be overridden.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.bisslight
.PHONY: install test slow gpu lint types check demo notebooks blanks page clean
.DEFAULT_GOAL := check

install: $(READY)
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

test: $(READY)  ## the suite; one thread a process, a process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

slow: $(READY)  ## minutes: kills while saving, torchrun, the notebooks, the commands of README and examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m slow --override-ini addopts='--import-mode=importlib'

gpu: $(READY)  ## CUDA tests: a CUDA device against the CPU; other tests do not see the device
	BISSLIGHT_GPU=1 $(BIN)/python -m pytest -m gpu -rs tests/test_gpu.py tests/test_data.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

check: lint types test

demo: $(READY)  ## align and fine-tune on handwriting, offline, two minutes; see runs/demo/demo.png
	$(BIN)/bisslight demo --out runs/demo

notebooks: $(READY)  ## run the scripts in examples/ and renew the .ipynb beside them, with outputs
	cd examples && for name in [0-9]_*.py; do \
		PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH="$(CURDIR)" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 \
		jupytext --to ipynb --set-kernel python3 --execute $$name || exit 1; done

blanks: $(READY)  ## sheets and notebooks with blanks, to be filled in; see examples/exercises.md
	$(BIN)/python examples/exercises/blank.py

page: $(READY)  ## docs/paper_beside_code.html, made anew from the sources
	$(BIN)/python docs/beside.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
