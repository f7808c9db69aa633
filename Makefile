# `make lab` opens the labs, `make test` proves that everything works. Both set up `.venv` by themselves.
#
#   PYTHON=python3.12     the interpreter to make `.venv` from (3.11, 3.12 or 3.13)
#   TORCH_INDEX=ADDRESS   the package index to take torch from, for instance one with CPU builds
#   LAB_ARGS="--port 9000 --no-browser"   passed on to JupyterLab
#   TEST_ARGS="-k buckets"                passed on to pytest
#   ONLY=name             the one benchmark that `make bench` runs

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
TORCH := import tomllib; print(*(d for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if d.startswith("torch")))

.PHONY: help lab test test-all test-gpu bench build lint clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "Targets: lab test test-all test-gpu bench build lint clean"

# JupyterLab refuses to run as root unless it is told that this is meant.
lab: $(STAMP)
	cd labs && ../$(VENV)/bin/jupyter lab $$(test "$$(id -u)" -ne 0 || echo --allow-root) $(LAB_ARGS)

# First what compares seconds or drives a browser, with the machine to itself; then all else, two files at a time.
# Pytest ends with 5 where TEST_ARGS leaves nothing to run; that is a failure only when both end so.
test: $(STAMP)
	@$(PY) -m pytest -m "not slow and not gpu and (timing or browser)" $(TEST_ARGS); alone=$$?; \
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not timing and not browser" $(TEST_ARGS); rest=$$?; \
	case $$alone,$$rest in 0,0|0,5|5,0) ;; *) echo "make test: pytest ended with $$alone and $$rest" >&2; exit 1;; esac

test-all: $(STAMP)
	$(PY) -m pytest $(TEST_ARGS)

test-gpu: $(STAMP)
	$(PY) -m pytest -m gpu $(TEST_ARGS)

bench: $(STAMP)
	$(PY) -m tests.benchmarks --out bench.json $(if $(ONLY),--only $(ONLY))

build: $(STAMP)
	$(VENV)/bin/course build

lint: $(STAMP)
	$(PY) -m ruff check .

# Installs on first use, and again when pyproject.toml has changed since. The stamp is written last, so
# an installation that was interrupted is taken up again.
$(STAMP): pyproject.toml
	@set -e; \
	if ! $(PY) -c '$(SUITABLE)' 2>/dev/null; then \
	  found=; \
	  for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	    if $$candidate -c '$(SUITABLE)' 2>/dev/null; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No suitable Python among: $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)." >&2; \
	    echo "The course needs Python 3.11, 3.12 or 3.13 with its venv module (Debian: apt-get install python3-venv)." >&2; \
	    echo "Name another one with: make lab PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up $(VENV) with $$($$found --version)"; \
	  $$found -m venv --clear $(VENV); \
	fi; \
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip; \
	if [ -n "$(TORCH_INDEX)" ]; then \
	  $(PY) -m pip install --index-url "$(TORCH_INDEX)" "$$($(PY) -c '$(TORCH)')"; \
	elif [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ]; then \
	  echo "No NVIDIA device here. If pip starts to fetch gigabytes of CUDA libraries, stop it and"; \
	  echo "name an index with CPU builds of torch: make lab TORCH_INDEX=ADDRESS"; \
	fi; \
	$(PY) -m pip install -e '.[test]'; \
	touch $@

# The environment stays: delete .venv by hand to start from nothing.
clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache bench.json
	find course_lib solutions tests -name __pycache__ -type d -prune -exec rm -rf {} +
