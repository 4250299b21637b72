# Everything sets itself up: `make demo`, `make test` work on a fresh clone. PYTHON, VENV and CONSTRAINTS can be overridden.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
WITH := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
# A warning is an error with the versions that are known; others may warn of what is to come.
WARNINGS := $(if $(CONSTRAINTS),-W error)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(WARNINGS)
.PHONY: install test slow newest lowest constraints gpu lint types check demo notebooks blanks page clean
.DEFAULT_GOAL := check

install: $(VENV)/.run  ## what running needs; CONSTRAINTS= takes the newest versions instead of the tested ones
$(VENV)/.run: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"BiSSLight needs Python 3.11 or later, this is %d.%d; give another: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing into $(VENV): 3 GB are fetched, 6 GB of disk are used, nearly all of it torch with CUDA. This takes minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(WITH) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Adding what tests, lint and notebooks need: 0.3 GB."
	$(BIN)/python -m pip install $(WITH) --editable '.[dev]'
	@touch $@

test: $(VENV)/.test  ## the suite; one thread a process, a process a core
	$(PYTEST)

slow: $(VENV)/.test  ## minutes: kills while saving, torchrun, studies, exercises, notebooks, the commands of README and examples
	$(PYTEST) -m slow --override-ini addopts='--import-mode=importlib'

newest:  ## the suite with the newest version of everything, in .venv-newest
	$(MAKE) .venv-newest/.test VENV=.venv-newest CONSTRAINTS=
	.venv-newest/bin/python -m pip freeze --exclude-editable
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

lowest: $(VENV)/.test  ## the suite with the lowest versions that pyproject.toml allows, in .venv-lowest
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	$(BIN)/uv pip install --python .venv-lowest/bin/python --resolution lowest-direct --editable '.[dev]'
	.venv-lowest/bin/python -m pip freeze --exclude-editable
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto

constraints: $(VENV)/.test  ## constraints.txt anew: the newest versions, for all Pythons and platforms
	(echo '# Made by `make constraints`, then tested by `make check slow`. Do not edit.'; \
		$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--no-header --no-annotate pyproject.toml) > constraints.new
	mv constraints.new constraints.txt

gpu: $(VENV)/.test  ## CUDA tests: a CUDA device against the CPU; other tests do not see the device
	BISSLIGHT_GPU=1 $(BIN)/python -m pytest -m gpu -rs tests/test_gpu.py tests/test_data.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

check: lint types test

demo: $(VENV)/.run  ## align and fine-tune on handwriting, offline, about two minutes on two cores; see runs/demo/demo.png
	$(BIN)/bisslight demo --out runs/demo

notebooks: $(VENV)/.test  ## run the scripts in examples/ and renew the .ipynb beside them, with outputs
	cd examples && for name in [0-9]_*.py; do \
		PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH="$(CURDIR)" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 \
		jupytext --to ipynb --set-kernel python3 --execute $$name || exit 1; done

blanks:  ## sheets and notebooks with blanks, to be filled in; see examples/exercises.md
	$(PYTHON) examples/exercises/blank.py

page: $(VENV)/.test  ## docs/index.html and docs/handout.html anew, from docs/*.md, examples/one_page.py and docs/*.svg
	$(BIN)/python docs/page.py

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest build *.egg-info .mypy_cache .pytest_cache .ruff_cache
