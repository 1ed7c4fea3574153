# Everything one does here. Each target sets up .venv by itself, on a machine with only Python
# (3.11 or newer: constraints.txt) and make.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# On a machine with a GPU nothing needs to be installed: its own Python, if it has torch and pytest.
PY := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: demo test check docs bench losses audit gpu clean

demo: $(READY)  ## train a small language model with and without FusedRemat
	$(BIN)/python examples/train_byte_lm.py

# Two processes, a file at a time, in which threads that wait do not spin; what measures time, after.
test: $(READY)  ## all tests, and the examples in the docstrings
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m "not timing"
	$(BIN)/python -m pytest -m timing

check: $(READY)  ## lint, format, types, and the arrows between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

docs: $(READY)  ## the generated parts of README.md and docs/ and the figures, from graphs, results and tests
	$(BIN)/python -m bench report

bench: $(READY)  ## all benchmarks on this CPU, then the pages: one to two hours
	$(BIN)/python -m bench kernels --device cpu
	$(BIN)/python -m bench layers --device cpu
	$(BIN)/python -m bench frontier --device cpu
	$(BIN)/python -m bench model --article --device cpu --layers 2 --seq 256
	$(BIN)/python -m bench plan --device cpu
	$(BIN)/python -m bench profile
	$(BIN)/python -m bench report

losses: $(READY)  ## exact and 8-bit kept activations: 500 steps, 3 seeds, 2 models: half an hour
	$(BIN)/python examples/compare_losses.py --out bench/results/losses-cpu.json
	$(BIN)/python -m bench report

audit: $(READY)  ## what the compiler makes of every kernel, for every GPU, without one: half an hour
	$(BIN)/python -m bench audit --arch 80 89 90 100 120 gfx942 --dtype bf16 fp16 --check --out build/audit

gpu:  ## on a machine with a GPU: its tests, then the GPU benchmark
	status=0; $(PY) -m pytest -m gpu -p bench.gpu.outcomes || status=1; \
	$(PY) -m bench gpu --out bench/results/gpu --minutes 8 || status=1; exit $$status

clean:  ## what can be made again, .venv included
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, alone and exact: that finds a CPU build where there is one, and nothing after it has
# a reason to replace it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install -c constraints.txt setuptools wheel
	$(BIN)/pip install -c constraints.txt --no-build-isolation -e '.[test,check,bench]'
	touch $@
