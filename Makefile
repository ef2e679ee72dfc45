# Each word is one command; README.md says what it is for.
PYTHON ?= python
export OMP_NUM_THREADS ?= 1

.PHONY: help install fast test sim sim-tests long check format recipes planner-exam docs pictures report-pictures site clean

help:            ## these words
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/'

install:         ## paddle_dp, Paddle for CPUs and all tools, into the environment of $(PYTHON)
	$(PYTHON) -m pip install -e '.[cpu,dev]'

fast:            ## the tests that start no process: what to run while typing
	$(PYTHON) -m pytest -q -m "not long and not processes"

test:            ## the tests, without those that take minutes: three files at a time for two processors
	$(PYTHON) -m pytest -n auto

sim:             ## the simulated accelerator, built if need be: where it is, and how long that took
	$(PYTHON) -m tests.sim.build

sim-tests: sim   ## all tests that run on it, also those that take minutes
	$(PYTHON) -m pytest -n auto -m "long or not long" tests/sim

long:            ## all tests, also those that take minutes
	$(PYTHON) -m pytest -m "long or not long"

check:           ## lint, format, types, shell scripts, recipes, and whether docs/ has what the docstrings say
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	shellcheck .ci/run tools/cluster/ssh.sh tests/cluster/*.sh
	paddle-dp check --no-run configs/*.yaml
	$(PYTHON) tools/document.py --check
	$(PYTHON) tools/api_page.py --check
	$(PYTHON) tools/notebooks.py --check

format:          ## mend what can be mended without thinking
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

recipes:         ## check every recipe, and run two steps of those that need no data
	paddle-dp check --no-run configs/*.yaml
	$(PYTHON) -m pytest tests/test_configs.py

planner-exam:    ## forecasts of `paddle-dp plan` beside published runs: fails when a threshold is missed
	$(PYTHON) tools/planner_exam.py

docs:            ## write the lists in docs/ anew: recipe keys, the Python API; and the notebooks of docs/learn
	$(PYTHON) tools/document.py
	$(PYTHON) tools/api_page.py
	$(PYTHON) tools/notebooks.py

site:            ## the documentation as a site, in site/: open site/index.html; needs `pip install -e '.[docs]'`
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

pictures:        ## draw the pictures of docs/learn anew, by the pages' own commands: minutes
	$(PYTHON) tools/learn_pictures.py docs/pictures

report-pictures: ## draw docs/pictures/report.webp and compare.webp anew: two trainings and Chromium, minutes
	$(PYTHON) tools/report_pictures.py docs/pictures

clean:           ## remove what tools left behind; runs/ stays
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
