# All tasks. Each target sets up .venv by itself, on a machine with only Python
# (3.11 or newer: constraints.txt) and make.

PYTHON ?= python3
BIN := .venv/bin
# Packages of the demo, of everything else, and of the site.
DEMO := .venv/.demo
READY := .venv/.ready
SITE := .venv/.site
# On a machine with a GPU nothing needs to be installed: its own Python, if it has torch and pytest.
PY := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Modules are compiled when they are first imported, once for all processes: most of what is installed
# never is, and pip would take minutes to compile it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-settings mutants mutants-ptx baseline check docs site bench audit gpu clean

demo: $(DEMO)  ## train a small language model with and without FusedRemat
	$(BIN)/python examples/train_byte_lm.py

# Small objects in huge pages, where the kernel has them: on a virtual machine that is slow at finding
# pages, all of Python is. What measures time runs without.
HUGE := PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# A process for each core, four at most for their memory. Kernels are interpreted in a run of their own.
# A file at a time, in alphabetical order, which has none of the longest among the last.
PYTEST = $(HUGE) $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --timeout 1800 \
	--dist loadfile --no-loadscope-reorder $(MARKS)

# Kernels compiled for these architectures are executed on the CPU (tests/ptx); those of one mark.
ARCHES := 80 90
EXECUTED := -m executed

test: $(READY)  ## all tests, and the examples in the docstrings
	@status=0; \
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels tests/backend tests/interpreted || status=1; \
	for arch in $(ARCHES); do \
	FUSED_REMAT_COMPILED=$$arch $(PYTEST) $(EXECUTED) tests/kernels tests/backend || status=1; done; \
	$(PYTEST) || status=1; exit $$status

test-all:  ## make test with full sweeps, ten times the examples and every audit: hours
	@status=0; FUSED_REMAT_MORE_EXAMPLES=10 $(MAKE) test MARKS='-m ""' \
	EXECUTED='--dist worksteal' ARCHES="80 89 90" || status=1; \
	$(MAKE) audit || status=1; exit $$status

# What decides the last bits of a result, and the order of threads.
SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE \
	ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=4 FUSED_REMAT_TEST_SEED=1

test-settings: $(READY)  ## make test as on other CPUs, with other threads and another random seed: hours
	@status=0; for setting in $(SETTINGS); do \
	echo "$$setting"; env $$setting $(MAKE) test || status=1; done; exit $$status

mutants: $(READY)  ## plant bugs in a copy, each of which a test has to catch
	$(HUGE) $(BIN)/python tests/mutants.py --jobs 2

mutants-ptx: $(READY)  ## break compiled kernels in one place at a time, which their execution has to show: an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.ptx.mutants --jobs 2

baseline: $(READY)  ## record what layers keep, call and compile, which a test compares with
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python tests/house/baseline.py > tests/house/baseline.json

check: $(READY) site  ## lint, format, types, the direction of imports, and the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(HUGE) $(BIN)/mypy
	$(HUGE) $(BIN)/python -m pytest -q tests/house/test_arrows.py

docs: $(READY)  ## the generated parts of README.md and docs/ and the figures, from graphs, results and tests
	$(BIN)/python -m bench report

site: $(SITE)  ## the documentation as a site, in build/site/index.html; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(READY)  ## all benchmarks on this CPU into bench/results, then the pages: one to two hours
	for name in kernels layers frontier plan; do $(BIN)/python -m bench $$name --device cpu --publish; done
	$(BIN)/python -m bench model --model smollm-135m qwen2-1.5b --layers 2 --seq 256 --lora 0 16 \
	--device cpu --publish
	$(BIN)/python -m bench profile --publish
	$(BIN)/python -m bench report

audit: $(READY)  ## what the compiler makes of every kernel, for every GPU, without one: most of an hour
	$(BIN)/python -m bench audit --arch 80 86 89 90 100 103 120 gfx942 --dtype bf16 fp16 --check --out build/audit

# Where results of a GPU go, and for how long it is used; the same command continues.
OUT ?= bench/results/gpu
MINUTES ?= 10

gpu:  ## on a machine with a GPU: tests and benchmarks, as `python -m bench gpu --list` prints them
	$(PY) -m bench gpu --out $(OUT) --minutes $(MINUTES)

clean:  ## what can be made again, .venv included
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, alone and exact: that finds a CPU build where there is one, and nothing after it has
# a reason to replace it. pip is silent unless it fails.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile -c constraints.txt
define HELP

Setting up .venv failed; the message above says where. Installing needs a package index that pip can
reach (PIP_INDEX_URL names another), 4 GB of disk, and Python 3.11 or newer with venv (on Debian and
Ubuntu: apt install python3-venv; another Python: make PYTHON=python3.11 test). Then run make again.
endef
export HELP
FAILED = { echo "$$HELP" >&2; exit 1; }

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)' || $(FAILED)
	@echo 'Installing into .venv: torch'
	@$(PYTHON) -m venv .venv || $(FAILED)
	@$(PIP) $$(grep '^torch==' constraints.txt) || $(FAILED)
	@echo 'Installing into .venv: triton, numpy, matplotlib, tqdm'
	@$(PIP) setuptools wheel && $(PIP) --no-build-isolation -e '.[demo]' || $(FAILED)
	@touch $@

$(READY): $(DEMO)
	@echo 'Installing into .venv: what tests, checks and benchmarks need'
	@$(PIP) --no-build-isolation -e '.[test,check,bench]' || $(FAILED)
	@touch $@

$(SITE): $(DEMO)
	@echo 'Installing into .venv: what the site needs'
	@$(PIP) --no-build-isolation -e '.[docs]' || $(FAILED)
	@touch $@
