# Every verb sets itself up: the first one creates .venv and installs the tested versions into it.
# Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help setup demo test fuzz lint types bench docs clean
.DEFAULT_GOAL := help

help:  ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## the environment in .venv, and nothing else

demo: $(INSTALLED)  ## the whole path on a real model, in under 3 minutes on two cores
	$(BIN)/placement-train workload=resnet50 num_microbatches=16 repeats=8 seconds=2 tracker=none \
	  training.total_steps=1000000 training.max_seconds=20 hydra.run.dir=runs/demo_training
	$(BIN)/placement-compare workload=resnet50 num_microbatches=16 repeats=8 rounds=3 seconds=20 \
	  "planner=[heft,contiguous_dp,random_search,'policy policy=runs/demo_training/policy.safetensors']" \
	  hydra.run.dir=runs/demo
	$(BIN)/placement export runs/demo/resnet50/plan.json --to torch_pipelining \
	  --out runs/demo/pipeline.py --nearest
	$(BIN)/placement run runs/demo/resnet50/plan.json

# pytest-xdist 3.8 may wait for ever once it has replaced a worker that crashed (its issue 1378): the run ends instead.
# A hundred processes of the tests import our files, which Python may be told to compile anew each time.
test: $(INSTALLED)  ## the whole test suite, on two processes
	@$(BIN)/python -m compileall -q agents conf envs experiments placement
	$(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0

fuzz: $(INSTALLED)  ## thousands of mutated files for everything that reads one
	$(BIN)/python -m tests.fuzz

lint: $(INSTALLED)  ## style, formatting, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

bench: $(INSTALLED)  ## speeds of simulator, planners and environments
	$(BIN)/python -m experiments.bench

docs: $(INSTALLED)  ## build the documentation into build/site; a warning is an error
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b dirhtml -c docs . build/site
	@echo '<meta http-equiv="refresh" content="0; url=docs/">' > build/site/index.html
	@echo "built: build/site/index.html"

clean:  ## remove the environment, builds and caches (results in runs/ stay)
	rm -rf .venv build dist docs/api wandb .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/.installing exists only while pip runs: finding it here means that an earlier installation
# was interrupted and may have left half a package, which pip would take for installed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: no '$(PYTHON)' on the PATH; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("make: %s is Python %d.%d, but 3.11 or later is needed; name another one: make PYTHON=/path/to/python3.11 ..." % (sys.executable, v[0], v[1]))'
	@if [ -e .venv/.installing ] || { [ -e .venv ] && ! $(BIN)/python -m pip --version >/dev/null 2>&1; }; then \
	  echo "An earlier installation into .venv is incomplete: starting again."; rm -rf .venv; fi
	@mkdir -p .venv && touch .venv/.installing
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || \
	  { echo "make: '$(PYTHON) -m venv' failed (on Debian or Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "Installing the tested versions into .venv (a few minutes, about 2 GB) ..."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[cp,plots,models,dev]'
	@rm .venv/.installing
	@echo "Compiling the kernels, once (a minute of two cores) ..."
	$(BIN)/placement doctor --warm
	@touch $@
