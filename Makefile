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
# Processes that share the tests: tests/conftest.py. The third has the time in which servers wait.
JOBS ?= 3
# Threads of torch that wait would spin: with a process on each core, that is half of the time.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS)
MYPY = $(BIN)/mypy serve_app engine lora kernels registry
# The tests start some hundred processes, each of which would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve quick test gpu lint docs conformance clean

serve: $(VENV)/.installed-demo
	@$(BIN)/loraplex demo
	@exec $(BIN)/loraplex serve configs/quickstart.yaml

# At each save: the linters and the tests that start no server.
quick: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -q -m "not serve and not slow and not gpu"

# Types are checked beside the tests, which wait for servers half of their time; without its cache
# mypy needs a core for a minute, and must not delay their starts. Its errors are printed last.
test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@found=$$(mktemp); nice -n 19 $(MYPY) >"$$found" 2>&1 & types=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$types; typed=$$?; \
	[ $$typed -eq 0 ] || cat "$$found"; rm "$$found"; \
	[ $$tests -eq 0 ] && [ $$typed -eq 0 ]

# The tests that need CUDA devices, on all devices at the same time.
gpu: $(VENV)/.installed-test
	$(BIN)/python -m tests.gpu

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY)

# The generated pages: configuration, command line, metrics, modules.
docs: $(VENV)/.installed-test
	$(BIN)/python -m tests.docs --write

# Public clients against the demo server, each in an environment of its own: some minutes and 3 GB.
# CLIENTS=openai,anthropic chooses; WRITE=1 writes their rows of docs/conformance.md.
conformance: $(VENV)/.installed-test
	$(BIN)/python -m tests.conformance $(if $(CLIENTS),--clients $(CLIENTS)) $(if $(WRITE),--write)

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
	rm -rf $(VENV) .venv-conformance build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
