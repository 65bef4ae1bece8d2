# Two commands set up a fresh machine that has Python 3.11, pip and make:
#   make swarm   a virtual environment, the package, and a local swarm of four peers for 90 s
#   make test    the same, and all tests, types and style

PYTHON ?= python3.11
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: swarm test check install clean

swarm: install
	OMP_NUM_THREADS=1 $(RUN) -m decentral.local --peers 4 --throttle 1,1,1,10 --stop-after 90s --summary swarm-summary.json

test: check
	OMP_NUM_THREADS=1 $(RUN) -m pytest

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

install: $(VENV)/installed

# torch comes first and through the constraints, so that nothing pulls in a larger build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,hf,plot]"
	touch $@

clean:
	rm -rf $(VENV) swarm build *.egg-info swarm-summary.json
