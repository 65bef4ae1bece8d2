# Two commands set up a fresh machine that has Python 3.11, pip and make:
#   make swarm   a virtual environment, the package, and a local swarm of four peers for 90 s, with a live page
#   make test    the same, and all tests, types and style, and 40 small simulated swarms with faults by chance;
#                WORKERS=6 plays six files of tests at once
# The head-to-head with others, over an emulated WAN (root on Linux; FULL=1 for everything, which takes about a day):
#   make benchmark            writes docs/BENCHMARKS.md; goes on where it was interrupted
# The documentation as a site, in site/index.html:
#   make docs
# And for a long night:
#   make soak SECONDS=3600    real peers, one of which is killed, frozen, cut off or out of disk every 20 s; with root
#                             each in a network of its own. soak-report.json has what was found
#   make night SECONDS=3600   plays the tests that are too many for `make test` (ways in which commands end), rehearses
#                             the check of a GPU, benchmarks/gpu, on the CPU in a few minutes; then goes on with
#                             simulated swarms that nobody has simulated yet; night-report.json says how
#                             many, and for each that was violated its seed and the line that replays it
#   make matrix               tests with the lowest and newest versions allowed, on each Python from 3.11 to 3.13 here
#   make fuzz SECONDS=600     looks for bytes that crash a decoder, by coverage; what it finds stays in
#                             tests/fuzz/corpus/

# Keep compiled bytecode, also where the environment says not to: without it each process compiles torch again.
export PYTHONDONTWRITEBYTECODE =

PYTHON ?= python3.11
VENV ?= .venv
RUN = $(VENV)/bin/python
SECONDS ?= 3600
WORKERS ?= 3

.PHONY: swarm test pytest check sweep soak night matrix fuzz benchmark docs install clean

swarm: install
	OMP_NUM_THREADS=1 $(RUN) -m decentral.local --peers 4 --throttle 1,1,1,10 --stop-after 90s --dashboard --summary swarm-summary.json

# The sweep is one process: the tests begin as soon as the style is checked, so that no core rests beside it.
test: install
	$(MAKE) --jobs=2 sweep pytest

pytest: check
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

sweep: install
	OMP_NUM_THREADS=1 $(RUN) -m decentral.simulate --sweep 40

soak: install
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.soak --seconds $(SECONDS) --json soak-report.json

night: install
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m night
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.gpu --rehearse --out build/gpu-rehearsal
	OMP_NUM_THREADS=1 $(RUN) -m decentral.simulate --sweep 100000000 --seed $$(date +%s) --for-seconds $(SECONDS) \
		--shrink --report night-report.json

matrix: install
	OMP_NUM_THREADS=1 $(RUN) -m tests.matrix

fuzz: install
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[fuzz]"
	OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz.guided --seconds $(SECONDS)

benchmark: install
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[benchmark]"
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.contest $(if $(FULL),--full)

docs: install
	rm -rf build/pages
	$(RUN) -m docs.stage build/pages
	$(VENV)/bin/zensical build --clean --strict

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

install: $(VENV)/installed

# torch comes first and through the constraints, so that nothing pulls in a larger build of it. Python compiles modules
# when they are first imported: compiling all of them takes longer than the download.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[dev,hf,lora,eval,plot,upload,8bit,dashboard]"
	touch $@

clean:
	rm -rf $(VENV) swarm build site .cache *.egg-info swarm-summary.json soak-report.json night-report.json
