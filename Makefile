# Wraps the documented commands; whatever it does can be typed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := .ci/requirements.lock

.PHONY: serve test lint clean

serve: $(VENV)/.installed-demo
	@$(BIN)/loraplex demo
	@exec $(BIN)/loraplex serve configs/quickstart.yaml

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy serve_app engine lora kernels registry

# torch is installed first and exactly: a range would let pip take the newest build.
$(VENV)/.installed-demo: pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "loraplex needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing loraplex into $(VENV) (once; about two minutes)"
	@$(BIN)/pip install -q -c $(LOCK) torch==2.13.0
	@$(BIN)/pip install -q -c $(LOCK) -e '.[demo]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	@$(BIN)/pip install -q -c $(LOCK) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
