# The commands that CI runs, by name. `make` alone runs lint, types and tests.
PYTHON ?= python

.PHONY: all format lint types test exhaustive notebook gallery site links bench smoke

all: lint types test

format:  ## Formats the code and applies safe fixes.
	ruff format .
	ruff check --fix .

lint:  ## Checks style and shell scripts.
	ruff format --check .
	ruff check .
	shellcheck launch.sh .ci/run

types:  ## Checks types.
	mypy

test:  ## Runs the default tests: 4 to 10 minutes on two cores.
	$(PYTHON) -m pytest -n auto

exhaustive:  ## Runs the full matrices and the fault tests: hours.
	$(PYTHON) -m pytest -n auto -m exhaustive

notebook:  ## Runs docs/story.md; writes docs/story.ipynb and its figures.
	$(PYTHON) docs/notebook.py

gallery:  ## Writes the pages of attention weights in the gallery: build/pages/.
	mkdir -p build/pages/gallery
	$(PYTHON) -m experiments.explore --workdir=releases/reverse \
	  --out=build/pages/gallery/reverse.html
	$(PYTHON) -m experiments.explore --workdir=releases/numbers \
	  --out=build/pages/gallery/numbers.html

site: gallery  ## Builds the documentation: build/site/index.html.
	$(PYTHON) -m sphinx -W --keep-going docs build/site

links:  ## Checks the links to other sites; needs a network.
	$(PYTHON) -m sphinx -b linkcheck docs build/links

bench:  ## Measures what the documents say about time; minutes.
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.synthetic_tasks

smoke:  ## Trains a tiny run to its end, in seconds.
	$(PYTHON) -m experiments.train --config=configs/reverse.py \
	  --config.train.steps=20 --config.train.eval_every=20 \
	  --workdir=$$(mktemp -d)
