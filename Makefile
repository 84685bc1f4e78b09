# One environment, four commands. Nothing here needs a GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# test processes side by side, each with whole files of tests
JOBS ?= 2
# the tests start hundreds of Pythons: none of them compiles evald again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test check chaos clean

install: $(VENV)/.installed

# The engine's list is closed under dependencies, hence --no-deps (its metadata asks for CUDA wheels).
$(VENV)/.installed: pyproject.toml configs/cpu-engine.txt configs/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-deps -r configs/cpu-engine.txt -r configs/dev.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/evald demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n $(JOBS) --dist loadfile --durations=15 tests
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=90

# Long runs: RUNS=300; one that failed: RUNS=1 SEED=its number.
RUNS ?= 20
SEED ?= 1
chaos: install
	$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED)

clean:
	rm -rf .demo build dist *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
