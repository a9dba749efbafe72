# Wraps the documented commands; everything that it does can be typed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := .ci/requirements.lock
# Installed first and exactly: a range would let pip take the newest build.
TORCH := torch==2.13.0
# Another index for torch alone, such as https://download.pytorch.org/whl/cpu. Its dependencies come
# from PyPI with the rest: such an index has few versions of them.
TORCH_INDEX ?=
GOAL := $(or $(firstword $(MAKECMDGOALS)),serve)
INSTALL = $(BIN)/python .ci/pip_install.py -c $(LOCK)

.PHONY: serve quick test test-halves slow-half other-half lint docs clean

serve: $(VENV)/.installed-demo
	@$(BIN)/loraplex demo
	@exec $(BIN)/loraplex serve configs/quickstart.yaml

# At each save: the linters and the tests that start no server.
quick: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -m "not serve and not slow and not gpu"

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest

# The same tests in two halves side by side: the slow half mostly waits for servers of its own.
test-halves: $(VENV)/.installed-test lint
	@$(MAKE) --no-print-directory -j2 --output-sync=target slow-half other-half

slow-half:
	@$(BIN)/python -m pytest -q -m slow -p no:cacheprovider

other-half:
	@$(BIN)/python -m pytest -q -m "not slow"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy serve_app engine lora kernels registry

# The generated pages: configuration, command line, metrics, modules.
docs: $(VENV)/.installed-test
	$(BIN)/python -m tests.docs --write

$(VENV)/.installed-demo: pyproject.toml $(LOCK)
	@$(PYTHON) -c '' 2>/dev/null \
		|| { echo "error: $(PYTHON) does not run; name a Python: make PYTHON=python3.12 $(GOAL)" >&2; exit 1; }
	@$(PYTHON) .ci/preflight.py '$(VENV)' '$(TORCH_INDEX)' $(GOAL)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing loraplex into $(VENV) (once; about two minutes)"
	@$(INSTALL) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) $(TORCH)
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	@$(INSTALL) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
