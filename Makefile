# `make demo` and `make test` set themselves up: one virtual environment outside the checkout, named by
# pyproject.toml's hash. It holds the dependencies; the checkout is installed into it at every run.
PYTHON ?= python3
VENV_ROOT ?= $(HOME)/.cache/vllm-topkx
VENV := $(VENV_ROOT)/venv-$(shell sha256sum pyproject.toml | cut -c1-12)
BIN := $(VENV)/bin
TESTS ?= tests
MINUTES ?= 10
BACKEND ?= cpu
SEED ?= 0

.PHONY: demo test fuzz lint install setup

demo: install
	$(BIN)/vllm-topkx demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

fuzz: install
	$(BIN)/vllm-topkx fuzz --minutes $(MINUTES) --backend $(BACKEND) --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: setup
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . 2> $(VENV)/install.log \
		|| { cat $(VENV)/install.log; exit 1; }

setup:
	@mkdir -p $(VENV_ROOT)
	@flock $(VENV).lock sh -c 'test -e $(VENV)/ready || { \
		echo "Setting up $(VENV): vLLM 0.33.0 and PyTorch, about 6 minutes and 10 GB, once." && \
		$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \"Python 3.11 or newer is needed: make PYTHON=...\")" && \
		rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && \
		$(BIN)/pip install --disable-pip-version-check --quiet --upgrade pip && \
		$(BIN)/pip install --disable-pip-version-check --editable ".[dev]" && \
		touch $(VENV)/ready; }'
