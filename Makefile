# What CI runs, by name. `make` alone runs all of it but the benchmarks.
PYTHON ?= python

.PHONY: all format lint types test notebook site links bench smoke

all: lint types test

format:  ## Rewrites the code in the house's style.
	ruff format .
	ruff check --fix .

lint:  ## Checks style.
	ruff format --check .
	ruff check .

types:  ## Checks types.
	mypy

test:  ## Runs every test.
	pytest -n auto

notebook:  ## Runs docs/story.md: docs/story.ipynb, and the pictures.
	$(PYTHON) docs/notebook.py

site:  ## Makes the documents a site: build/site/index.html.
	$(PYTHON) -m sphinx -W --keep-going docs build/site

links:  ## Asks the network whether links to other sites still lead anywhere.
	$(PYTHON) -m sphinx -b linkcheck docs build/links

bench:  ## Measures what the documents claim about time; minutes.
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.tasks

smoke:  ## Trains a tiny run to its end, in seconds.
	$(PYTHON) -m experiments.train --config=configs/reverse.py \
	  --config.train.steps=20 --config.train.eval_every=20 \
	  --workdir=$$(mktemp -d)
