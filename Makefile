# Everything runs in .venv, which the first command makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_TRITON := .triton

.PHONY: setup train test test-slow gpu lint reliability audit

setup: $(VENV)/.installed

# `make test PYTHON=python3.13`: a .venv of another Python is made anew.
ifeq ($(origin PYTHON),command line)
VERSION := -c 'import sys; print(sys.version_info[:2])' 2>/dev/null
ifneq ($(shell $(PYTHON) $(VERSION)),$(shell $(BIN)/python $(VERSION)))
ANEW := rm -rf $(VENV)
.PHONY: $(VENV)/.installed
endif
endif

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python -a -z "$(ANEW)" || $(PYTHON) common/require_python.py
	$(ANEW)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/python train.py runtime=fast

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/interpreted

# Beside the torch of .venv: compiling and interpreting need Triton alone, and a numpy of its time.
$(OLDEST_TRITON)/.installed: Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OLDEST_TRITON) triton==3.6.0 'numpy<2.4'
	touch $@

test-slow: setup $(OLDEST_TRITON)/.installed
	$(BIN)/python -m pytest -m slow
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m slow tests/interpreted
	PYTHONPATH=$(OLDEST_TRITON) $(BIN)/python -m pytest -m "slow or not slow" tests/accel/kernels/test_kernel_resources.py
	PYTHONPATH=$(OLDEST_TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "slow or not slow" -W "ignore:Conversion of an array:DeprecationWarning" tests/interpreted

reliability: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --maxschedchunk 1 -m fault --write-reliability

audit: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# Installs nothing: it runs where the packages are, in .venv or outside of it.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m scripts.bench gpu $(ARGS)
